mod access;
mod error;
mod view;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use stagewire_core::{ByteCount, Handle, Handover, Timestamp};
use stagewire_transfer::{ConnectError, Target, TransferError};
use tokio::time::Instant;

use crate::Stop;
use crate::connector::Shared;
use crate::link::Call;
use crate::wire::{End, Refusal, Reply, State};
use access::{Access, AccessError, Pull};

pub use error::{ConsumeError, Place};
pub use view::{Chunk, ChunkView, Fetched, ViewMemory};

/// How long a holder may take to acknowledge that the consumer is done.
const FINISH_WITHIN: Duration = Duration::from_secs(1);

/// How a payload is consumed.
#[derive(Debug, Default)]
pub struct ConsumeOptions {
    /// Where the bytes of each tensor go, in the order of the manifest, each as large as its tensor. `None` shows the
    /// holder's memory where it can be mapped, else uses private memory.
    pub destinations: Option<Vec<Arc<Target>>>,
    /// Copies into private memory also where the holder's memory could be mapped.
    pub private: bool,
    /// Longest wait for each next chunk; `None` waits as long as the holder lives.
    pub deadline: Option<Duration>,
    /// Ends the wait early.
    pub stop: Option<Stop>,
}

impl ConsumeOptions {
    /// Options with a deadline and nothing else.
    pub fn within(deadline: Duration) -> Self {
        Self {
            deadline: Some(deadline),
            ..Self::default()
        }
    }
}

/// Is told what a consumer sees.
pub(crate) trait Observer: Send + Sync {
    fn chunk(&self, handover: &Handover);
    fn error(&self, error: &ConsumeError);
}

/// A payload being consumed, chunk by chunk, in order.
///
/// Dropping it lets go of every pin that no view needs any more; a payload that its consumer owns may then be consumed
/// by another one, from chunk 0.
pub struct Consumer {
    shared: Arc<Shared>,
    handle: Arc<Handle>,
    destinations: Option<Vec<Arc<Target>>>,
    private: bool,
    deadline: Option<Duration>,
    stop: Option<Stop>,
    observer: Option<Arc<dyn Observer>>,
    _counted: Counted,
    call: Option<Call>,
    /// What the holder said last.
    state: State,
    access: Option<Access>,
    /// The pull of chunk `next`, and when it began.
    pull: Option<(Pull, Timestamp)>,
    next: u32,
    done: bool,
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("payload", &self.handle.payload)
            .field("next", &self.next)
            .field("state", &self.state)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

/// Counts one consumer for as long as it lives.
struct Counted(Arc<AtomicU64>);

impl Counted {
    fn new(counter: &Arc<AtomicU64>) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(counter))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Consumer {
    pub(crate) fn new(shared: Arc<Shared>, handle: Handle, options: ConsumeOptions) -> Result<Self, ConsumeError> {
        if let Some(destinations) = &options.destinations {
            let expected = handle.manifest.tensors().count();
            if destinations.len() != expected {
                return Err(ConsumeError::DestinationCount {
                    expected,
                    found: destinations.len(),
                });
            }
            for (index, (target, spec)) in destinations.iter().zip(handle.manifest.tensors()).enumerate() {
                let (found, expected) = (ByteCount(target.len()), spec.nbytes());
                if found != expected {
                    return Err(ConsumeError::DestinationSize { index, found, expected });
                }
            }
        }
        let counted = Counted::new(shared.consumers());
        let consumer = Self {
            shared,
            handle: Arc::new(handle),
            destinations: options.destinations,
            private: options.private,
            deadline: options.deadline,
            stop: options.stop,
            observer: None,
            _counted: counted,
            call: None,
            state: State { readable: 0, end: None },
            access: None,
            pull: None,
            next: 0,
            done: false,
        };
        let foreign = consumer.handle.regions.iter().find(|region| {
            let mut transports = consumer.shared.transports();
            region.len > 0 && !transports.any(|transport| transport.name() == region.transport)
        });
        match foreign {
            Some(region) => Err(consumer.no_transport(region.transport.clone())),
            None => Ok(consumer),
        }
    }

    /// What is consumed.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The next chunk, once it is complete; `None` after the last one, when the holder knows that the consumer is done.
    ///
    /// # Errors
    /// [`ConsumeError`]. A dead or failed producer is an error at once; a silent one at the deadline. The call may be
    /// repeated after an error.
    ///
    /// # Cancel safety
    /// Safe: a dropped call loses no chunk.
    pub async fn next(&mut self) -> Result<Option<Chunk>, ConsumeError> {
        let deadline = self.deadline.map(|deadline| Instant::now() + deadline);
        let stop = self.stop.clone();
        let stopped = async {
            match &stop {
                Some(stop) => stop.stopped().await,
                None => std::future::pending().await,
            }
        };
        let late = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let shared = Arc::clone(&self.shared);
        let at = self.place();
        let waited = self.deadline.unwrap_or_default();
        let result = tokio::select! {
            biased;
            reason = stopped => Err(ConsumeError::Stopped { at, reason }),
            () = shared.closed() => Err(ConsumeError::Closed { at }),
            result = self.advance() => result,
            () = late => Err(ConsumeError::Deadline { at, waited }),
        };
        if matches!(
            result,
            Err(ConsumeError::Failed { .. } | ConsumeError::PeerLost { .. } | ConsumeError::Gone { .. })
        ) {
            // No chunk will come any more; whoever keeps this consumer must not keep the producer's memory.
            self.access = None;
            self.pull = None;
        }
        if let Some(observer) = &self.observer {
            match &result {
                Ok(Some(chunk)) => observer.chunk(&chunk.handover),
                Ok(None) => {}
                Err(error) => observer.error(error),
            }
        }
        result
    }

    /// All chunks that are left, and then the whole payload.
    ///
    /// # Errors
    /// As [`Consumer::next`].
    ///
    /// # Cancel safety
    /// Safe: the chunks that came stay with the consumer; only their [`Handover`]s are lost.
    pub async fn fetch_all(&mut self) -> Result<Fetched, ConsumeError> {
        let mut handovers = Vec::new();
        while self.next < self.handle.manifest.chunks() {
            if let Some(chunk) = self.next().await? {
                handovers.push(chunk.handover);
            }
        }
        let Some(access) = &self.access else {
            let why = "this consumer has let go of it already";
            return Err(ConsumeError::Gone { at: self.place(), why });
        };
        let tensors = access.views(&self.handle, None);
        self.ack().await?;
        Ok(Fetched { tensors, handovers })
    }

    /// Tells the holder that the consumer needs no more chunks. A payload that its consumer owns is deleted; one of an
    /// orchestrator stays. Views stay valid. The end of the iteration does the same.
    ///
    /// # Errors
    /// [`ConsumeError::Stopped`], [`ConsumeError::Deadline`]. A holder that is gone is no error any more.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn ack(&mut self) -> Result<(), ConsumeError> {
        self.next = self.handle.manifest.chunks();
        self.next().await.map(drop)
    }

