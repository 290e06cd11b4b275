//! Runs the attempts of one stage: the worker's side of the orchestrator, on top of the connector.
//!
//! [`Worker::attach`] starts a connector and a session. Offers are accepted while slots are free; each granted attempt
//! comes out of [`Worker::next_task`] as a [`Task`], which reads its inputs, reports progress, and ends with an
//! [`Output`] or a failure. Renewal, reconnects, releases and the handover reports need no help.

mod driver;
mod error;
mod leave;
mod output;
mod task;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stagewire_api::{RunDir, SessionOptions, WorkerSession};
use stagewire_core::{ByteCount, ErrorClass, Failure, Member, PayloadId, StageName, Token};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use crate::{Carrier, Connector, ConnectorOptions};
use driver::Driver;
use leave::{Drain, Made};
use task::{Answer, Sent, TaskState};

pub use error::{Cancelled, SaveError, TaskError, WorkerError};
pub use output::{Output, OutputPlan};
pub use task::{Checkpoint, InputFile, Saving, Task, TaskInput};

/// Who works where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerOptions {
    /// Run directory of the deployment.
    pub run_dir: PathBuf,
    /// Pipeline that the worker serves; empty for whichever the server has.
    pub pipeline: String,
    /// Stage that the worker serves.
    pub stage: StageName,
    /// Name shown to people.
    pub name: String,
    /// Attempts at once.
    pub slots: u32,
    /// Attempts of one shape that it runs together, where it has one slot: see [`Worker::next_batch`].
    pub max_batch: u32,
    /// Its place in a group that runs every attempt together, where it is in one: see [`Task::follow`].
    pub member: Option<Member>,
    /// The NUMA node that it runs on, where that is known: work is preferably given to workers near what they read.
    pub numa: Option<u32>,
    /// The rail of the network that it is on, where that is known.
    pub rail: Option<u32>,
    /// Most bytes of shared memory.
    pub arena_limit: ByteCount,
    /// What carries the bytes, as in [`ConnectorOptions::transports`].
    pub transports: Vec<Carrier>,
    /// How long to look for the server at first.
    pub attach_within: Duration,
}

impl WorkerOptions {
    /// One slot, an arena of 1 GiB, 60 s to find the server.
    pub fn new(run_dir: impl Into<PathBuf>, stage: StageName) -> Self {
        Self {
            run_dir: run_dir.into(),
            pipeline: String::new(),
            name: stage.to_string(),
            stage,
            slots: 1,
            max_batch: 1,
            member: None,
            numa: None,
            rail: None,
            arena_limit: ByteCount(1 << 30),
            transports: Carrier::DEFAULT.to_vec(),
            attach_within: Duration::from_secs(60),
        }
    }
}

/// A process that runs attempts of one stage.
#[derive(Debug)]
pub struct Worker {
    inner: Arc<Inner>,
    tasks: tokio::sync::Mutex<Granted>,
    driver: AbortHandle,
}

/// Granted attempts that nobody has taken yet.
#[derive(Debug)]
struct Granted {
    queue: mpsc::UnboundedReceiver<Vec<Task>>,
    /// The rest of a batch that was taken one by one, last first.
    next: Vec<Task>,
}

/// What the worker, its driver and its tasks have in common.
#[derive(Debug)]
pub(crate) struct Inner {
    connector: Arc<Connector>,
    /// Dropped when the worker closes: the server sees it leave.
    session: Mutex<Option<WorkerSession>>,
    stage: StageName,
    /// Attempts that it may have at once.
    places: u32,
    /// What is offered at once runs at once.
    batches: bool,
    attempts: Mutex<BTreeMap<Token, Slot>>,
    /// Why no more tasks come; set once.
    over: Mutex<Option<Failure>>,
    draining: AtomicBool,
    drain: Mutex<Drain>,
    /// Payloads of attempts that ended well, until the server releases them.
    made: Mutex<BTreeMap<PayloadId, Made>>,
    /// The session has ended: nobody releases payloads any more.
    alone: AtomicBool,
    /// Counts the times that an attempt left its slot or a payload was released.
    freed: watch::Sender<u64>,
}

/// What an accepted attempt is doing.
#[derive(Debug)]
enum Slot {
    /// Accepted, not granted yet.
    Offered(Box<Offered>),
    /// Granted, until the server has answered how it ended.
    Running(Arc<TaskState>),
}

/// What an offer says.
#[derive(Debug)]
struct Offered {
    params: String,
    files: Vec<InputFile>,
    inputs: Vec<TaskInput>,
    output: OutputPlan,
    member: Option<Member>,
    /// The stage takes checkpoints.
    checkpoints: bool,
    resume: Option<Checkpoint>,
}

