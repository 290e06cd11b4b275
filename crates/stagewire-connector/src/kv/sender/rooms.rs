use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::super::KvError;
use super::super::outgoing::{Attempt, Outgoing};
use super::room::Cell;

/// Rooms that have ended and are still known, so that who asks again hears the same.
const ENDED: usize = 1024;

/// The rooms of a sender, by number, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Rooms {
    by_number: BTreeMap<u64, Vec<Arc<Cell>>>,
    ended: VecDeque<Arc<Cell>>,
    closed: bool,
}

impl Rooms {
    pub(super) fn open(&mut self, room: u64, outgoing: Outgoing) -> Result<Arc<Cell>, KvError> {
        if self.closed {
            return Err(KvError::Closed);
        }
        let cells = self.by_number.entry(room).or_default();
        if cells.iter().any(|cell| !cell.phase().is_terminal()) {
            return Err(KvError::RoomOpen { room });
        }
        let cell = Arc::new(Cell::new(room, outgoing));
        cells.push(Arc::clone(&cell));
        Ok(cell)
    }

    /// The one that an attempt reads or has read, else the newest of this number.
    pub(super) fn of(&self, room: u64, attempt: Attempt) -> Option<Arc<Cell>> {
        let newest = || self.by_number.get(&room)?.last().cloned();
        self.read_by(room, attempt).or_else(newest)
    }

    /// The one that an attempt reads, or has read.
    pub(super) fn read_by(&self, room: u64, attempt: Attempt) -> Option<Arc<Cell>> {
        let mut cells = self.by_number.get(&room)?.iter();
        cells.find(|cell| cell.is_read_by(attempt)).cloned()
    }

    /// Those that are open, or whose pages are still read.
    pub(super) fn cells(&self) -> Vec<Arc<Cell>> {
        let all = self.by_number.values().flatten();
        all.filter(|cell| !cell.is_released()).cloned().collect()
    }

    /// Opens no more. Returns those that are live.
    pub(super) fn close(&mut self) -> Vec<Arc<Cell>> {
        self.closed = true;
        self.cells()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    pub(super) fn live(&self) -> usize {
        self.by_number
            .values()
            .flatten()
            .filter(|cell| !cell.is_released())
            .count()
    }

    /// A room is over, and nobody reads its pages.
    pub(super) fn end(&mut self, cell: &Arc<Cell>) {
        self.ended.push_back(Arc::clone(cell));
        while self.ended.len() > ENDED
            && let Some(oldest) = self.ended.pop_front()
        {
            let room = oldest.room();
            if let Some(cells) = self.by_number.get_mut(&room) {
                cells.retain(|cell| !Arc::ptr_eq(cell, &oldest));
                if cells.is_empty() {
                    self.by_number.remove(&room);
                }
            }
        }
    }
}
