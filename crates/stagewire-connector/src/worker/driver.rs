use std::sync::{Arc, Mutex};

use stagewire_api::{SessionEvent, WireError, v1};
use stagewire_core::{Classify, ErrorClass, Failure, Handle, Member, Peer, Token};
use tokio::sync::mpsc;

use super::output::{OfferError, OutputPlan};
use super::task::{Answer, Checkpoint, InputFile, Task, TaskInput, TaskState};
use super::{Inner, Offered, Slot, lock};

/// Turns what the server says into tasks, stops and releases.
pub(super) struct Driver {
    inner: Arc<Inner>,
    /// `None` once no more tasks come.
    queue: Option<mpsc::UnboundedSender<Vec<Task>>>,
    /// Granted, while others of the batch are not.
    granted: Mutex<Vec<Task>>,
}

impl Driver {
    pub(super) fn new(inner: Arc<Inner>, queue: mpsc::UnboundedSender<Vec<Task>>) -> Self {
        let (queue, granted) = (Some(queue), Mutex::default());
        Self { inner, queue, granted }
    }

    /// Runs until the session is over. The queue ends before, once a drain is done: payloads are still held then, and
    /// releases still come, until the worker leaves.
    pub(super) async fn run(mut self, mut events: mpsc::UnboundedReceiver<SessionEvent>) {
        let mut freed = self.inner.freed.subscribe();
        loop {
            if self.queue.is_some() && self.inner.is_draining() && lock(&self.inner.attempts).is_empty() {
                let message = "this worker was drained";
                self.inner
                    .end(Failure::new(ErrorClass::Cancelled, "worker.drained", message));
                self.queue = None;
            }
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => self.hear(event),
                    None => {
                        self.inner.leave_alone();
                        self.inner.end(gone("the session ended"));
                        return;
                    }
                },
                _ = freed.changed() => {}
            }
        }
    }

    fn hear(&self, event: SessionEvent) {
        let inner = &self.inner;
        match event {
            SessionEvent::Attached { epoch, store } => {
                tracing::info!(epoch, stage = %inner.stage, "attached to the server");
                inner.connector.set_store(read_peer(&store));
                inner.say_drain();
            }
            SessionEvent::Away => {
                tracing::warn!(stage = %inner.stage, "lost the server; what runs goes on");
                inner.forget_server();
                // Offers end with the stream that brought them.
                lock(&inner.attempts).retain(|_, slot| matches!(slot, Slot::Running(_)));
                self.hand_over();
            }
            SessionEvent::Offer(offer) => self.offer(*offer),
            SessionEvent::Grant(token) => self.grant(token),
            SessionEvent::Cancel(token, failure) => self.cancel(token, failure),
            SessionEvent::Yield(token, failure) => self.ask(token, failure),
            SessionEvent::Release(payload) => inner.release(payload),
            SessionEvent::Accepted(token) => self.accepted(token),
            SessionEvent::Refused(token, failure) => self.refused(token, failure),
            SessionEvent::Drain(within) => {
                tracing::info!(stage = %inner.stage, ?within, "this worker drains");
                inner.hear_drain(within);
            }
            SessionEvent::Over(error) => {
                tracing::error!(stage = %inner.stage, %error, "gave up looking for the server");
                inner.leave_alone();
                inner.end(error.to_failure());
            }
            other => tracing::debug!(?other, "ignored an event of the session"),
        }
    }

    fn offer(&self, offer: v1::Offer) {
        let inner = &self.inner;
        let token = match read_token(offer.token.clone()) {
            Ok(token) => token,
            Err(error) => {
                tracing::warn!(%error, "ignored an offer without a token");
                return;
            }
        };
        if inner.is_draining() {
            inner.tell(|session| session.decline(token, draining()));
            return;
        }
        let mut attempts = lock(&inner.attempts);
        let busy = attempts.len();
        if busy >= inner.places as usize {
            drop(attempts);
            let message = format!("all {} slots of this worker are in use", inner.places);
            let failure = Failure::new(ErrorClass::Exhausted, "credit.slots", message).with("busy", busy);
            inner.tell(|session| session.decline(token, failure));
            return;
        }
        match read_offer(offer) {
            Ok(offered) => {
                attempts.insert(token, Slot::Offered(Box::new(offered)));
                drop(attempts);
                inner.tell(|session| session.accept(token));
            }
            Err(error) => {
                drop(attempts);
                let message = crate::error::chain(&error);
                tracing::warn!(%token, error = message, "declined an offer that cannot be read");
                let failure = Failure::new(ErrorClass::Invalid, "protocol.malformed", message);
                inner.tell(|session| session.decline(token, failure));
            }
        }
    }

    fn grant(&self, token: Token) {
        let inner = &self.inner;
        let mut attempts = lock(&inner.attempts);
        match attempts.remove(&token) {
            Some(Slot::Offered(offered)) => {
                let task = Task::new(Arc::clone(inner), token, *offered);
                attempts.insert(token, Slot::Running(Arc::clone(task.state())));
                drop(attempts);
                lock(&self.granted).push(task);
                self.hand_over();
            }
            // Granted twice.
            Some(running @ Slot::Running(_)) => {
                attempts.insert(token, running);
            }
            None => {
                drop(attempts);
                inner.tell(|session| session.stopped(token));
            }
        }
    }

    fn cancel(&self, token: Token, failure: Failure) {
        let inner = &self.inner;
        let mut attempts = lock(&inner.attempts);
        match attempts.get(&token) {
            Some(Slot::Running(state)) => {
                let state = Arc::clone(state);
                drop(attempts);
                state.stop().stop(failure);
            }
            Some(Slot::Offered(_)) | None => {
                attempts.remove(&token);
                drop(attempts);
                inner.tell(|session| session.stopped(token));
                self.hand_over();
            }
        }
    }

    /// Asks an attempt to yield. One that does not run has nothing to hand over.
    fn ask(&self, token: Token, failure: Failure) {
        if let Some(state) = self.running(token) {
            tracing::info!(%token, reason = failure.message, "the attempt is asked to yield");
            state.asked().stop(failure);
        }
    }

    /// Hands over what was granted, once nothing is offered any more that would run along with it.
    fn hand_over(&self) {
        let open = self.inner.batches
            && lock(&self.inner.attempts)
                .values()
                .any(|slot| matches!(slot, Slot::Offered(_)));
        if open {
            return;
        }
        let batch = std::mem::take(&mut *lock(&self.granted));
        if let Some(queue) = self.queue.as_ref().filter(|_| !batch.is_empty()) {
            // Nobody takes tasks any more where this fails; they say so to the server as they are dropped.
            let _ = queue.send(batch);
        }
    }

    fn accepted(&self, token: Token) {
        match self.running(token) {
            Some(state) => {
                self.inner.free(token);
                self.inner.answer(&state, Answer::Accepted);
            }
            // It has left its slot; who waits to leave may go.
            None => self.inner.note_freed(),
        }
    }

    /// An attempt that still runs stops at its next step, and says so itself. An offer that was accepted too late is
    /// nothing any more.
    fn refused(&self, token: Token, failure: Failure) {
        let mut attempts = lock(&self.inner.attempts);
        if let Some(Slot::Offered(_)) = attempts.get(&token) {
            attempts.remove(&token);
            drop(attempts);
            self.inner.note_freed();
            self.hand_over();
            return;
        }
        drop(attempts);
        match self.running(token) {
            Some(state) if state.stop_unless_ended(&failure) => {
                self.inner.tell(|session| session.stopped(token));
                self.inner.free(token);
                self.inner.answer(&state, Answer::Refused(failure));
            }
            Some(_) => {}
            // It has left its slot; who waits to leave may go.
            None => self.inner.note_freed(),
        }
    }

    fn running(&self, token: Token) -> Option<Arc<TaskState>> {
        match lock(&self.inner.attempts).get(&token) {
            Some(Slot::Running(state)) => Some(Arc::clone(state)),
            _ => None,
        }
    }
}

