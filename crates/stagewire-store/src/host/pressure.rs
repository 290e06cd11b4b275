//! Makes room for those who wait for it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use stagewire_core::{ByteCount, PayloadId};
use stagewire_transfer::{ArenaError, Extent, ExtentMut, Location};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::Inner;
use super::index::Index;
use super::lent::Lent;
use super::object::{About, HostObject};
use super::order::Class;
use super::rooms::{Room, in_pages};
use crate::journal::Record;
use crate::spill::{Charge, Spill, SpillFile};
use crate::{Reservation, SpillFault, StoreError};

/// Pause before those who wait look again whether readers have let go of something.
const PAUSE: Duration = Duration::from_millis(5);
/// How long gathering memory for one object may take whatever its deadline is.
const GATHER_WITHIN: Duration = Duration::from_millis(250);
/// How often memory is gathered for one object without a pause: each time empties a segment, or evicts something.
const TRIES: u32 = 64;

impl Inner {
    /// Room, reserved: what the caller reserved before, and more where that is too little; `None` when it is too late, after
    /// which the reservation is as it was.
    pub(super) async fn room(
        self: &Arc<Self>,
        nbytes: ByteCount,
        reservation: Option<&Reservation>,
        late: Pin<&mut Sleep>,
    ) -> Option<Room> {
        let reserved = reservation.and_then(Reservation::take::<Room>);
        let reserved = reserved.filter(|room| room.is_of(&self.rooms));
        let kept = reserved.as_ref().map_or(0, |room| room.nbytes().0);
        let reserved = reserved.map(|room| Lent::new(room, reservation.cloned()));
        let missing = ByteCount(nbytes.0.saturating_sub(kept));
        let mut room = match self.rooms.try_take(missing) {
            Some(room) => room,
            None => self.wait_for_room(missing, late).await?,
        };
        if let Some(reserved) = reserved {
            room.join(reserved.keep());
        }
        Some(room)
    }

    async fn wait_for_room(self: &Arc<Self>, nbytes: ByteCount, mut late: Pin<&mut Sleep>) -> Option<Room> {
        let mut queued = self.rooms.queue(nbytes);
        self.relieve();
        loop {
            tokio::select! {
                biased;
                room = queued.room() => return Some(room),
                () = &mut late => return None,
                () = sleep(PAUSE) => {}
            }
            if queued.is_first() {
                self.relieve();
            }
        }
    }

    /// Memory for parts of these sizes, for which there is room.
    pub(super) async fn allocate(
        self: &Arc<Self>,
        payload: PayloadId,
        parts: &[ByteCount],
        mut late: Pin<&mut Sleep>,
    ) -> Result<Vec<Option<ExtentMut>>, StoreError> {
        let arena = self.host.arena();
        let allocate = |part: &ByteCount| match part.0 {
            0 => Ok(None),
            len => arena.allocate(len).map(Some),
        };
        let least = Instant::now() + GATHER_WITHIN;
        let mut tries = 0;
        loop {
            let source = match parts.iter().map(allocate).collect() {
                Ok(extents) => return Ok(extents),
                Err(error) => error,
            };
            let wanted = in_pages(parts);
            let full = matches!(source, ArenaError::Exhausted { .. });
            tries += 1;
            if full && tries < TRIES {
                let gathered = tokio::select! {
                    biased;
                    gathered = self.gather(parts) => gathered,
                    () = too_late(late.as_mut(), least) => false,
                };
                if gathered {
                    continue;
                }
            }
            // Or they belong to a copy into an aborted draft that still runs, or to what moves to a file.
            if !full || tokio::time::timeout(PAUSE, late.as_mut()).await.is_ok() {
                return Err(StoreError::Arena {
                    payload,
                    wanted,
                    source,
                });
            }
            tries = 0;
        }
    }

    /// Makes larger pieces of what is free, where those that are there are too small. Tells whether another try is worth it.
    async fn gather(self: &Arc<Self>, parts: &[ByteCount]) -> bool {
        let turn = Arc::clone(&self.gathering).lock_owned().await;
        let lens: Vec<u64> = parts.iter().map(|part| part.0).collect();
        if self.host.arena().would_fit(&lens, []) {
            // Somebody else did.
            return true;
        }
        let store = Arc::clone(self);
        let gathered = tokio::task::spawn_blocking(move || {
            // Whoever asked may not wait for the end.
            let _turn = turn;
            store.evacuate_one() || store.vacate(&lens)
        });
        gathered
            .await
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }

