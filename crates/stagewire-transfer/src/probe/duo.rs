use std::io;
use std::mem;
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

/// A thread that runs what the caller runs, at the same time.
#[derive(Debug)]
pub(super) struct Duo {
    jobs: mpsc::Sender<Job>,
}

type Work<'a> = &'a (dyn Fn() + Sync);

struct Job {
    work: Work<'static>,
    done: Arc<Done>,
}

#[derive(Debug, Default)]
struct Done {
    done: Mutex<bool>,
    changed: Condvar,
}

impl Done {
    fn set(&self) {
        *self.done.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_while(done, |done| !*done);
        drop(waited);
    }
}

/// Tells that a job is over also where it panicked.
struct Over(Arc<Done>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.set();
    }
}

/// Waits for the other thread also where this one panicked.
struct Join<'a>(&'a Done);

impl Drop for Join<'_> {
    fn drop(&mut self) {
        self.0.wait();
    }
}

impl Duo {
    pub(super) fn start() -> io::Result<Self> {
        let (jobs, orders) = mpsc::channel::<Job>();
        thread::Builder::new().name("probe".to_owned()).spawn(move || {
            for Job { work, done } in orders {
                let _over = Over(done);
                work();
            }
        })?;
        Ok(Self { jobs })
    }

    /// Runs `work` here and on the other thread, until both are done.
    pub(super) fn both(&self, work: Work<'_>) {
        let done = Arc::new(Done::default());
        {
            let job = Job {
                // SAFETY: the other thread uses it only until it says that it is over, which `Join` waits for before
                // this function returns or unwinds.
                work: unsafe { mem::transmute::<Work<'_>, Work<'static>>(work) },
                done: done.clone(),
            };
            if self.jobs.send(job).is_err() {
                // The other thread is gone with a panic; this one does all of it.
                return work();
            }
            let _join = Join(&done);
            work();
        }
    }
}
