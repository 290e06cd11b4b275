use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{ByteCount, PayloadId, RegionRef, Token};
use stagewire_transfer::Target;

use crate::{Reservation, StoreError, Usage};

/// What a store may do with a sealed object when it needs room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Retention {
    /// Nobody has read it yet, or somebody wants it kept: it is never evicted. It may be moved to a file.
    #[default]
    Held,
    /// It goes when nothing else can.
    SoftPinned,
    /// It can be made again, so that it may go at any time. It stays the longer, the dearer and the smaller it is and the
    /// more often it is read.
    Cached {
        /// What making it again takes.
        cost: Duration,
    },
}

/// What is to be written: one part per tensor, in the order of the manifest.
#[derive(Debug)]
pub struct NewObject {
    /// Key of the object.
    pub payload: PayloadId,
    /// Bytes of each part; 0 is allowed.
    pub parts: Vec<ByteCount>,
    /// Attempt that writes. A closed gate asks for it.
    pub token: Option<Token>,
    /// How long to wait for room.
    pub wait: Duration,
    /// What may happen to it when the store needs room.
    pub retention: Retention,
    /// It is deleted so long after it was sealed, read or not. Reads do not extend it.
    pub expires: Option<Duration>,
    /// Room that was reserved for it, and is again, should it be given up. What it does not need of that is given back.
    pub reservation: Option<Reservation>,
    /// What its owner wants to find again with it after the store's process has died.
    pub label: Vec<u8>,
}

impl NewObject {
    /// An object written by nobody in particular, which does not wait for room and is held until it is deleted.
    pub fn new(payload: PayloadId, parts: impl IntoIterator<Item = ByteCount>) -> Self {
        Self {
            payload,
            parts: parts.into_iter().collect(),
            token: None,
            wait: Duration::ZERO,
            retention: Retention::Held,
            expires: None,
            reservation: None,
            label: Vec::new(),
        }
    }
}

/// What not every store can do. The checks of `conformance` ask for no more than a store says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreAbilities {
    /// It knows what holds its space: [`Store::usage`] is exact, it is full at its limit, to the page, and
    /// [`Store::reserve`] keeps room.
    pub bound: bool,
    /// What leaves when room is short goes in the order of [`Retention`], and nothing goes that somebody reads. Without
    /// it, [`Retention::Held`] is all that is kept of it.
    pub retention: bool,
    /// It keeps [`NewObject::expires`] itself. Otherwise its user does.
    pub deadlines: bool,
    /// [`Store::delete`] also aborts what somebody is writing.
    pub deletes_drafts: bool,
}

impl StoreAbilities {
    /// Everything.
    pub const ALL: Self = Self {
        bound: true,
        retention: true,
        deadlines: true,
        deletes_drafts: true,
    };
}

