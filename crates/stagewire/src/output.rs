use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;

use console::{Style, style};
use indicatif::MultiProgress;
use serde::Serialize;

use crate::exit::Fault;

/// Where a command speaks: data to stdout, talk to stderr. Colours follow `NO_COLOR` and what the stream is.
#[derive(Debug, Clone)]
pub(crate) struct Output {
    /// Machines read stdout: one JSON document instead of text.
    pub(crate) json: bool,
    quiet: bool,
    /// Progress bars that lines of talk must go around.
    bars: std::sync::Arc<OnceLock<MultiProgress>>,
}

impl Output {
    pub(crate) fn new(json: bool, quiet: bool) -> Self {
        Self {
            json,
            quiet,
            bars: std::sync::Arc::default(),
        }
    }

    /// Whether a person looks at stderr, so that lines may move.
    pub(crate) fn is_terminal(&self) -> bool {
        io::stderr().is_terminal() && !self.quiet
    }

    /// Lines of talk go above these bars from now on.
    pub(crate) fn around(&self, bars: &MultiProgress) {
        // A second set of bars would be a second progress display: the first stays.
        let _ = self.bars.set(bars.clone());
    }

    /// A line of talk.
    pub(crate) fn say(&self, line: impl Display) {
        if !self.quiet {
            self.line(&line.to_string());
        }
    }

    /// A line of talk with its subject in bold, aligned with its neighbours.
    pub(crate) fn topic(&self, topic: &str, line: impl Display) {
        let topic = style(format!("{topic:<9}")).for_stderr().bold();
        self.say(format_args!("{topic} {line}"));
    }

    /// What went wrong, without ending the command.
    pub(crate) fn warn(&self, line: impl Display) {
        self.line(&format!("{} {line}", style("warning:").for_stderr().yellow().bold()));
    }

    /// Why the command ends.
    pub(crate) fn error(&self, fault: &Fault) {
        // `{:#}` is the chain of causes on one line.
        let text = format!("{:#}", fault.error);
        self.line(&format!("{} {text}", style("error:").for_stderr().red().bold()));
    }

    fn line(&self, line: &str) {
        let written = match self.bars.get() {
            Some(bars) if self.is_terminal() => bars.println(line),
            _ => writeln!(io::stderr().lock(), "{line}"),
        };
        // A closed stderr leaves nobody to tell.
        let _ = written;
    }

    /// A line of data.
    pub(crate) fn data(&self, line: impl Display) -> Result<(), Fault> {
        quietly_closed(writeln!(io::stdout().lock(), "{line}"))
    }

    /// The one JSON document of the command.
    pub(crate) fn document(&self, value: &impl Serialize) -> Result<(), Fault> {
        let mut stdout = io::stdout().lock();
        serde_json::to_writer_pretty(&mut stdout, value)
            .map_err(io::Error::from)
            .and_then(|()| writeln!(stdout))
            .or_else(|error| quietly_closed(Err(error)))
    }

    /// Rows under a header, columns aligned.
    pub(crate) fn table<const N: usize>(&self, header: [&str; N], rows: &[[String; N]]) -> Result<(), Fault> {
        let width = |column: usize| {
            let cells = rows.iter().map(|row| row[column].as_str()).chain([header[column]]);
            cells.map(console::measure_text_width).max().unwrap_or(0)
        };
        let widths: [usize; N] = std::array::from_fn(width);
        let line = |cells: [&str; N], look: &Style| {
            let cells = cells.iter().zip(widths).map(|(cell, width)| {
                let padding = width.saturating_sub(console::measure_text_width(cell));
                format!("{cell}{}", " ".repeat(padding))
            });
            look.apply_to(cells.collect::<Vec<_>>().join("  ").trim_end())
                .to_string()
        };
        self.data(line(header, &Style::new().bold()))?;
        for row in rows {
            self.data(line(std::array::from_fn(|column| row[column].as_str()), &Style::new()))?;
        }
        Ok(())
    }
}

/// Whoever closes the pipe, as `head` does, has read enough: that is no failure.
fn quietly_closed(written: io::Result<()>) -> Result<(), Fault> {
    match written {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Bytes for people: `13.6 MiB`.
pub(crate) fn bytes(count: u64) -> String {
    stagewire_core::ByteCount(count).to_string()
}

/// A time for people: `850 ms`, `12.3 s`, `4 min 10 s`.
pub(crate) fn duration(time: std::time::Duration) -> String {
    match time.as_secs_f64() {
        seconds if seconds < 0.001 => format!("{:.0} µs", seconds * 1e6),
        seconds if seconds < 1.0 => format!("{:.0} ms", seconds * 1e3),
        seconds if seconds < 120.0 => format!("{seconds:.1} s"),
        _ => format!("{} min {} s", time.as_secs() / 60, time.as_secs() % 60),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_read_well() {
        let shown = |millis| duration(Duration::from_micros(millis));
        assert_eq!(shown(250), "250 µs");
        assert_eq!(shown(850_000), "850 ms");
        assert_eq!(shown(12_340_000), "12.3 s");
        assert_eq!(shown(250_000_000), "4 min 10 s");
    }
}
