//! A few threads that block on the disk, so that nobody else has to.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::BLOCK;
use super::buffer::Buffer;
use crate::SpillFault;

/// Enough to keep an SSD busy with large pieces.
const THREADS: usize = 4;

/// Threads that write at a time at most; a reader does not wait for all writes to end.
const WRITERS: usize = 2;

/// Bytes that are read or written at a time through a buffer.
pub(super) const PIECE: usize = 256 * BLOCK;

pub(super) type Job = Box<dyn FnOnce(&mut Buffer) + Send>;

/// What goes before what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Remove,
    Read,
    Write,
}

pub(super) struct Workers {
    queue: Arc<Queue>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    changed: Condvar,
}

#[derive(Default)]
struct Jobs {
    removes: VecDeque<Job>,
    reads: VecDeque<Job>,
    writes: VecDeque<Job>,
    writing: usize,
    closed: bool,
}

impl Jobs {
    fn next(&mut self) -> Option<(Turn, Job)> {
        let job = self.removes.pop_front().map(|job| (Turn::Remove, job));
        let job = job.or_else(|| self.reads.pop_front().map(|job| (Turn::Read, job)));
        if job.is_some() || self.writing >= WRITERS {
            return job;
        }
        let write = self.writes.pop_front()?;
        self.writing += 1;
        Some((Turn::Write, write))
    }
}

impl Queue {
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut buffer = Buffer::new(PIECE);
        let mut jobs = self.jobs();
        while !jobs.closed {
            let Some((turn, job)) = jobs.next() else {
                jobs = self.changed.wait(jobs).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(jobs);
            job(&mut buffer);
            jobs = self.jobs();
            if turn == Turn::Write && !jobs.closed {
                jobs.writing -= 1;
                // Somebody may have passed over a write because of this one.
                self.changed.notify_one();
            }
        }
    }
}

impl Workers {
    pub(super) fn start(dir: &Path) -> Result<Self, SpillFault> {
        let queue = Arc::<Queue>::default();
        let spawn = |number| {
            let queue = Arc::clone(&queue);
            let builder = thread::Builder::new().name(format!("stagewire-spill-{number}"));
            builder.spawn(move || queue.work())
        };
        let threads = (0..THREADS).map(spawn).collect::<Result<_, _>>().map_err(|error| {
            let error = rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::AGAIN);
            SpillFault::new("start threads for", dir, error)
        });
        let workers = Self {
            queue,
            threads: Mutex::new(threads?),
        };
        Ok(workers)
    }

    /// Has a thread do this in its turn; never, once closed.
    pub(super) fn submit(&self, turn: Turn, job: Job) {
        let mut jobs = self.queue.jobs();
        if jobs.closed {
            return;
        }
        match turn {
            Turn::Remove => jobs.removes.push_back(job),
            Turn::Read => jobs.reads.push_back(job),
            Turn::Write => jobs.writes.push_back(job),
        }
        drop(jobs);
        self.queue.changed.notify_one();
    }

    /// Waits for the jobs under way, removes what is to be removed, and forgets the other jobs.
    pub(super) fn close(&self) {
        let mut jobs = self.queue.jobs();
        let mut left = std::mem::take(&mut *jobs);
        jobs.closed = true;
        drop(jobs);
        self.queue.changed.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        let this = thread::current().id();
        for other in threads.into_iter().filter(|other| other.thread().id() != this) {
            // Its panic was reported where it happened.
            let _ = other.join();
        }
        let mut buffer = Buffer::new(BLOCK);
        for remove in left.removes.drain(..) {
            remove(&mut buffer);
        }
    }
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Workers({THREADS} threads)")
    }
}