/// A place that keeps payloads apart from the processes that made them.
///
/// An object is created, written in place, sealed, read by any number of readers, deleted. Nobody reads it before it
/// is sealed; nobody writes it after.
#[async_trait]
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// What kind of store it is, such as `host`.
    fn name(&self) -> &'static str;

    /// What of this trait it cannot do.
    fn abilities(&self) -> StoreAbilities {
        StoreAbilities::ALL
    }

    /// What holds its space now; nothing where it does not know.
    fn usage(&self) -> Usage;

    /// Begins an object if there is none under its key.
    ///
    /// # Errors
    /// [`StoreError::Exists`] where there is one, sealed, being written, or waiting for room: nothing is changed then.
    /// [`StoreError::Exhausted`] where no room came free within [`NewObject::wait`], [`StoreError::TooLarge`] where
    /// none ever could, [`StoreError::Fenced`] where the token may not write.
    ///
    /// # Cancel safety
    /// Dropping the future leaves nothing behind.
    async fn create(&self, object: NewObject) -> Result<Box<dyn Draft>, StoreError>;

    /// The sealed object under this key. It can be read as long as the caller keeps it, also after a delete. An object
    /// that had left the memory is brought back, which may take time and room: [`Store::fetch`] needs no room.
    ///
    /// # Errors
    /// [`StoreError::NotFound`], [`StoreError::NotSealed`]; where it is brought back, [`StoreError::Spill`],
    /// [`StoreError::Corrupt`], and [`StoreError::Exhausted`] where there was no room within 30 seconds.
    ///
    /// # Cancel safety
    /// Bringing it back goes on by itself.
    async fn get(&self, payload: PayloadId) -> Result<Arc<dyn Object>, StoreError>;

    /// Copies the sealed object into one destination for each part, of exactly its bytes, wherever the store has it: what
    /// lies in a file is read from there and checked against its digest.
    ///
    /// # Errors
    /// [`StoreError::NotFound`], [`StoreError::NotSealed`]; [`StoreError::Destinations`] and [`StoreError::Target`] where
    /// a destination does not fit; [`StoreError::Spill`] and [`StoreError::Corrupt`] where the bytes did not come back.
    /// Some destinations may have been written then, none of them in part.
    ///
    /// # Cancel safety
    /// A copy under way ends by itself; until then the destinations are not idle.
    async fn fetch(&self, payload: PayloadId, destinations: &[Arc<Target>]) -> Result<(), StoreError>;

    /// Keeps `nbytes` of room free for [`NewObject::reservation`], waiting up to `wait` for it. An object takes whole
    /// pages of 4 KiB for each part.
    ///
    /// # Errors
    /// [`StoreError::Unreserved`] where there is not so much room in time, or could never be.
    ///
    /// # Cancel safety
    /// Dropping the future leaves nothing behind.
    async fn reserve(&self, nbytes: ByteCount, wait: Duration) -> Result<Reservation, StoreError>;

    /// Takes the object away: nobody finds it any more, and its bytes are free once the last reader is done. An
    /// object being written is aborted.
    ///
    /// # Errors
    /// [`StoreError::NotFound`], [`StoreError::Fenced`].
    async fn delete(&self, payload: PayloadId, token: Option<Token>) -> Result<(), StoreError>;
}

/// An object being written. Dropping it aborts: the key is free again at once, the bytes when the last copy into them
/// has ended.
#[async_trait]
pub trait Draft: fmt::Debug + Send {
    /// Key of the object.
    fn payload(&self) -> PayloadId;

    /// Memory of part `part`, for writing in place by this process.
    ///
    /// # Errors
    /// [`StoreError::NoSuchPart`]; [`StoreError::Busy`] where [`Draft::target`] was called for the part.
    fn bytes_mut(&mut self, part: usize) -> Result<&mut [u8], StoreError>;

    /// Memory of part `part`, as the destination of pulls. Every byte must be pulled before [`Draft::seal`].
    ///
    /// # Errors
    /// [`StoreError::NoSuchPart`], also for a part of no bytes.
    fn target(&mut self, part: usize) -> Result<Arc<Target>, StoreError>;

    /// Makes the object readable, and immutable.
    ///
    /// # Errors
    /// [`StoreError::Busy`] where a [`Target`] of it is still in use, [`StoreError::Unwritten`] where one is not full,
    /// [`StoreError::Fenced`] where the writer's token was revoked meanwhile, [`StoreError::NotFound`] where the object was deleted meanwhile,
    /// [`StoreError::Index`] and [`StoreError::Keeper`] where it would not survive this process although it should. The
    /// draft is gone then.
    async fn seal(self: Box<Self>) -> Result<Arc<dyn Object>, StoreError>;
}

/// A sealed object, kept alive by whoever holds it.
pub trait Object: fmt::Debug + Send + Sync {
    /// Key of the object.
    fn payload(&self) -> PayloadId;

    /// Number of parts.
    fn parts(&self) -> usize;

    /// Bytes of part `part`; `None` where there is no such part.
    fn part(&self, part: usize) -> Option<&[u8]>;

    /// Where other processes read the parts, one for each part. A part of no bytes has no region, nor has one that others
    /// cannot read.
    fn regions(&self) -> Vec<Option<RegionRef>>;
}
