use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, Failure, Incarnation, PayloadId, ProcessRef, Progress, StageName, Token};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Endpoint;
use tonic::{Code, Request, Status, Streaming};

use crate::convert::{WireError, payload_id, required};
use crate::outbox::Outbox;
use crate::v1::orchestrator_client::OrchestratorClient;
use crate::v1::server_message::Message as FromServer;
use crate::v1::worker_message::Message as ToServer;
use crate::{PROTOCOL, RunDir, RunDirError, host_id, v1};

/// Messages in flight to the server. More means that the server has stopped reading: the stream is given up.
const IN_FLIGHT: usize = 1024;
/// Progress reports within this time are merged into one.
const MERGE: Duration = Duration::from_millis(20);
/// Longest message of the server: an offer with several handles, each with metadata of up to 16 MiB.
const LONGEST_MESSAGE: usize = 128 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const FIRST_BACK_OFF: Duration = Duration::from_millis(50);
const LAST_BACK_OFF: Duration = Duration::from_secs(1);

/// Who attaches, and to which deployment.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    /// Where the server is found.
    pub run_dir: RunDir,
    /// This life of the worker process.
    pub incarnation: Incarnation,
    /// The worker process.
    pub process: ProcessRef,
    /// Pipeline that the worker serves; empty for whichever the server has.
    pub pipeline: String,
    /// Stage that the worker serves.
    pub stage: StageName,
    /// Name shown to people.
    pub name: String,
    /// Attempts that the worker runs at once.
    pub slots: u32,
    /// How long to look for a server at first. Once attached, the server says how long to look for it again.
    pub attach_within: Duration,
}

/// Why a worker could not attach, or cannot attach again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum AttachError {
    #[error("no server was found within {waited:?}")]
    NoServer { waited: Duration, source: RunDirError },
    #[error("the server at {address} could not be reached within {waited:?}: {error}")]
    Unreachable {
        address: String,
        waited: Duration,
        error: String,
    },
    #[error("the server at {address} refused worker {worker} for stage {stage}: {message}")]
    Refused {
        address: String,
        worker: String,
        stage: StageName,
        code: Code,
        message: String,
    },
}

impl Classify for AttachError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NoServer { source, .. } => source.class(),
            Self::Unreachable { .. } => ErrorClass::Unavailable,
            Self::Refused {
                code: Code::Unauthenticated,
                ..
            } => ErrorClass::Unauthenticated,
            Self::Refused {
                code: Code::Unimplemented | Code::FailedPrecondition,
                ..
            } => ErrorClass::Unsupported,
            Self::Refused { .. } => ErrorClass::Invalid,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::NoServer { source, .. } => source.reason(),
            Self::Unreachable { .. } => "server.unreachable",
            Self::Refused { .. } => "worker.refused",
        }
    }
}

/// What the server, or its absence, tells a worker.
#[derive(Debug)]
#[non_exhaustive]
pub enum SessionEvent {
    /// Attached, at first or again. `store` is the encoded address of the server's store, which is new with each server.
    Attached {
        /// Epoch of the server.
        epoch: u64,
        /// Encoded [`stagewire_core::Peer`] of the server's store; empty where it has none.
        store: Vec<u8>,
    },
    /// The stream is down. What runs goes on; the session looks for the server.
    Away,
    /// Work is offered; answer with [`WorkerSession::accept`] or [`WorkerSession::decline`].
    Offer(v1::Offer),
    /// The accepted attempt may run.
    Grant(Token),
    /// The attempt must stop at its next step; answer with [`WorkerSession::stopped`].
    Cancel(Token, Failure),
    /// Nobody needs this payload any more.
    Release(PayloadId),
    /// The completion or failure was taken.
    Accepted(Token),
    /// The attempt was superseded; it must stop.
    Refused(Token, Failure),
    /// No more offers will come: finish what runs within this time, then leave.
    Drain(Duration),
    /// No server for longer than the linger time, or it does not take this worker back. The session has ended.
    Over(AttachError),
}

/// The worker's side of the stream to the orchestrator.
///
/// One task sends and receives; clones of this handle talk to it without waiting. When the last handle is dropped the
/// stream ends and the server sees the worker leave.
#[derive(Debug, Clone)]
pub struct WorkerSession {
    shared: Arc<Shared>,
    /// Wakes the task. The handles alone own it, so that the task learns when they are gone.
    changed: Arc<watch::Sender<()>>,
}

