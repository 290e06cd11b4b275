//! A few threads that block on the disk, so that nobody else has to.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
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

/// Threads that read at a time at most while a write waits and no other is under way: whoever reads may need the room
/// that it makes.
const READERS: usize = THREADS - 1;

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
    reading: usize,
    writing: usize,
    closed: bool,
}

impl Jobs {
    fn next(&mut self) -> Option<(Turn, Job)> {
        if let Some(remove) = self.removes.pop_front() {
            return Some((Turn::Remove, remove));
        }
        let starving = self.writing == 0 && self.reading >= READERS && !self.writes.is_empty();
        if !starving && let Some(read) = self.reads.pop_front() {
            self.reading += 1;
            return Some((Turn::Read, read));
        }
        if self.writing >= WRITERS {
            return None;
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
            // Its panic was reported where it happened. The thread lives on, and so do the counts.
            let _ = catch_unwind(AssertUnwindSafe(|| job(&mut buffer)));
            jobs = self.jobs();
            match turn {
                // The counts went with the jobs that were left.
                _ if jobs.closed => {}
                Turn::Remove => {}
                Turn::Read => jobs.reading -= 1,
                Turn::Write => {
                    jobs.writing -= 1;
                    // Somebody may have passed over a write because of this one.
                    self.changed.notify_one();
                }
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Reads that never end: each has another one follow it before it ends.
    fn read_on(workers: &Arc<Workers>, stop: &Arc<AtomicBool>) {
        let (again, stopped) = (Arc::clone(workers), Arc::clone(stop));
        let read = Box::new(move |_: &mut Buffer| {
            if !stopped.load(Ordering::Relaxed) {
                read_on(&again, &stopped);
                // As others would, that wait as well.
                thread::yield_now();
            }
        });
        workers.submit(Turn::Read, read);
    }

    #[test]
    fn readers_do_not_starve_a_writer() {
        let workers = Arc::new(Workers::start(Path::new("/nowhere")).expect("threads"));
        let stop = Arc::new(AtomicBool::new(false));
        for _ in 0..3 * THREADS {
            read_on(&workers, &stop);
        }
        let (wrote, writes) = mpsc::channel();
        for n in 0..10 {
            let wrote = wrote.clone();
            workers.submit(Turn::Write, Box::new(move |_| wrote.send(n).expect("somebody waits")));
        }
        let order: Vec<_> = (0..10).map_while(|_| writes.recv_timeout(PATIENCE).ok()).collect();
        stop.store(true, Ordering::Relaxed);
        workers.close();
        assert_eq!(order.len(), 10, "reads went before every write");
    }

    #[test]
    fn who_panics_takes_no_thread_along() {
        let workers = Workers::start(Path::new("/nowhere")).expect("threads");
        let (done, ends) = mpsc::channel();
        for turn in [Turn::Remove, Turn::Read, Turn::Write] {
            for _ in 0..2 * THREADS {
                workers.submit(turn, Box::new(|_| panic!("on purpose")));
            }
            let done = done.clone();
            workers.submit(turn, Box::new(move |_| done.send(turn).expect("somebody waits")));
        }
        let mut ended: Vec<_> = (0..3).map_while(|_| ends.recv_timeout(PATIENCE).ok()).collect();
        ended.sort_by_key(|turn| *turn as u8);
        assert_eq!(ended, [Turn::Remove, Turn::Read, Turn::Write]);
        // Others may still be on their way out of their panic.
        let begin = Instant::now();
        let counts = || {
            let jobs = workers.queue.jobs();
            (jobs.reading, jobs.writing)
        };
        while counts() != (0, 0) {
            assert!(begin.elapsed() < PATIENCE, "{:?} still count", counts());
            thread::yield_now();
        }
        workers.close();
    }

    #[test]
    fn writers_leave_threads_to_readers() {
        let workers = Workers::start(Path::new("/nowhere")).expect("threads");
        let (end, ends) = mpsc::channel::<()>();
        let ends = Arc::new(Mutex::new(ends));
        for _ in 0..THREADS {
            let ends = Arc::clone(&ends);
            let write = move |_: &mut Buffer| {
                let _ = ends.lock().expect("no panic").recv();
            };
            workers.submit(Turn::Write, Box::new(write));
        }
        let (read, reads) = mpsc::channel();
        workers.submit(Turn::Read, Box::new(move |_| read.send(()).expect("somebody waits")));
        reads.recv_timeout(PATIENCE).expect("two threads are left");
        drop(end);
        workers.close();
    }
}
