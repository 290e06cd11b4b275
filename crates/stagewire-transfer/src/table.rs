//! The regions of this host: who may pin what, and what is pinned.

#[cfg(all(test, stagewire_loom))]
mod models;
mod pins;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::mem;
use std::sync::PoisonError;
use std::time::Instant;

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
    /// Nothing while the memory goes: until then the region is not idle, and its number is not used again.
    kept: Option<Kept>,
    kind: Kind,
    device: Device,
    capability: Capability,
    pins: u64,
    /// Whose they are, with their number.
    readers: Vec<(Reader, u64)>,
    /// Its bytes are still being written.
    open: bool,
    released: bool,
}

/// Who keeps a region in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reader {
    /// Its process; `None` for one of another host.
    pub pid: Option<u32>,
    /// Since when, without a break.
    pub since: Instant,
}

impl Entry {
    fn pin(&mut self, pid: Option<u32>) {
        self.pins += 1;
        match self.readers.iter_mut().find(|(reader, _)| reader.pid == pid) {
            Some((_, pins)) => *pins += 1,
            None => {
                let since = Instant::now();
                self.readers.push((Reader { pid, since }, 1));
            }
        }
    }

    fn unpin(&mut self, pid: Option<u32>) {
        self.pins -= 1;
        if let Some(index) = self.readers.iter().position(|(reader, _)| reader.pid == pid) {
            self.readers[index].1 -= 1;
            if self.readers[index].1 == 0 {
                self.readers.swap_remove(index);
            }
        }
    }
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
        slots.registrations += 1;
        Ok(slots.enter(Registration {
            kind,
            memory,
            device,
            guard,
        }))
    }

    /// Another entry for the memory of a region, which `guard` keeps; `None` where that was released, or the table was
    /// closed. Both are read only: what peers may write is in one region alone.
    pub(crate) fn grant(&self, key: RegionKey, memory: Memory, guard: Box<dyn Any + Send>) -> Option<RegionRef> {
        let mut slots = self.lock();
        if slots.closed {
            return None;
        }
        let entry = slots.entry(key).filter(|entry| !entry.released)?;
        let (kind, device) = (entry.kind, entry.device);
        // The others keep books of their own.
        if !matches!(kind, Kind::Shm | Kind::Cma | Kind::Tcp) {
            return None;
        }
        let whole = &entry.kept.as_ref()?.memory;
        (!whole.is_writable() && whole.contains(&memory)).then(|| {
            slots.enter(Registration {
                kind,
                memory,
                device,
                guard: Some(guard),
            })
        })
    }

    /// Adds a pin for whoever presents the right capability, and tells where the memory is.
    fn pin(&self, kind: Kind, key: RegionKey, capability: &Capability, pid: Option<u32>) -> Result<Memory, Refusal> {
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
        let kept = entry.kept.as_ref().filter(|_| !entry.released);
        let memory = kept.ok_or(Refusal::Released)?.memory.clone();
        if !kind.pins(entry.kind.name()) {
            return Err(Refusal::Registered { kind: entry.kind });
        }
        if entry.kind != kind && entry.device != Device::Cpu {
            let device = entry.device;
            return Err(Refusal::Device { device });
        }
        entry.pin(pid);
        slots.pins_served += 1;
        slots.pins_held += 1;
        Ok(memory)
    }

    fn unpin(&self, key: RegionKey, pid: Option<u32>) {
        let mut slots = self.lock();
        let Some(entry) = slots.entry(key) else {
            return;
        };
        entry.unpin(pid);
        let unpinned = entry.pins == 0;
        slots.pins_held -= 1;
        if !self.reclaim(slots, key) && unpinned {
            self.idle.notify_waiters();
        }
    }

    pub(crate) fn release(&self, key: RegionKey) {
        let mut slots = self.lock();
        if let Some(entry) = slots.entry(key) {
            entry.released = true;
        }
        self.reclaim(slots, key);
    }

    /// Gives the memory back if nobody may touch it any more, and only then says that the region is idle.
    fn reclaim(&self, mut slots: MutexGuard<'_, Slots>, key: RegionKey) -> bool {
        let Some(kept) = slots.take(key) else {
            return false;
        };
        // The owner of borrowed memory may do anything when dropped: not under the lock.
        drop(slots);
        drop(kept);
        self.lock().vacate(key);
        self.idle.notify_waiters();
        true
    }

    /// Who holds pins.
    pub(crate) fn readers(&self, key: RegionKey) -> Vec<Reader> {
        let mut slots = self.lock();
        let readers = slots
            .entry(key)
            .map(|entry| entry.readers.iter().map(|(reader, _)| *reader));
        readers.into_iter().flatten().collect()
    }

    /// Whether the owner may still write its bytes.
    pub(crate) fn is_open(&self, key: RegionKey) -> bool {
        self.lock().entry(key).is_some_and(|entry| entry.open)
    }

    pub(crate) fn set_open(&self, key: RegionKey, open: bool) {
        if let Some(entry) = self.lock().entry(key) {
            entry.open = open;
        }
    }

    /// Whether it takes new pins.
    pub(crate) fn is_registered(&self, key: RegionKey) -> bool {
        self.lock().entry(key).is_some_and(|entry| !entry.released)
    }

    /// Whether nobody holds a pin; where the region was released besides, its memory is gone.
    pub(crate) fn is_idle(&self, key: RegionKey) -> bool {
        let mut slots = self.lock();
        slots
            .entry(key)
            .is_none_or(|entry| entry.pins == 0 && entry.kept.is_some())
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
    /// Gives memory a number, a generation and a capability.
    fn enter(&mut self, registration: Registration) -> RegionRef {
        let Registration {
            kind,
            memory,
            device,
            guard,
        } = registration;
        let index = self.free.pop().unwrap_or(self.slots.len());
        if index == self.slots.len() {
            self.slots.push(Slot {
                generation: 0,
                entry: None,
            });
        }
        self.writable += u64::from(memory.is_writable());
        let slot = &mut self.slots[index];
        slot.generation += 1;
        let (capability, len) = (Capability::from_random(rand::random()), memory.len());
        slot.entry = Some(Entry {
            kept: Some(Kept { _guard: guard, memory }),
            kind,
            device,
            capability,
            pins: 0,
            readers: Vec::new(),
            open: false,
            released: false,
        });
        RegionRef {
            transport: kind.name().to_owned(),
            region: index as u64,
            generation: slot.generation,
            capability,
            len,
        }
    }

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
                entry.kept.as_ref().is_some_and(|Kept { memory: other, .. }| {
                    let found = range(other);
                    (memory.is_writable() || other.is_writable())
                        && entry.device == device
                        && found.start < wanted.end
                        && wanted.start < found.end
                })
            })
        });
        found.map(|index| index as u64)
    }

    /// Takes the memory out, once, if nobody may touch it any more. Its number is kept until [`Slots::vacate`].
    fn take(&mut self, key: RegionKey) -> Option<Kept> {
        let entry = self.entry(key)?;
        if !entry.released || entry.pins > 0 {
            return None;
        }
        let kept = entry.kept.take()?;
        self.writable -= u64::from(kept.memory.is_writable());
        Some(kept)
    }

    /// The memory is gone: the number may be used again.
    fn vacate(&mut self, key: RegionKey) {
        if let Ok(index) = usize::try_from(key.region) {
            self.slots[index].entry = None;
            self.free.push(index);
        }
    }
}
