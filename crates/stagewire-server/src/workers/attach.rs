//! `Orchestrator.Attach`: who may attach, and the life of one stream.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use stagewire_api::v1::orchestrator_server::Orchestrator;
use stagewire_api::v1::worker_message::Message;
use stagewire_api::{PROTOCOL, host_id, v1};
use stagewire_core::{Classify, ErrorClass, Incarnation, PayloadId, ProcessRef, StageName, Token};
use stagewire_sched::{Input, Place, WorkerInfo};
use stagewire_transfer::ProcessWatch;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};

use super::input::{Said, read};
use super::{IN_FLIGHT, Sender, Workers};
use crate::driver::{DriveError, Driver};
use crate::nearest::known;
use crate::results::Results;
use crate::run_dir::sweep_incarnation;
use crate::secret::{Secret, Shown};

/// How long a worker may take to say hello.
const HELLO: Duration = Duration::from_secs(5);
/// Longest name of a worker, in characters.
const NAME: usize = 128;

/// What the service needs to know.
#[derive(Debug)]
pub(crate) struct AttachOptions {
    pub(crate) pipeline: StageName,
    pub(crate) stages: Vec<StageName>,
    pub(crate) worker_token: Secret,
    pub(crate) epoch: u64,
    pub(crate) renew_interval: Duration,
    /// A stream on which nothing came for so long is ended: workers renew, even when they have nothing to renew.
    pub(crate) silence: Duration,
    pub(crate) linger: Duration,
    /// Encoded address of the store.
    pub(crate) store: Vec<u8>,
    /// Where the sockets of workers are.
    pub(crate) peers: std::path::PathBuf,
}

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct Attach {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    options: AttachOptions,
    host: String,
    workers: Arc<Workers>,
    driver: Driver,
    results: Arc<Results>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Attach {
    pub(crate) fn new(
        options: AttachOptions,
        workers: Arc<Workers>,
        driver: Driver,
        results: Arc<Results>,
        stop: CancellationToken,
        tasks: TaskTracker,
    ) -> Self {
        let inner = Inner {
            options,
            host: host_id(),
            workers,
            driver,
            results,
            stop,
            tasks,
        };
        Self { inner: Arc::new(inner) }
    }
}

#[tonic::async_trait]
impl Orchestrator for Attach {
    type AttachStream = ReceiverStream<Result<v1::ServerMessage, Status>>;

    async fn attach(
        &self,
        request: Request<Streaming<v1::WorkerMessage>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let inner = &self.inner;
        inner.authenticate(&request)?;
        let mut incoming = request.into_inner();
        let first = tokio::time::timeout(HELLO, incoming.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded(format!("no hello within {HELLO:?}")))??;
        let Some(Message::Hello(hello)) = first.and_then(|first| first.message) else {
            return Err(Status::invalid_argument(
                "the first message of a worker must be a hello",
            ));
        };
        let worker = inner.check(&hello)?;
        let (running, holding) = hello
            .carried()
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let process = (hello.pid != 0 && hello.host == inner.host).then_some(ProcessRef {
            pid: hello.pid,
            started: hello.started,
        });

        let (sender, outgoing) = mpsc::channel(IN_FLIGHT);
        let welcome = v1::ServerMessage {
            message: Some(v1::server_message::Message::Welcome(inner.welcome())),
        };
        sender
            .try_send(Ok(welcome))
            .expect("the channel is new and not empty of room");
        let attach = Attaching {
            worker,
            running,
            holding,
            process,
            sender,
        };
        // On a task of its own: a worker that hangs up now must not be left half attached.
        let attached = inner.tasks.spawn(attach.run(Arc::clone(inner), incoming));
        attached.await.map_err(|error| Status::internal(error.to_string()))??;
        // Ends once the stream is taken out and everything that was sent before has gone.
        Ok(Response::new(ReceiverStream::new(outgoing)))
    }
}

/// Stands for a host, while the server runs.
fn number(host: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    host.hash(&mut hasher);
    hasher.finish()
}

fn status(error: &DriveError) -> Status {
    let message = error.to_string();
    match error.class() {
        ErrorClass::NotFound | ErrorClass::Invalid => Status::invalid_argument(message),
        ErrorClass::Unavailable => Status::unavailable(message),
        _ => Status::failed_precondition(message),
    }
}

impl Inner {
    fn authenticate(&self, request: &Request<Streaming<v1::WorkerMessage>>) -> Result<(), Status> {
        let shown = request.metadata().get("authorization").map(|value| value.as_bytes());
        match self.options.worker_token.judge(shown) {
            Shown::Right => Ok(()),
            Shown::Wrong => Err(Status::unauthenticated(
                "this is not the worker token of this deployment; it is in worker.token of the server's run directory",
            )),
            Shown::Nothing => Err(Status::unauthenticated(
                "a worker must send `authorization: Bearer TOKEN`; the token is in worker.token of the server's run \
                 directory",
            )),
        }
    }

    fn check(&self, hello: &v1::Hello) -> Result<WorkerInfo, Status> {
        let invalid = |error: stagewire_api::WireError| Status::invalid_argument(error.to_string());
        if hello.protocol != PROTOCOL {
            return Err(Status::failed_precondition(format!(
                "the worker speaks protocol {}, the server {PROTOCOL}; install the same version of Stagewire on both",
                hello.protocol
            )));
        }
        let pipeline = self.options.pipeline.as_str();
        if !hello.pipeline.is_empty() && hello.pipeline != pipeline {
            return Err(Status::failed_precondition(format!(
                "the worker serves pipeline {:?}, the server {pipeline:?}; give the worker the run directory of its own server",
                hello.pipeline
            )));
        }
        let stage = hello.stage().map_err(invalid)?;
        if !self.options.stages.contains(&stage) {
            let hint = known(
                stage.as_str(),
                "it has",
                self.options.stages.iter().map(StageName::as_str),
            );
            return Err(Status::invalid_argument(format!(
                "pipeline {pipeline:?} has no stage {:?}{hint}",
                stage.as_str()
            )));
        }
        Ok(WorkerInfo {
            incarnation: hello.incarnation().map_err(invalid)?,
            stage,
            slots: hello.slots,
            max_batch: hello.max_batch.max(1),
            member: hello.member().map_err(invalid)?,
            place: Place {
                host: (!hello.host.is_empty()).then(|| number(&hello.host)),
                numa: hello.numa,
                rail: hello.rail,
            },
            name: hello.name.chars().filter(|c| !c.is_control()).take(NAME).collect(),
        })
    }

    fn welcome(&self) -> v1::Welcome {
        let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        v1::Welcome {
            epoch: self.options.epoch,
            renew_interval_ms: ms(self.options.renew_interval),
            linger_ms: ms(self.options.linger),
            store: self.options.store.clone(),
        }
    }

    /// Watches the process of a worker, once: its death is the worker's loss, whatever its stream says.
    fn watch(self: &Arc<Self>, worker: Incarnation, process: ProcessRef) {
        if self.workers.lock().processes.insert(worker, process).is_some() {
            return;
        }
        let inner = Arc::clone(self);
        self.tasks.spawn(async move {
            let died = tokio::select! {
                () = inner.stop.cancelled() => return,
                died = died(process) => died,
            };
            inner.workers.lock().processes.remove(&worker);
            if let Err(error) = died {
                tracing::warn!(%worker, pid = process.pid, %error, "cannot watch the process of a worker");
                return;
            }
            tracing::info!(%worker, pid = process.pid, "the process of a worker has ended");
            sweep_incarnation(&inner.options.peers, worker);
            let _turn = inner.workers.turn.lock().await;
            // A child that it left behind may keep the stream up.
            inner.workers.end(worker, "the process of the worker has ended");
            inner.driver.tell(Input::WorkerLost { worker }).await;
        });
    }
}

/// A worker that may attach and is about to.
struct Attaching {
    worker: WorkerInfo,
    running: Vec<Token>,
    holding: Vec<PayloadId>,
    process: Option<ProcessRef>,
    sender: Sender,
}

impl Attaching {
    async fn run(self, inner: Arc<Inner>, incoming: Streaming<v1::WorkerMessage>) -> Result<(), Status> {
        let Self {
            worker,
            running,
            holding,
            process,
            sender,
        } = self;
        let (incarnation, name, stage) = (worker.incarnation, worker.name.clone(), worker.stage.clone());
        let close = inner.stop.child_token();
        let turn = inner.workers.turn.lock().await;
        let generation = inner.workers.up(incarnation, sender, close.clone());
        let attached = inner.driver.decide(Input::WorkerAttached {
            worker,
            running,
            holding,
        });
        if let Err(error) = attached.await {
            inner.workers.down(incarnation, generation);
            return Err(status(&error));
        }
        drop(turn);
        tracing::info!(worker = %incarnation, name, %stage, "worker attached");
        if let Some(process) = process {
            inner.watch(incarnation, process);
        }
        let reader = Reader {
            inner: Arc::clone(&inner),
            worker: incarnation,
            generation,
        };
        inner.tasks.spawn(reader.run(incoming, close));
        Ok(())
    }
}

/// Resolves when the process has died, at once where it is dead already.
async fn died(process: ProcessRef) -> io::Result<()> {
    match ProcessWatch::open(process) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        watch => watch?.died().await,
    }
    Ok(())
}

