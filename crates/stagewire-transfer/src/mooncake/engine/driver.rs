//! The thread of a lane.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::flight::{Failure, Flight, Job, Keep, Rebuilt};
use super::lane::Shared;
use super::pace::Pace;
use super::{EngineStatus, Member};

/// Slices under way at a peer. Mooncake's queue holds 1024 and as many before it; past them, it fails transfers, and now
/// and then stays stuck.
const MOST_SLICES: usize = 512;

/// Slices that are submitted and looked after together.
const BATCH: usize = 64;

pub(super) struct Driver<H> {
    shared: Arc<Shared<H>>,
    jobs: HashMap<u64, Job<H>>,
    next_job: u64,
    /// Jobs with slices to submit, in the order of their turns.
    turns: VecDeque<u64>,
    flights: Vec<Flight>,
    in_flight: usize,
    pace: Pace,
}

impl<H: Keep> Driver<H> {
    pub(super) fn new(shared: Arc<Shared<H>>) -> Self {
        Self {
            shared,
            jobs: HashMap::new(),
            next_job: 0,
            turns: VecDeque::new(),
            flights: Vec::new(),
            in_flight: 0,
            pace: Pace::new(),
        }
    }

    /// Works until there has been nothing to do for some time.
    pub(super) fn run(mut self) {
        let _unwinding = Unwinding(self.shared.clone());
        // Short pauses are short then. Where that is not allowed, they are 50 µs longer.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1000));
        loop {
            let arrivals = if self.jobs.is_empty() {
                let arrivals = self.shared.arrivals_or_end();
                if arrivals.is_empty() {
                    return;
                }
                arrivals
            } else {
                self.shared.arrivals(self.pause())
            };
            for job in arrivals {
                self.admit(job);
            }
            self.look();
            self.give_up();
            self.submit();
        }
    }

    fn pause(&self) -> Duration {
        let oldest = self.flights.iter().map(|flight| (flight.since, flight.bytes)).min();
        self.pace.pause(Instant::now(), oldest.map_or(0, |(_, bytes)| bytes))
    }

    fn admit(&mut self, job: Job<H>) {
        let id = self.next_job;
        self.next_job += 1;
        self.jobs.insert(id, job);
        self.turns.push_back(id);
    }

    /// Fills the peer's queue, a batch of each job in turn.
    fn submit(&mut self) {
        while self.in_flight < MOST_SLICES
            && let Some(id) = self.turns.pop_front()
        {
            let Some(job) = self.jobs.get_mut(&id) else { continue };
            let member = self.shared.slot.current();
            if let Err(error) = job.prepare(&member) {
                job.fail(Failure::Register(error));
            }
            let slices = job.next(BATCH.min(MOST_SLICES - self.in_flight));
            if let Some(&slice) = slices.first() {
                let submitted = member.engine.submit(&self.shared.segment, job.operation, slices);
                let (len, bytes) = (slices.len(), slices.iter().map(|slice| slice.len).sum());
                let now = Instant::now();
                match submitted {
                    Ok(batch) => {
                        let first = job.took_off(len);
                        self.in_flight += len;
                        self.turns.push_back(id);
                        self.flights.push(Flight {
                            job: id,
                            member,
                            batch,
                            first,
                            len,
                            bytes,
                            since: now,
                            looked: false,
                        });
                        self.pace.happened(now);
                    }
                    Err(error) => job.fail(Failure::Submit { slice, error }),
                }
            }
            self.settle(id);
        }
    }

    /// Ends jobs that nobody waits for any more before their turn comes, which may be never where the peer stands still.
    fn give_up(&mut self) {
        let over = |id: &u64| self.jobs.get(id).is_none_or(Job::is_over);
        let (over, turns) = std::mem::take(&mut self.turns)
            .into_iter()
            .partition::<VecDeque<u64>, _>(over);
        self.turns = turns;
        for id in over {
            self.settle(id);
        }
    }

    /// Asks about everything under way, once.
    fn look(&mut self) {
        let mut at = 0;
        while let Some(flight) = self.flights.get(at) {
            let status = flight.member.engine.status(flight.batch);
            if status == EngineStatus::Pending {
                self.flights[at].looked = true;
                at += 1;
                continue;
            }
            let flight = self.flights.swap_remove(at);
            self.in_flight -= flight.len;
            self.pace
                .ended(Instant::now(), flight.since, flight.bytes, !flight.looked);
            let failure = match status {
                EngineStatus::Failed { slice } => Some(self.failed(&flight, slice)),
                _ => {
                    self.shared.strikes().clear();
                    None
                }
            };
            let job = self
                .jobs
                .get_mut(&flight.job)
                .expect("a job stays until its flights have ended");
            job.landed(flight.len);
            if let Some(failure) = failure {
                job.fail(failure);
            }
            self.settle(flight.job);
        }
    }

    /// Ends a job with nothing left to do.
    fn settle(&mut self, id: u64) {
        if self.jobs.get(&id).is_some_and(Job::is_over)
            && let Some(job) = self.jobs.remove(&id)
        {
            job.finish();
        }
    }

    /// Judges a failed batch, and with it the engine.
    fn failed(&self, flight: &Flight, slice: usize) -> Failure {
        let now = Instant::now();
        let slices = &self.jobs[&flight.job].slices[flight.first..flight.first + flight.len];
        let failure = Failure::Slice {
            slice: slices[slice.min(flight.len - 1)],
            after: now - flight.since,
        };
        if !(self.shared.is_alive)() {
            self.shared.strikes().clear();
            return failure;
        }
        let strikes = self.shared.strikes().add(flight.since, now);
        match strikes {
            Some((failures, within)) => Failure::Stuck {
                failures,
                within,
                rebuilt: self.rebuild(&flight.member),
            },
            None => failure,
        }
    }

    fn rebuild(&self, stuck: &Member) -> Rebuilt {
        let segment = &self.shared.segment;
        match self.shared.slot.replace(stuck) {
            Ok(true) => {
                tracing::warn!(%segment, "a transfer engine was stuck; another takes its place");
                self.shared.strikes().clear();
                Rebuilt::Yes
            }
            Ok(false) => Rebuilt::Unknown,
            Err(error) => {
                tracing::warn!(%segment, %error, "a transfer engine is stuck, and another cannot be made");
                Rebuilt::Failed(error)
            }
        }
    }
}

/// Where the thread panics, the lane begins another for the next job. One that ends has said so already, and another may
/// run by then.
struct Unwinding<H>(Arc<Shared<H>>);

impl<H> Drop for Unwinding<H> {
    fn drop(&mut self) {
        if thread::panicking() {
            drop(self.0.stopped());
        }
    }
}
