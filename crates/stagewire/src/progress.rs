//! Shows a job while it runs: bars for a person at a terminal, lines for everyone else.

mod bars;
mod lines;

use std::time::Duration;

use crate::client::Event;
use crate::output::Output;

use self::bars::Bars;
use self::lines::Lines;

/// Shows the events of one job.
#[derive(Debug)]
pub(crate) enum Progress {
    Bars(Bars),
    Lines(Lines),
}

impl Progress {
    /// How long nothing must happen before [`Progress::settle`].
    pub(crate) const QUIET: Duration = lines::QUIET;

    /// For a pipeline with these stages, in order.
    pub(crate) fn new(stages: &[String], output: &Output) -> Self {
        if output.is_terminal() {
            Self::Bars(Bars::new(stages, output))
        } else {
            Self::Lines(Lines::new(output))
        }
    }

    pub(crate) fn show(&mut self, event: &Event) {
        match self {
            Self::Bars(bars) => bars.show(event),
            Self::Lines(lines) => lines.show(event),
        }
    }

    /// Shows what was held back, once nothing has happened for [`Progress::QUIET`].
    pub(crate) fn settle(&mut self) {
        if let Self::Lines(lines) = self {
            lines.settle();
        }
    }

    /// Leaves the last state standing; nothing moves any more.
    pub(crate) fn end(&mut self) {
        if let Self::Bars(bars) = self {
            bars.end();
        }
    }
}
