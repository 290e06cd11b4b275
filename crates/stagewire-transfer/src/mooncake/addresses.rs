//! The addresses under which peers know memory of this process.
//!
//! They are no addresses of this process: each is drawn at random when memory is exposed or pinned, and means nothing any
//! more when that ends. So what a peer kept for too long is unknown, and cannot reach memory that came after.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stagewire_core::Capability;

use super::data::{Operation, Request};
use super::handshake::Buffer;
use crate::table::{Hold, Pins, RegionKey, Table};
use crate::wire::Kind;

/// Addresses are multiples of this: peers may expect memory to be aligned.
const ALIGN: u64 = 4096;

/// All addresses in use.
#[derive(Default)]
pub(crate) struct Addresses {
    ranges: Mutex<Ranges>,
}

#[derive(Default)]
struct Ranges {
    grants: BTreeMap<u64, Arc<Grant>>,
    /// Grants to any peer, also where their region was released.
    exposed: usize,
}

/// Why addresses are not lent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unlent {
    /// As many regions are exposed as may be.
    Full,
    /// So many bytes fit nowhere.
    Nowhere,
}

/// What one range of addresses stands for.
struct Grant {
    base: u64,
    len: u64,
    source: Source,
    ended: AtomicBool,
}

enum Source {
    /// A region of this process that any peer may use for as long as it is registered.
    Exposed {
        table: Arc<Table>,
        key: RegionKey,
        capability: Capability,
    },
    /// A region that one of our own peers has pinned.
    Pinned(Arc<Hold>),
}

/// A range of addresses. It ends when this is dropped; requests under way end soon after.
pub(crate) struct Lent {
    addresses: Arc<Addresses>,
    grant: Arc<Grant>,
}

/// Memory that a request may use, kept in place until this is dropped.
pub(crate) struct Held {
    hold: Arc<Hold>,
    offset: u64,
    grant: Arc<Grant>,
}

impl Addresses {
    /// Lends a registered region to any peer, as one of at most so many.
    pub(crate) fn expose(
        self: &Arc<Self>,
        table: Arc<Table>,
        key: RegionKey,
        capability: Capability,
        len: u64,
        most: usize,
    ) -> Result<Lent, Unlent> {
        let mut ranges = self.lock();
        if ranges.exposed >= most && ranges.exposed().count() >= most {
            return Err(Unlent::Full);
        }
        let source = Source::Exposed { table, key, capability };
        let grant = ranges.lend(len, source).ok_or(Unlent::Nowhere)?;
        ranges.exposed += 1;
        drop(ranges);
        Ok(self.lent(grant))
    }

    /// Lends a region that a peer has pinned. `None` where so many bytes fit nowhere.
    pub(crate) fn lend_pinned(self: &Arc<Self>, hold: Arc<Hold>) -> Option<Lent> {
        let grant = self.lock().lend(hold.memory().len(), Source::Pinned(hold))?;
        Some(self.lent(grant))
    }

    fn lent(self: &Arc<Self>, grant: Arc<Grant>) -> Lent {
        let addresses = self.clone();
        Lent { addresses, grant }
    }

    /// The memory that a request names, if it may be used so.
    pub(crate) fn hold(&self, request: &Request) -> Option<Held> {
        let grant = self.find(request)?;
        let hold = match &grant.source {
            Source::Pinned(hold) => hold.clone(),
            Source::Exposed { table, key, capability } => {
                let mut pins = Pins::new(table.clone(), 0, None);
                let hold = pins.pin(Kind::Mooncake, *key, capability);
                // From here on, only the request holds it.
                pins.end();
                hold.ok()?
            }
        };
        let allowed = request.operation == Operation::Read || hold.memory().is_writable();
        let offset = request.addr - grant.base;
        allowed.then_some(Held { hold, offset, grant })
    }

    fn find(&self, request: &Request) -> Option<Arc<Grant>> {
        let ranges = self.lock();
        let (_, grant) = ranges.grants.range(..=request.addr).next_back()?;
        let end = request.addr.checked_add(request.len)?;
        (end <= grant.base + grant.len).then(|| grant.clone())
    }

    /// What any peer may use, as it is listed.
    pub(crate) fn exposed(&self, name: &str) -> Vec<Buffer> {
        let ranges = self.lock();
        let buffer = |grant: &Arc<Grant>| Buffer::new(grant.base, grant.len, name.to_owned());
        ranges.exposed().map(buffer).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ranges {
    /// `None` where so many bytes fit nowhere.
    fn lend(&mut self, len: u64, source: Source) -> Option<Arc<Grant>> {
        let base = (0..64).find_map(|_| {
            let base = rand::random_range(1..(1_u64 << 62) / ALIGN) * ALIGN;
            let end = base.checked_add(len)?.checked_add(ALIGN)?;
            let before = self.grants.range(..end).next_back();
            before
                .is_none_or(|(_, grant)| grant.base + grant.len < base)
                .then_some(base)
        })?;
        let grant = Arc::new(Grant {
            base,
            len,
            source,
            ended: AtomicBool::new(false),
        });
        self.grants.insert(base, grant.clone());
        Some(grant)
    }

    /// What any peer may use.
    fn exposed(&self) -> impl Iterator<Item = &Arc<Grant>> {
        let grants = self.grants.values();
        grants.filter(|grant| grant.is_exposed() && grant.is_open())
    }
}

impl Grant {
    fn is_exposed(&self) -> bool {
        matches!(self.source, Source::Exposed { .. })
    }

    fn is_open(&self) -> bool {
        let registered = match &self.source {
            Source::Exposed { table, key, .. } => table.is_registered(*key),
            Source::Pinned(_) => true,
        };
        registered && !self.ended.load(Ordering::Acquire)
    }
}

impl Lent {
    /// The first address.
    pub(crate) fn base(&self) -> u64 {
        self.grant.base
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.grant.ended.store(true, Ordering::Release);
        let mut ranges = self.addresses.lock();
        let grant = ranges.grants.remove(&self.grant.base);
        ranges.exposed -= usize::from(self.grant.is_exposed());
        // What it refers to goes without the lock.
        drop(ranges);
        drop(grant);
    }
}

impl Held {
    /// The first byte of the request.
    pub(crate) fn as_ptr(&self) -> std::ptr::NonNull<u8> {
        // SAFETY: `Addresses::find` compared offset and length with the grant, which is as long as the memory.
        unsafe { self.hold.memory().as_ptr().add(self.offset as usize) }
    }

    /// Whether the request may go on: nobody took the addresses back meanwhile.
    pub(crate) fn is_open(&self) -> bool {
        self.grant.is_open()
    }
}
