use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::Fault;
use super::peer::Peer;
use crate::nixl::agent::{Agent, Op, Request, Span, Stretch};

/// Stretches of one request at most.
const REQUEST_STRETCHES: usize = 1024;

/// Bytes of one request at most: some 10 ms in which the thread does nothing else, and cannot stop.
const REQUEST_BYTES: u64 = 32 << 20;

/// Requests of one job in flight at most.
const WINDOW: usize = 4;

/// Bytes to move between memory of this process and a registration of a peer.
pub(in crate::nixl) struct Job<K> {
    pub(in crate::nixl) peer: CString,
    pub(in crate::nixl) op: Op,
    /// Memory of this process; the thread gives it a number and registers it.
    pub(in crate::nixl) local: Span,
    pub(in crate::nixl) remote: Span,
    pub(in crate::nixl) stretches: Vec<Stretch>,
    /// Keeps the memory of both sides in place. It is dropped, or given back, when nothing touches it any more.
    pub(in crate::nixl) held: K,
    pub(in crate::nixl) progress: Arc<Progress>,
    /// Until it is answered.
    pub(in crate::nixl) done: Option<oneshot::Sender<Result<K, Fault>>>,
}

impl<K> Job<K> {
    pub(super) fn fail(mut self, fault: Fault) {
        self.answer(fault);
    }

    fn answer(&mut self, fault: Fault) {
        if let Some(done) = self.done.take() {
            // Nobody may wait any more.
            drop(done.send(Err(fault)));
        }
    }

    fn is_awaited(&self) -> bool {
        self.done.as_ref().is_some_and(|done| !done.is_closed())
    }
}

/// Whether any request of a job was posted.
#[derive(Debug, Default)]
pub(in crate::nixl) struct Progress(AtomicU8);

impl Progress {
    const WAITING: u8 = 0;
    const POSTED: u8 = 1;
    const CALLED_OFF: u8 = 2;

    /// Has nothing posted any more. `false` where something was already.
    pub(in crate::nixl) fn call_off(&self) -> bool {
        self.leave_waiting(Self::CALLED_OFF)
    }

    /// `false` where the job was called off.
    fn post(&self) -> bool {
        self.leave_waiting(Self::POSTED)
    }

    fn leave_waiting(&self, to: u8) -> bool {
        match self
            .0
            .compare_exchange(Self::WAITING, to, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => true,
            Err(now) => now == to,
        }
    }
}

/// What came of a turn.
pub(super) enum Turn {
    GoesOn,
    /// Nothing is in flight, and nothing is left to post.
    Done,
    /// Nothing is in flight as far as NIXL says, after an error.
    Failed,
}

/// A job at work.
pub(super) struct Running<K> {
    job: Job<K>,
    pub(super) peer: CString,
    registered: bool,
    /// The next stretch, and how much of it was posted.
    next: usize,
    taken: u64,
    in_flight: Vec<Request>,
    posted: Instant,
    fault: Option<Fault>,
    /// NIXL did not take a request back: it may touch the memory for ever.
    doomed: bool,
}

impl<K> Running<K> {
    pub(super) fn new(mut job: Job<K>, number: u64) -> Self {
        job.local.number = number;
        Self {
            peer: job.peer.clone(),
            job,
            registered: false,
            next: 0,
            taken: 0,
            in_flight: Vec::new(),
            posted: Instant::now(),
            fault: None,
            doomed: false,
        }
    }

    /// For how long the youngest request has been in flight, where there is one.
    pub(super) fn in_flight_for(&self) -> Option<Duration> {
        (!self.in_flight.is_empty()).then(|| self.posted.elapsed())
    }

    /// Whether it has more to post and may do so.
    pub(super) fn has_room(&self) -> bool {
        self.wants_more() && self.in_flight.len() < WINDOW
    }

    fn wants_more(&self) -> bool {
        self.fault.is_none() && self.next < self.job.stretches.len() && self.job.is_awaited()
    }

    /// Looks at the requests in flight, then posts one more.
    pub(super) fn turn(&mut self, agent: &Agent, peer: &mut Peer<K>) -> Turn {
        self.look(agent);
        if self.has_room()
            && !peer.is_settling()
            && let Err(fault) = self.post_next(agent, peer)
        {
            self.fault = Some(fault);
        }
        if !self.in_flight.is_empty() || self.wants_more() {
            return Turn::GoesOn;
        }
        match &self.fault {
            Some(Fault::Nixl { .. }) if self.registered => Turn::Failed,
            _ => Turn::Done,
        }
    }

