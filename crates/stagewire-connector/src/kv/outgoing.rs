//! A sender's room as a state machine: no I/O, no clock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use stagewire_core::{ErrorClass, Failure};
use stagewire_kv::Engine;

use super::protocol::{Announced, News, ReceiverId, Seen};
use super::{ChunkSpec, KvError, Phase, RoomId, chunk, failure};

/// Entries of page tables in one answer, unless one chunk has more. A message has room for all that a room may have.
const TOLD_AT_ONCE: u64 = 1 << 20;

/// One try of one receiver to read a room.
pub(super) type Attempt = (ReceiverId, u64);

/// A decode engine as one sender sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Destination {
    pub(super) engine: Arc<[u8]>,
    /// Its ranks that need bytes of this sender.
    pub(super) readers: Arc<BTreeSet<u32>>,
}

#[derive(Debug, Clone)]
pub(super) struct Outgoing {
    room: u64,
    generation: u64,
    seq_len: u64,
    chunks: Vec<Announced>,
    destination: Option<Destination>,
    readers: BTreeMap<u32, Reader>,
    /// Copies of its pages that this process itself makes for readers.
    copies: u32,
    failure: Option<Failure>,
}

#[derive(Debug, Clone)]
struct Reader {
    attempt: Attempt,
    reads: Reads,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reads {
    /// It may read.
    On,
    /// It has everything, and reads nothing any more.
    All,
    /// It has let go before that.
    NoMore,
}

impl Outgoing {
    pub(super) fn new(room: u64, generation: u64, seq_len: u64) -> Self {
        Self {
            room,
            generation,
            seq_len,
            chunks: Vec::new(),
            destination: None,
            readers: BTreeMap::new(),
            copies: 0,
            failure: None,
        }
    }

    /// Announces a chunk.
    pub(super) fn send(&mut self, engine: &Engine, spec: ChunkSpec) -> Result<(), KvError> {
        let ended = |how: String| KvError::Ended { room: self.room, how };
        if let Some(failure) = &self.failure {
            return Err(ended(failure.to_string()));
        }
        if self.is_whole() {
            return Err(ended("its last chunk was announced".to_owned()));
        }
        let chunk = chunk::announced(self.room, engine, spec)?;
        chunk::check(self.room, engine, self.seq_len, self.chunks.last(), &chunk)?;
        self.chunks.push(chunk);
        if self.is_unread() {
            self.forget_pages();
        }
        Ok(())
    }

    /// Whether its last chunk is announced.
    fn is_whole(&self) -> bool {
        self.chunks.last().is_some_and(|chunk| chunk.last)
    }

    /// Whether no rank of decode needs anything of this sender.
    fn is_unread(&self) -> bool {
        self.destination.as_ref().is_some_and(|known| known.readers.is_empty())
    }

    /// Lets a receiver's rank read. False where this is not its room: another attempt reads it.
    pub(super) fn bind(&mut self, rank: u32, attempt: Attempt, destination: &Destination) -> bool {
        if let Some(reader) = self.readers.get(&rank) {
            return reader.attempt == attempt;
        }
        if self.failure.is_some() {
            // It is told of the failure, and reads nothing. Its next attempt waits for the next room.
            let reads = Reads::NoMore;
            self.readers.insert(rank, Reader { attempt, reads });
            return true;
        }
        match &self.destination {
            Some(known) if known.engine != destination.engine => return false,
            Some(_) => {}
            None => self.destination = Some(destination.clone()),
        }
        // A rank that needs nothing says which engine it is, so that a sender whom nobody reads learns that.
        let needed = destination.readers.contains(&rank);
        let reads = if needed { Reads::On } else { Reads::All };
        self.readers.insert(rank, Reader { attempt, reads });
        true
    }

    /// What there is beyond what was seen, as much as one answer has room for.
    pub(super) fn news(&self, seen: Option<Seen>) -> News {
        let known = seen.filter(|seen| seen.generation == self.generation);
        let known = known.map_or(0, |seen| usize::try_from(seen.chunks).unwrap_or(usize::MAX));
        let mut chunks = Vec::new();
        // Who is told of a failure needs nothing else.
        let untold = self.chunks.iter().skip(known).filter(|_| self.failure.is_none());
        let mut entries = 0;
        for chunk in untold {
            entries += chunk.entries();
            if entries > TOLD_AT_ONCE && !chunks.is_empty() {
                break;
            }
            chunks.push(chunk.clone());
        }
        let known = known.min(self.chunks.len()) + chunks.len();
        News {
            seen: self.seen(known),
            seq_len: self.seq_len,
            chunks,
            failure: self.failure.clone(),
        }
    }

    fn seen(&self, chunks: usize) -> Seen {
        Seen {
            generation: self.generation,
            chunks: chunks as u64,
        }
    }

    /// Whether there is more to know than was seen.
    pub(super) fn is_news(&self, seen: Option<Seen>) -> bool {
        self.failure.is_some() || seen != Some(self.seen(self.chunks.len()))
    }

    pub(super) fn is_read_by(&self, attempt: Attempt) -> bool {
        self.readers.values().any(|reader| reader.attempt == attempt)
    }

