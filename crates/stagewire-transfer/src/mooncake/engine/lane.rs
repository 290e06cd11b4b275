//! The way to one peer: jobs queue up, and a thread of its own submits them and looks after them while there are any.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::driver::Driver;
use super::flight::{Failed, Failure, Job, Keep};
use super::slot::Slot;
use super::strikes::Strikes;
use super::{EngineMemory, EngineOperation, EngineSlice};

/// A thread with nothing to do ends after this time.
const LINGER: Duration = Duration::from_secs(5);

/// Jobs for one peer. Dropped, what is under way is still looked after.
pub(super) struct Lane<H> {
    shared: Arc<Shared<H>>,
}

/// What the lane and its thread use together.
pub(super) struct Shared<H> {
    pub(super) slot: Arc<Slot>,
    pub(super) segment: String,
    /// Whether the peer lives, as the control connection knows.
    pub(super) is_alive: Box<dyn Fn() -> bool + Send + Sync>,
    strikes: Mutex<Strikes>,
    arrivals: Mutex<Arrivals<H>>,
    wake: Condvar,
}

struct Arrivals<H> {
    jobs: VecDeque<Job<H>>,
    running: bool,
}

impl<H: Keep> Lane<H> {
    pub(super) fn new(slot: Arc<Slot>, segment: String, is_alive: Box<dyn Fn() -> bool + Send + Sync>) -> Self {
        let arrivals = Mutex::new(Arrivals {
            jobs: VecDeque::new(),
            running: false,
        });
        let shared = Shared {
            slot,
            segment,
            is_alive,
            strikes: Mutex::default(),
            arrivals,
            wake: Condvar::new(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    pub(super) fn segment(&self) -> &str {
        &self.shared.segment
    }

    /// Whether the peer lives, as far as known here.
    pub(super) fn is_alive(&self) -> bool {
        (self.shared.is_alive)()
    }

    /// Moves the slices, and gives `hold` back once all of them have arrived.
    ///
    /// # Cancel safety
    /// Dropped, no other slice begins; `hold` goes when those under way have ended.
    pub(super) async fn run(
        &self,
        operation: EngineOperation,
        slices: Vec<EngineSlice>,
        local: EngineMemory,
        hold: H,
    ) -> Result<H, Failed> {
        let (job, outcome) = Job::new(operation, slices, local, hold);
        self.shared.enqueue(job);
        match outcome.await {
            Ok(outcome) => outcome,
            Err(_) => Err(Failed {
                failure: Failure::Thread(std::io::Error::other("the thread of the transfers panicked")),
                begun: true,
            }),
        }
    }
}

impl<H: Keep> Shared<H> {
    fn enqueue(self: &Arc<Self>, job: Job<H>) {
        let mut arrivals = self.lock();
        arrivals.jobs.push_back(job);
        if arrivals.running {
            drop(arrivals);
            self.wake.notify_one();
            return;
        }
        arrivals.running = true;
        drop(arrivals);
        let shared = self.clone();
        let driver = move || Driver::new(shared).run();
        if let Err(error) = thread::Builder::new().name("sw-engine".to_owned()).spawn(driver) {
            let jobs = self.stopped();
            for mut job in jobs {
                job.fail(Failure::Thread(std::io::Error::new(error.kind(), error.to_string())));
                job.finish();
            }
        }
    }
}

impl<H> Shared<H> {
    /// New jobs. Waits for some for at most `pause`.
    pub(super) fn arrivals(&self, pause: Duration) -> VecDeque<Job<H>> {
        let arrivals = self.lock();
        let waited = self
            .wake
            .wait_timeout_while(arrivals, pause, |arrivals| arrivals.jobs.is_empty());
        let (mut arrivals, _) = waited.unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut arrivals.jobs)
    }

    /// New jobs, for a thread that has none. Empty where none came: then the thread is to end.
    pub(super) fn arrivals_or_end(&self) -> VecDeque<Job<H>> {
        let arrivals = self.lock();
        let waited = self
            .wake
            .wait_timeout_while(arrivals, LINGER, |arrivals| arrivals.jobs.is_empty());
        let (mut arrivals, _) = waited.unwrap_or_else(PoisonError::into_inner);
        arrivals.running = !arrivals.jobs.is_empty();
        std::mem::take(&mut arrivals.jobs)
    }

    /// There is no thread; gives the jobs that nobody will do.
    pub(super) fn stopped(&self) -> VecDeque<Job<H>> {
        let mut arrivals = self.lock();
        arrivals.running = false;
        std::mem::take(&mut arrivals.jobs)
    }

    /// How the engine does at this peer.
    pub(super) fn strikes(&self) -> MutexGuard<'_, Strikes> {
        self.strikes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Arrivals<H>> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<H> fmt::Debug for Lane<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane")
            .field("segment", &self.shared.segment)
            .field("running", &self.shared.lock().running)
            .finish_non_exhaustive()
    }
}