    pub(crate) fn observe(&mut self, observer: Arc<dyn Observer>) {
        self.observer = Some(observer);
    }

    /// Lets go of the memory without being done: what was read is somewhere else by now.
    pub(crate) fn let_go(&mut self) {
        self.access = None;
        self.pull = None;
        self.destinations = None;
    }

    async fn advance(&mut self) -> Result<Option<Chunk>, ConsumeError> {
        if self.next == self.handle.manifest.chunks() {
            self.finish().await;
            return Ok(None);
        }
        if self.pull.is_none() {
            self.wait_readable().await?;
            let begin = now();
            if self.access.is_none() {
                self.access = Some(self.open_access().await?);
            }
            let access = self.access.as_ref();
            match access.and_then(|access| access.pull(&self.handle, self.next)) {
                Some(pull) => self.pull = Some((pull, begin)),
                None => return Ok(Some(self.take_chunk(begin))),
            }
        }
        let Some((pull, begin)) = self.pull.as_mut() else {
            return Err(self.protocol("a pull vanished"));
        };
        let (result, begin) = (pull.await, *begin);
        self.pull = None;
        match result {
            Ok(()) => Ok(Some(self.take_chunk(begin))),
            Err(error) => Err(self.access_error(error)),
        }
    }

    /// Waits until chunk `next` may be read. A failure of the producer is seen also where chunks are readable.
    async fn wait_readable(&mut self) -> Result<(), ConsumeError> {
        loop {
            if self.call.is_none() {
                self.call = Some(self.watch().await?);
            }
            let readable = self.state.readable > self.next;
            let Some(call) = &mut self.call else { return Ok(()) };
            let reply = if readable {
                call.pending()
            } else {
                call.next().await.map(Some).ok_or(())
            };
            match reply {
                Ok(Some(reply)) => self.hear(reply)?,
                Ok(None) => return Ok(()),
                // The holder is gone. What was readable may still be: its memory is mapped, or the pull will tell.
                Err(()) if readable => return Ok(()),
                Err(()) => {
                    self.call = None;
                    return Err(self.lost("it ended the connection".to_owned()));
                }
            }
        }
    }

    async fn watch(&self) -> Result<Call, ConsumeError> {
        let link = self.shared.links().to(&self.handle.holder).await.map_err(|source| {
            if source.is_lost() {
                self.lost(source.to_string())
            } else {
                ConsumeError::Link {
                    at: self.place(),
                    source,
                }
            }
        })?;
        Ok(link.watch(self.handle.payload, self.handle.capability))
    }

