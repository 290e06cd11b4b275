//! Why a stage was offered to the worker that got it: what was chosen, and from what.

use serde_json::{Value, json};
use stagewire_sched::{Candidate, Choice, Contender, TurnOf};

use super::jobs::Names;
use super::waiting::nanos;

pub(super) fn json(choice: &Choice, workers: &Names) -> Value {
    let mut json = json!({
        "stage": choice.stage,
        "attempt": choice.token.attempt,
        "workers": numbered(&choice.candidates, choice.chosen, |candidate| worker(candidate, workers)),
    });
    match &choice.turn {
        TurnOf::Class { contenders, chosen } => {
            json["because"] = json!("turn");
            json["classes"] = numbered(contenders, *chosen, class);
        }
        TurnOf::Oldest => json["because"] = json!("oldest"),
        TurnOf::Along(job) => {
            json["because"] = json!("along");
            json["along"] = json!(job);
        }
    }
    json
}

/// All that there was to choose from, and which of it was chosen.
fn numbered<T>(all: &[T], chosen: usize, json: impl Fn(&T) -> Value) -> Value {
    let one = |(position, one)| {
        let mut json = json(one);
        json["chosen"] = json!(position == chosen);
        json
    };
    all.iter().enumerate().map(one).collect()
}

fn worker(candidate: &Candidate, workers: &Names) -> Value {
    json!({
        "worker": workers.name(candidate.worker),
        "used": candidate.used,
        "slots": candidate.slots,
        "steps": candidate.steps,
        "cost_ns": nanos(candidate.cost),
    })
}

fn class(contender: &Contender) -> Value {
    json!({
        "class": contender.class,
        "job": contender.job,
        "due_ns": contender.due,
        "predicted_ns": nanos(contender.predicted),
        "turns": contender.turns,
        "owed": contender.owed,
    })
}
