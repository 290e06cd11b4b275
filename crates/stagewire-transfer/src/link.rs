//! The reader's side of the data socket: one connection per peer, shared by its transports.

mod connect;
mod segment;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stagewire_core::{Incarnation, ProcessRef, RegionRef};
use tokio::sync::{Notify, oneshot, watch};

pub(crate) use connect::Links;
pub(crate) use segment::PeerSegment;

use crate::host::Counters;
use crate::process::ProcessWatch;
use crate::wire::{self, Kind, MAX_FRAME, Place, Received, Refusal, Reply, Request, Socket};
use crate::{TransferError, TransferOptions};

/// How long a closed connection is watched for the death behind it, so that the error names it.
const DEATH_AFTER_CLOSE: Duration = Duration::from_millis(20);

/// A connection to a peer.
pub(crate) struct Link {
    peer: Incarnation,
    watch: ProcessWatch,
    /// Address and value of a word in the peer's memory.
    canary: (u64, u64),
    socket: Socket,
    counters: Arc<Counters>,
    /// The process that made the connection; a fork of it must not speak on it.
    owner: u32,
    next_request: AtomicU64,
    pending: Mutex<Pending>,
    segments: Mutex<HashMap<u64, Arc<PeerSegment>>>,
    /// Unpins that found the socket's buffer full.
    backlog: Mutex<VecDeque<Vec<u8>>>,
    backlog_filled: Notify,
    /// Why it is over, once it is.
    lost: watch::Sender<Option<String>>,
}

/// Requests without an answer.
#[derive(Default)]
struct Pending {
    closed: bool,
    waiting: HashMap<u64, Waiting>,
}

enum Waiting {
    Pin(oneshot::Sender<Result<Grip, Refusal>>),
    Confirm(oneshot::Sender<Result<(), Refusal>>),
}

/// A pin at the peer; ends when dropped.
pub(crate) struct Grip {
    link: Arc<Link>,
    pin: u64,
    /// Where the region is.
    place: Place,
    /// The segment it is in, for shared memory.
    segment: Option<Arc<PeerSegment>>,
    region: u64,
    len: u64,
}

impl Link {
    pub(crate) fn peer(&self) -> Incarnation {
        self.peer
    }

    pub(crate) fn process(&self) -> ProcessRef {
        self.watch.process()
    }