    /// A reader has everything. Its bytes count where the room has not failed: until now its pages were kept.
    pub(super) fn confirm(&mut self, attempt: Attempt, generation: u64) -> Result<(), Failure> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let (room, whole) = (self.room, self.is_whole());
        let reader = self.readers.values_mut().find(|reader| reader.attempt == attempt);
        match reader {
            Some(reader) if self.generation == generation && whole => {
                reader.reads = Reads::All;
                Ok(())
            }
            _ => Err(restarted(room, generation, self.generation)),
        }
    }

    /// Begins to copy pages for a reader; [`Outgoing::copied`] ends it.
    pub(super) fn copies(&mut self, attempt: Attempt) -> Result<(), Failure> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let mut readers = self.readers.values();
        if !readers.any(|reader| reader.attempt == attempt && reader.reads == Reads::On) {
            return Err(restarted(self.room, 0, self.generation));
        }
        self.copies += 1;
        Ok(())
    }

    pub(super) fn copied(&mut self) {
        self.copies -= 1;
    }

    /// A reader reads nothing any more and has given up, unless it has confirmed before.
    pub(super) fn leave(&mut self, attempt: Attempt, failure: Failure) {
        let mut readers = self.readers.values_mut();
        let leaves = readers.find(|reader| reader.attempt == attempt && reader.reads == Reads::On);
        if let Some(reader) = leaves {
            reader.reads = Reads::NoMore;
            self.fail(failure);
        }
    }

    /// A receiver is gone.
    pub(super) fn lose(&mut self, receiver: ReceiverId, failure: &Failure) {
        let gone = self.readers.values().filter(|reader| reader.attempt.0 == receiver);
        let attempts: Vec<Attempt> = gone.map(|reader| reader.attempt).collect();
        for attempt in attempts {
            self.leave(attempt, failure::in_room(self.room, failure.clone()));
        }
    }

    /// Ends the room, unless it has ended. Readers are told, and let go.
    pub(super) fn fail(&mut self, failure: Failure) {
        if !self.phase().is_terminal() {
            self.failure = Some(failure);
        }
    }

    /// Whoever still reads is not waited for any more. Nothing that it read counts: a failed room confirms nothing.
    pub(super) fn cut_off(&mut self) {
        debug_assert!(self.failure.is_some(), "only a room that has failed");
        let still = self.readers.values_mut().filter(|reader| reader.reads == Reads::On);
        still.for_each(|reader| reader.reads = Reads::NoMore);
    }

    pub(super) fn phase(&self) -> Phase {
        if let Some(failure) = &self.failure {
            return Phase::Failed(failure.clone());
        }
        let Some(destination) = &self.destination else {
            return Phase::Bootstrapping;
        };
        let reads = |rank| self.readers.get(rank).map(|reader| reader.reads);
        if destination.readers.iter().any(|rank| reads(rank).is_none()) {
            Phase::Bootstrapping
        } else if self.is_unread() {
            Phase::Success
        } else if self.chunks.is_empty() {
            Phase::Waiting
        } else if self.is_whole() && destination.readers.iter().all(|rank| reads(rank) == Some(Reads::All)) {
            Phase::Success
        } else {
            Phase::Transferring
        }
    }

    /// Whether its pages are nobody's any more.
    pub(super) fn is_released(&self) -> bool {
        self.phase().is_terminal() && self.copies == 0 && self.readers.values().all(|reader| reader.reads != Reads::On)
    }

    /// Without what only readers that still read need.
    pub(super) fn forget_pages(&mut self) {
        for chunk in &mut self.chunks {
            chunk.pages.iter_mut().for_each(|pages| *pages = Vec::new());
            chunk.aux = None;
        }
    }
}

/// The room has begun anew, in a later life.
pub(super) fn superseded(room: RoomId, newest: u64) -> Failure {
    let RoomId { number, life } = room;
    let message = format!("room {number}: prefill has begun life {newest} of it, and this is life {life}");
    Failure::new(ErrorClass::Conflict, "kv.superseded", message)
        .with("room", number)
        .with("life", life)
        .with("newest", newest)
}

/// The room is another one than the one that was read.
pub(super) fn restarted(room: u64, generation: u64, found: u64) -> Failure {
    Failure::new(
        ErrorClass::Conflict,
        "kv.room_restarted",
        format!("room {room} was opened anew at prefill while it was read: generation {generation} is {found} now"),
    )
}

#[cfg(test)]
mod tests {
    use stagewire_core::DType;
    use stagewire_kv::{Component, Geometry};
    use uuid::Uuid;

    use super::*;

    /// A reader that gives up after the last chunk was announced, and nobody else reads, has not got everything.
    #[test]
    fn who_leaves_has_not_everything() {
        let full = Component::mha("full", 1, 1, [8, 8], DType::U8);
        let engine = Engine::new(Geometry::new(1, 4, vec![full])).expect("sizes");
        let destination = Destination {
            engine: engine.to_bytes().into(),
            readers: Arc::new([0].into()),
        };
        let mut room = Outgoing::new(7, 1, 4);
        let attempt = (Uuid::from_u128(1), 0);
        assert!(room.bind(0, attempt, &destination));
        room.send(&engine, ChunkSpec::new(0..4).pages("full", [1]).last())
            .expect("a chunk");
        room.leave(attempt, Failure::new(ErrorClass::Invalid, "kv.not_resident", "page 0"));
        assert!(matches!(room.phase(), Phase::Failed(failure) if failure.reason == "kv.not_resident"));
        assert!(room.is_released());
    }
}
