//! How a consumer gets from one chunk to the next.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::FutureExt;
use stagewire_core::{Classify, ErrorClass, Handover, RegionRef, Timestamp, TransferMode};
use stagewire_transfer::{ConnectError, TransferError};

use super::access::{Access, AccessError, Way};
use super::progress::{AHEAD_OF_HOST, Batch, Landed, Slot};
use super::pump::Pump;
use super::seek::Sought;
use super::{Chunk, ChunkView, ConsumeError, Consumer, Place};
use crate::digest;
use crate::link::{Heard, Watching};
use crate::live::Shown;
use crate::wire::{self, End, Refusal};

/// How long a holder may take to acknowledge that the consumer is done.
const FINISH_WITHIN: Duration = Duration::from_secs(1);

impl Consumer {
    pub(super) async fn advance(&mut self) -> Result<Option<Chunk>, ConsumeError> {
        loop {
            let error = match self.step().await {
                Err(error) => self.with_reason(error).await,
                result => return result,
            };
            match self.seek(&error).await {
                Sought::Found => {}
                Sought::Nowhere => {
                    let why = "the store that had it has died, and the one in its place does not have it";
                    return Err(ConsumeError::Gone { at: self.place(), why });
                }
                Sought::Unknown => return Err(error),
            }
        }
    }

    async fn step(&mut self) -> Result<Option<Chunk>, ConsumeError> {
        let chunks = self.handle.manifest.chunks();
        if self.next == chunks {
            self.finish().await?;
            return Ok(None);
        }
        if self.watching.is_none() && self.access.is_none() {
            self.begin().await?;
        }
        if !self.watching.as_ref().is_some_and(|watching| watching.has(self.next)) {
            // What comes in another order than it is asked for.
            self.look_ahead();
        }
        self.wait_readable().await?;
        let begin = now();
        let access = self.access().await?;
        if !access.is_copied() {
            self.look_ahead();
            let landed = Landed {
                begin,
                end: now(),
                stored: self.shown.stored,
            };
            return self.take_chunk(landed).map(Some);
        }
        loop {
            if let Some(flight) = &mut self.flight {
                let flight = flight.get_mut().unwrap_or_else(PoisonError::into_inner);
                let landed = flight.await;
                self.flight = None;
                landed.map_err(|error| self.access_error(error))?;
            }
            match self.progress.slot(self.next) {
                Slot::Here(landed) => {
                    self.look_ahead();
                    return self.take_chunk(landed).map(Some);
                }
                Slot::Flying => self.progress.landed(self.next).await,
                Slot::Missing => {
                    // What copies ahead may not have begun: a short copy does not let this worker go in between. So the
                    // chunks after the first come as many at a time as they would from there.
                    let batch = if self.whole {
                        Batch::All
                    } else {
                        Batch::Paced { unmeasured: 0 }
                    };
                    if let Some(flying) = self.progress.take(self.next, &self.shown, batch) {
                        self.flight = Some(Mutex::new(flying.pull(Arc::clone(&access)).boxed()));
                    }
                    self.look_ahead();
                }
            }
        }
    }

    /// Has go on what can while this consumer waits for a chunk, or is busy with one.
    fn look_ahead(&mut self) {
        let (Some(access), Some(watching)) = (&self.access, &self.watching) else {
            return;
        };
        if self.pump.as_ref().is_some_and(|pump| !pump.is_over()) || !access.is_of(self.regions()) {
            return;
        }
        let (runtime, heard) = (self.shared.runtime(), watching.subscribe());
        let unmeasured = if access.is_local() { AHEAD_OF_HOST } else { 0 };
        let batch = if self.whole {
            Batch::All
        } else {
            Batch::Paced { unmeasured }
        };
        self.pump = match self.progress.told() {
            _ if access.is_copied() => {
                let progress = Arc::clone(&self.progress);
                progress
                    .lacks_any()
                    .then(|| Pump::copying(runtime, Arc::clone(access), progress, heard, batch))
            }
            Some(told) if !told.all() => {
                let (access, handle) = (Arc::clone(access), Arc::clone(&self.handle));
                Some(Pump::telling(runtime, access, handle, Arc::clone(told), heard))
            }
            _ => None,
        };
    }