    /// Has as many objects leave, in their order, as it takes for parts of these sizes to find places, and none where all
    /// would not do. Tells whether some are gone. Blocks; what it finds out, it does with the index unlocked: should another
    /// object be in its place by then, it is tried again.
    fn vacate(self: &Arc<Self>, lens: &[u64]) -> bool {
        let index = self.lock();
        let mut places: Vec<Location> = index
            .moving()
            .flat_map(|object| object.extents().map(Extent::location))
            .collect();
        // How many of the places are free once an object has left, and what of each class has left by then.
        let (mut steps, mut left) = (vec![(places.len(), [0_u64; 3])], [0; 3]);
        let spare = self.spill.as_ref().map_or(0, Spill::left);
        for class in [Class::Cached, Class::Held, Class::SoftPinned] {
            for object in index.leavers(class) {
                left[class as usize] += nbytes(object);
                if class == Class::Held && left[Class::Held as usize] > spare {
                    left[Class::Held as usize] -= nbytes(object);
                    break;
                }
                places.extend(object.extents().map(Extent::location));
                steps.push((places.len(), left));
            }
        }
        drop(index);
        let arena = self.host.arena();
        let needed = steps.partition_point(|(count, _)| !arena.would_fit(lens, &places[..*count]));
        let Some((_, wanted)) = steps.get(needed).filter(|_| needed > 0) else {
            return false;
        };
        self.part(*wanted)
    }

    /// Frees what those who wait need, as far as that is enough for one of them.
    fn relieve(self: &Arc<Self>) {
        // What is over goes first, for nothing.
        self.free_condemned();
        let _ = self.expire();
        let supply = {
            let index = self.lock();
            let movable = self.spill.as_ref().map_or(0, |spill| index.movable().min(spill.left()));
            index.evictable() + index.leaving() + movable
        };
        let mut short = self.rooms.shortage(supply);
        if short > 0 {
            // What somebody reads does not help: nothing goes for those for whom that leaves too little.
            let spare = self.spill.as_ref().map_or(0, Spill::left);
            let supply = self.lock().supply(short, spare);
            if supply < short {
                short = self.rooms.shortage(supply);
            }
        }
        self.free(short);
    }

    /// Has so many bytes leave the memory, those included that are leaving it.
    fn free(self: &Arc<Self>, wanted: u64) {
        let mut index = self.lock();
        let mut wanted = wanted.saturating_sub(index.leaving());
        let mut gone = index.evict(Class::Cached, wanted);
        wanted = wanted.saturating_sub(gone.iter().map(nbytes).sum());
        if let Some(spill) = &self.spill {
            let moving = index.spill(spill, wanted);
            wanted = wanted.saturating_sub(moving.iter().map(|(object, _)| nbytes(object)).sum());
            if spill.is_busy() {
                // The rest can be written when something else has been.
                wanted = 0;
            }
            for (object, charge) in moving {
                self.write(object, charge);
            }
        }
        gone.extend(index.evict(Class::SoftPinned, wanted));
        self.evicted(index, gone);
    }

    /// Has so many bytes of each class leave. Tells whether some are gone, and not only leaving.
    fn part(self: &Arc<Self>, wanted: [u64; 3]) -> bool {
        let mut index = self.lock();
        let [cached, held, soft] = [Class::Cached, Class::Held, Class::SoftPinned].map(|class| wanted[class as usize]);
        let mut gone = index.evict(Class::Cached, cached);
        gone.extend(index.evict(Class::SoftPinned, soft));
        if let Some(spill) = &self.spill {
            for (object, charge) in index.spill(spill, held) {
                self.write(object, charge);
            }
        }
        let some = !gone.is_empty();
        self.evicted(index, gone);
        some
    }

