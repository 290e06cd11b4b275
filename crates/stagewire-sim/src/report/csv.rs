use std::fmt::Write;

use stagewire_core::Timestamp;

use crate::record::{JobRecord, Sample};

pub(super) fn jobs(jobs: &[JobRecord], classes: &[String]) -> String {
    let mut text = "class,scale,submitted_s,first_s,ended_s,outcome\n".to_owned();
    for job in jobs {
        let outcome = if job.succeeded { "succeeded" } else { "failed" };
        let (first, ended) = (optional(job.first), optional(job.ended));
        let (class, scale, submitted) = (&classes[job.class], job.scale, seconds(job.submitted));
        // Writing to a string does not fail.
        let _ = writeln!(text, "{class},{scale},{submitted},{first},{ended},{outcome}");
    }
    text
}

pub(super) fn samples(samples: &[Sample], stages: &[String]) -> String {
    let mut text = format!("at_s,queued_{},resident_bytes\n", stages.join(",queued_"));
    for sample in samples {
        let queued: Vec<_> = sample.queued.iter().map(usize::to_string).collect();
        let (at, queued, resident) = (seconds(sample.at), queued.join(","), sample.resident);
        let _ = writeln!(text, "{at},{queued},{resident}");
    }
    text
}

/// Exact: nanoseconds with a point.
fn seconds(at: Timestamp) -> String {
    format!("{}.{:09}", at.0 / 1_000_000_000, at.0 % 1_000_000_000)
}

fn optional(at: Option<Timestamp>) -> String {
    at.map(seconds).unwrap_or_default()
}