#[derive(Debug, Default)]
struct Shared(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    outbox: Outbox,
    /// Messages that wait for the task, in order.
    queue: Vec<ToServer>,
    holding: BTreeSet<PayloadId>,
}

impl WorkerSession {
    /// Attaches and keeps the worker attached until every handle is dropped.
    ///
    /// Events come in order; the first is [`SessionEvent::Attached`].
    ///
    /// # Errors
    /// [`AttachError`] where no server is found in time or the server refuses the worker.
    pub async fn attach(options: SessionOptions) -> Result<(Self, mpsc::UnboundedReceiver<SessionEvent>), AttachError> {
        let shared = Arc::<Shared>::default();
        let stream = connect(&options, &shared, options.attach_within).await?;
        let (changed, changes) = watch::channel(());
        let (events, receiver) = mpsc::unbounded_channel();
        tokio::spawn(drive(options, Arc::clone(&shared), changes, stream, events));
        Ok((
            Self {
                shared,
                changed: Arc::new(changed),
            },
            receiver,
        ))
    }

    /// Takes an offer. Run it once [`SessionEvent::Grant`] has come.
    pub fn accept(&self, token: Token) {
        self.push(ToServer::Accept(token.into()));
    }

    /// Refuses an offer.
    pub fn decline(&self, token: Token, failure: Failure) {
        self.push(ToServer::Decline(v1::Decline {
            token: Some(token.into()),
            failure: Some(failure.into()),
        }));
    }

    /// Reports progress of a running attempt; renews its grant.
    pub fn progress(&self, token: Token, progress: Progress) {
        self.lock().outbox.progress(token, progress);
        self.wake();
    }

    /// Says that the attempt's payload exists and its chunk 0 is visible. The payload is held until released.
    pub fn published(&self, token: Token, payload: v1::Payload) {
        if !payload.stored
            && let Ok(id) = payload.payload_id()
        {
            self.lock().holding.insert(id);
        }
        self.say(
            token,
            ToServer::Published(v1::Published {
                token: Some(token.into()),
                payload: Some(payload),
            }),
        );
    }

    /// Says that the attempt is done. Answered by [`SessionEvent::Accepted`] or [`SessionEvent::Refused`].
    pub fn completed(&self, token: Token, result: Option<v1::Payload>, handovers: Vec<v1::Handover>) {
        let message = v1::Completed {
            token: Some(token.into()),
            result,
            handovers,
        };
        self.say(token, ToServer::Completed(message));
    }

    /// Says that the attempt failed; `lost` names an input whose holder is gone.
    pub fn failed(&self, token: Token, failure: Failure, lost: Option<PayloadId>) {
        let lost_payload = lost.map(|id| id.0.as_bytes().to_vec()).unwrap_or_default();
        let message = v1::Failed {
            token: Some(token.into()),
            failure: Some(failure.into()),
            lost_payload,
        };
        self.say(token, ToServer::Failed(message));
    }

    /// Says that a cancelled or refused attempt has stopped: its slot is free.
    pub fn stopped(&self, token: Token) {
        self.lock().outbox.end(token);
        self.push(ToServer::Stopped(token.into()));
    }

    /// Forgets a payload that this worker held.
    pub fn dropped(&self, payload: PayloadId) {
        self.lock().holding.remove(&payload);
    }

    fn say(&self, token: Token, message: ToServer) {
        let mut state = self.lock();
        if state.outbox.say(token, &message) {
            state.queue.push(message);
        }
        drop(state);
        self.wake();
    }

    fn push(&self, message: ToServer) {
        self.lock().queue.push(message);
        self.wake();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.lock()
    }

