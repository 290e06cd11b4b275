//! What was decided and waits for the disk.

use std::collections::BTreeMap;

use stagewire_core::{Classify, Epoch, Incarnation, JobId, PayloadId, StageName, Timestamp, Token, TransferMode};
use stagewire_sched::{
    ArtefactInfo, Decision, Effect, Event, Input, Job, JobNotice, NoticeKind as Notice, Output, Phase, Refusal, Sched,
    Worker,
};

use super::record::{Record, encode};
use crate::history::Histories;
use crate::note::{Note, NoteId, NoteKind, ProgressNote};

/// Notes that may wait for the next event that must be written. They are history, not state: a crash may lose them.
const UNWRITTEN: usize = 1024;
/// Notes of one job above which those about waiting and offers are left out.
const LONG_HISTORY: u64 = 4096;

/// One thing that goes out once the disk has what it follows from.
#[derive(Debug)]
pub(crate) enum Out {
    Effect(Effect),
    Note(JobId, Note),
    Progress(JobId, StageName, ProgressNote),
    Forget(JobId),
    Grant(Token),
    /// The attempt puts nothing more into the store, and what it has put is dropped but for these payloads.
    Discard(Token, Vec<PayloadId>),
    DiscardResults(JobId, Vec<ArtefactInfo>),
}

#[derive(Debug)]
pub(super) struct Batch {
    epoch: Epoch,
    /// For the journal.
    records: Vec<Record>,
    /// Whether one of the records is an event.
    durable: bool,
    /// For the world, in order.
    out: Vec<Out>,
    /// Last notes of jobs that are in `out` and not yet in a history.
    last: BTreeMap<JobId, u64>,
    /// Names of workers, for people.
    names: BTreeMap<Incarnation, String>,
}

impl Batch {
    pub(super) const fn new(epoch: Epoch) -> Self {
        Self {
            epoch,
            records: Vec::new(),
            durable: false,
            out: Vec::new(),
            last: BTreeMap::new(),
            names: BTreeMap::new(),
        }
    }

    pub(super) const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Makes a decision true and keeps what has to be written and let out.
    pub(super) fn take(&mut self, sched: &mut Sched, histories: &Histories, now: Timestamp, decision: Decision) {
        let mut lost = Vec::new();
        for event in decision.events {
            match &event {
                Event::WorkerLost { worker } => lost.push(*worker),
                Event::WorkerAttached { worker, .. } => {
                    self.names.insert(worker.incarnation, worker.name.clone());
                }
                Event::AttemptGranted { token, .. } => self.out.push(Out::Grant(*token)),
                // From now on it may have the store take what it holds.
                Event::WorkerDraining { worker, .. } => {
                    let held = sched.held_by(*worker).filter(|(token, _)| !sched.is_running(*token));
                    self.out.extend(held.map(|(token, _)| Out::Grant(token)));
                }
                Event::JobRedriven { job } => {
                    let results = sched.job(*job).into_iter().flat_map(Job::results);
                    let files: Vec<_> = results.flat_map(|(_, result)| result.artefacts.clone()).collect();
                    if !files.is_empty() {
                        self.out.push(Out::DiscardResults(*job, files));
                    }
                }
                _ => {}
            }
            let ended = puts_no_more(sched, &event);
            sched.apply(now, &event);
            let ended = ended.filter(|token| !sched.is_running(*token));
            self.out
                .extend(ended.map(|token| Out::Discard(token, known_of(sched, token))));
            if event.is_durable() {
                self.records.push(Record::Event(now, event));
                self.durable = true;
            }
        }
        for effect in decision.effects {
            match effect {
                Effect::Job(notice) => self.notice(histories, now, notice),
                effect => self.out.push(Out::Effect(effect)),
            }
        }
        // Only now: the notices of this decision still name them.
        for worker in lost {
            self.names.remove(&worker);
        }
    }

