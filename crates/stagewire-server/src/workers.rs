//! The workers: one gRPC stream each, and a watch on their processes.

mod attach;
mod input;
pub(crate) mod message;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use stagewire_api::v1;
use stagewire_api::v1::server_message::Message;
use stagewire_core::{Failure, Incarnation, ProcessRef};
use stagewire_transfer::ProcessWatch;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::Status;

pub(crate) use attach::{Attach, AttachOptions};

/// Messages in flight to one worker. A worker that lets more pile up has stopped reading: its stream is ended.
const IN_FLIGHT: usize = 1024;

/// What goes to a worker: messages, and a status as the last.
type Sender = mpsc::Sender<Result<v1::ServerMessage, Status>>;

/// The streams that are up.
#[derive(Debug, Default)]
pub(crate) struct Workers {
    state: Mutex<State>,
    /// Taken while a stream comes up or goes down, so that the driver hears of both in the right order.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    streams: BTreeMap<Incarnation, Stream>,
    /// Processes of this host that are watched, whether or not their stream is up.
    processes: BTreeMap<Incarnation, ProcessRef>,
    generation: u64,
}

#[derive(Debug)]
struct Stream {
    sender: Sender,
    /// Ends the stream.
    close: CancellationToken,
    /// Tells this stream from others of the same worker.
    generation: u64,
}

impl Stream {
    fn end(self, why: &str) {
        // A worker that does not read need not be told.
        let _ = self.sender.try_send(Err(Status::aborted(why)));
        self.close.cancel();
    }
}

impl Workers {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends to a worker, or drops the message where its stream is down or does not flow: the scheduler makes up for it.
    pub(crate) fn send(&self, worker: Incarnation, message: Message) {
        let state = self.lock();
        let Some(stream) = state.streams.get(&worker) else {
            return;
        };
        let message = v1::ServerMessage { message: Some(message) };
        if let Err(mpsc::error::TrySendError::Full(_)) = stream.sender.try_send(Ok(message)) {
            tracing::warn!(%worker, "a worker does not read its messages; its stream is ended");
            stream.close.cancel();
        }
    }

    /// The process of a worker, where it is one of this host.
    pub(crate) fn process(&self, worker: Incarnation) -> Option<ProcessRef> {
        self.lock().processes.get(&worker).copied()
    }

    /// Tells a worker that the result it sent is safe.
    pub(crate) fn release(&self, worker: Incarnation, payload: &v1::Payload) {
        self.send(worker, Message::Release(payload.id.clone()));
    }

    /// Ends the stream of a worker that is given up, and its process where that is one of this host.
    pub(crate) fn evict(&self, worker: Incarnation, failure: &Failure) {
        tracing::warn!(%worker, %failure, "a worker is given up");
        self.end(worker, &failure.message);
        if let Some(process) = self.process(worker)
            && let Err(error) = kill(process)
        {
            tracing::warn!(%worker, pid = process.pid, %error, "cannot end the process of a worker that was given up");
        }
    }

    /// Ends the stream of a worker, if it is up.
    fn end(&self, worker: Incarnation, why: &str) {
        let stream = self.lock().streams.remove(&worker);
        if let Some(stream) = stream {
            stream.end(why);
        }
    }

    /// Puts a new stream in place; one that was there before is ended.
    fn up(&self, worker: Incarnation, sender: Sender, close: CancellationToken) -> u64 {
        let mut state = self.lock();
        state.generation += 1;
        let generation = state.generation;
        let stream = Stream {
            sender,
            close,
            generation,
        };
        if let Some(old) = state.streams.insert(worker, stream) {
            old.end("the worker has attached again, over another stream");
        }
        generation
    }

    /// Takes a stream out; false where another one has taken its place.
    fn down(&self, worker: Incarnation, generation: u64) -> bool {
        let mut state = self.lock();
        let current = state
            .streams
            .get(&worker)
            .is_some_and(|stream| stream.generation == generation);
        if current {
            state.streams.remove(&worker);
        }
        current
    }

    /// Number of streams that are up.
    pub(crate) fn count(&self) -> usize {
        self.lock().streams.len()
    }
}

/// Ends a process at once, unless it has ended.
fn kill(process: ProcessRef) -> io::Result<()> {
    match ProcessWatch::open(process) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        watch => watch?.kill(),
    }
}
