//! What became of the attempts of a job.

use serde_json::{Value, json};
use stagewire_sched::{AttemptLog, EndedAttempt};

/// The attempts that have ended, the first to end first.
pub(super) fn json(log: &AttemptLog) -> Value {
    log.iter().map(ended).collect()
}

fn ended(attempt: &EndedAttempt) -> Value {
    let mut json = json!({
        "attempt": attempt.token.attempt,
        "epoch": attempt.token.epoch,
        "stage": attempt.stage,
        "worker": attempt.name,
        "incarnation": attempt.worker,
        "began_ns": attempt.began,
        "ended_ns": attempt.ended,
        "end": attempt.end.name(),
    });
    if let Some(failure) = attempt.end.failure() {
        json["failure"] = json!(failure);
    }
    json
}