    /// Tells a worker that the failure it reported was taken, so that it need not repeat it. Completions are answered by
    /// the scheduler itself.
    pub(super) fn accept_failure(&mut self, worker: Incarnation, token: Token) {
        self.out.push(Out::Effect(Effect::Accepted { worker, token }));
    }

    /// Tells a worker that what it said of an attempt is not taken.
    pub(super) fn refuse(&mut self, worker: Incarnation, token: Token, refusal: &Refusal) {
        let failure = refusal.to_failure();
        self.out.push(Out::Effect(Effect::Refused { worker, token, failure }));
    }

    fn notice(&mut self, histories: &Histories, now: Timestamp, notice: JobNotice) {
        let JobNotice {
            job,
            stage,
            attempt,
            worker,
            kind,
        } = notice;
        let attempt = attempt.map(|attempt| attempt.0);
        let worker = worker.map(|worker| self.name(worker));
        let mut kinds = Vec::new();
        match kind {
            Notice::Submitted => kinds.push(NoteKind::Submitted),
            Notice::Redriven => kinds.push(NoteKind::Redriven),
            Notice::Queued => kinds.push(NoteKind::Queued),
            Notice::Offered => kinds.push(NoteKind::Offered),
            Notice::Running => kinds.push(NoteKind::Running),
            Notice::Progress(progress) => {
                if let Some(stage) = stage {
                    let note = ProgressNote {
                        at: now,
                        attempt,
                        worker,
                        progress,
                    };
                    self.out.push(Out::Progress(job, stage, note));
                }
                return;
            }
            Notice::Published {
                payload,
                nbytes,
                chunks,
                stored,
            } => kinds.push(NoteKind::Published {
                payload,
                nbytes,
                chunks,
                mode: if stored { TransferMode::Store } else { TransferMode::P2p },
            }),
            Notice::Checkpointed {
                payload,
                nbytes,
                stored,
                progress,
            } => kinds.push(NoteKind::Checkpointed {
                payload,
                nbytes,
                mode: if stored { TransferMode::Store } else { TransferMode::P2p },
                progress,
            }),
            Notice::Yielding(failure) => kinds.push(NoteKind::Yielding(failure)),
            Notice::Yielded(failure) => kinds.push(NoteKind::Yielded(failure)),
            Notice::Cached {
                payload,
                nbytes,
                chunks,
            } => kinds.extend([
                NoteKind::Cached {
                    payload,
                    nbytes,
                    chunks,
                },
                NoteKind::StageDone,
            ]),
            Notice::StageDone { handovers } => {
                kinds.extend(handovers.into_iter().map(NoteKind::Chunk));
                kinds.push(NoteKind::StageDone);
            }
            Notice::Requeued { failure } => kinds.push(NoteKind::Requeued(failure)),
            Notice::Cancelling => kinds.push(NoteKind::Cancelling),
            Notice::Succeeded => kinds.push(NoteKind::Succeeded),
            Notice::Failed(failure) => kinds.push(NoteKind::Failed(failure)),
            Notice::Cancelled => kinds.push(NoteKind::Cancelled),
            Notice::Forgotten => {
                self.last.remove(&job);
                self.out.push(Out::Forget(job));
                return;
            }
        }
        for kind in kinds {
            let last = self.last.get(&job).copied().unwrap_or_else(|| histories.last_seq(job));
            let idle = matches!(
                kind,
                NoteKind::Queued | NoteKind::Offered | NoteKind::Requeued(None) | NoteKind::Checkpointed { .. }
            );
            if idle && last >= LONG_HISTORY {
                continue;
            }
            self.last.insert(job, last + 1);
            let note = Note {
                id: NoteId {
                    epoch: self.epoch,
                    seq: last + 1,
                },
                at: now,
                stage: stage.clone(),
                attempt,
                worker: worker.clone(),
                kind,
            };
            self.records.push(Record::Note(job, note.clone()));
            self.out.push(Out::Note(job, note));
        }
    }

    /// What people call a worker: its name, or the start of its incarnation where it has not attached in this epoch.
    fn name(&self, worker: Incarnation) -> String {
        let name = self.names.get(&worker).cloned();
        name.unwrap_or_else(|| worker.0.simple().to_string()[..8].to_owned())
    }

