//! What a lane moves: jobs, and the batches of them that are under way.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::registration::Registration;
use super::{EngineBatch, EngineError, EngineMemory, EngineOperation, EngineSlice, Member};

/// One pull or push: its slices, and what must stay in place until none of them is under way.
pub(super) struct Job<H> {
    pub(super) operation: EngineOperation,
    pub(super) slices: Vec<EngineSlice>,
    /// Memory of this side in which the slices lie.
    local: EngineMemory,
    hold: Held<H>,
    registration: Option<(Member, Registration)>,
    /// Slices that were submitted so far.
    sent: usize,
    in_flight: usize,
    failure: Option<Failure>,
    done: oneshot::Sender<Result<H, Failed>>,
}

/// What a job holds.
pub(super) trait Keep: Send + 'static {
    /// Lets go of it later: the engine gave up on a write of which the peer may still have bytes to place.
    fn quarantine(self);
}

/// A job that failed.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) failure: Failure,
    /// Whether slices of it had begun, so that bytes may have moved.
    pub(super) begun: bool,
}

/// Why a job failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The engine does not take the memory of this side.
    Register(EngineError),
    /// The engine does not begin.
    Submit { slice: EngineSlice, error: EngineError },
    /// The engine gave up on a slice.
    Slice { slice: EngineSlice, after: Duration },
    /// The engine fails again and again though the peer lives.
    Stuck {
        failures: u32,
        within: Duration,
        rebuilt: Rebuilt,
    },
    /// There is no thread to look after transfers.
    Thread(std::io::Error),
}

/// What was done about a stuck engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Rebuilt {
    /// Another one takes its place.
    Yes,
    /// Nobody said how.
    Unknown,
    Failed(EngineError),
}

/// A batch of one job.
pub(super) struct Flight {
    pub(super) job: u64,
    pub(super) member: Member,
    pub(super) batch: EngineBatch,
    /// Its first slice in the job, and how many.
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) bytes: u64,
    pub(super) since: Instant,
    /// Whether a look found it pending.
    pub(super) looked: bool,
}

impl<H: Keep> Job<H> {
    pub(super) fn new(
        operation: EngineOperation,
        slices: Vec<EngineSlice>,
        local: EngineMemory,
        hold: H,
    ) -> (Self, oneshot::Receiver<Result<H, Failed>>) {
        let (done, outcome) = oneshot::channel();
        let job = Self {
            operation,
            slices,
            local,
            hold: Held(Some(hold)),
            registration: None,
            sent: 0,
            in_flight: 0,
            failure: None,
            done,
        };
        (job, outcome)
    }

    /// The next slices to submit, at most so many. None once it failed or nobody waits for it any more.
    pub(super) fn next(&self, most: usize) -> &[EngineSlice] {
        if self.failure.is_some() || self.done.is_closed() {
            return &[];
        }
        let rest = &self.slices[self.sent..];
        &rest[..rest.len().min(most)]
    }

    /// Whether nothing of it is under way and nothing will be.
    pub(super) fn is_over(&self) -> bool {
        self.in_flight == 0 && self.next(1).is_empty()
    }

    /// Counts slices as submitted, and gives the first of them.
    pub(super) fn took_off(&mut self, slices: usize) -> usize {
        let first = self.sent;
        self.sent += slices;
        self.in_flight += slices;
        first
    }

    pub(super) fn landed(&mut self, slices: usize) {
        self.in_flight -= slices;
    }

    /// The first failure stands.
    pub(super) fn fail(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
    }

    /// Has the memory of this side registered with `member`, where that is not so already.
    pub(super) fn prepare(&mut self, member: &Member) -> Result<(), EngineError> {
        let ready = |(with, _): &(Member, Registration)| Arc::ptr_eq(with, member);
        if member.engine.registers_local() && !self.registration.as_ref().is_some_and(ready) {
            self.registration = Some((member.clone(), member.register(self.local)?));
        }
        Ok(())
    }

    /// Hands what was held to whoever waits.
    pub(super) fn finish(mut self) {
        drop(self.registration.take());
        let hold = self.hold.0.take().expect("taken here only");
        let outcome = match self.failure.take() {
            None => Ok(hold),
            Some(failure) => {
                let begun = self.sent > 0;
                if begun && self.operation == EngineOperation::Write {
                    hold.quarantine();
                } else {
                    // Whoever hears of it finds the memory free again.
                    drop(hold);
                }
                Err(Failed { failure, begun })
            }
        };
        // Nobody may wait any more: then it goes, too.
        drop(self.done.send(outcome));
    }
}

/// Dropped while its thread panics, it is kept for ever: nobody knows any more what the engine still touches.
struct Held<H>(Option<H>);

impl<H> Drop for Held<H> {
    fn drop(&mut self) {
        if thread::panicking() {
            std::mem::forget(self.0.take());
        }
    }
}