    fn look(&mut self, agent: &Agent) {
        let mut index = 0;
        while index < self.in_flight.len() {
            let over = match agent.is_over(&self.in_flight[index]) {
                Ok(over) => over,
                Err(error) => {
                    self.fault.get_or_insert(Fault::Nixl {
                        what: "finish a transfer",
                        error,
                    });
                    true
                }
            };
            if over {
                let request = self.in_flight.swap_remove(index);
                self.release(agent, request);
            } else {
                index += 1;
            }
        }
    }

    fn release(&mut self, agent: &Agent, request: Request) {
        if let Err(error) = agent.release(request) {
            self.doomed = true;
            self.fault.get_or_insert(Fault::Nixl {
                what: "release a transfer",
                error,
            });
        }
    }

    fn post_next(&mut self, agent: &Agent, peer: &mut Peer<K>) -> Result<(), Fault> {
        peer.load(agent, self.job.remote.number)?;
        if !self.registered {
            // SAFETY: `held` keeps the memory mapped; it is deregistered before that goes, in `end`.
            unsafe { agent.register(&self.job.local) }.map_err(Fault::nixl("register the memory of this side"))?;
            self.registered = true;
        }
        let stretches = self.take();
        let Job { op, local, remote, .. } = &self.job;
        let request = agent.request(*op, &self.peer, local, remote, &stretches);
        let request = request.map_err(Fault::nixl("prepare a transfer"))?;
        if !self.job.progress.post() {
            self.release(agent, request);
            return Err(Fault::Stopped);
        }
        self.posted = Instant::now();
        // SAFETY: `held` reserves the memory until the request is over.
        match unsafe { agent.post(&request) } {
            Ok(true) => self.release(agent, request),
            Ok(false) => self.in_flight.push(request),
            Err(error) => {
                self.release(agent, request);
                return Err(Fault::Nixl {
                    what: "start a transfer",
                    error,
                });
            }
        }
        Ok(())
    }

    /// What the next request moves.
    fn take(&mut self) -> Vec<Stretch> {
        let mut stretches = Vec::new();
        let mut room = REQUEST_BYTES;
        while let Some(&Stretch { local, remote, len }) = self.job.stretches.get(self.next)
            && room > 0
            && stretches.len() < REQUEST_STRETCHES
        {
            let taken = self.taken;
            let len_here = (len - taken).min(room);
            stretches.push(Stretch {
                local: local + taken,
                remote: remote + taken,
                len: len_here,
            });
            room -= len_here;
            self.taken += len_here;
            if self.taken == len {
                self.next += 1;
                self.taken = 0;
            }
        }
        stretches
    }

    /// Gives back what the job held, where it moved everything.
    pub(super) fn succeed(mut self, agent: &Agent) {
        match self.fault.take() {
            Some(fault) => self.fail(fault, agent),
            None => {
                self.deregister(agent);
                let Job { held, done, .. } = self.job;
                if let Some(done) = done {
                    // Whoever waited may be gone: then what was held comes back and is dropped.
                    drop(done.send(Ok(held)));
                }
            }
        }
    }

    /// Ends a job that nothing is in flight of.
    pub(super) fn fail(mut self, fault: Fault, agent: &Agent) {
        if self.doomed {
            tracing::warn!(%fault, "memory is kept for ever, because NIXL may still use it");
            self.job.answer(fault);
            std::mem::forget(self.job.held);
            return;
        }
        self.deregister(agent);
        self.job.fail(fault);
    }

    /// Says that it failed, while what it holds stays.
    pub(super) fn answer(&mut self) {
        if let Some(fault) = &self.fault {
            self.job.answer(fault.clone());
        }
    }

    /// Ends a job after its connection is gone.
    pub(super) fn bury(mut self, agent: &Agent) {
        let fault = self.fault.take().unwrap_or(Fault::NotLoaded);
        self.fail(fault, agent);
    }

    fn deregister(&mut self, agent: &Agent) {
        if std::mem::take(&mut self.registered)
            && let Err(error) = agent.deregister(&self.job.local)
        {
            tracing::warn!(%error, "NIXL cannot end a registration");
        }
    }
}