    /// Whether something waits that must be written before anything goes out.
    pub(super) const fn must_write(&self) -> bool {
        self.durable || self.records.len() > UNWRITTEN
    }

    /// Takes what waits for the journal; `None` where nothing does.
    pub(super) fn encode(&mut self) -> Option<Vec<u8>> {
        self.durable = false;
        let records = std::mem::take(&mut self.records);
        if records.is_empty() {
            return None;
        }
        Some(encode(&records))
    }

    /// Everything that waited, in order, to be let out.
    pub(super) fn release(&mut self) -> impl Iterator<Item = Out> {
        self.last.clear();
        self.out.drain(..)
    }
}

/// The attempt that has nothing left, with this event, which the store may yet take; unless it runs on.
fn puts_no_more(sched: &Sched, event: &Event) -> Option<Token> {
    match event {
        Event::AttemptCompleted { token, .. } => (!runs_on_leaving(sched, *token)).then_some(*token),
        Event::AttemptFailed { token, .. }
        | Event::AttemptLost { token, .. }
        | Event::AttemptFenced { token, .. }
        | Event::AttemptYielded { token, .. }
        | Event::PayloadMoved { token, .. } => Some(*token),
        Event::PayloadLost { job, stage, payload } | Event::PayloadReleased { job, stage, payload } => {
            held_of(sched, *job, stage, *payload)
        }
        _ => None,
    }
}

/// Whether the worker of the attempt drains and holds its output: the store may yet take that, once the attempt is done.
fn runs_on_leaving(sched: &Sched, token: Token) -> bool {
    let runs = sched.job(token.job).into_iter().flat_map(Job::stages);
    let mut workers = runs
        .filter(|run| run.phase().token() == Some(token) && run.output().live().is_some_and(|output| !output.stored))
        .filter_map(|run| run.phase().worker());
    workers.any(|worker| sched.worker(worker).is_some_and(Worker::is_draining))
}

/// The attempt whose output this is, where a worker holds it: one that leaves, or that left under the server before, may
/// have put that into the store and not said so.
fn held_of(sched: &Sched, job: JobId, stage: &StageName, payload: PayloadId) -> Option<Token> {
    let Output::Live(output) = sched.job(job)?.stage(stage)?.output() else {
        return None;
    };
    let held = output.payload.id == payload && !output.payload.stored;
    held.then_some(output.token)
}

/// What the attempt has made that somebody may still need: its output and its checkpoint.
fn known_of(sched: &Sched, token: Token) -> Vec<PayloadId> {
    let runs = sched.job(token.job).into_iter().flat_map(Job::stages);
    let known = runs.flat_map(|run| {
        let output = match run.output() {
            Output::Live(live) => (live.token == token).then_some(&live.payload),
            Output::Shared(shared) => (shared.token == token).then_some(&shared.payload),
            Output::None | Output::Gone { .. } => None,
        };
        let checkpoint = run.checkpoint().filter(|kept| kept.token == token);
        output.into_iter().chain(checkpoint.map(|kept| &kept.payload))
    });
    known.map(|payload| payload.id).collect()
}

/// Tokens of the attempts of a job that run.
pub(super) fn running(job: &Job) -> impl Iterator<Item = Token> + use<'_> {
    job.stages().iter().filter_map(|stage| match stage.phase() {
        Phase::Running(running) => Some(running.token),
        _ => None,
    })
}

/// Who waits for an answer to an input about an attempt.
pub(super) const fn sender(input: &Input) -> Option<(Incarnation, Token)> {
    match input {
        Input::Accept { worker, token }
        | Input::Renew { worker, token, .. }
        | Input::Published { worker, token, .. }
        | Input::Checkpointed { worker, token, .. }
        | Input::Yielded { worker, token, .. }
        | Input::Completed { worker, token, .. }
        | Input::Failed { worker, token, .. } => Some((*worker, *token)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
