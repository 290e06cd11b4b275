//! The driver without its runtime: decides, and keeps what follows until the disk has what it must have.
//!
//! The order is always the same: [`Core::decide`] for each input, [`Core::settle`], write what [`Core::encode`] gives
//! where [`Core::must_write`], and only then let out what [`Core::release`] gives.

use std::collections::BTreeSet;
use std::sync::Arc;

use stagewire_core::{Epoch, JobId, PayloadId, Timestamp, Token};
use stagewire_sched::{Input, Refusal, Sched};

use super::batch::{self, Batch, Out};
use crate::history::Histories;

#[derive(Debug)]
pub(crate) struct Core {
    sched: Sched,
    batch: Batch,
    histories: Arc<Histories>,
}

impl Core {
    /// A core that has replayed a journal, for the epoch that the journal began when it was opened.
    pub(crate) const fn new(sched: Sched, epoch: Epoch, histories: Arc<Histories>) -> Self {
        Self {
            sched,
            batch: Batch::new(epoch),
            histories,
        }
    }

    pub(crate) const fn sched(&self) -> &Sched {
        &self.sched
    }

    /// Tokens of the attempts that run.
    pub(crate) fn running(&self) -> impl Iterator<Item = Token> {
        self.sched.jobs().flat_map(batch::running)
    }

    /// The input that begins the epoch, with the payloads that the store still has.
    pub(crate) const fn restarted(&self, stored: BTreeSet<PayloadId>) -> Input {
        let epoch = self.batch.epoch();
        Input::Restarted { epoch, stored }
    }

    /// Decides an input and makes true what follows. The answer may go out with what [`Core::release`] gives, not before.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(crate) fn decide(&mut self, now: Timestamp, input: Input) -> Result<Option<JobId>, Refusal> {
        let worker = batch::sender(&input);
        let failed = matches!(input, Input::Failed { .. });
        let answer = self.sched.decide(now, input).map(|decision| {
            let job = decision.job;
            self.batch.take(&mut self.sched, &self.histories, now, decision);
            job
        });
        match (&answer, worker) {
            (Err(refusal), Some((worker, token))) => self.batch.refuse(worker, token, refusal),
            (Ok(_), Some((worker, token))) if failed => self.batch.accept_failure(worker, token),
            _ => {}
        }
        answer
    }

    /// Does all that is due.
    pub(crate) fn settle(&mut self, now: Timestamp) {
        loop {
            // A poll refuses nothing.
            let next = self.sched.decide(now, Input::Poll).unwrap_or_default();
            if next.events.is_empty() && next.effects.is_empty() {
                break;
            }
            self.batch.take(&mut self.sched, &self.histories, now, next);
        }
        debug_assert_eq!(self.sched.check(), Ok(()));
    }

    /// Whether something waits that must be written before anything goes out.
    pub(crate) const fn must_write(&self) -> bool {
        self.batch.must_write()
    }

    /// Takes what waits for the journal; `None` where nothing does.
    pub(crate) fn encode(&mut self) -> Option<Vec<u8>> {
        self.batch.encode()
    }

    /// Takes what waits to go out, in order.
    pub(crate) fn release(&mut self) -> impl Iterator<Item = Out> {
        self.batch.release()
    }
}
