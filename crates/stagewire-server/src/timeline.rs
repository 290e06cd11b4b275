//! A job over time: which attempt of which stage ran when and where, and how each chunk was handed over.

mod page;

use std::sync::Arc;

use serde_json::{Value, json};
use stagewire_core::{Failure, Handover, JobId, PayloadId, StageName, Timestamp, TransferMode};

use crate::note::{Note, NoteKind, handover_json};

pub(crate) use page::page;

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// It runs.
    Running,
    /// Its output was accepted.
    Done,
    /// It was lost, failed or fenced, and the stage goes back to its queue.
    Requeued,
    /// The job ended before it.
    Stopped,
}

impl End {
    const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Requeued => "requeued",
            Self::Stopped => "stopped",
        }
    }
}

/// One attempt that ran.
#[derive(Debug, Clone)]
pub(crate) struct AttemptBar {
    pub(crate) attempt: Option<u32>,
    pub(crate) worker: Option<String>,
    /// Since when the stage waited for a worker.
    pub(crate) queued: Option<Timestamp>,
    pub(crate) begin: Timestamp,
    /// When its first chunk was there.
    pub(crate) published: Option<Timestamp>,
    pub(crate) end: Option<Timestamp>,
    pub(crate) how: End,
    pub(crate) failure: Option<Failure>,
}

/// One stage with its attempts.
#[derive(Debug, Clone)]
pub(crate) struct StageLane {
    pub(crate) stage: StageName,
    pub(crate) attempts: Vec<AttemptBar>,
    /// When it was done with what another job had made, where that is how it is done.
    pub(crate) cached: Option<Timestamp>,
    /// Since when it waits for a worker, where it does.
    waiting: Option<Timestamp>,
}

/// A payload that was published.
#[derive(Debug, Clone)]
pub(crate) struct PayloadMark {
    pub(crate) payload: PayloadId,
    pub(crate) stage: StageName,
    pub(crate) at: Timestamp,
    pub(crate) nbytes: u64,
    pub(crate) chunks: u32,
    pub(crate) mode: TransferMode,
}

/// A chunk that a consumer received.
#[derive(Debug, Clone)]
pub(crate) struct ChunkMark {
    pub(crate) to: StageName,
    pub(crate) attempt: Option<u32>,
    pub(crate) handover: Handover,
}

/// Everything.
#[derive(Debug, Clone)]
pub(crate) struct Timeline {
    pub(crate) job: JobId,
    pub(crate) state: &'static str,
    pub(crate) begin: Timestamp,
    /// When the job ended, else when the timeline was made.
    pub(crate) until: Timestamp,
    pub(crate) ended: bool,
    pub(crate) failure: Option<Failure>,
    pub(crate) lanes: Vec<StageLane>,
    pub(crate) payloads: Vec<PayloadMark>,
    pub(crate) chunks: Vec<ChunkMark>,
}

impl Timeline {
    /// Puts the notes of a job together. Lanes are in the order of `stages`.
    pub(crate) fn of(
        job: JobId,
        state: &'static str,
        stages: &[StageName],
        notes: &[Arc<Note>],
        now: Timestamp,
    ) -> Self {
        let lane = |stage: &StageName| StageLane {
            stage: stage.clone(),
            attempts: Vec::new(),
            cached: None,
            waiting: None,
        };
        let mut timeline = Self {
            job,
            state,
            begin: notes.first().map_or(now, |note| note.at),
            until: now,
            ended: false,
            failure: None,
            lanes: stages.iter().map(lane).collect(),
            payloads: Vec::new(),
            chunks: Vec::new(),
        };
        for note in notes {
            timeline.take(note);
        }
        if !timeline.ended {
            timeline.until = now;
        }
        timeline
    }