    /// Asks the holder how the payload comes on, and pins its memory meanwhile. A pin that fails is tried again once the
    /// holder has said that there is something to read: only then does its reason count.
    async fn begin(&mut self) -> Result<(), ConsumeError> {
        if self.may_be_sent() {
            let watching = self.watching.insert(self.watch().await?);
            watching.first_word_soon().await;
            let heard = watching.heard();
            if let Some(bytes) = heard.bytes {
                let regions = heard.shown.regions.as_ref().unwrap_or(&self.handle.regions);
                // Where the destination does not take them, the copy says why.
                let access = Access::sent(&self.handle, regions, &self.rooms, &bytes);
                self.access = access.ok().map(Arc::new);
            }
            return Ok(());
        }
        let watching = async {
            let watching = self.watch().await?;
            watching.first_word().await;
            Ok(watching)
        };
        let (watching, access) = tokio::join!(watching, self.open_access());
        self.watching = Some(watching?);
        self.access = access.ok().map(Arc::new);
        Ok(())
    }

    /// Whether a store may send the bytes along with its first answer.
    fn may_be_sent(&self) -> bool {
        self.way == Way::Copied && self.is_stored() && self.handle.manifest.nbytes().0 <= wire::SENT_ALONG
    }

    /// The pins, taken where there are none yet.
    async fn access(&mut self) -> Result<Arc<Access>, ConsumeError> {
        if let Some(access) = &self.access
            && access.is_of(self.regions())
        {
            return Ok(Arc::clone(access));
        }
        // What was copied stays; what is shown keeps its own memory. What is being copied is copied again.
        self.leave().await;
        for room in &self.rooms {
            room.idle().await;
        }
        self.progress = self.progress.anew();
        let access = match self.open_access().await {
            Err(error) if error.is_of_an_old_place() && self.is_stored() => {
                // It may have moved within the store since that was last heard of: the holder knows.
                self.watching = None;
                // What was heard before is not what is asked for.
                self.shown = Shown::default();
                self.wait_readable().await?;
                self.open_access().await
            }
            access => access,
        };
        let access = access.map_err(|error| self.access_error(error))?;
        Ok(Arc::clone(self.access.insert(Arc::new(access))))
    }

    /// Where the bytes of each tensor are.
    fn regions(&self) -> &[RegionRef] {
        self.shown.regions.as_deref().unwrap_or(&self.handle.regions)
    }

    /// Waits until chunk `next` may be read. A failure of the producer is seen also where chunks are readable.
    async fn wait_readable(&mut self) -> Result<(), ConsumeError> {
        let mut again = false;
        loop {
            self.check_end()?;
            if self.watching.is_none() {
                self.watching = Some(self.watch().await?);
            }
            let Some(watching) = &mut self.watching else {
                return Ok(());
            };
            // Looked at first, so that the last word is heard.
            let over = watching.is_over();
            let heard = watching.heard();
            self.hear(heard)?;
            if self.shown.complete.readable() > self.next {
                // Where the holder is gone, its memory may still be mapped, or the pull will tell.
                return Ok(());
            }
            if !over {
                if let Some(watching) = &mut self.watching {
                    watching.changed().await;
                }
                continue;
            }
            // Only the connection may be gone: a dead holder does not answer to another try.
            self.watching = None;
            if again {
                return Err(self.lost("it ended the connection twice".to_owned()));
            }
            again = true;
        }
    }

    /// Whether the payload has ended without chunk `next`.
    fn check_end(&self) -> Result<(), ConsumeError> {
        match &self.shown.end {
            Some(End::Failed(failure)) => Err(ConsumeError::Failed {
                at: self.place(),
                failure: failure.clone(),
            }),
            Some(End::Released) if self.shown.complete.readable() <= self.next => {
                Err(gone(self.place(), &Refusal::Released))
            }
            _ => Ok(()),
        }
    }

