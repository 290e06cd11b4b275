//! The regions of this host: who may pin what, and what is pinned.

#[cfg(all(test, stagewire_loom))]
mod models;

use std::collections::HashMap;
use std::mem;
use std::sync::{Arc, PoisonError};

use stagewire_core::{Capability, RegionRef};

use crate::Memory;
use crate::sync::{Mutex, MutexGuard, Notify};
use crate::wire::{Kind, Refusal};

/// All regions. A number is used again under the next generation.
#[derive(Default)]
pub(crate) struct Table {
    slots: Mutex<Slots>,
    /// Told whenever a region lost its last pin.
    idle: Notify,
}

#[derive(Default)]
struct Slots {
    slots: Vec<Slot>,
    free: Vec<usize>,
    closed: bool,
    registrations: u64,
    pins_served: u64,
    pins_held: u64,
}

struct Slot {
    generation: u64,
    entry: Option<Entry>,
}

struct Entry {
    memory: Memory,
    kind: Kind,
    capability: Capability,
    pins: u64,
    released: bool,
}

/// Names one registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegionKey {
    pub(crate) region: u64,
    pub(crate) generation: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TableStats {
    pub(crate) regions: u64,
    pub(crate) registrations: u64,
    pub(crate) pins_served: u64,
    pub(crate) pins_held: u64,
}

impl Table {
    /// Gives the memory back when the table was closed.
    pub(crate) fn register(&self, kind: Kind, memory: Memory) -> Result<RegionRef, Memory> {
        let mut slots = self.lock();
        if slots.closed {
            return Err(memory);
        }
        let index = slots.free.pop().unwrap_or(slots.slots.len());
        if index == slots.slots.len() {
            slots.slots.push(Slot {
                generation: 0,
                entry: None,
            });
        }
        slots.registrations += 1;
        let slot = &mut slots.slots[index];
        slot.generation += 1;
        let (capability, len) = (Capability::from_random(rand::random()), memory.len());
        slot.entry = Some(Entry {
            memory,
            kind,
            capability,
            pins: 0,
            released: false,
        });
        Ok(RegionRef {
            transport: kind.name().to_owned(),
            region: index as u64,
            generation: slot.generation,
            capability,
            len,
        })
    }

    /// Adds a pin for whoever presents the right capability, and tells where the memory is.
    fn pin(&self, kind: Kind, key: RegionKey, capability: &Capability) -> Result<Memory, Refusal> {
        let mut slots = self.lock();
        let slot = slots.slot(key).ok_or(Refusal::Unknown)?;
        let current = slot.generation;
        if key.generation > current {
            return Err(Refusal::Unknown);
        }
        if key.generation < current {
            return Err(Refusal::Generation { current });
        }
        let entry = slot.entry.as_mut().ok_or(Refusal::Released)?;
        if entry.capability != *capability {
            return Err(Refusal::Capability);
        }
        if entry.released {
            return Err(Refusal::Released);
        }
        if entry.kind != kind && kind != Kind::Tcp {
            return Err(Refusal::Registered { kind: entry.kind });
        }
        entry.pins += 1;
        let memory = entry.memory.clone();
        slots.pins_served += 1;
        slots.pins_held += 1;
        Ok(memory)
    }

    fn unpin(&self, key: RegionKey) {
        let mut slots = self.lock();
        let Some(entry) = slots.entry(key) else {
            return;
        };
        entry.pins -= 1;
        let idle = entry.pins == 0;
        slots.pins_held -= 1;
        let memory = slots.reclaim(key);
        drop(slots);
        if idle {
            self.idle.notify_waiters();
        }
        // The owner of borrowed memory may do anything when dropped: not under the lock.
        drop(memory);
    }

    pub(crate) fn release(&self, key: RegionKey) {
        let mut slots = self.lock();
        if let Some(entry) = slots.entry(key) {
            entry.released = true;
        }
        let memory = slots.reclaim(key);
        drop(slots);
        drop(memory);
    }

    /// Whether it takes new pins.
    pub(crate) fn is_registered(&self, key: RegionKey) -> bool {
        self.lock().entry(key).is_some_and(|entry| !entry.released)
    }

    pub(crate) fn is_idle(&self, key: RegionKey) -> bool {
        self.lock().entry(key).is_none_or(|entry| entry.pins == 0)
    }

    pub(crate) async fn idle(&self, key: RegionKey) {
        loop {
            let notified = self.idle.notified();
            if self.is_idle(key) {
                return;
            }
            notified.await;
        }
    }

