//! What those who watch a job are told, and how it looks in JSON.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use stagewire_core::{Epoch, Failure, Handover, PayloadId, Progress, StageName, Timestamp, TransferMode};
use stagewire_sched::Position;

/// Place of a note in the history of its job. Notes of a later epoch come after all of an earlier one, so that what a
/// server showed but lost in a crash cannot hide what the next one has to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct NoteId {
    pub(crate) epoch: Epoch,
    pub(crate) seq: u64,
}

impl fmt::Display for NoteId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch.0, self.seq)
    }
}

impl FromStr for NoteId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (epoch, seq) = text.split_once('.').ok_or(())?;
        Ok(Self {
            epoch: Epoch(epoch.parse().map_err(drop)?),
            seq: seq.parse().map_err(drop)?,
        })
    }
}

/// One thing that happened to a job. Journaled: new kinds go to the end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Note {
    pub(crate) id: NoteId,
    pub(crate) at: Timestamp,
    pub(crate) stage: Option<StageName>,
    pub(crate) attempt: Option<u32>,
    /// Name of the worker.
    pub(crate) worker: Option<String>,
    pub(crate) kind: NoteKind,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum NoteKind {
    Submitted,
    Queued,
    Offered,
    Running,
    Published {
        payload: PayloadId,
        nbytes: u64,
        chunks: u32,
        mode: TransferMode,
    },
    Chunk(Handover),
    StageDone,
    Requeued(Option<Failure>),
    Cancelling,
    Succeeded,
    Failed(Failure),
    Cancelled,
    Redriven,
    Checkpointed {
        payload: PayloadId,
        nbytes: u64,
        mode: TransferMode,
        progress: Progress,
    },
    Yielding(Failure),
    Yielded(Failure),
    Cached {
        payload: PayloadId,
        nbytes: u64,
        chunks: u32,
    },
}

impl NoteKind {
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Submitted => "submitted",
            Self::Queued => "queued",
            Self::Offered => "offered",
            Self::Running => "running",
            Self::Published { .. } => "published",
            Self::Chunk(_) => "chunk",
            Self::StageDone => "stage_done",
            Self::Requeued(_) => "requeued",
            Self::Cancelling => "cancelling",
            Self::Succeeded => "succeeded",
            Self::Failed(_) => "failed",
            Self::Cancelled => "cancelled",
            Self::Redriven => "redriven",
            Self::Checkpointed { .. } => "checkpointed",
            Self::Yielding(_) => "yielding",
            Self::Yielded(_) => "yielded",
            Self::Cached { .. } => "cached",
        }
    }

    /// Whether the stage may wait for a worker from then on.
    pub(crate) const fn queues(&self) -> bool {
        matches!(self, Self::Queued | Self::Requeued(_) | Self::Yielded(_))
    }

    /// Whether a life of the job begins with it.
    pub(crate) const fn is_first(&self) -> bool {
        matches!(self, Self::Submitted | Self::Redriven)
    }

    /// Whether nothing comes after it, unless the job is redriven.
    pub(crate) const fn is_last(&self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed(_) | Self::Cancelled)
    }
}