impl Worker {
    /// Starts a connector and attaches to the server of the run directory.
    ///
    /// # Errors
    /// [`WorkerError`]; nothing is left behind then.
    pub async fn attach(options: WorkerOptions) -> Result<Arc<Self>, WorkerError> {
        let connector = Connector::start(ConnectorOptions {
            arena_limit: options.arena_limit,
            transports: options.transports,
            ..ConnectorOptions::new(&options.run_dir, options.stage.clone())
        })
        .await?;
        let session = WorkerSession::attach(SessionOptions {
            run_dir: RunDir::locate(Some(&options.run_dir)),
            incarnation: connector.peer().incarnation,
            process: connector.peer().process,
            pipeline: options.pipeline,
            stage: options.stage.clone(),
            name: options.name,
            slots: options.slots,
            max_batch: options.max_batch,
            member: options.member,
            numa: options.numa,
            rail: options.rail,
            attach_within: options.attach_within,
        });
        let (session, events) = match session.await {
            Ok(session) => session,
            Err(error) => {
                connector.close().await;
                return Err(error.into());
            }
        };
        let inner = Arc::new(Inner {
            connector,
            session: Mutex::new(Some(session)),
            stage: options.stage,
            places: options.slots.saturating_mul(options.max_batch),
            batches: options.max_batch > 1,
            attempts: Mutex::default(),
            over: Mutex::default(),
            draining: AtomicBool::new(false),
            drain: Mutex::default(),
            made: Mutex::default(),
            alone: AtomicBool::new(false),
            freed: watch::Sender::new(0),
        });
        let (queue, tasks) = mpsc::unbounded_channel();
        let driver = Driver::new(Arc::clone(&inner), queue);
        Ok(Arc::new(Self {
            inner,
            tasks: tokio::sync::Mutex::new(Granted {
                queue: tasks,
                next: Vec::new(),
            }),
            driver: tokio::spawn(driver.run(events)).abort_handle(),
        }))
    }

    /// The next granted attempt; `None` once no more will come: see [`Worker::over`].
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn next_task(&self) -> Option<Task> {
        let mut tasks = self.tasks.lock().await;
        if tasks.next.is_empty() {
            tasks.next = tasks.queue.recv().await?;
            tasks.next.reverse();
        }
        tasks.next.pop()
    }

    /// The next granted attempts that are to run together, which each end on their own: one or more, at most
    /// [`WorkerOptions::max_batch`], in the order in which they were offered. Some of them may have been told to stop by
    /// then. `None` once no more will come: see [`Worker::over`].
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn next_batch(&self) -> Option<Vec<Task>> {
        let mut tasks = self.tasks.lock().await;
        if tasks.next.is_empty() {
            return tasks.queue.recv().await;
        }
        Some(std::mem::take(&mut tasks.next).into_iter().rev().collect())
    }

    /// Takes no more offers, and tells the server. What runs is finished; then no more tasks come.
    pub fn drain(&self) {
        if !self.inner.draining.swap(true, Ordering::AcqRel) {
            self.inner.tell(|session| session.drain(None));
            self.inner.note_freed();
        }
    }

    /// Why no more tasks come: the server drained this worker, or was gone for longer than the linger time.
    pub fn over(&self) -> Option<Failure> {
        lock(&self.inner.over).clone()
    }

    /// The worker's connector.
    pub fn connector(&self) -> &Arc<Connector> {
        &self.inner.connector
    }

    /// Number of attempts that hold a slot.
    pub fn busy(&self) -> usize {
        lock(&self.inner.attempts).len()
    }

    /// Ends the session and the connector; what runs is told to stop. Calling it again does nothing.
    pub async fn close(&self) {
        self.end();
        self.inner.connector.close().await;
    }

    fn end(&self) {
        self.driver.abort();
        let message = "the worker was closed";
        self.inner
            .end(Failure::new(ErrorClass::Cancelled, "worker.closed", message));
        lock(&self.inner.session).take();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

impl Inner {
    /// Stops everything that runs and tells every waiter. The first reason stays.
    fn end(&self, failure: Failure) {
        lock(&self.over).get_or_insert_with(|| failure.clone());
        for slot in std::mem::take(&mut *lock(&self.attempts)).into_values() {
            if let Slot::Running(state) = slot {
                state.stop().stop(failure.clone());
                self.answer(&state, Answer::Over(failure.clone()));
            }
        }
        self.note_freed();
    }

    /// Lets go of the output of an attempt as the server has answered, and tells its task.
    fn answer(&self, state: &TaskState, answer: Answer) {
        match (state.take_output(), &answer) {
            // The server releases it once nobody needs it.
            (None, _) | (Some(Sent { result: false, .. }), Answer::Accepted) => {}
            // A result is the server's own by now.
            (Some(output), Answer::Accepted) => self.connector.release(output.payload),
            // Nobody will ask for it, and the server may not know of it.
            (Some(output), Answer::Refused(_) | Answer::Over(_)) => {
                lock(&self.made).remove(&output.payload);
                self.connector.release(output.payload);
                self.tell(|session| session.dropped(output.payload));
            }
        }
        self.note_freed();
        state.answer(answer);
    }

    /// The attempt has left its slot.
    fn free(&self, token: Token) {
        lock(&self.attempts).remove(&token);
        self.note_freed();
    }

    /// The session has ended.
    fn leave_alone(&self) {
        self.alone.store(true, Ordering::Release);
        self.note_freed();
    }

    /// The server needs the payload no more.
    fn release(&self, payload: PayloadId) {
        lock(&self.made).remove(&payload);
        self.connector.release(payload);
        self.note_freed();
    }

    fn note_freed(&self) {
        self.freed.send_modify(|count| *count += 1);
    }

    /// Tells the server something; nothing once the worker has closed.
    fn tell(&self, message: impl FnOnce(&WorkerSession)) {
        let session = lock(&self.session).clone();
        if let Some(session) = session {
            message(&session);
        }
    }

    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
