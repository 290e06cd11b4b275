use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{ByteCount, PayloadId, Token};
use stagewire_transfer::{Extent, ExtentMut, Target};
use tokio::time::Instant;

use super::index::Claim;
use super::lent::Lent;
use super::object::{About, HostObject};
use crate::{Draft, NewObject, Object, ObjectState, Retention, StoreError};

/// Bytes of one part of a draft.
#[derive(Debug)]
pub(super) enum Part {
    Empty,
    Extent(ExtentMut),
    Target(Arc<Target>),
}

/// An object being written.
#[derive(Debug)]
pub(super) struct HostDraft {
    claim: Claim,
    token: Option<Token>,
    retention: Retention,
    expires: Option<Duration>,
    sizes: Vec<ByteCount>,
    label: Vec<u8>,
    parts: Vec<Part>,
    room: Lent,
}

impl HostDraft {
    pub(super) fn new(claim: Claim, object: NewObject, room: Lent, extents: Vec<Option<ExtentMut>>) -> Self {
        let part = |extent: Option<ExtentMut>| extent.map_or(Part::Empty, Part::Extent);
        Self {
            claim,
            token: object.token,
            retention: object.retention,
            expires: object.expires,
            sizes: object.parts,
            label: object.label,
            parts: extents.into_iter().map(part).collect(),
            room,
        }
    }

    fn part(&mut self, part: usize) -> Result<&mut Part, StoreError> {
        let (payload, parts) = (self.claim.payload(), self.parts.len());
        self.parts
            .get_mut(part)
            .ok_or(StoreError::NoSuchPart { payload, part, parts })
    }

    /// The bytes of every part, now immutable.
    fn freeze(&mut self) -> Result<Vec<Option<Extent>>, StoreError> {
        let payload = self.claim.payload();
        let parts = std::mem::take(&mut self.parts).into_iter().enumerate();
        let freeze = |(part, bytes)| match bytes {
            Part::Empty => Ok(None),
            Part::Extent(extent) => Ok(Some(extent.freeze())),
            Part::Target(target) => {
                if target.as_slice().is_err() {
                    return Err(StoreError::Unwritten { payload, part });
                }
                let target = Arc::try_unwrap(target).map_err(|_| StoreError::Busy { payload, part })?;
                let extent = target.into_extent().map_err(|_| StoreError::Busy { payload, part })?;
                Ok(Some(extent))
            }
        };
        parts.map(freeze).collect()
    }
}

#[async_trait]
impl Draft for HostDraft {
    fn payload(&self) -> PayloadId {
        self.claim.payload()
    }

    fn bytes_mut(&mut self, part: usize) -> Result<&mut [u8], StoreError> {
        let payload = self.claim.payload();
        match self.part(part)? {
            Part::Empty => Ok(&mut []),
            Part::Extent(extent) => Ok(extent),
            Part::Target(_) => Err(StoreError::Busy { payload, part }),
        }
    }

    fn target(&mut self, part: usize) -> Result<Arc<Target>, StoreError> {
        let (payload, parts) = (self.claim.payload(), self.parts.len());
        let place = self.part(part)?;
        match std::mem::replace(place, Part::Empty) {
            Part::Empty => Err(StoreError::NoSuchPart { payload, part, parts }),
            Part::Extent(extent) => {
                let target = Arc::new(Target::from(extent));
                *place = Part::Target(Arc::clone(&target));
                Ok(target)
            }
            Part::Target(target) => {
                *place = Part::Target(Arc::clone(&target));
                Ok(target)
            }
        }
    }

    async fn seal(mut self: Box<Self>) -> Result<Arc<dyn Object>, StoreError> {
        let payload = self.claim.payload();
        let fenced = |source| StoreError::Fenced { payload, source };
        self.claim.store().gate.check(self.token).map_err(fenced)?;
        let extents = self.freeze()?;
        self.claim.store().keep(payload, &extents).await?;
        let parts = self.claim.store().register(payload, extents)?;
        let room = self.room.keep();
        room.set(ObjectState::Sealed);
        let about = About {
            payload,
            token: self.token,
            retention: self.retention,
            deadline: self.expires.and_then(|after| Instant::now().checked_add(after)),
            parts: self.sizes,
            label: self.label,
        };
        let object = Arc::new(HostObject::new(Arc::new(about), parts, room));
        self.claim.seal(&object)?;
        Ok(object)
    }
}
