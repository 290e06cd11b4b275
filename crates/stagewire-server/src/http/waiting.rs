//! Why a job waits, for programs and for people.

use std::time::Duration;

use serde_json::{Map, Value, json};
use stagewire_core::{Progress, StageName};
use stagewire_sched::{WaitCause, Waiting};

use super::jobs::Names;

fn names(stages: &[StageName]) -> String {
    stages.iter().map(StageName::as_str).collect::<Vec<_>>().join(", ")
}

/// Who else waits: jobs of its class that come first, and jobs of other classes.
fn ahead(ahead: usize, others: usize) -> String {
    let before = match ahead {
        0 => "it is next".to_owned(),
        1 => "1 job is ahead".to_owned(),
        n => format!("{n} jobs are ahead"),
    };
    match others {
        0 => before,
        1 => format!("{before} of its class, beside 1 job of other classes"),
        n => format!("{before} of its class, beside {n} jobs of other classes"),
    }
}

pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Why its attempt yields, or has, and where the next one goes on.
fn yields(waiting: &Waiting) -> String {
    let runs = matches!(waiting.cause, WaitCause::Attempt { .. });
    let why = waiting.yields.as_ref().map(|failure| match &*failure.reason {
        "attempt.preempted" => match (runs, failure.details.get("by"), failure.details.get("class")) {
            (true, Some(job), Some(class)) => format!("; it makes way for job {job} of class {class} at its next step"),
            (false, Some(job), Some(class)) => format!("; it was preempted by job {job} of class {class}"),
            _ => format!("; {}", failure.message),
        },
        _ if runs => "; it yields at its next step, as its worker leaves".to_owned(),
        _ => "; it has yielded".to_owned(),
    });
    let from = waiting.resumes.as_ref().filter(|_| !runs).map(|progress| {
        let but = if why.is_some() { " and" } else { "; it" };
        format!("{but} goes on from {}", far(progress))
    });
    [why, from].into_iter().flatten().collect()
}

/// How far it has come, of how much where that is known.
fn far(progress: &Progress) -> String {
    let Progress { done, total, unit } = progress;
    match total {
        0 => format!("{unit} {done}"),
        _ => format!("{unit} {done} of {total}"),
    }
}

/// One reason, with its numbers and a sentence.
pub(super) fn json(waiting: &Waiting, workers: &Names) -> Value {
    let (cause, message, numbers) = match &waiting.cause {
        WaitCause::Inputs { stages } => (
            "inputs",
            format!("waits for the output of {}", names(stages)),
            json!({"stages": stages}),
        ),
        WaitCause::Backoff {
            failures,
            limit,
            within,
            failure,
        } => (
            "backoff",
            format!("has failed {failures} of {limit} times that end the job, and is tried again in {within:.1?}"),
            json!({"failures": failures, "limit": limit, "within_ns": nanos(*within), "failure": failure}),
        ),
        WaitCause::NoWorker { away, draining } => (
            "no_worker",
            match (away, draining) {
                (0, 0) => "no worker of this stage is attached".to_owned(),
                (n, 0) => format!("no worker of this stage is attached; {n} may come back"),
                (0, n) => format!("no worker of this stage takes work: {n} leave"),
                (away, leaving) => {
                    format!("no worker of this stage takes work: {leaving} leave, {away} are away and may come back")
                }
            },
            json!({"away": away, "leaving": draining}),
        ),
        WaitCause::Ranks { group, attached, world } => (
            "ranks",
            format!("group {group} has {attached} of its {world} ranks; it gets work once all are attached"),
            json!({"group": group, "attached": attached, "world": world}),
        ),
        WaitCause::Slot {
            ahead: before,
            others,
            advertised,
            running,
            reserved,
            stopping,
            paused,
            declined,
        } => (
            "slot",
            match (paused, declined) {
                (0, _) => format!(
                    "waits for a free slot: all {advertised} are taken; {}",
                    ahead(*before, *others)
                ),
                (_, None) => format!(
                    "waits for a worker that did not answer an offer; {}",
                    ahead(*before, *others)
                ),
                (_, Some(failure)) => format!(
                    "waits for a worker that declined an offer, because {}; {}",
                    failure.message,
                    ahead(*before, *others)
                ),
            },
            json!({
                "ahead": before, "rank": before + 1, "others": others, "advertised": advertised, "running": running, "reserved": reserved,
                "stopping": stopping, "paused": paused, "declined": declined,
            }),
        ),
        WaitCause::Credit {
            ahead: before,
            others,
            held,
            limit,
        } => (
            "credit",
            format!(
                "waits until outputs of this stage are consumed: {held} of {limit} are held; {}",
                ahead(*before, *others)
            ),
            json!({"ahead": before, "rank": before + 1, "others": others, "held": held, "limit": limit}),
        ),
        WaitCause::Bytes {
            ahead: before,
            others,
            needed,
            free,
            reserved,
            held,
            advertised,
        } => (
            "bytes",
            format!(
                "waits until outputs are consumed: {needed} are needed for this stage and those after it, and of \
                 {advertised} {free} are free; {}",
                ahead(*before, *others)
            ),
            json!({
                "ahead": before, "rank": before + 1, "others": others, "needed_bytes": needed, "free_bytes": free,
                "reserved_bytes": reserved, "held_bytes": held, "advertised_bytes": advertised,
            }),
        ),
        WaitCause::SameWork { job } => (
            "same_work",
            format!("waits for job {job}, which makes what this stage would"),
            json!({"job": job}),
        ),
        WaitCause::Dispatch { ahead: before, others } => (
            "dispatch",
            ahead(*before, *others),
            json!({"ahead": before, "rank": before + 1, "others": others}),
        ),
        WaitCause::Paused { ahead: before, others } => (
            "paused",
            format!(
                "has not begun, and the pipeline is paused until `stagewire resume`; {}",
                ahead(*before, *others)
            ),
            json!({"ahead": before, "rank": before + 1, "others": others}),
        ),
        WaitCause::Draining => (
            "draining",
            "the server is draining and starts nothing new".to_owned(),
            json!({}),
        ),
        WaitCause::Answer { worker, within } => (
            "answer",
            format!(
                "was offered to worker {}, which answers within {within:.1?}",
                workers.name(*worker)
            ),
            json!({"worker": workers.name(*worker)}),
        ),
        WaitCause::Attempt { worker, progress, .. } => (
            "attempt",
            match progress {
                Some(progress) => format!("runs: {}", far(progress)),
                None => "runs".to_owned(),
            },
            json!({"worker": workers.name(*worker), "progress": progress}),
        ),
        WaitCause::Stopping { attempts, within } => (
            "stopping",
            match attempts {
                1 => format!("1 attempt was told to stop; it ends within {within:.1?}"),
                n => format!("{n} attempts were told to stop; they end within {within:.1?}"),
            },
            json!({"attempts": attempts}),
        ),
        _ => ("other", "waits".to_owned(), json!({})),
    };
    let message = format!("{message}{}", yields(waiting));
    let mut json = Map::new();
    json.extend(waiting.stage.as_ref().map(|stage| ("stage".to_owned(), json!(stage))));
    json.insert("class".to_owned(), json!(waiting.class));
    json.insert("cause".to_owned(), json!(cause));
    json.insert("message".to_owned(), json!(message));
    json.insert("waited_ns".to_owned(), json!(nanos(waiting.waited)));
    if let Some(dropped_in) = waiting.dropped_in {
        json.insert("dropped_in_ns".to_owned(), json!(nanos(dropped_in)));
    }
    if let Some(progress) = &waiting.resumes {
        json.insert("resumes".to_owned(), json!(progress));
    }
    if let Some(failure) = &waiting.yields {
        json.insert("yields".to_owned(), json!(failure));
    }
    if let Value::Object(numbers) = numbers {
        json.extend(numbers);
    }
    Value::Object(json)
}