    fn wake(&self) {
        self.changed.send_replace(());
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One connected stream.
struct Stream {
    sender: mpsc::Sender<v1::WorkerMessage>,
    receiver: Streaming<v1::ServerMessage>,
    welcome: v1::Welcome,
}

/// Why one try to connect failed, and whether another makes sense.
enum Try {
    Again(AttachError),
    Final(AttachError),
}

/// Looks for the server until `within` is over, again and again.
async fn connect(options: &SessionOptions, shared: &Shared, within: Duration) -> Result<Stream, AttachError> {
    let begin = Instant::now();
    let mut back_off = FIRST_BACK_OFF;
    loop {
        let error = match try_connect(options, shared, begin).await {
            Ok(stream) => return Ok(stream),
            Err(Try::Final(error)) => return Err(error),
            Err(Try::Again(error)) => error,
        };
        if begin.elapsed() + back_off > within {
            return Err(error);
        }
        tokio::time::sleep(back_off).await;
        back_off = (back_off * 2).min(LAST_BACK_OFF);
    }
}

async fn try_connect(options: &SessionOptions, shared: &Shared, begin: Instant) -> Result<Stream, Try> {
    let no_server = |source| {
        Try::Again(AttachError::NoServer {
            waited: begin.elapsed(),
            source,
        })
    };
    let file = options.run_dir.server().map_err(no_server)?;
    let token = options.run_dir.worker_token().map_err(no_server)?;
    let address = file.http;
    let unreachable = |error: String| {
        Try::Again(AttachError::Unreachable {
            address: address.clone(),
            waited: begin.elapsed(),
            error,
        })
    };
    let refused = |status: Status| {
        let (code, message) = (status.code(), status.message().to_owned());
        let worker = options.name.clone();
        Try::Final(AttachError::Refused {
            address: address.clone(),
            worker,
            stage: options.stage.clone(),
            code,
            message,
        })
    };
    let endpoint =
        Endpoint::from_shared(format!("http://{address}")).map_err(|error| unreachable(error.to_string()))?;
    let channel = endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(5))
        .connect()
        .await
        .map_err(|error| unreachable(chain(&error)))?;

    let (sender, outgoing) = mpsc::channel(IN_FLIGHT);
    sender
        .try_send(wrap(ToServer::Hello(hello(options, shared))))
        .expect("the channel is new and not empty of room");
    let mut request = Request::new(ReceiverStream::new(outgoing));
    let bearer: MetadataValue<Ascii> = format!("Bearer {token}")
        .parse()
        .map_err(|_| unreachable("the worker token is not text".to_owned()))?;
    request.metadata_mut().insert("authorization", bearer);
    let judge = |status: Status| match status.code() {
        Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Internal | Code::DeadlineExceeded => {
            unreachable(status.message().to_owned())
        }
        _ => refused(status),
    };
    let answer = async {
        let mut receiver = OrchestratorClient::new(channel)
            .max_decoding_message_size(LONGEST_MESSAGE)
            .attach(request)
            .await?
            .into_inner();
        match receiver.message().await?.and_then(|message| message.message) {
            Some(FromServer::Welcome(welcome)) => Ok((receiver, welcome)),
            _ => Err(Status::failed_precondition(
                "the server did not begin with a welcome; is it another version?",
            )),
        }
    };
    match tokio::time::timeout(CONNECT_TIMEOUT, answer).await {
        Ok(Ok((receiver, welcome))) => Ok(Stream {
            sender,
            receiver,
            welcome,
        }),
        Ok(Err(status)) => Err(judge(status)),
        Err(_) => Err(unreachable(format!("no welcome within {CONNECT_TIMEOUT:?}"))),
    }
}

fn hello(options: &SessionOptions, shared: &Shared) -> v1::Hello {
    let mut state = shared.lock();
    // What waited for the old stream is in the outbox as well, or was an answer to an offer that is void now.
    state.queue.retain(|message| matches!(message, ToServer::Stopped(_)));
    v1::Hello {
        protocol: PROTOCOL,
        incarnation: options.incarnation.0.as_bytes().to_vec(),
        pipeline: options.pipeline.clone(),
        stage: options.stage.to_string(),
        name: options.name.clone(),
        slots: options.slots,
        pid: options.process.pid,
        started: options.process.started,
        host: host_id(),
        running: state.outbox.running(),
        holding: state.holding.iter().map(|id| id.0.as_bytes().to_vec()).collect(),
    }
}

fn wrap(message: ToServer) -> v1::WorkerMessage {
    v1::WorkerMessage { message: Some(message) }
}

fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain(source)),
        None => error.to_string(),
    }
}

/// Keeps the worker attached: one stream after the other, until the handles are gone or the linger time is over.
async fn drive(
    options: SessionOptions,
    shared: Arc<Shared>,
    mut changes: watch::Receiver<()>,
    mut stream: Stream,
    events: mpsc::UnboundedSender<SessionEvent>,
) {
    loop {
        let linger = Duration::from_millis(stream.welcome.linger_ms);
        let attached = SessionEvent::Attached {
            epoch: stream.welcome.epoch,
            store: std::mem::take(&mut stream.welcome.store),
        };
        if events.send(attached).is_err() {
            return;
        }
        if matches!(run(&shared, &mut changes, stream, &events).await, Ended::HandlesGone)
            || events.send(SessionEvent::Away).is_err()
        {
            return;
        }
        let again = tokio::select! {
            again = connect(&options, &shared, linger) => again,
            () = handles_gone(&mut changes) => return,
        };
        stream = match again {
            Ok(stream) => stream,
            Err(error) => {
                // Nobody may be left to hear it, which is as well.
                let _ = events.send(SessionEvent::Over(error));
                return;
            }
        };
    }
}