    pub(crate) fn canary(&self) -> (u64, u64) {
        self.canary
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether the peer lives and the connection stands.
    pub(crate) fn is_alive(&self) -> bool {
        self.lost.borrow().is_none() && self.watch.is_alive()
    }

    /// Resolves when the connection is over, with the reason.
    pub(crate) async fn closed(&self) -> String {
        let mut lost = self.lost.subscribe();
        match lost.wait_for(Option::is_some).await {
            Ok(how) => how.clone().unwrap_or_default(),
            Err(_) => unreachable!("the sender is part of this link"),
        }
    }

    /// The error for whatever was going on when the peer was lost.
    pub(crate) fn peer_lost(&self) -> TransferError {
        let how = self.lost.borrow().clone();
        TransferError::PeerLost {
            peer: self.peer,
            pid: self.process().pid,
            how: how.unwrap_or_else(|| "its process died".to_owned()),
        }
    }

    /// Runs one operation on a region of the peer, as long as the peer lives and the deadline allows.
    pub(crate) async fn bounded<T>(
        &self,
        what: &'static str,
        region: u64,
        options: &TransferOptions,
        operation: impl Future<Output = Result<T, TransferError>>,
    ) -> Result<T, TransferError> {
        let unless_lost = async {
            tokio::select! {
                biased;
                outcome = operation => outcome,
                _ = self.closed() => Err(self.peer_lost()),
            }
        };
        let Some(after) = options.deadline else {
            return unless_lost.await;
        };
        match tokio::time::timeout(after, unless_lost).await {
            Ok(outcome) => outcome,
            Err(_) if !self.is_alive() => Err(self.peer_lost()),
            Err(_) => Err(TransferError::Deadline {
                peer: self.peer,
                pid: self.process().pid,
                region,
                what,
                after,
            }),
        }
    }

    /// Pins a region of the peer.
    pub(crate) async fn pin(
        self: &Arc<Self>,
        kind: Kind,
        region: &RegionRef,
        options: &TransferOptions,
    ) -> Result<Grip, TransferError> {
        let peer = self.peer;
        if region.transport != kind.name() {
            return Err(TransferError::Transport {
                peer,
                region: region.region,
                registered: region.transport.clone(),
                used: kind.name(),
            });
        }
        let granted = async {
            let (answer, answered) = oneshot::channel();
            let request = self.expect(Waiting::Pin(answer))?;
            self.send(&Request::Pin {
                request,
                kind,
                region: region.region,
                generation: region.generation,
                capability: region.capability,
            })
            .await?;
            answered.await.map_err(|_| self.peer_lost())
        };
        let granted = self.bounded("the pin", region.region, options, granted).await?;
        let mut grip = granted.map_err(|refusal| self.refused(refusal, region, kind))?;
        if grip.len != region.len {
            return Err(TransferError::Length {
                peer,
                region: region.region,
                wanted: region.len,
                found: grip.len,
            });
        }
        grip.region = region.region;
        Ok(grip)
    }

    fn refused(&self, refusal: Refusal, region: &RegionRef, kind: Kind) -> TransferError {
        let peer = self.peer;
        let &RegionRef {
            region,
            generation: wanted,
            ..
        } = region;
        match refusal {
            Refusal::Unknown => TransferError::UnknownRegion { peer, region },
            Refusal::Released | Refusal::NotHeld => TransferError::Released { peer, region },
            Refusal::Generation { current } => TransferError::Generation {
                peer,
                region,
                wanted,
                current,
            },
            Refusal::Capability => TransferError::Capability { peer, region },
            Refusal::Registered { kind: registered } => TransferError::Transport {
                peer,
                region,
                registered: registered.name().to_owned(),
                used: kind.name(),
            },
        }
    }

    /// Enters a request into the books; its answer may come any time after.
    fn expect(&self, waiting: Waiting) -> Result<u64, TransferError> {
        let mut pending = lock(&self.pending);
        if pending.closed {
            drop(pending);
            return Err(self.peer_lost());
        }
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        pending.waiting.insert(request, waiting);
        Ok(request)
    }

    async fn send(&self, request: &Request) -> Result<(), TransferError> {
        if self.socket.send(&wire::encode(request), None).await.is_err() {
            // The task that reads the socket finds out why.
            self.closed().await;
            return Err(self.peer_lost());
        }
        Ok(())
    }

    /// Ends a pin. Never waits: it is called when values are dropped.
    fn unpin(&self, pin: u64) {
        if std::process::id() != self.owner {
            return;
        }
        let frame = wire::encode(&Request::Unpin { pin });
        if let Err(error) = self.socket.try_send(&frame)
            && error.kind() == io::ErrorKind::WouldBlock
        {
            lock(&self.backlog).push_back(frame);
            self.backlog_filled.notify_one();
        }
    }

    /// Reads answers until the peer or this host ends the connection.
    async fn run(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        let mut buffer = [0; MAX_FRAME];
        let how = loop {
            let done = tokio::select! {
                received = self.socket.receive(&mut buffer) => match received {
                    Ok(Received::Frame(len, descriptor)) => self.answered(&buffer[..len], descriptor),
                    Ok(Received::End) => {
                        let died = tokio::time::timeout(DEATH_AFTER_CLOSE, self.watch.died()).await;
                        let closed = "it closed the connection";
                        break died.map_or(closed, |()| "its process died").to_owned();
                    }
                    Err(error) => Err(error.to_string()),
                },
                () = self.watch.died() => break "its process died".to_owned(),
                () = self.flush() => Ok(()),
                () = stopped(&mut stop) => break "this host was shut down".to_owned(),
            };
            if let Err(problem) = done {
                tracing::warn!(peer = %self.peer, %problem, "a data connection is given up");
                break problem;
            }
        };
        self.end(how);
    }

    fn end(&self, how: String) {
        self.lost.send_if_modified(|lost| {
            let first = lost.is_none();
            lost.get_or_insert(how);
            first
        });
        let waiting = {
            let mut pending = lock(&self.pending);
            pending.closed = true;
            std::mem::take(&mut pending.waiting)
        };
        drop(waiting);
        // Mappings in use keep their segment.
        let segments = std::mem::take(&mut *lock(&self.segments));
        drop(segments);
    }

    fn answered(self: &Arc<Self>, frame: &[u8], descriptor: Option<OwnedFd>) -> Result<(), String> {
        match wire::decode(frame).map_err(|error| error.to_string())? {
            Reply::Pinned {
                request,
                pin,
                place,
                len,
            } => {
                // From here on, the pin ends when this is dropped.
                let mut grip = Grip {
                    link: self.clone(),
                    pin,
                    place,
                    segment: None,
                    region: 0,
                    len,
                };
                if let Place::Segment {
                    segment,
                    segment_len,
                    offset,
                } = place
                {
                    let inside = offset.checked_add(len).is_some_and(|end| end <= segment_len);
                    if !inside {
                        return Err(format!("{len} bytes at {offset} of a segment of {segment_len} bytes"));
                    }
                    grip.segment = Some(self.segment(segment, segment_len, descriptor)?);
                }
                match self.take(request) {
                    // Whoever asked may have stopped waiting: then the grip comes back and is dropped.
                    Some(Waiting::Pin(answer)) => drop(answer.send(Ok(grip))),
                    _ => return Err(format!("an answer to request {request}, which was not asked")),
                }
            }
            Reply::Confirmed { request } => match self.take(request) {
                Some(Waiting::Confirm(answer)) => drop(answer.send(Ok(()))),
                _ => return Err(format!("an answer to request {request}, which was not asked")),
            },
            Reply::Refused { request, refusal } => match self.take(request) {
                Some(Waiting::Pin(answer)) => drop(answer.send(Err(refusal))),
                Some(Waiting::Confirm(answer)) => drop(answer.send(Err(refusal))),
                None => return Err(format!("an answer to request {request}, which was not asked")),
            },
            Reply::Retired { segments } => {
                let mut known = lock(&self.segments);
                let gone: Vec<_> = segments.iter().filter_map(|id| known.remove(id)).collect();
                drop(known);
                drop(gone);
            }
        }
        Ok(())
    }

    /// Who waits for the answer to a request.
    fn take(&self, request: u64) -> Option<Waiting> {
        lock(&self.pending).waiting.remove(&request)
    }

    /// The segment with this number: known already, or by the descriptor that just came.
    fn segment(&self, id: u64, len: u64, descriptor: Option<OwnedFd>) -> Result<Arc<PeerSegment>, String> {
        let mut known = lock(&self.segments);
        if let Some(descriptor) = descriptor {
            let segment = PeerSegment::new(descriptor, len, self.counters.clone());
            let segment = Arc::new(segment.map_err(|error| error.to_string())?);
            known.insert(id, segment.clone());
            return Ok(segment);
        }
        match known.get(&id) {
            Some(segment) if segment.len() == len => Ok(segment.clone()),
            _ => Err(format!("segment {id} of {len} bytes was named without its descriptor")),
        }
    }

    /// Waits until unpins are left over, and sends them.
    ///
    /// # Cancel safety
    /// A frame leaves the backlog only once it is sent.
    async fn flush(&self) {
        let next = || lock(&self.backlog).front().cloned();
        let Some(frame) = next() else {
            self.backlog_filled.notified().await;
            return;
        };
        // Where it fails, the connection is over, and with it the pins.
        let _ = self.socket.send(&frame, None).await;
        lock(&self.backlog).pop_front();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.counters.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("peer", &self.peer)
            .field("process", &self.process())
            .field("lost", &*self.lost.borrow())
            .finish_non_exhaustive()
    }
}

impl Grip {
    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    pub(crate) fn place(&self) -> Place {
        self.place
    }

    pub(crate) fn segment(&self) -> Option<&Arc<PeerSegment>> {
        self.segment.as_ref()
    }

    pub(crate) fn region(&self) -> u64 {
        self.region
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Proves that the pin was held and its owner alive until now. Comes after a copy, and makes it count.
    pub(crate) async fn confirm(&self) -> Result<(), TransferError> {
        let link = &self.link;
        if !link.is_alive() {
            return Err(link.peer_lost());
        }
        let (answer, answered) = oneshot::channel();
        let request = link.expect(Waiting::Confirm(answer))?;
        let pin = self.pin;
        link.send(&Request::Confirm { request, pin }).await?;
        match answered.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(TransferError::Released {
                peer: link.peer,
                region: self.region,
            }),
            Err(_) => Err(link.peer_lost()),
        }
    }
}

impl Drop for Grip {
    fn drop(&mut self) {
        self.link.unpin(self.pin);
    }
}

impl fmt::Debug for Grip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Grip(region {} of {}, {} bytes)",
            self.region, self.link.peer, self.len
        )
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stopped| *stopped).await;
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