impl Note {
    /// As it stands in an event of the event stream; absent parts are left out.
    pub(crate) fn to_json(&self) -> Value {
        let mut json = head(self.id.seq, self.at, self.kind.name(), self.stage.as_ref());
        if let Some(attempt) = self.attempt {
            json.insert("attempt".to_owned(), json!(attempt));
        }
        if let Some(worker) = &self.worker {
            json.insert("worker".to_owned(), json!(worker));
        }
        let extra = match &self.kind {
            NoteKind::Published {
                payload,
                nbytes,
                chunks,
                mode,
            } => Some((
                "payload",
                json!({"id": payload, "nbytes": nbytes, "chunks": chunks, "mode": mode}),
            )),
            NoteKind::Cached {
                payload,
                nbytes,
                chunks,
            } => Some((
                "payload",
                json!({"id": payload, "nbytes": nbytes, "chunks": chunks, "mode": TransferMode::Store}),
            )),
            NoteKind::Chunk(handover) => Some(("handover", handover_json(handover))),
            NoteKind::Checkpointed {
                payload,
                nbytes,
                mode,
                progress,
            } => Some((
                "checkpoint",
                json!({"id": payload, "nbytes": nbytes, "mode": mode, "progress": progress}),
            )),
            NoteKind::Failed(failure)
            | NoteKind::Requeued(Some(failure))
            | NoteKind::Yielding(failure)
            | NoteKind::Yielded(failure) => Some(("failure", json!(failure))),
            _ => None,
        };
        json.extend(extra.map(|(name, value)| (name.to_owned(), value)));
        Value::Object(json)
    }
}

fn head(seq: u64, at: Timestamp, kind: &str, stage: Option<&StageName>) -> Map<String, Value> {
    let mut json = Map::new();
    json.insert("seq".to_owned(), json!(seq));
    json.insert("at_ns".to_owned(), json!(at));
    json.insert("type".to_owned(), json!(kind));
    json.extend(stage.map(|stage| ("stage".to_owned(), json!(stage))));
    json
}

/// One chunk as its consumer received it.
pub(crate) fn handover_json(handover: &Handover) -> Value {
    json!({
        "payload": handover.payload,
        "from": handover.from,
        "chunk": handover.chunk,
        "chunks": handover.chunks,
        "nbytes": handover.nbytes,
        "mode": handover.mode,
        "path": handover.path,
        "begin_ns": handover.begin,
        "end_ns": handover.end,
    })
}

/// Where a job stands in the queue of a stage, as it stands in the event stream. A level, as progress is.
pub(crate) fn position_json(seq: u64, at: Timestamp, stage: &StageName, position: Position) -> Value {
    let mut json = head(seq, at, "position", Some(stage));
    json.insert("position".to_owned(), place_json(position));
    Value::Object(json)
}

/// The numbers of a place in a queue.
pub(crate) fn place_json(position: Position) -> Value {
    let Position { ahead, others } = position;
    json!({"rank": ahead + 1, "ahead": ahead, "others": others})
}

/// How far a running attempt has come. A level, not an event: only the newest counts, and none is journaled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProgressNote {
    pub(crate) at: Timestamp,
    pub(crate) attempt: Option<u32>,
    pub(crate) worker: Option<String>,
    pub(crate) progress: Progress,
}

impl ProgressNote {
    /// As it stands in the event stream. `seq` is that of the last note before it.
    pub(crate) fn to_json(&self, seq: u64, stage: &StageName) -> Value {
        let mut json = head(seq, self.at, "progress", Some(stage));
        if let Some(attempt) = self.attempt {
            json.insert("attempt".to_owned(), json!(attempt));
        }
        if let Some(worker) = &self.worker {
            json.insert("worker".to_owned(), json!(worker));
        }
        json.insert("progress".to_owned(), json!(self.progress));
        Value::Object(json)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_order_by_epoch_first_and_parse_back() {
        let id = |text: &str| text.parse::<NoteId>().unwrap();
        assert!(id("1.9") < id("2.0"));
        assert_eq!(id("3.17").to_string(), "3.17");
        for wrong in ["", "5", "1.", ".1", "1.2.3", "-1.2", "a.b"] {
            assert!(wrong.parse::<NoteId>().is_err(), "{wrong:?} parsed");
        }
    }

    #[test]
    fn json_leaves_out_what_is_not_there() {
        let note = Note {
            id: "1.3".parse().unwrap(),
            at: Timestamp(5),
            stage: None,
            attempt: None,
            worker: None,
            kind: NoteKind::Succeeded,
        };
        assert_eq!(note.to_json(), json!({"seq": 3, "at_ns": 5, "type": "succeeded"}));
    }
}
