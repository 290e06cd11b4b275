mod access;
mod advance;
mod error;
mod progress;
mod pump;
mod seek;
mod view;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stagewire_core::{ByteCount, Handle, Handover};
use stagewire_transfer::Target;

use crate::Stop;
use crate::connector::Shared;
use crate::link::Watching;
use crate::live::Shown;
use access::{Access, Room, Way};
pub(crate) use access::{AccessError, pin};
use futures::future::BoxFuture;
use progress::Progress;
use pump::Pump;
use seek::Whereabouts;

pub use error::{ConsumeError, Place};
pub use view::{Chunk, ChunkView, Fetched, ViewMemory};

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
    /// Is told of each chunk as it comes, once [`Consumer::next`] was called first.
    pub on_chunk: Option<OnChunk>,
}

/// Told of each chunk of a payload as it comes: once it can be read here, in whatever order chunks become complete, and
/// before [`Consumer::next`] returns it. It is called on whatever thread learnt of that, and must not block. Digests are
/// compared later, by [`Consumer::next`]. Chunks that are copied come one at a time then, each with a pull of its own.
#[derive(Clone)]
pub struct OnChunk(Arc<Tell>);

type Tell = dyn Fn(u32, &[ChunkView]) + Send + Sync;

impl OnChunk {
    /// Calls `told` with the index of each chunk and a view of each of its tensors.
    pub fn new(told: impl Fn(u32, &[ChunkView]) + Send + Sync + 'static) -> Self {
        Self(Arc::new(told))
    }

    fn tell(&self, index: u32, tensors: &[ChunkView]) {
        (self.0)(index, tensors);
    }
}

impl fmt::Debug for OnChunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnChunk")
    }
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

/// A copy under way.
type Flight = Mutex<BoxFuture<'static, Result<(), AccessError>>>;

/// A payload being consumed, chunk by chunk, in order.
///
/// Dropping it lets go of every pin that no view needs any more; one that is deleted on consume may then be consumed
/// by another consumer, from chunk 0.
pub struct Consumer {
    shared: Arc<Shared>,
    handle: Arc<Handle>,
    way: Way,
    /// One per tensor.
    rooms: Vec<Room>,
    deadline: Option<Duration>,
    stop: Option<Stop>,
    observer: Option<Arc<dyn Observer>>,
    _counted: Counted,
    whereabouts: Whereabouts,
    watching: Option<Watching>,
    /// What the holder said last.
    shown: Shown,
    access: Option<Arc<Access>>,
    progress: Arc<Progress>,
    /// The copy that a call waits for. A dropped call loses nothing: the next one goes on with it.
    flight: Option<Flight>,
    /// What goes on between calls.
    pump: Option<Pump>,
    /// Nobody looks at a chunk before the last has come.
    whole: bool,
    next: u32,
    done: bool,
    acknowledged: bool,
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("payload", &self.handle.payload)
            .field("next", &self.next)
            .field("shown", &self.shown)
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
        let (way, rooms) = match options.destinations {
            Some(targets) => (Way::Copied, targets.into_iter().map(Room::of).collect()),
            None => {
                let way = if options.private { Way::Copied } else { Way::Mapped };
                (way, handle.manifest.tensors().map(|_| Room::default()).collect())
            }
        };
        let counted = Counted::new(shared.consumers());
        let handle = Arc::new(handle);
        let consumer = Self {
            shared,
            whereabouts: Whereabouts::new(handle.holder.clone()),
            progress: Progress::new(&handle, options.on_chunk),
            handle,
            way,
            rooms,
            deadline: options.deadline,
            stop: options.stop,
            observer: None,
            _counted: counted,
            watching: None,
            shown: Shown::default(),
            access: None,
            flight: None,
            pump: None,
            whole: false,
            next: 0,
            done: false,
            acknowledged: false,
        };
        let foreign = consumer
            .handle
            .regions
            .iter()
            .find(|region| region.len > 0 && access::routes(consumer.shared.transports(), region).next().is_none());
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
        let (deadline, stop) = (self.deadline, self.stop.clone());
        let stopped = async {
            match &stop {
                Some(stop) => stop.stopped().await,
                None => std::future::pending().await,
            }
        };
        let late = async {
            match deadline {
                Some(deadline) => tokio::time::sleep(deadline).await,
                None => std::future::pending().await,
            }
        };
        let shared = Arc::clone(&self.shared);
        let at = self.place();
        let waited = deadline.unwrap_or_default();
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
            self.leave().await;
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
        self.whole = true;
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

    /// Tells the holder that the consumer needs no more chunks. A payload that is deleted on consume is;
    /// any other stays. Views stay valid. The end of the iteration does the same.
    ///
    /// # Errors
    /// [`ConsumeError::Claimed`] and the like where nothing was read before and the holder refuses this consumer;
    /// [`ConsumeError::Stopped`], [`ConsumeError::Deadline`]. A holder that is gone is no error any more.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn ack(&mut self) -> Result<(), ConsumeError> {
        self.next = self.handle.manifest.chunks();
        self.next().await.map(drop)
    }

    /// Whether the holder has heard that this consumer needs no more chunks, see [`Consumer::ack`]. A store that died
    /// before it did may have a payload that is deleted on consume once more when it is back.
    pub const fn is_acknowledged(&self) -> bool {
        self.acknowledged
    }

    /// Gives it up. When this returns, no copy writes into the destinations any more, so that whoever lent them may use
    /// them for something else; after a plain drop, one that is under way still ends.
    ///
    /// # Cancel safety
    /// A dropped future has given it up.
    pub async fn close(mut self) {
        self.leave().await;
        let rooms = std::mem::take(&mut self.rooms);
        drop(self);
        for room in &rooms {
            room.idle().await;
        }
    }

    pub(crate) fn observe(&mut self, observer: Arc<dyn Observer>) {
        self.observer = Some(observer);
    }

    /// Copies all chunks of a payload that is complete, without asking its holder anything but to leave the bytes as they
    /// are meanwhile.
    pub(crate) async fn copy_complete(&mut self) -> Result<(), ConsumeError> {
        let copied = async {
            let access = self.open_access().await?;
            access.pull(&self.handle, 0..self.handle.manifest.chunks()).await
        };
        // One deadline for all of it: connections, pins and copies have it each.
        let waited = self.deadline.unwrap_or(Duration::MAX);
        match tokio::time::timeout(waited, copied).await {
            Ok(copied) => copied.map_err(|error| self.access_error(error)),
            Err(_) => Err(ConsumeError::Deadline {
                at: self.place(),
                waited,
            }),
        }
    }

    /// Lets go of the memory without being done: what was read is somewhere else by now.
    pub(crate) async fn let_go(&mut self) {
        self.leave().await;
        self.rooms.clear();
    }

    /// Lets go of the holder's memory, and of all that goes on there.
    async fn leave(&mut self) {
        self.flight = None;
        self.access = None;
        if let Some(pump) = self.pump.take() {
            pump.end().await;
        }
    }
}
