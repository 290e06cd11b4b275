use std::fmt;
use std::sync::Arc;

use stagewire_core::RegionRef;
use tokio::sync::oneshot;

use super::{Link, PeerSegment, Waiting};
use crate::wire::{self, Full, Kind, Place, Refusal, Request};
use crate::{TransferError, TransferOptions};

/// A pin at the peer; ends when dropped.
pub(crate) struct Grip {
    link: Arc<Link>,
    pin: u64,
    kind: Kind,
    writable: bool,
    /// Where the region is.
    place: Place,
    /// The segment it is in, for shared memory.
    segment: Option<Arc<PeerSegment>>,
    region: u64,
    len: u64,
}

impl Link {
    /// Pins a region of the peer.
    pub(crate) async fn pin(
        self: &Arc<Self>,
        kind: Kind,
        region: &RegionRef,
        options: &TransferOptions,
    ) -> Result<Grip, TransferError> {
        let peer = self.peer;
        if !kind.pins(&region.transport) {
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
        let placed = match kind {
            Kind::Shm => matches!(grip.place, Place::Segment { .. }) && grip.segment.is_some(),
            Kind::Cma => matches!(grip.place, Place::Address(_)),
            // They look for themselves.
            Kind::Tcp | Kind::Mooncake | Kind::Nixl | Kind::Engine => true,
        };
        if !placed {
            return Err(TransferError::Backend {
                transport: kind.name(),
                peer,
                region: region.region,
                what: "pin",
                record: None,
                problem: format!(
                    "the owner answers with {:?}, which says nothing to {}",
                    grip.place,
                    kind.name()
                ),
            });
        }
        grip.region = region.region;
        grip.kind = kind;
        Ok(grip)
    }

    /// The error that a refusal means.
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
            Refusal::Device { device } => TransferError::Device {
                transport: kind.name(),
                device,
            },
            Refusal::Backend { problem } => TransferError::Backend {
                transport: kind.name(),
                peer,
                region,
                what: "pin",
                record: None,
                problem,
            },
            Refusal::Full(Full { what, held, most }) => {
                let what = what.name();
                TransferError::Full { peer, what, held, most }
            }
            Refusal::Registered { kind: registered } => TransferError::Transport {
                peer,
                region,
                registered: registered.name().to_owned(),
                used: kind.name(),
            },
        }
    }

    /// Ends a pin. Never waits: it is called when values are dropped.
    fn unpin(&self, pin: u64) {
        if std::process::id() != self.owner {
            return;
        }
        let frame = wire::encode(&Request::Unpin { pin });
        // Where it fails, the connection is over, and with it the pins.
        let _ = self.channel.post(&frame);
    }
}

impl Grip {
    /// The link fills in region and kind.
    pub(super) fn new(link: Arc<Link>, pin: u64, place: Place, len: u64, writable: bool) -> Self {
        Self {
            link,
            pin,
            kind: Kind::Shm,
            writable,
            place,
            segment: None,
            region: 0,
            len,
        }
    }

    pub(super) fn set_segment(&mut self, segment: Arc<PeerSegment>) {
        self.segment = Some(segment);
    }

    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// Number of the pin, by which the owner knows it.
    pub(crate) fn pin(&self) -> u64 {
        self.pin
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether the owner lets it be written.
    pub(crate) fn is_writable(&self) -> bool {
        self.writable
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

    /// Proves that the pin was held and its owner alive until now, without asking the owner: for copies that this process
    /// makes on its own.
    ///
    /// The owner granted the pin for one generation, to the right capability. It keeps the memory as it is until this
    /// process lets go or ends: by [`Request::Unpin`], which only the last reference to this grip sends, or by the close
    /// of the socket, which the link holds. Where the owner gives the connection up, pins stay. So a pin ends before its
    /// grip only together with its owner, and that the kernel tells (pidfd). Asking the owner would add nothing but a
    /// wait, and would fail a copy whose bytes are exact where the owner stands still.
    pub(crate) fn still_held(&self) -> Result<(), TransferError> {
        if self.link.is_alive() {
            Ok(())
        } else {
            Err(self.link.peer_lost())
        }
    }

    /// As [`Grip::still_held`], but asks the owner: for bytes that came by other ways than out of memory that the pin
    /// itself keeps. Comes after a copy, and makes it count.
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