    pub(super) async fn watch(&self) -> Result<Watching, ConsumeError> {
        let link = self
            .shared
            .links()
            .to(&self.whereabouts.holder)
            .await
            .map_err(|source| {
                if source.is_lost() {
                    self.lost(source.how())
                } else {
                    ConsumeError::Link {
                        at: self.place(),
                        source,
                    }
                }
            })?;
        let untold = self.is_elsewhere() || self.handle.regions.iter().any(wire::is_nowhere);
        let copies = self.may_be_sent() && self.access.is_none();
        Ok(link.watch(&self.handle, untold, copies))
    }

    fn hear(&mut self, heard: Heard) -> Result<(), ConsumeError> {
        if let Some(refusal) = heard.refused {
            // Another try may find the payload free again.
            self.watching = None;
            self.access = None;
            self.whereabouts.refusal = Some(refusal.clone());
            let at = self.place();
            return Err(match refusal {
                Refusal::Denied => ConsumeError::Denied { at },
                Refusal::Claimed => ConsumeError::Claimed { at },
                Refusal::Failed(failure) => ConsumeError::Failed { at, failure },
                other => gone(at, &other),
            });
        }
        if heard.spoken {
            self.shown = heard.shown;
        }
        self.check_end()
    }

    pub(super) async fn open_access(&self) -> Result<Access, AccessError> {
        let transports: Vec<_> = self.shared.transports().cloned().collect();
        let holder = &self.whereabouts.holder;
        Access::open(
            holder,
            self.regions(),
            &transports,
            &self.rooms,
            self.way,
            self.deadline,
        )
        .await
    }

    fn take_chunk(&mut self, landed: Landed) -> Result<Chunk, ConsumeError> {
        let Landed { begin, end, stored } = landed;
        let (index, count) = (self.next, self.handle.manifest.chunks());
        let access = self.access.as_ref();
        let tensors = access
            .map(|access| access.views(&self.handle, Some(index)))
            .unwrap_or_default();
        self.compare(index, &tensors)?;
        if let (Some(told), Some(access)) = (self.progress.told(), &self.access) {
            told.tell(index, access, &self.handle);
        }
        self.next += 1;
        Ok(Chunk {
            index,
            count,
            tensors,
            handover: Handover {
                payload: self.handle.payload,
                from: self.handle.stage.clone(),
                chunk: index,
                chunks: count,
                nbytes: self.handle.manifest.chunk_nbytes(index).0,
                mode: if stored { TransferMode::Store } else { TransferMode::P2p },
                path: access.map(|access| access.path().to_owned()).unwrap_or_default(),
                begin,
                end,
            },
        })
    }

    /// Compares a chunk with the producer's digest of it, where there is one.
    fn compare(&self, index: u32, views: &[ChunkView]) -> Result<(), ConsumeError> {
        let Some(expected) = self.shown.complete.digest(index) else {
            return Ok(());
        };
        let found = digest::of_views(views);
        if found == expected {
            return Ok(());
        }
        let at = Place::new(&self.handle, index, self.whereabouts.holder.process.pid);
        Err(ConsumeError::Modified { at, found, expected })
    }

    /// Compares once more what the consumer was shown of the holder's own memory.
    fn compare_again(&self) -> Result<(), ConsumeError> {
        let Some(access) = self.access.as_ref().filter(|access| !access.is_copied()) else {
            return Ok(());
        };
        if !self.shown.complete.has_digests() {
            return Ok(());
        }
        let shown = self.shown.complete.readable().min(self.handle.manifest.chunks());
        (0..shown).try_for_each(|index| self.compare(index, &access.views(&self.handle, Some(index))))
    }

    /// Lets go of the pins and tells the holder. One that does not answer has other worries; a store that has died since
    /// is told when it is back, where that is soon: it has the payload again.
    async fn finish(&mut self) -> Result<(), ConsumeError> {
        self.compare_again()?;
        self.leave().await;
        while !self.done {
            if self.watching.is_none() {
                // Acknowledged before anything was read, or the connection was lost.
                self.watch_again().await;
            }
            let told = match &mut self.watching {
                Some(watching) => tokio::time::timeout(FINISH_WITHIN, watching.finish()).await,
                None => Ok(()),
            };
            let heard = self.watching.take().map(|mut watching| watching.heard());
            let heard = heard.unwrap_or_default();
            if told.is_err() {
                tracing::warn!(payload = %self.handle.payload, "the holder did not answer that the payload was consumed");
            } else if heard.refused.is_some() {
                let refused = heard.refused;
                self.hear(Heard {
                    refused,
                    ..Heard::default()
                })?;
            } else if !heard.finished && self.is_stored() {
                let lost = self.lost("it ended the connection before it answered".to_owned());
                if self.seek(&lost).await == Sought::Found {
                    continue;
                }
            }
            self.acknowledged = heard.finished;
            self.done = true;
        }
        Ok(())
    }

