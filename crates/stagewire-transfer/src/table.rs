//! The regions of this host: who may pin what, and what is pinned.

#[cfg(all(test, stagewire_loom))]
mod models;
mod pins;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::mem;
use std::sync::PoisonError;

use stagewire_core::{Capability, Device, RegionRef};

pub(crate) use pins::{Hold, Pins};

use crate::sync::{Mutex, MutexGuard, Notify};
use crate::wire::{Kind, Refusal};
use crate::{Memory, RegisterProblem};

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
    /// Regions that peers may write.
    writable: u64,
    registrations: u64,
    pins_served: u64,
    pins_held: u64,
}

struct Slot {
    generation: u64,
    entry: Option<Entry>,
}

struct Entry {
    kept: Kept,
    kind: Kind,
    device: Device,
    capability: Capability,
    pins: u64,
    released: bool,
}

/// What goes when a region goes, in this order.
pub(crate) struct Kept {
    /// Undoes what a transport did to the memory.
    _guard: Option<Box<dyn Any + Send>>,
    memory: Memory,
}

/// What a region is made of.
pub(crate) struct Registration {
    pub(crate) kind: Kind,
    pub(crate) memory: Memory,
    pub(crate) device: Device,
    /// Dropped, outside any lock, before the memory is: once the region was released and the last pin ended.
    pub(crate) guard: Option<Box<dyn Any + Send>>,
}

/// Why nothing was registered, and the memory back.
type Refused = (RegisterProblem, Memory);

/// Names one registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
    /// # Errors
    /// Gives the memory back when the table was closed, or another region has some of its bytes and one of the two may be
    /// written by peers.
    pub(crate) fn register(&self, registration: Registration) -> Result<RegionRef, Refused> {
        let Registration {
            kind,
            memory,
            device,
            guard,
        } = registration;
        let mut slots = self.lock();
        let refused = if slots.closed {
            Some(RegisterProblem::ShutDown)
        } else {
            let region = slots.overlapping(&memory, device);
            region.map(|region| RegisterProblem::Overlap { region })
        };
        if let Some(problem) = refused {
            drop(slots);
            drop(guard);
            return Err((problem, memory));
        }
        let index = slots.free.pop().unwrap_or(slots.slots.len());
        if index == slots.slots.len() {
            slots.slots.push(Slot {
                generation: 0,
                entry: None,
            });
        }
        slots.registrations += 1;
        slots.writable += u64::from(memory.is_writable());
        let slot = &mut slots.slots[index];
        slot.generation += 1;
        let (capability, len) = (Capability::from_random(rand::random()), memory.len());
        slot.entry = Some(Entry {
            kept: Kept { _guard: guard, memory },
            kind,
            device,
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
        if !kind.pins(entry.kind.name()) {
            return Err(Refusal::Registered { kind: entry.kind });
        }
        if entry.kind != kind && entry.device != Device::Cpu {
            let device = entry.device;
            return Err(Refusal::Device { device });
        }
        entry.pins += 1;
        let memory = entry.kept.memory.clone();
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
        let kept = slots.reclaim(key);
        drop(slots);
        if idle {
            self.idle.notify_waiters();
        }
        // The owner of borrowed memory may do anything when dropped: not under the lock.
        drop(kept);
    }

    pub(crate) fn release(&self, key: RegionKey) {
        let mut slots = self.lock();
        if let Some(entry) = slots.entry(key) {
            entry.released = true;
        }
        let kept = slots.reclaim(key);
        drop(slots);
        drop(kept);
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
                mem::forget(entry.kept);
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

    /// A region that shares bytes with `memory`, where one of the two may be written by peers. Regions that peers only read
    /// may share bytes: a payload may be registered twice.
    fn overlapping(&self, memory: &Memory, device: Device) -> Option<u64> {
        let range = |memory: &Memory| {
            let start = memory.as_ptr().addr().get() as u64;
            start..start + memory.len()
        };
        if !memory.is_writable() && self.writable == 0 {
            return None;
        }
        let wanted = range(memory);
        let found = self.slots.iter().position(|slot| {
            slot.entry.as_ref().is_some_and(|entry| {
                let other = range(&entry.kept.memory);
                (memory.is_writable() || entry.kept.memory.is_writable())
                    && entry.device == device
                    && other.start < wanted.end
                    && wanted.start < other.end
            })
        });
        found.map(|index| index as u64)
    }

    /// Takes the memory out if nobody may touch it any more.
    fn reclaim(&mut self, key: RegionKey) -> Option<Kept> {
        let entry = self.entry(key)?;
        if !entry.released || entry.pins > 0 {
            return None;
        }
        let index = usize::try_from(key.region).ok()?;
        self.free.push(index);
        let kept = self.slots[index].entry.take()?.kept;
        self.writable -= u64::from(kept.memory.is_writable());
        Some(kept)
    }
}
