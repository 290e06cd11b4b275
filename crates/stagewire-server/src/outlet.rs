//! Where effects go: to workers, stores, watchers and the disk. Nothing here waits for anybody.

use std::sync::Arc;
use std::time::Instant;

use stagewire_core::JobId;
use stagewire_sched::{Effect, Holder};

use crate::artefacts::Artefacts;
use crate::driver::Out;
use crate::history::Histories;
use crate::host::StoreHost;
use crate::inputs::Inputs;
use crate::metrics::Metrics;
use crate::note::Note;
use crate::pace::Pace;
use crate::workers::{Workers, message};

/// Everything that the driver lets something out to.
#[derive(Debug)]
pub(crate) struct Outlet {
    pub(crate) workers: Arc<Workers>,
    pub(crate) histories: Arc<Histories>,
    pub(crate) store: Arc<StoreHost>,
    pub(crate) artefacts: Arc<Artefacts>,
    pub(crate) inputs: Arc<Inputs>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) pace: Arc<Pace>,
}

impl Outlet {
    pub(crate) fn let_out(&self, out: Out) {
        match out {
            Out::Effect(effect) => self.effect(effect),
            Out::Note(job, note) => self.note(job, note),
            Out::Progress(job, stage, note) => self.histories.of(job).progress(stage, note),
            Out::Forget(job) => self.forget(job),
            Out::Grant(token) => self.store.grant(token),
            Out::Discard(token, kept) => self.store.discard(token, &kept),
            Out::DiscardResults(job, files) => self.artefacts.discard_soon(job, files),
        }
    }

    fn effect(&self, effect: Effect) {
        let (worker, message) = match effect {
            Effect::Offer(offer) => {
                let files = self.inputs.files(&offer.params);
                (offer.worker, message::offer(*offer, files))
            }
            Effect::Grant { worker, token } => (worker, message::grant(token)),
            Effect::CancelAttempt { worker, token, failure } => (worker, message::cancel(token, failure)),
            Effect::Yield { worker, token, failure } => (worker, message::yield_up(token, failure)),
            Effect::Accepted { worker, token } => (worker, message::accepted(token)),
            Effect::Refused { worker, token, failure } => (worker, message::refused(token, failure)),
            Effect::Drain { worker, within } => (worker, message::drain(within)),
            Effect::Release { holder, payload } => match holder {
                Holder::Worker(worker) => (worker, message::release(payload)),
                Holder::Store => return self.store.release(payload),
            },
            Effect::Evict { worker, failure } => return self.workers.evict(worker, &failure),
            Effect::Chosen(choice) => return self.histories.of(choice.token.job).chose(*choice),
            // The driver has made it a note.
            Effect::Job(_) => return,
        };
        self.workers.send(worker, message);
    }

    fn note(&self, job: JobId, note: Note) {
        let history = self.histories.of(job);
        self.metrics.note(&note);
        if note.kind.is_last() {
            let begin = history.begin().unwrap_or(note.at);
            self.pace.ended(Instant::now());
            self.metrics.job(note.kind.name(), note.at.since(begin));
        }
        history.push(note);
    }

    /// Drops what is kept of an ended job.
    fn forget(&self, job: JobId) {
        self.histories.forget(job);
        self.artefacts.forget(job);
    }
}