#[cfg(test)]
mod tests {
    use stagewire_core::{ErrorClass, Failure};

    use super::*;

    #[test]
    fn sentences_are_those_of_people() {
        let message = |cause| {
            let waiting = Waiting {
                stage: None,
                class: StageName::new("batch").unwrap(),
                waited: Duration::ZERO,
                dropped_in: None,
                resumes: None,
                yields: None,
                cause,
            };
            json(&waiting, &Names::default())["message"].clone()
        };
        let stopping = |attempts| {
            let within = Duration::from_secs(30);
            message(WaitCause::Stopping { attempts, within })
        };
        assert_eq!(stopping(1), "1 attempt was told to stop; it ends within 30.0s");
        assert_eq!(stopping(2), "2 attempts were told to stop; they end within 30.0s");
        let credit = |ahead, others| {
            message(WaitCause::Credit {
                ahead,
                others,
                held: 2,
                limit: 2,
            })
        };
        let held = "waits until outputs of this stage are consumed: 2 of 2 are held";
        assert_eq!(credit(1, 0), format!("{held}; 1 job is ahead"));
        assert_eq!(
            credit(2, 1),
            format!("{held}; 2 jobs are ahead of its class, beside 1 job of other classes")
        );
        let slot = |paused, declined| {
            message(WaitCause::Slot {
                ahead: 0,
                others: 0,
                advertised: 2,
                running: 2 - paused,
                reserved: 0,
                stopping: 0,
                paused,
                declined,
            })
        };
        let preempted = Waiting {
            stage: None,
            class: StageName::new("batch").unwrap(),
            waited: Duration::ZERO,
            dropped_in: None,
            resumes: Some(Progress {
                done: 12,
                total: 40,
                unit: "step".to_owned(),
            }),
            yields: Some(
                Failure::new(ErrorClass::Unavailable, "attempt.preempted", "")
                    .with("by", "7")
                    .with("class", "interactive"),
            ),
            cause: WaitCause::Dispatch { ahead: 0, others: 0 },
        };
        assert_eq!(
            json(&preempted, &Names::default())["message"],
            "it is next; it was preempted by job 7 of class interactive and goes on from step 12 of 40"
        );
        let endless = Waiting {
            resumes: Some(Progress {
                done: 12,
                total: 0,
                unit: "step".to_owned(),
            }),
            yields: None,
            ..preempted
        };
        assert_eq!(
            json(&endless, &Names::default())["message"],
            "it is next; it goes on from step 12"
        );
        let failure = Failure::new(ErrorClass::Exhausted, "credit.slots", "every slot is in use");
        assert_eq!(slot(0, None), "waits for a free slot: all 2 are taken; it is next");
        assert_eq!(
            slot(1, None),
            "waits for a worker that did not answer an offer; it is next"
        );
        assert_eq!(
            slot(1, Some(failure)),
            "waits for a worker that declined an offer, because every slot is in use; it is next"
        );
    }
}
