//! Scratch in which a sender gathers rows for readers whose transport moves runs of bytes only.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use stagewire_core::{Classify, Record};
use stagewire_transfer::{Arena, Region, RegisterOptions, Target, Transport};

use super::super::RoomId;
use super::super::outgoing::{Attempt, Outgoing, restarted};
use super::super::protocol::{Answer, ReceiverId};
use super::super::sender::Inner;
use super::super::sender::known::Reader;
use super::super::sender::room::Cell;

/// Bytes of scratch of one sender.
const MOST: u64 = 64 << 20;

/// How long scratch that nobody uses is kept for the receiver that used it.
const KEPT: Duration = Duration::from_secs(10);

/// Scratch, of which what is free stays registered for a while: what it takes to register memory, and at a reader to learn
/// how it is reached, is more than a copy takes.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    books: Mutex<Books>,
    nbytes: Arc<AtomicU64>,
    next: AtomicU64,
}

#[derive(Debug, Default)]
struct Books {
    /// What is gathered and not freed yet.
    gathered: BTreeMap<(Attempt, u64), Piece>,
    /// What is free, the longest free first.
    idle: VecDeque<Idle>,
}

/// Memory of the arena that is registered.
#[derive(Debug)]
struct Piece {
    /// Filled anew for each reader; before the region, so that it is not written any more when that goes.
    target: Target,
    region: Region,
    transport: &'static str,
    _share: Share,
}

/// Filled again for the same receiver only: another one might still read what it was told of once.
#[derive(Debug)]
struct Idle {
    receiver: ReceiverId,
    since: Instant,
    piece: Piece,
}

/// A part of the scratch that is taken.
#[derive(Debug)]
struct Share {
    all: Arc<AtomicU64>,
    nbytes: u64,
}

impl Share {
    fn take(all: &Arc<AtomicU64>, nbytes: u64) -> Option<Self> {
        let taken = |held: u64| held.checked_add(nbytes).filter(|sum| *sum <= MOST);
        all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).ok()?;
        let all = Arc::clone(all);
        Some(Self { all, nbytes })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.all.fetch_sub(self.nbytes, Ordering::Relaxed);
    }
}

impl Scratch {
    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn free(&self, attempt: Attempt, id: u64) {
        self.free_all(|key| *key == (attempt, id));
    }

    /// An attempt has ended.
    pub(super) fn free_of(&self, attempt: Attempt) {
        self.free_all(|key| key.0 == attempt);
    }

    fn free_all(&self, which: impl Fn(&(Attempt, u64)) -> bool) {
        let mut books = self.lock();
        let Books { gathered, idle } = &mut *books;
        let freed = gathered.extract_if(.., |key, _| which(key));
        idle.extend(freed.map(|((attempt, _), piece)| Idle {
            receiver: attempt.0,
            since: Instant::now(),
            piece,
        }));
    }

    /// A receiver is gone.
    pub(super) fn forget(&self, receiver: ReceiverId) {
        let mut books = self.lock();
        let gathered: Vec<_> = books.gathered.extract_if(.., |key, _| key.0.0 == receiver).collect();
        let idle = books.take_idle(|idle| idle.receiver == receiver);
        drop(books);
        drop((gathered, idle));
    }

    /// Gives back what nobody has used for long.
    pub(super) fn trim(&self) {
        let idle = self.lock().take_idle(|idle| idle.since.elapsed() >= KEPT);
        drop(idle);
    }

    /// Free scratch of so many bytes or more, the smallest there is.
    fn take(&self, receiver: ReceiverId, transport: &str, nbytes: u64) -> Option<Piece> {
        let mut books = self.lock();
        let fitting = books.idle.iter().enumerate().filter(|(_, idle)| {
            let Piece {
                target, transport: of, ..
            } = &idle.piece;
            idle.receiver == receiver && *of == transport && target.len() >= nbytes && target.is_idle()
        });
        let (at, _) = fitting.min_by_key(|(_, idle)| idle.piece.target.len())?;
        books.idle.remove(at).map(|idle| idle.piece)
    }

