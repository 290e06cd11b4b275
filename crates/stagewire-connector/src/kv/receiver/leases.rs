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
        let mut taken: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
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
                        free.insert(spec.room.number);
                        taken.entry(index).or_default().push(page);
                    }
                    // Twice in one table: the plan says what is wrong.
                    btree_map::Entry::Occupied(_) if holds(&taken, index, page) => {}
                    btree_map::Entry::Occupied(other) => {
                        let by = *other.get();
                        held.give_back(&taken);
                        return Err(KvError::PageInUse {
                            room: spec.room.number,
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
        Ok(Lease {
            leases: Arc::clone(leases),
            pages: taken,
        })
    }
}

impl Held {
    fn give_back(&mut self, taken: &BTreeMap<u32, Vec<u64>>) {
        for (&component, pages) in taken {
            for &page in pages {
                self.pages.remove(&(component, page));
            }
        }
    }
}

fn holds(taken: &BTreeMap<u32, Vec<u64>>, component: u32, page: u64) -> bool {
    taken.get(&component).is_some_and(|pages| pages.contains(&page))
}

impl Lease {
    /// By component.
    pub(super) fn pages(&self) -> &BTreeMap<u32, Vec<u64>> {
        &self.pages
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut held = self.leases.lock();
        held.give_back(&self.pages);
        held.rooms -= 1;
    }
}