    fn hear(&mut self, reply: Reply) -> Result<(), ConsumeError> {
        let at = self.place();
        match reply {
            Reply::State { state, .. } => {
                self.state = state;
                match &self.state.end {
                    Some(End::Failed(failure)) => Err(ConsumeError::Failed {
                        at,
                        failure: failure.clone(),
                    }),
                    Some(End::Released) if self.state.readable <= self.next => Err(gone(at, &Refusal::Released)),
                    _ => Ok(()),
                }
            }
            Reply::Refused { refusal, .. } => {
                // Another try may find the payload free again.
                self.call = None;
                Err(match refusal {
                    Refusal::Denied => ConsumeError::Denied { at },
                    Refusal::Claimed => ConsumeError::Claimed { at },
                    Refusal::Failed(failure) => ConsumeError::Failed { at, failure },
                    other => gone(at, &other),
                })
            }
            Reply::Finished { .. } | Reply::Stored { .. } => Err(self.protocol("the holder gave an answer to nothing")),
        }
    }

    async fn open_access(&self) -> Result<Access, ConsumeError> {
        let transports: Vec<_> = self.shared.transports().cloned().collect();
        let destinations = self.destinations.as_deref();
        let access = Access::open(&self.handle, &transports, destinations, self.private, self.deadline);
        access.await.map_err(|error| self.access_error(error))
    }

    fn take_chunk(&mut self, begin: Timestamp) -> Chunk {
        let (index, count) = (self.next, self.handle.manifest.chunks());
        let access = self.access.as_ref();
        let tensors = access
            .map(|access| access.views(&self.handle, Some(index)))
            .unwrap_or_default();
        self.next += 1;
        Chunk {
            index,
            count,
            tensors,
            handover: Handover {
                payload: self.handle.payload,
                from: self.handle.stage.clone(),
                chunk: index,
                chunks: count,
                nbytes: self.handle.manifest.chunk_nbytes(index).0,
                mode: self.handle.mode,
                path: access.map(|access| access.path().to_owned()).unwrap_or_default(),
                begin,
                end: now(),
            },
        }
    }

    /// Lets go of the pins and tells the holder. One that does not answer has other worries.
    async fn finish(&mut self) {
        self.access = None;
        self.pull = None;
        if self.done {
            return;
        }
        if self.call.is_none() {
            // Acknowledged before anything was read.
            self.call = self.watch().await.ok();
        }
        if let Some(call) = &mut self.call {
            call.finish();
            let finished = async { while !matches!(call.next().await, None | Some(Reply::Finished { .. })) {} };
            if tokio::time::timeout(FINISH_WITHIN, finished).await.is_err() {
                tracing::warn!(payload = %self.handle.payload, "the holder did not answer that the payload was consumed");
            }
        }
        self.call = None;
        self.done = true;
    }

    fn place(&self) -> Box<Place> {
        Place::new(&self.handle, self.next)
    }

    fn lost(&self, how: String) -> ConsumeError {
        ConsumeError::PeerLost { at: self.place(), how }
    }

    fn protocol(&self, message: &'static str) -> ConsumeError {
        ConsumeError::Protocol {
            at: self.place(),
            message,
        }
    }

    fn no_transport(&self, transport: String) -> ConsumeError {
        let ours = self
            .shared
            .transports()
            .map(|transport| transport.name())
            .collect::<Vec<_>>()
            .join(", ");
        ConsumeError::NoTransport {
            at: self.place(),
            transport,
            ours,
        }
    }

    fn access_error(&self, error: AccessError) -> ConsumeError {
        let at = self.place();
        match error {
            AccessError::NoTransport(transport) => self.no_transport(transport),
            AccessError::Connect(error @ (ConnectError::Gone { .. } | ConnectError::Incarnation { .. })) => {
                self.lost(error.to_string())
            }
            AccessError::Connect(source) => ConsumeError::Connect { at, source },
            AccessError::Transfer(error @ TransferError::PeerLost { .. }) => self.lost(error.to_string()),
            AccessError::Transfer(TransferError::Released { .. } | TransferError::UnknownRegion { .. }) => {
                gone(at, &Refusal::Released)
            }
            AccessError::Transfer(source) => ConsumeError::Transfer { at, source },
        }
    }
}

fn gone(at: Box<Place>, refusal: &Refusal) -> ConsumeError {
    let why = match refusal {
        Refusal::Unknown => "its holder never had it, or released it long ago",
        Refusal::Expired => "nobody consumed it in time",
        _ => "it was consumed or released",
    };
    ConsumeError::Gone { at, why }
}

fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}