/// Reads what one stream brings.
struct Reader {
    inner: Arc<Inner>,
    worker: Incarnation,
    generation: u64,
}

impl Reader {
    async fn run(self, mut incoming: Streaming<v1::WorkerMessage>, close: CancellationToken) {
        let silence = self.inner.options.silence;
        loop {
            let next = tokio::select! {
                () = close.cancelled() => break,
                next = tokio::time::timeout(silence, incoming.message()) => next,
            };
            let Ok(next) = next else {
                tracing::warn!(worker = %self.worker, ?silence, "a worker has fallen silent; its stream is ended");
                break;
            };
            match next {
                // A message of a later protocol that this build does not know.
                Ok(Some(v1::WorkerMessage { message: None })) => {}
                Ok(Some(v1::WorkerMessage { message: Some(message) })) => {
                    if let Err(error) = self.take(message).await {
                        tracing::warn!(worker = %self.worker, %error, "a worker does not keep to the protocol; its stream is ended");
                        break;
                    }
                }
                Ok(None) => break,
                Err(status) => {
                    tracing::debug!(worker = %self.worker, %status, "the stream of a worker broke");
                    break;
                }
            }
        }
        close.cancel();
        let _turn = self.inner.workers.turn.lock().await;
        if self.inner.workers.down(self.worker, self.generation) {
            self.inner.driver.tell(Input::WorkerAway { worker: self.worker }).await;
        }
    }

    async fn take(&self, message: Message) -> Result<(), stagewire_api::WireError> {
        match read(self.worker, message, &self.inner.options.stages)? {
            Said::Inputs(inputs) => {
                for input in inputs {
                    self.inner.driver.tell(input).await;
                }
            }
            Said::Refused { token, failure } => {
                let worker = self.worker;
                tracing::warn!(%worker, %token, %failure, "a worker says what cannot be");
                let lost = None;
                let refused = super::message::refused(token, failure.clone());
                self.inner.workers.send(worker, refused);
                let failed = Input::Failed {
                    worker,
                    token,
                    failure,
                    lost,
                };
                self.inner.driver.tell(failed).await;
            }
            Said::Result {
                token,
                result,
                handovers,
            } => {
                let (results, driver) = (Arc::clone(&self.inner.results), self.inner.driver.clone());
                let worker = self.worker;
                self.inner.tasks.spawn(async move {
                    results.take(&driver, worker, token, &result, handovers).await;
                });
            }
        }
        Ok(())
    }
}
