use std::time::Duration;

use stagewire_core::Timestamp;

use crate::client::{Event, Position};
use crate::output::{Output, bytes};

/// One line for each thing that happens; progress and places in queues at most once in a second and stage, and the last of
/// them in any case.
#[derive(Debug)]
pub(crate) struct Lines {
    output: Output,
    first: Option<Timestamp>,
    /// The stage whose progress was printed last, and when.
    printed: Option<(String, Timestamp)>,
    /// Progress that came too soon after the one before.
    held: Option<Box<Event>>,
}

/// No two lines of progress of a stage come closer.
pub(super) const QUIET: Duration = Duration::from_secs(1);

impl Lines {
    pub(super) fn new(output: &Output) -> Self {
        Self {
            output: output.clone(),
            first: None,
            printed: None,
            held: None,
        }
    }

    pub(super) fn show(&mut self, event: &Event) {
        let first = *self.first.get_or_insert(event.at_ns);
        if matches!(event.kind.as_str(), "progress" | "position") && !self.is_due(event) {
            self.held = Some(Box::new(event.clone()));
            return;
        }
        self.held = None;
        self.print(event, first);
    }

    /// Nothing happened for [`QUIET`]: what was held back is shown.
    pub(super) fn settle(&mut self) {
        if let (Some(event), Some(first)) = (self.held.take(), self.first) {
            self.print(&event, first);
        }
    }

    fn print(&self, event: &Event, first: Timestamp) {
        let Some(text) = describe(event) else { return };
        let stage = event.stage.as_deref().unwrap_or("job");
        let seconds = event.at_ns.since(first).as_secs_f64();
        self.output.say(format_args!("{seconds:>7.1} s  {stage}: {text}"));
    }

    fn is_due(&mut self, event: &Event) -> bool {
        let stage = event.stage.clone().unwrap_or_default();
        let finished = event
            .progress
            .as_ref()
            .is_some_and(|progress| progress.done >= progress.total);
        let recent = |(last, at): &(String, Timestamp)| *last == stage && event.at_ns.since(*at) < QUIET;
        let due = finished || !self.printed.as_ref().is_some_and(recent);
        if due {
            self.printed = Some((stage, event.at_ns));
        }
        due
    }
}

/// What happened, in a few words; `None` for what nobody needs to know.
pub(super) fn describe(event: &Event) -> Option<String> {
    let failure = || {
        event
            .failure
            .as_ref()
            .map_or_else(String::new, |failure| format!(": {}", failure.message))
    };
    Some(match event.kind.as_str() {
        "queued" => "waits for a worker".to_owned(),
        "position" => {
            let Position { ahead, others } = event.position?;
            let first = match ahead {
                0 => "is next in its class".to_owned(),
                1 => "1 job of its class is ahead".to_owned(),
                n => format!("{n} jobs of its class are ahead"),
            };
            match others {
                0 => first,
                1 => format!("{first}, 1 of other classes waits"),
                n => format!("{first}, {n} of other classes wait"),
            }
        }
        "running" => format!("runs on {}", event.worker.as_deref().unwrap_or("a worker")),
        "progress" => {
            let progress = event.progress.as_ref()?;
            format!("{} {}/{}", progress.unit, progress.done, progress.total)
        }
        "published" => {
            let payload = event.payload.as_ref()?;
            let chunks = if payload.chunks == 1 {
                "whole".to_owned()
            } else {
                format!("in {} chunks", payload.chunks)
            };
            format!("hands over {}, {chunks}, {}", bytes(payload.nbytes), payload.mode)
        }
        "chunk" => {
            let handover = event.handover.as_ref()?;
            let took = crate::output::duration(handover.end_ns.since(handover.begin_ns));
            format!(
                "has chunk {}/{} of {} ({}, {} over {}, {took})",
                handover.chunk + 1,
                handover.chunks,
                handover.from,
                bytes(handover.nbytes),
                handover.mode,
                handover.path
            )
        }
        "cached" => "is cached: another job has made the same".to_owned(),
        "stage_done" => "done".to_owned(),
        "requeued" => format!("starts again{}", failure()),
        "yielding" => format!("is asked to yield{}", failure()),
        "yielded" => "has yielded, and goes on later".to_owned(),
        "cancelling" => "is being cancelled".to_owned(),
        "succeeded" => "succeeded".to_owned(),
        "failed" => format!("failed{}", failure()),
        "cancelled" => "cancelled".to_owned(),
        _ => return None,
    })
}