    /// Registers nothing any more.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
    }

    pub(crate) fn stats(&self) -> TableStats {
        let slots = self.lock();
        TableStats {
            regions: slots.slots.iter().filter(|slot| slot.entry.is_some()).count() as u64,
            registrations: slots.registrations,
            pins_served: slots.pins_served,
            pins_held: slots.pins_held,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Table {
    /// Memory that a peer may still read is never given back, rather than too early.
    fn drop(&mut self) {
        let slots = self.slots.get_mut().unwrap_or_else(PoisonError::into_inner);
        for entry in slots.slots.iter_mut().filter_map(|slot| slot.entry.take()) {
            if entry.pins > 0 {
                mem::forget(entry.memory);
            }
        }
    }
}

impl Slots {
    fn slot(&mut self, key: RegionKey) -> Option<&mut Slot> {
        self.slots.get_mut(usize::try_from(key.region).ok()?)
    }

    fn entry(&mut self, key: RegionKey) -> Option<&mut Entry> {
        let slot = self.slot(key)?;
        slot.entry.as_mut().filter(|_| slot.generation == key.generation)
    }

    /// Takes the memory out if nobody may touch it any more.
    fn reclaim(&mut self, key: RegionKey) -> Option<Memory> {
        let entry = self.entry(key)?;
        if !entry.released || entry.pins > 0 {
            return None;
        }
        let index = usize::try_from(key.region).ok()?;
        self.free.push(index);
        self.slots[index].entry.take().map(|entry| entry.memory)
    }
}

/// The pins of one connection.
///
/// They end one by one, or all together with [`Pins::end`] once the reader has let go or died. Dropped without that
/// (its task was aborted, so nobody knows what the reader still does), they are held for ever.
pub(crate) struct Pins {
    table: Arc<Table>,
    held: HashMap<u64, RegionKey>,
    next: u64,
}

impl Pins {
    pub(crate) fn new(table: Arc<Table>) -> Self {
        Self {
            table,
            held: HashMap::new(),
            next: 0,
        }
    }

    pub(crate) fn pin(
        &mut self,
        kind: Kind,
        key: RegionKey,
        capability: &Capability,
    ) -> Result<(u64, Memory), Refusal> {
        let memory = self.table.pin(kind, key, capability)?;
        let pin = self.next;
        self.next += 1;
        self.held.insert(pin, key);
        Ok((pin, memory))
    }

    pub(crate) fn is_held(&self, pin: u64) -> bool {
        self.held.contains_key(&pin)
    }

    pub(crate) fn unpin(&mut self, pin: u64) {
        if let Some(key) = self.held.remove(&pin) {
            self.table.unpin(key);
        }
    }

    pub(crate) fn end(mut self) {
        for key in mem::take(&mut self.held).into_values() {
            self.table.unpin(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Borrowed;

    fn memory() -> (Memory, std::sync::Weak<dyn std::any::Any + Send + Sync>) {
        let bytes: Arc<dyn std::any::Any + Send + Sync> = Arc::new(vec![7_u8; 64]);
        let weak = Arc::downgrade(&bytes);
        let ptr = bytes.downcast_ref::<Vec<u8>>().expect("a Vec").as_ptr();
        let ptr = std::ptr::NonNull::new(ptr.cast_mut()).expect("not null");
        // SAFETY: the Vec is kept by its owner and never changed.
        (unsafe { Borrowed::new(ptr, 64, bytes) }.into(), weak)
    }

    fn key(reference: &RegionRef) -> RegionKey {
        RegionKey {
            region: reference.region,
            generation: reference.generation,
        }
    }

    #[test]
    fn memory_goes_only_after_release_and_the_last_pin() {
        let table = Arc::new(Table::default());
        let (memory, alive) = memory();
        let reference = table.register(Kind::Cma, memory).expect("open");
        let (mut one, mut two) = (Pins::new(table.clone()), Pins::new(table.clone()));
        let (first, _) = one
            .pin(Kind::Cma, key(&reference), &reference.capability)
            .expect("pinned");
        two.pin(Kind::Cma, key(&reference), &reference.capability)
            .expect("pinned");
        table.release(key(&reference));
        assert_eq!(
            one.pin(Kind::Cma, key(&reference), &reference.capability).err(),
            Some(Refusal::Released)
        );
        one.unpin(first);
        one.unpin(first);
        assert!(alive.upgrade().is_some(), "freed under a pin");
        two.end();
        assert!(alive.upgrade().is_none(), "not freed");
        assert_eq!(table.stats().pins_held, 0);
        assert_eq!(table.stats().regions, 0);
    }

    #[test]
    fn a_number_used_again_is_another_generation() {
        let table = Arc::new(Table::default());
        let old = table.register(Kind::Cma, memory().0).expect("open");
        table.release(key(&old));
        let mut pins = Pins::new(table.clone());
        let mut refusal = |kind, key, capability: &Capability| pins.pin(kind, key, capability).err();
        assert_eq!(refusal(Kind::Cma, key(&old), &old.capability), Some(Refusal::Released));
        let new = table.register(Kind::Cma, memory().0).expect("open");
        assert_eq!(new.region, old.region);
        let current = new.generation;
        assert_eq!(
            refusal(Kind::Cma, key(&old), &old.capability),
            Some(Refusal::Generation { current })
        );
        assert_eq!(
            refusal(Kind::Cma, key(&new), &old.capability),
            Some(Refusal::Capability)
        );
        let registered = Some(Refusal::Registered { kind: Kind::Cma });
        assert_eq!(refusal(Kind::Shm, key(&new), &new.capability), registered);
        let later = RegionKey {
            generation: current + 1,
            ..key(&new)
        };
        assert_eq!(refusal(Kind::Cma, later, &new.capability), Some(Refusal::Unknown));
        let elsewhere = RegionKey {
            region: 99,
            ..key(&new)
        };
        assert_eq!(refusal(Kind::Cma, elsewhere, &new.capability), Some(Refusal::Unknown));
    }

    #[test]
    fn pins_whose_end_nobody_saw_are_held_for_ever() {
        let table = Arc::new(Table::default());
        let (memory, alive) = memory();
        let reference = table.register(Kind::Cma, memory).expect("open");
        let mut pins = Pins::new(table.clone());
        pins.pin(Kind::Cma, key(&reference), &reference.capability)
            .expect("pinned");
        drop(pins);
        table.release(key(&reference));
        drop(table);
        assert!(alive.upgrade().is_some(), "memory given back while a reader may use it");
    }
}
