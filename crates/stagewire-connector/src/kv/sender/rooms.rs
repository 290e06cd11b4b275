use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use tokio::sync::Notify;

use super::super::outgoing::{Attempt, Outgoing, superseded};
use super::super::{KvError, RoomId};
use super::room::Cell;

/// Rooms that have ended and are still known, so that who asks again hears the same.
const ENDED: usize = 1024;

/// Where questions wait for rooms that are not open yet; numbers share a place.
const PLACES: usize = 64;

/// The rooms of a sender, by number, the oldest first. Lives of a number never go back.
#[derive(Debug)]
pub(in crate::kv) struct Rooms {
    by_number: BTreeMap<u64, Vec<Arc<Cell>>>,
    waiting: [Arc<Notify>; PLACES],
    ended: VecDeque<Arc<Cell>>,
    closed: bool,
}

/// The room that an attempt asks for.
#[derive(Debug)]
pub(in crate::kv) enum Found {
    /// The one that it reads, or has read; else the newest of this life.
    Room(Arc<Cell>),
    /// It is not open yet.
    NotYet,
    /// A later life has begun, which is this one.
    Superseded(u64),
}

impl Default for Rooms {
    fn default() -> Self {
        Self {
            by_number: BTreeMap::new(),
            waiting: std::array::from_fn(|_| Arc::default()),
            ended: VecDeque::new(),
            closed: false,
        }
    }
}

impl Rooms {
    /// Opens a room. Those of earlier lives fail.
    pub(in crate::kv) fn open(&mut self, id: RoomId, outgoing: Outgoing) -> Result<Arc<Cell>, KvError> {
        if self.closed {
            return Err(KvError::Closed);
        }
        let cells = self.by_number.entry(id.number).or_default();
        if let Some(newest) = cells.last().map(|cell| cell.id().life)
            && newest > id.life
        {
            return Err(KvError::Superseded { room: id, newest });
        }
        if cells.iter().any(|cell| cell.id() == id && !cell.phase().is_terminal()) {
            return Err(KvError::RoomOpen { room: id.number });
        }
        for before in cells.iter().filter(|cell| cell.id() != id) {
            let failure = superseded(before.id(), id.life);
            before.change(|room| room.fail(failure));
        }
        let cell = Arc::new(Cell::new(id, outgoing));
        cells.push(Arc::clone(&cell));
        self.waiting(id).notify_waiters();
        Ok(cell)
    }

    /// Who waits here hears when such a room is opened, or none any more.
    pub(in crate::kv) fn waiting(&self, id: RoomId) -> &Arc<Notify> {
        &self.waiting[(id.number % PLACES as u64) as usize]
    }

    /// The room that an attempt asks for.
    pub(in crate::kv) fn find(&self, id: RoomId, attempt: Attempt) -> Found {
        if let Some(cell) = self.read_by(id, attempt) {
            return Found::Room(cell);
        }
        match self.by_number.get(&id.number).and_then(|cells| cells.last()) {
            Some(newest) if newest.id().life == id.life => Found::Room(Arc::clone(newest)),
            Some(newest) if newest.id().life > id.life => Found::Superseded(newest.id().life),
            _ => Found::NotYet,
        }
    }

    /// The one that an attempt reads, or has read.
    pub(in crate::kv) fn read_by(&self, id: RoomId, attempt: Attempt) -> Option<Arc<Cell>> {
        let mut cells = self.by_number.get(&id.number)?.iter();
        cells.find(|cell| cell.is_read_by(attempt)).cloned()
    }

    /// Those that are open, or whose pages are still read.
    pub(in crate::kv) fn cells(&self) -> Vec<Arc<Cell>> {
        let all = self.by_number.values().flatten();
        all.filter(|cell| !cell.is_released()).cloned().collect()
    }

    /// Opens no more. Returns those that are live.
    pub(in crate::kv) fn close(&mut self) -> Vec<Arc<Cell>> {
        self.closed = true;
        // Who waits for a room waits for nothing.
        self.waiting.iter().for_each(|waiting| waiting.notify_waiters());
        self.cells()
    }

    pub(in crate::kv) fn is_closed(&self) -> bool {
        self.closed
    }

    pub(in crate::kv) fn live(&self) -> usize {
        self.by_number
            .values()
            .flatten()
            .filter(|cell| !cell.is_released())
            .count()
    }

    /// A room is over, and nobody reads its pages.
    pub(in crate::kv) fn end(&mut self, cell: &Arc<Cell>) {
        self.ended.push_back(Arc::clone(cell));
        while self.ended.len() > ENDED
            && let Some(oldest) = self.ended.pop_front()
        {
            let number = oldest.id().number;
            if let Some(cells) = self.by_number.get_mut(&number) {
                cells.retain(|cell| !Arc::ptr_eq(cell, &oldest));
                if cells.is_empty() {
                    self.by_number.remove(&number);
                }
            }
        }
    }
}