fn draining() -> Failure {
    Failure::new(ErrorClass::Unavailable, "worker.draining", "this worker is draining")
}

fn gone(message: &str) -> Failure {
    Failure::new(ErrorClass::Unavailable, "server.gone", message)
}

fn read_token(token: Option<v1::Token>) -> Result<Token, WireError> {
    token.ok_or(WireError::Missing { field: "offer.token" })?.try_into()
}

fn read_offer(offer: v1::Offer) -> Result<Offered, OfferError> {
    let mut inputs = Vec::new();
    for input in offer.inputs {
        let stage = input.stage()?;
        let payload = input.payload.ok_or(OfferError::NoPayload)?;
        let handle = Handle::from_bytes(&payload.handle)?;
        inputs.push(TaskInput { stage, handle });
    }
    Ok(Offered {
        checkpoints: offer.checkpoints,
        resume: offer.checkpoint.map(read_checkpoint).transpose()?,
        params: offer.params,
        files: offer
            .files
            .into_iter()
            .map(|file| InputFile {
                path: (!file.path.is_empty()).then(|| file.path.into()),
                param: file.param,
            })
            .collect(),
        inputs,
        output: OutputPlan::read(offer.output)?,
        member: offer.member.map(Member::try_from).transpose()?,
    })
}

fn read_checkpoint(checkpoint: v1::Checkpoint) -> Result<Checkpoint, OfferError> {
    let payload = checkpoint.payload.ok_or(OfferError::NoPayload)?;
    Ok(Checkpoint {
        token: read_token(checkpoint.token)?,
        handle: Handle::from_bytes(&payload.handle)?,
        progress: checkpoint.progress.unwrap_or_default().into(),
    })
}

fn read_peer(bytes: &[u8]) -> Option<Peer> {
    if bytes.is_empty() {
        return None;
    }
    let peer = postcard::from_bytes(bytes);
    peer.map_err(|error| tracing::warn!(%error, "the server's store has an address that does not decode"))
        .ok()
}