    /// Follows the payload once more, to say that it was read, where the holder can be asked soon.
    async fn watch_again(&mut self) {
        let watching = tokio::time::timeout(FINISH_WITHIN, self.watch()).await;
        self.watching = watching.ok().and_then(Result::ok);
    }

    /// Tells the holder that the store of this process has every byte, which is to keep them from now on.
    ///
    /// # Errors
    /// It is not to: the payload has ended, or who asked for it has given up. Where the holder does not say, the store has it.
    pub(crate) async fn take_over(&mut self) -> Result<(), Refusal> {
        // The connection may have been lost by itself: whether the holder heard, it says to who asks again.
        for _ in 0..2 {
            if self.watching.is_none() {
                self.watch_again().await;
            }
            let Some(mut watching) = self.watching.take() else {
                break;
            };
            if tokio::time::timeout(FINISH_WITHIN, watching.finish()).await.is_err() {
                break;
            }
            let heard = watching.heard();
            match heard.refused {
                // It has heard that before.
                Some(Refusal::Moved(store)) if store.incarnation == self.shared.peer().incarnation => return Ok(()),
                // By this very store, on the connection before.
                None | Some(Refusal::Claimed) if !heard.finished => {}
                Some(refusal) => return Err(refusal),
                None => return Ok(()),
            }
        }
        tracing::debug!(payload = %self.handle.payload, "the producer of a stored payload could not be told");
        Ok(())
    }

    pub(super) fn place(&self) -> Box<Place> {
        Place::new(&self.handle, self.next, self.whereabouts.holder.process.pid)
    }

    fn lost(&self, how: String) -> ConsumeError {
        ConsumeError::PeerLost { at: self.place(), how }
    }

    pub(super) fn no_transport(&self, transport: String) -> ConsumeError {
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

    pub(super) fn access_error(&self, error: AccessError) -> ConsumeError {
        let at = self.place();
        match error {
            AccessError::NoTransport(transport) => self.no_transport(transport),
            AccessError::Connect(error @ (ConnectError::Gone { .. } | ConnectError::Incarnation { .. })) => {
                self.lost(error.to_string())
            }
            AccessError::Connect(error) if self.died_in_between(error.class()) => self.lost(error.to_string()),
            AccessError::Connect(source) => ConsumeError::Connect { at, source },
            AccessError::Transfer(error @ TransferError::PeerLost { .. }) => self.lost(error.to_string()),
            AccessError::Transfer(
                TransferError::Released { .. } | TransferError::UnknownRegion { .. } | TransferError::Generation { .. },
            ) => gone(at, &Refusal::Released),
            AccessError::Transfer(error) if self.died_in_between(error.class()) => self.lost(error.to_string()),
            AccessError::Transfer(source) => ConsumeError::Transfer { at, source },
        }
    }

    /// Whether an error is only how the holder's death looked from here.
    fn died_in_between(&self, class: ErrorClass) -> bool {
        class == ErrorClass::Unavailable && !self.shared.is_alive(&self.whereabouts.holder)
    }
}

pub(super) fn gone(at: Box<Place>, refusal: &Refusal) -> ConsumeError {
    let why = match refusal {
        Refusal::Unknown => "its holder never had it, or released it long ago",
        Refusal::Expired => "nobody consumed it in time, or its lease is over",
        Refusal::Consumed => "it was consumed, and deleted by that",
        Refusal::Moved(_) => "it went to a store, which does not have it any more",
        _ => "it was released, or consumed and deleted by that",
    };
    ConsumeError::Gone { at, why }
}

pub(super) fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}