async fn handles_gone(changes: &mut watch::Receiver<()>) {
    while changes.changed().await.is_ok() {}
}

enum Ended {
    HandlesGone,
    StreamDown,
}

/// Runs one stream until it or the handles end.
async fn run(
    shared: &Shared,
    changes: &mut watch::Receiver<()>,
    mut stream: Stream,
    events: &mpsc::UnboundedSender<SessionEvent>,
) -> Ended {
    let mut renew = tokio::time::interval(Duration::from_millis(stream.welcome.renew_interval_ms.max(10)));
    renew.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let repeated = shared.lock().outbox.unanswered();
    if !send(&stream.sender, repeated) {
        return Ended::StreamDown;
    }
    let mut next_news = Instant::now();
    let mut news_wait = true;
    changes.mark_changed();
    loop {
        let alive = tokio::select! {
            changed = changes.changed() => {
                if changed.is_err() {
                    return Ended::HandlesGone;
                }
                news_wait = true;
                flush(shared, &stream.sender)
            }
            () = tokio::time::sleep_until(next_news), if news_wait => {
                news_wait = false;
                next_news = Instant::now() + MERGE;
                let news = shared.lock().outbox.renewal(false);
                send(&stream.sender, news)
            }
            _ = renew.tick() => {
                let renewal = shared.lock().outbox.renewal(true);
                send(&stream.sender, renewal)
            }
            message = stream.receiver.message() => {
                let Ok(Some(message)) = message else { return Ended::StreamDown };
                match receive(shared, message) {
                    Ok(Some(event)) => {
                        if events.send(event).is_err() {
                            return Ended::HandlesGone;
                        }
                    }
                    Ok(None) => {}
                    Err(error) => tracing::warn!(%error, "ignored a message of the server"),
                }
                true
            }
        };
        if !alive {
            return Ended::StreamDown;
        }
    }
}

/// Sends what waits. Returns false where the stream takes no more.
fn flush(shared: &Shared, sender: &mpsc::Sender<v1::WorkerMessage>) -> bool {
    let mut state = shared.lock();
    let queue = std::mem::take(&mut state.queue);
    // News first: a completion ends the attempt that the news is about.
    let news = if queue.is_empty() {
        None
    } else {
        state.outbox.renewal(false)
    };
    send(sender, news.into_iter().chain(queue))
}

fn send(sender: &mpsc::Sender<v1::WorkerMessage>, messages: impl IntoIterator<Item = ToServer>) -> bool {
    messages
        .into_iter()
        .all(|message| sender.try_send(wrap(message)).is_ok())
}

/// Turns a message into an event, and notes in the outbox what it answers.
fn receive(shared: &Shared, message: v1::ServerMessage) -> Result<Option<SessionEvent>, WireError> {
    let event = match required("message", message.message)? {
        FromServer::Welcome(_) => return Ok(None),
        FromServer::Offer(offer) => SessionEvent::Offer(offer),
        FromServer::Grant(token) => {
            let token = Token::try_from(token)?;
            shared.lock().outbox.begin(token);
            SessionEvent::Grant(token)
        }
        FromServer::Cancel(cancel) => {
            let token = Token::try_from(required("cancel.token", cancel.token)?)?;
            SessionEvent::Cancel(token, required("cancel.failure", cancel.failure)?.into())
        }
        FromServer::Release(id) => {
            let id = payload_id("release", &id)?;
            shared.lock().holding.remove(&id);
            SessionEvent::Release(id)
        }
        FromServer::Accepted(token) => {
            let token = Token::try_from(token)?;
            shared.lock().outbox.end(token);
            SessionEvent::Accepted(token)
        }
        FromServer::Refused(refused) => {
            let token = Token::try_from(required("refused.token", refused.token)?)?;
            shared.lock().outbox.end(token);
            SessionEvent::Refused(token, required("refused.failure", refused.failure)?.into())
        }
        FromServer::Drain(drain) => SessionEvent::Drain(Duration::from_millis(drain.deadline_ms)),
    };
    Ok(Some(event))
}
