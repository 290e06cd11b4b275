//! How far the copies of a consumer are.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use stagewire_core::{Handle, Timestamp};
use tokio::sync::watch;
use tokio::time::Instant;

use super::OnChunk;
use super::access::{Access, AccessError};
use super::advance::now;
use crate::complete::Complete;
use crate::live::Shown;

/// How long the pull of several chunks at a time may take by the pace of the one before: what a consumer waits longer for
/// the first of them at most. Below, each pull on its own costs more than it moves.
const AHEAD: Duration = Duration::from_millis(5);

/// What the memory of one host moves in [`AHEAD`] at least, at 4 GB/s: one thread copies 5 to 9 GB/s of it. Fewer bytes at
/// first would be copied by one thread only, and through the caches: measured, 8 chunks of 1.8 MB took 1.3 times as long as
/// the whole.
pub(super) const AHEAD_OF_HOST: u64 = 20_000_000;

/// What is known of one chunk.
#[derive(Debug, Clone, Copy)]
pub(super) enum Slot {
    Missing,
    /// It is being copied.
    Flying,
    Here(Landed),
}

impl Slot {
    const fn is_missing(&self) -> bool {
        matches!(self, Self::Missing)
    }
}

/// When a chunk came, and from where.
#[derive(Debug, Clone, Copy)]
pub(super) struct Landed {
    pub(super) begin: Timestamp,
    pub(super) end: Timestamp,
    /// From a store, and not from its producer.
    pub(super) stored: bool,
}

/// How many chunks are copied at a time.
#[derive(Debug, Clone, Copy)]
pub(super) enum Batch {
    /// One, so that each is told of as it comes.
    One,
    /// As many as the pace of the last pull moves in [`AHEAD`]; before there is one, at most so many bytes.
    Paced { unmeasured: u64 },
    /// As many as are there: nobody looks at one before the last has come.
    All,
}

#[derive(Debug)]
struct Table {
    slots: Vec<Slot>,
    /// How many of them are missing.
    missing: usize,
    /// Those of them that are complete, as far as that is known from `complete`.
    free: BTreeSet<u32>,
    complete: Arc<Complete>,
    /// How much of it is in `free`.
    known: usize,
    /// What [`AHEAD`] is enough for, once it is known.
    ahead_bytes: Option<u64>,
}

impl Table {
    fn new(slots: Vec<Slot>, ahead_bytes: Option<u64>) -> Self {
        Self {
            missing: slots.iter().filter(|slot| slot.is_missing()).count(),
            slots,
            free: BTreeSet::new(),
            complete: Arc::default(),
            known: 0,
            ahead_bytes,
        }
    }

    /// Learns what is complete by now, of which each chunk is looked at once.
    fn learn(&mut self, complete: &Arc<Complete>) {
        if !Arc::ptr_eq(complete, &self.complete) {
            // Another holder is asked, or the same once more: only what it says counts.
            self.complete = Arc::clone(complete);
            self.known = 0;
            self.free.clear();
        }
        let new = complete.since(&mut self.known).into_iter();
        let slots = &self.slots;
        self.free
            .extend(new.filter(|index| slots[*index as usize].is_missing()));
    }

    fn set(&mut self, chunks: Range<u32>, slot: Slot) {
        for index in chunks {
            let before = std::mem::replace(&mut self.slots[index as usize], slot);
            self.missing += usize::from(slot.is_missing());
            self.missing -= usize::from(before.is_missing());
            if !slot.is_missing() {
                self.free.remove(&index);
            } else if self.complete.has(index) {
                self.free.insert(index);
            }
        }
    }
}

/// The chunks of one payload, each of which is copied by one at a time.
#[derive(Debug)]
pub(super) struct Progress {
    handle: Arc<Handle>,
    told: Option<Arc<Told>>,
    table: watch::Sender<Table>,
}

impl Progress {
    pub(super) fn new(handle: &Arc<Handle>, on_chunk: Option<OnChunk>) -> Arc<Self> {
        let chunks = handle.manifest.chunks() as usize;
        let told = on_chunk.map(|on_chunk| {
            let told = (0..chunks).map(|_| OnceLock::new()).collect();
            let untold = AtomicUsize::new(chunks);
            Arc::new(Told { on_chunk, told, untold })
        });
        Arc::new(Self {
            handle: Arc::clone(handle),
            told,
            table: watch::Sender::new(Table::new(vec![Slot::Missing; chunks], None)),
        })
    }

    /// The same, for copies from another place: none is under way.
    pub(super) fn anew(&self) -> Arc<Self> {
        let table = self.table.borrow();
        let grounded = |slot: &Slot| match slot {
            Slot::Here(_) => *slot,
            Slot::Missing | Slot::Flying => Slot::Missing,
        };
        let slots = table.slots.iter().map(grounded).collect();
        let ahead_bytes = table.ahead_bytes;
        drop(table);
        Arc::new(Self {
            handle: Arc::clone(&self.handle),
            told: self.told.clone(),
            table: watch::Sender::new(Table::new(slots, ahead_bytes)),
        })
    }