    /// New scratch. What is free makes room for it.
    fn make(&self, arena: &Arena, transport: &dyn Transport, nbytes: u64) -> Option<Piece> {
        let give_back = || {
            let oldest = self.lock().idle.pop_front();
            oldest.map(drop)
        };
        let share = loop {
            match Share::take(&self.nbytes, nbytes) {
                Some(share) => break share,
                None => give_back()?,
            }
        };
        let extent = loop {
            match arena.allocate(nbytes) {
                Ok(extent) => break extent,
                Err(_) => give_back()?,
            }
        };
        let (extent, writer) = extent.open();
        match transport.register(extent.into(), RegisterOptions::default()) {
            Ok(region) => Some(Piece {
                target: writer.into(),
                region,
                transport: transport.name(),
                _share: share,
            }),
            Err(error) => {
                tracing::debug!(reason = error.reason(), "scratch could not be registered");
                None
            }
        }
    }
}

impl Books {
    /// Takes what is free. To be dropped not under the lock: a region that goes tells others.
    fn take_idle(&mut self, which: impl Fn(&Idle) -> bool) -> Vec<Idle> {
        let (gone, kept): (Vec<Idle>, _) = self.idle.drain(..).partition(which);
        self.idle = kept.into();
        gone
    }
}

/// Keeps the pages of a room from being released while they are copied.
struct Copying(Arc<Cell>);

impl Drop for Copying {
    fn drop(&mut self) {
        self.0.change(Outgoing::copied);
    }
}

impl Inner {
    /// Gathers rows of a region; [`Answer::NoScratch`] where there is no room for them, or they are not in host memory.
    pub(super) async fn gather(
        self: Arc<Self>,
        room: RoomId,
        attempt: Attempt,
        region: usize,
        rows: Vec<Record>,
    ) -> Answer {
        let cell = self.rooms().read_by(room, attempt);
        let Some(cell) = cell else {
            return Answer::Refused(restarted(room.number, 0, 0));
        };
        if let Err(failure) = cell.change(|room| room.copies(attempt)) {
            return Answer::Refused(failure);
        }
        let copying = Copying(cell);
        let Some((memory, transport)) = self.memories.get(region).zip(self.transport_of(region)) else {
            return Answer::NoScratch;
        };
        let nbytes = rows.iter().map(Record::nbytes).fold(0, u64::saturating_add);
        let scratch = &self.scratch;
        let free = scratch.take(attempt.0, transport.name(), nbytes);
        let made = || {
            let arena = self.shared.host().arena();
            let roomy = nbytes.checked_next_power_of_two().filter(|roomy| *roomy <= MOST);
            let roomy = roomy.and_then(|roomy| scratch.make(arena, &*transport, roomy));
            roomy.or_else(|| scratch.make(arena, &*transport, nbytes))
        };
        let Some(piece) = free.or_else(made) else {
            return Answer::NoScratch;
        };
        if let Err(error) = piece.target.copy(&rows, memory).await {
            tracing::debug!(%error, "rows of a cache could not be gathered");
            return Answer::NoScratch;
        }
        drop(copying);
        let id = scratch.next.fetch_add(1, Ordering::Relaxed);
        let reference = piece.region.reference();
        scratch.lock().gathered.insert((attempt, id), piece);
        // It may have let go meanwhile, and frees nothing any more.
        match self.receivers.reader(attempt.0, attempt.1) {
            Reader::Reads { .. } => Answer::Gathered { id, region: reference },
            Reader::Left(_) => {
                scratch.free(attempt, id);
                Answer::Left
            }
            Reader::Unknown => {
                scratch.forget(attempt.0);
                Answer::Stranger
            }
        }
    }

    /// What a region was registered with.
    fn transport_of(&self, region: usize) -> Option<Arc<dyn Transport>> {
        let name = &self.welcome.regions.get(region)?.transport;
        let own = self.options.transport.iter();
        own.chain(self.shared.transports())
            .find(|transport| transport.name() == name)
            .cloned()
    }
}
