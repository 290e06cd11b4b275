use std::collections::{BTreeMap, btree_map};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stagewire_kv::Engine;

use super::super::KvError;
use super::super::cache::Buffers;
use super::RoomSpec;

/// Which room may write which page.
#[derive(Debug, Default)]
pub(super) struct Leases(Mutex<Held>);

#[derive(Debug, Default)]
struct Held {
    /// By component and page.
    pages: BTreeMap<(u32, u64), u64>,
    rooms: usize,
}

/// The pages that a room may write, which are no other room's as long as this is held.
#[derive(Debug)]
pub(super) struct Lease {
    leases: Arc<Leases>,
    pages: BTreeMap<u32, Vec<u64>>,
}

impl Leases {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn rooms(&self) -> usize {
        self.lock().rooms
    }

    /// Takes the pages that a room may write: those of its tables beyond what is here already. Takes none where one of them
    /// is another room's. What no page may be is left to the plan, which refuses it.
    pub(super) fn lease(
        leases: &Arc<Self>,
        engine: &Engine,
        buffers: &Buffers,
        spec: &RoomSpec,
    ) -> Result<Lease, KvError> {
        let geometry = engine.geometry();
        let mut lease = Lease {
            leases: Arc::clone(leases),
            pages: BTreeMap::new(),
        };
        let mut held = leases.lock();
        for (index, component) in (0..).zip(&geometry.components) {
            let Some(table) = spec.pages.get(&component.name) else {
                continue;
            };
            let prefix = spec.prefix.get(&component.name).copied().unwrap_or(0) / u64::from(geometry.page_size);
            let needed = component.pages(geometry.page_size, spec.seq_len);
            let written = (0..)
                .zip(table)
                .filter(|(logical, _)| (needed.start.max(prefix)..needed.end).contains(logical));
            let pages = written.filter_map(|(_, &page)| u64::try_from(page).ok());
            for page in pages.filter(|&page| buffers.has_page(index, page)) {
                match held.pages.entry((index, page)) {
                    btree_map::Entry::Vacant(free) => {
                        free.insert(spec.room);
                        lease.pages.entry(index).or_default().push(page);
                    }
                    // Twice in one table: the plan says what is wrong.
                    btree_map::Entry::Occupied(_) if lease.holds(index, page) => {}
                    btree_map::Entry::Occupied(other) => {
                        let by = *other.get();
                        lease.give_back(&mut held);
                        return Err(KvError::PageInUse {
                            room: spec.room,
                            component: component.name.clone(),
                            page: page.cast_signed(),
                            by,
                        });
                    }
                }
            }
        }
        held.rooms += 1;
        drop(held);
        Ok(lease)
    }
}

impl Lease {
    fn holds(&self, component: u32, page: u64) -> bool {
        self.pages.get(&component).is_some_and(|pages| pages.contains(&page))
    }

    /// By component.
    pub(super) fn pages(&self) -> &BTreeMap<u32, Vec<u64>> {
        &self.pages
    }

    fn give_back(&mut self, held: &mut Held) {
        for (component, pages) in std::mem::take(&mut self.pages) {
            for page in pages {
                held.pages.remove(&(component, page));
            }
        }
        // Counts once it is whole, and once it goes.
        held.rooms += 1;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let leases = Arc::clone(&self.leases);
        let mut held = leases.lock();
        self.give_back(&mut held);
        held.rooms -= 2;
    }
}
