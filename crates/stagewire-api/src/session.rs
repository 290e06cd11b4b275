mod connect;
mod drive;
mod error;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stagewire_core::{Failure, Incarnation, Member, PayloadId, ProcessRef, Progress, StageName, Token};
use tokio::sync::{mpsc, watch};

use crate::outbox::Outbox;
use crate::v1::worker_message::Message as ToServer;
use crate::{RunDir, v1};

pub use error::AttachError;

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
    /// Attempts of one shape that it runs together, where it has one slot.
    pub max_batch: u32,
    /// Its place in a group that runs every attempt together, where it is in one.
    pub member: Option<Member>,
    /// The NUMA node that it runs on, where that is known.
    pub numa: Option<u32>,
    /// The rail of the network that it is on, where that is known.
    pub rail: Option<u32>,
    /// How long to look for a server at first. Once attached, the server says how long to look for it again.
    pub attach_within: Duration,
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
    Offer(Box<v1::Offer>),
    /// The accepted attempt may run.
    Grant(Token),
    /// The attempt must stop at its next step; answer with [`WorkerSession::stopped`].
    Cancel(Token, Failure),
    /// The attempt should stop at its next step boundary, with a checkpoint; answer with [`WorkerSession::yielded`]. One
    /// that does not goes on.
    Yield(Token, Failure),
    /// Nobody needs this payload any more.
    Release(PayloadId),
    /// The completion or failure was taken.
    Accepted(Token),
    /// The attempt was superseded; it must stop.
    Refused(Token, Failure),
    /// No more offers will come: finish what runs, within this time where there is one, then leave. From now on the store
    /// takes the payloads that this worker holds; say so with [`WorkerSession::moved`].
    Drain(Option<Duration>),
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
        let stream = connect::connect(&options, &shared, options.attach_within).await?;
        let (changed, changes) = watch::channel(());
        let (events, receiver) = mpsc::unbounded_channel();
        tokio::spawn(drive::drive(options, Arc::clone(&shared), changes, stream, events));
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
        self.hold(&payload);
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

    /// Says that the running attempt has a checkpoint: the next attempt of its stage goes on from there. The payload is held
    /// until released; each new one takes the place of the one before.
    pub fn checkpoint(&self, token: Token, payload: v1::Payload, progress: Progress) {
        self.hold(&payload);
        let message = v1::Checkpoint {
            token: Some(token.into()),
            payload: Some(payload),
            progress: Some(progress.into()),
        };
        self.say(token, ToServer::Checkpoint(message));
    }

    /// Says that the attempt has stopped at a step boundary, as it was asked to; without a payload the next one goes on from
    /// the last checkpoint. Answered by [`SessionEvent::Accepted`] or [`SessionEvent::Refused`].
    pub fn yielded(&self, token: Token, payload: Option<v1::Payload>, progress: Progress) {
        if let Some(payload) = &payload {
            self.hold(payload);
        }
        let message = v1::Yielded {
            token: Some(token.into()),
            payload,
            progress: Some(progress.into()),
        };
        self.say(token, ToServer::Yielded(message));
    }

    /// Says that a cancelled or refused attempt has stopped: its slot is free.
    pub fn stopped(&self, token: Token) {
        self.lock().outbox.end(token);
        self.push(ToServer::Stopped(token.into()));
    }

    /// Says that no more offers are taken, and how long what runs may take where the server has said so. Answered by
    /// [`SessionEvent::Drain`]; to be said again to the next server.
    pub fn drain(&self, within: Option<Duration>) {
        let deadline_ms = within.map(|within| u64::try_from(within.as_millis()).unwrap_or(u64::MAX));
        self.push(ToServer::Drain(v1::Drain { deadline_ms }));
    }

    /// Says that the store has taken the payload of an attempt that is done. Answered by [`SessionEvent::Release`].
    pub fn moved(&self, token: Token, payload: v1::Payload) {
        self.push(ToServer::Published(v1::Published {
            token: Some(token.into()),
            payload: Some(payload),
        }));
    }

    /// Forgets a payload that this worker held.
    pub fn dropped(&self, payload: PayloadId) {
        self.lock().holding.remove(&payload);
    }

    /// Whether the server has answered all that was said of attempts.
    pub fn is_answered(&self) -> bool {
        self.lock().outbox.is_answered()
    }

    fn hold(&self, payload: &v1::Payload) {
        if !payload.stored
            && let Ok(id) = payload.payload_id()
        {
            self.lock().holding.insert(id);
        }
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