    /// Parts with what was evicted.
    fn evicted(&self, index: MutexGuard<'_, Index>, gone: Vec<Arc<HostObject>>) {
        let written = gone.iter().map(|object| self.journal_gone(object.about().payload));
        let written: Vec<_> = written.collect();
        drop(index);
        for (object, written) in gone.into_iter().zip(written) {
            self.counts.evicted.add(object.about().nbytes());
            self.let_go(object, written);
        }
    }

    /// Has the index on disk name a file in place of memory, safe from a loss of power, before the memory is free. Tells
    /// whether it does. Blocks.
    fn enter(&self, about: &Arc<About>, file: &SpillFile) -> bool {
        let Some(durable) = &self.durable else { return true };
        let entered = {
            // Under the lock: an object that was taken away meanwhile does not come back.
            let mut index = self.lock();
            match index.writing(about) {
                None => return true,
                // Whoever got it while it was written reads it in memory.
                Some(object) if object.is_read_beside(0) => return false,
                Some(_) => durable.journal.append(Record::Moved(about.payload, file.place())),
            }
        };
        let written = entered.is_ok();
        let Err(error) = entered.and_then(|_| durable.journal.sync()) else {
            return true;
        };
        tracing::error!(payload = %about.payload, %error, "a payload could not move to a file");
        if let Some(spill) = &self.spill {
            spill.pause(SpillFault::of_index(&error));
        }
        let mut index = self.lock();
        match index.writing(about) {
            None => true,
            Some(_) if !written => false,
            // The file goes only once the index names the memory again. Where it cannot, the object is in the file: so
            // a killed process still loses nothing.
            Some(object) => durable
                .journal
                .append(Record::Moved(about.payload, object.place()))
                .is_err(),
        }
    }

    /// Has the index on disk name the memory again, whatever a defect has left there. The panic was reported where it
    /// happened; errors about space say that there was one.
    fn recall(&self, about: &Arc<About>, file: &SpillFile) {
        let named = catch_unwind(AssertUnwindSafe(|| {
            let mut index = self.lock();
            let (Some(durable), Some(object)) = (&self.durable, index.writing(about)) else {
                return true;
            };
            let moved = Record::Moved(about.payload, object.place());
            durable.journal.append(moved).is_ok()
        }));
        if !named.unwrap_or(false) {
            // It may name the file for all that is known.
            file.abandon();
        }
        if let Some(spill) = &self.spill {
            spill.defect(file);
        }
    }

    /// Moves an object to a file, on another thread.
    fn write(self: &Arc<Self>, object: Arc<HostObject>, charge: Charge) {
        let Some(spill) = &self.spill else { return };
        let (about, nbytes) = (Arc::clone(object.about()), object.room().nbytes());
        let store = Arc::downgrade(self);
        spill.write(object, charge, move |file| {
            let Some(store) = store.upgrade() else { return };
            let file = file.ok().filter(|file| {
                let entered = catch_unwind(AssertUnwindSafe(|| store.enter(&about, file)));
                entered.unwrap_or_else(|_| {
                    store.recall(&about, file);
                    false
                })
            });
            let object = store.lock().end_writing(&about, nbytes, file);
            if let Some(object) = object {
                store.counts.spilled.add(about.nbytes());
                store.drain(object);
            }
        });
    }
}

/// Resolves at a deadline, but not before another time: who does not want to wait at all has memory gathered as well.
async fn too_late(late: Pin<&mut Sleep>, least: Instant) {
    late.await;
    sleep_until(least).await;
}

fn nbytes(object: &Arc<HostObject>) -> u64 {
    object.room().nbytes().0
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    /// However often memory is gathered whose pieces others take.
    #[tokio::test(start_paused = true)]
    async fn all_tries_have_one_deadline() {
        for wait in [Duration::ZERO, GATHER_WITHIN * 3] {
            let begin = Instant::now();
            let (mut late, least) = (pin!(sleep(wait)), begin + GATHER_WITHIN);
            let end = begin + wait.max(GATHER_WITHIN);
            for _ in 0..TRIES {
                tokio::select! {
                    () = sleep(GATHER_WITHIN / 2) => {}
                    () = too_late(late.as_mut(), least) => break,
                }
            }
            let over = Instant::now();
            assert!(
                (end..end + GATHER_WITHIN / 2).contains(&over),
                "after {:?}",
                over - begin
            );
        }
    }
}
