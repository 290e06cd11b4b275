//! The server's way from inputs to effects by way of its journal, one step at a time: for fault harnesses.
//!
//! It is the driver's own core and the journal's own code, without a runtime, a clock and a network, on a [`Disk`] that
//! loses what real ones lose. Not part of the server's interface.

mod disk;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use stagewire_core::{JobId, PayloadId, Timestamp};
use stagewire_sched::{Effect, Input, Limits, Refusal, Sched, Topology};

pub use disk::Disk;

use crate::driver::{Core, Out, replay};
use crate::history::Histories;
use crate::journal::{Journal, JournalError};

/// A server's driver between two crashes.
#[derive(Debug)]
pub struct Rehearsal {
    core: Core,
    histories: Arc<Histories>,
    journal: Journal,
    last: Timestamp,
}

/// What one step let out. Nothing of it was known outside before the disk had what it follows from.
#[derive(Debug)]
pub struct Step {
    /// Answers to the inputs, in their order.
    pub answers: Vec<Result<Option<JobId>, Refusal>>,
    /// Effects, in their order; those for people, [`Effect::Job`], have become notes and are left out.
    pub effects: Vec<Effect>,
}

impl Rehearsal {
    /// Opens and replays the journal on a disk, as a server does when it starts, and sums it up where it has more batches
    /// than `long`. [`Rehearsal::begin`] comes next.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn open(disk: Disk, topology: &Topology, limits: Limits, long: u64) -> Result<Self, JournalError> {
        let path = Path::new("rehearsal");
        let mut journal = Journal::open_backend(disk, path.to_owned(), "rehearsal")?;
        let replayed = replay(&mut journal, path, topology, limits, long)?;
        let histories = Arc::new(replayed.histories);
        Ok(Self {
            core: Core::new(replayed.sched, journal.epoch(), Arc::clone(&histories)),
            histories,
            journal,
            last: replayed.last,
        })
    }

    /// When the last event of the journal was decided: the clock of a server that starts is not behind that.
    pub const fn last(&self) -> Timestamp {
        self.last
    }

    /// Begins the epoch, where the store still has these payloads.
    ///
    /// # Errors
    /// [`JournalError`]: the server is dead.
    pub fn begin(&mut self, now: Timestamp, stored: BTreeSet<PayloadId>) -> Result<Step, JournalError> {
        let restarted = self.core.restarted(stored);
        self.step(now, [restarted])
    }

    /// Decides the inputs and all that is due, writes that in one batch, and only then lets it out.
    ///
    /// # Errors
    /// [`JournalError`]: the server is dead, and said nothing of this step.
    pub fn step(&mut self, now: Timestamp, inputs: impl IntoIterator<Item = Input>) -> Result<Step, JournalError> {
        let answers = inputs.into_iter().map(|input| self.core.decide(now, input)).collect();
        self.core.settle(now);
        if self.core.must_write()
            && let Some(bytes) = self.core.encode()
        {
            self.journal.append(&bytes)?;
        }
        let mut effects = Vec::new();
        for out in self.core.release() {
            match out {
                Out::Effect(effect) => effects.push(effect),
                Out::Note(job, note) => self.histories.of(job).push(note),
                Out::Forget(job) => self.histories.forget(job),
                // A harness asks the scheduler itself what its store may take.
                Out::Progress(..) | Out::Grant(_) | Out::Discard(..) | Out::DiscardResults(..) => {}
            }
        }
        Ok(Step { answers, effects })
    }

    /// The scheduler, as of the last step.
    pub const fn sched(&self) -> &Sched {
        self.core.sched()
    }
}