    fn take(&mut self, note: &Note) {
        if note.kind.is_last() {
            self.ended = true;
            self.until = note.at;
            if let NoteKind::Failed(failure) = &note.kind {
                self.failure = Some(failure.clone());
            }
            for lane in &mut self.lanes {
                lane.end(None, note.at, End::Stopped, None);
                lane.waiting = None;
            }
            return;
        }
        if note.kind.is_first() {
            (self.ended, self.failure) = (false, None);
        }
        let Some(stage) = &note.stage else { return };
        let Some(lane) = self.lanes.iter_mut().find(|lane| lane.stage == *stage) else {
            return;
        };
        match &note.kind {
            NoteKind::Queued => lane.waiting = lane.waiting.or(Some(note.at)),
            NoteKind::Running => {
                lane.cached = None;
                // An attempt whose end was not noted: the server crashed.
                lane.end(None, note.at, End::Requeued, None);
                let bar = AttemptBar {
                    attempt: note.attempt,
                    worker: note.worker.clone(),
                    queued: lane.waiting.take(),
                    begin: note.at,
                    published: None,
                    end: None,
                    how: End::Running,
                    failure: None,
                };
                lane.attempts.push(bar);
            }
            NoteKind::Published {
                payload,
                nbytes,
                chunks,
                mode,
            } => {
                if let Some(bar) = lane.attempts.last_mut() {
                    bar.published = Some(note.at);
                }
                self.payloads.push(PayloadMark {
                    payload: *payload,
                    stage: stage.clone(),
                    at: note.at,
                    nbytes: *nbytes,
                    chunks: *chunks,
                    mode: *mode,
                });
            }
            NoteKind::Chunk(handover) => self.chunks.push(ChunkMark {
                to: stage.clone(),
                attempt: note.attempt,
                handover: handover.clone(),
            }),
            NoteKind::Cached { .. } => (lane.cached, lane.waiting) = (Some(note.at), None),
            NoteKind::StageDone => lane.end(note.attempt, note.at, End::Done, None),
            NoteKind::Requeued(failure) => lane.end(note.attempt, note.at, End::Requeued, failure.as_ref()),
            NoteKind::Yielded(failure) => lane.end(note.attempt, note.at, End::Requeued, Some(failure)),
            _ => {}
        }
    }

    /// As the API shows it.
    pub(crate) fn to_json(&self) -> Value {
        let stages: Vec<Value> = self.lanes.iter().map(StageLane::to_json).collect();
        let payloads: Vec<Value> = self
            .payloads
            .iter()
            .map(|mark| {
                json!({
                    "payload": mark.payload, "stage": mark.stage, "at_ns": mark.at, "nbytes": mark.nbytes,
                    "chunks": mark.chunks, "mode": mark.mode,
                })
            })
            .collect();
        let handovers: Vec<Value> = self
            .chunks
            .iter()
            .map(|mark| {
                let mut json = handover_json(&mark.handover);
                json["to"] = json!(mark.to);
                json["attempt"] = json!(mark.attempt);
                json
            })
            .collect();
        json!({
            "job": self.job,
            "state": self.state,
            "submitted_ns": self.begin,
            "ended_ns": self.ended.then_some(self.until),
            "failure": self.failure,
            "stages": stages,
            "payloads": payloads,
            "handovers": handovers,
        })
    }
}

impl StageLane {
    /// Ends the attempt that runs, if it is the one that is meant.
    fn end(&mut self, attempt: Option<u32>, at: Timestamp, how: End, failure: Option<&Failure>) {
        let Some(bar) = self.attempts.last_mut().filter(|bar| bar.end.is_none()) else {
            return;
        };
        if attempt.is_none() || attempt == bar.attempt {
            bar.end = Some(at);
            bar.how = how;
            bar.failure = failure.cloned();
        }
    }

    fn to_json(&self) -> Value {
        let attempts: Vec<Value> = self
            .attempts
            .iter()
            .map(|bar| {
                json!({
                    "attempt": bar.attempt, "worker": bar.worker, "queued_ns": bar.queued, "begin_ns": bar.begin,
                    "published_ns": bar.published, "end_ns": bar.end, "end": bar.how.name(), "failure": bar.failure,
                })
            })
            .collect();
        json!({"stage": self.stage, "cached_ns": self.cached, "attempts": attempts})
    }
}

#[cfg(test)]
mod tests;