    pub(super) fn slot(&self, index: u32) -> Slot {
        self.table.borrow().slots[index as usize]
    }

    /// Who is to be told of each chunk as it comes.
    pub(super) const fn told(&self) -> Option<&Arc<Told>> {
        self.told.as_ref()
    }

    /// Whether a chunk is neither here nor on its way.
    pub(super) fn lacks_any(&self) -> bool {
        self.table.borrow().missing > 0
    }

    /// Waits until a chunk is not being copied.
    pub(super) async fn landed(&self, index: u32) {
        let landed = |table: &Table| !matches!(table.slots[index as usize], Slot::Flying);
        // The sender is in `self`.
        let _ = self.table.subscribe().wait_for(landed).await;
    }

    /// Takes chunks to copy, the first that are complete and that nobody copies, from `next` on.
    pub(super) fn take(self: &Arc<Self>, next: u32, shown: &Shown, batch: Batch) -> Option<Flying> {
        let mut taken = None;
        // Several at a time would all be told of when the last has come.
        let batch = if self.told.is_some() { Batch::One } else { batch };
        self.table.send_if_modified(|table| {
            table.learn(&shown.complete);
            let mut free = table.free.range(next..);
            let Some(&first) = free.next() else {
                return false;
            };
            let touching = (first + 1..)
                .zip(free)
                .map_while(|(index, free)| (index == *free).then_some(index));
            let all = std::iter::once(first).chain(touching);
            let end = match batch {
                Batch::One => first + 1,
                Batch::All => all.last().map_or(first, |last| last + 1),
                Batch::Paced { unmeasured } => {
                    let mut left = table.ahead_bytes.unwrap_or(unmeasured);
                    let fits = |index: &u32| {
                        let bytes = self.handle.manifest.chunk_nbytes(*index).0;
                        let fits = *index == first || bytes <= left;
                        left = left.saturating_sub(bytes);
                        fits
                    };
                    all.take_while(fits).last().map_or(first, |last| last + 1)
                }
            };
            table.set(first..end, Slot::Flying);
            taken = Some(Flying {
                progress: Arc::clone(self),
                chunks: first..end,
                stored: shown.stored,
                landed: false,
            });
            // Nobody waits for what begins.
            false
        });
        taken
    }
}

/// Chunks that are being copied by who has this. Dropped before they are here, they are missing again.
pub(super) struct Flying {
    progress: Arc<Progress>,
    chunks: Range<u32>,
    stored: bool,
    landed: bool,
}

impl Flying {
    pub(super) async fn pull(mut self, access: Arc<Access>) -> Result<(), AccessError> {
        let (begin, started) = (now(), Instant::now());
        let handle = Arc::clone(&self.progress.handle);
        access.pull(&handle, self.chunks.clone()).await?;
        if let Some(told) = &self.progress.told {
            self.chunks.clone().for_each(|index| told.tell(index, &access, &handle));
        }
        // Once the last chunk is here, whoever asks for it may want the memory for itself.
        drop(access);
        self.land(begin, started.elapsed());
        Ok(())
    }

    fn land(&mut self, begin: Timestamp, took: Duration) {
        self.landed = true;
        let manifest = &self.progress.handle.manifest;
        let bytes: u64 = self.chunks.clone().map(|index| manifest.chunk_nbytes(index).0).sum();
        let ahead = u128::from(bytes) * AHEAD.as_nanos() / took.as_nanos().max(1);
        let landed = Slot::Here(Landed {
            begin,
            end: now(),
            stored: self.stored,
        });
        self.progress.table.send_modify(|table| {
            table.set(self.chunks.clone(), landed);
            table.ahead_bytes = Some(u64::try_from(ahead).unwrap_or(u64::MAX));
        });
    }
}

impl Drop for Flying {
    fn drop(&mut self) {
        if !self.landed {
            let chunks = self.chunks.clone();
            self.progress
                .table
                .send_modify(|table| table.set(chunks, Slot::Missing));
        }
    }
}

/// Who is told of each chunk, once.
#[derive(Debug)]
pub(super) struct Told {
    on_chunk: OnChunk,
    told: Box<[OnceLock<()>]>,
    untold: AtomicUsize,
}

impl Told {
    /// When this returns, it was told, by whomever.
    pub(super) fn tell(&self, index: u32, access: &Access, handle: &Handle) {
        self.told[index as usize].get_or_init(|| {
            self.on_chunk.tell(index, &access.views(handle, Some(index)));
            self.untold.fetch_sub(1, Ordering::Relaxed);
        });
    }

    /// Whether there is nothing more to tell.
    pub(super) fn all(&self) -> bool {
        self.untold.load(Ordering::Relaxed) == 0
    }
}
