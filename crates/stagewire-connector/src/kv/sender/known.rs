use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::super::Heartbeat;
use super::super::heartbeat::Silence;
use super::super::outgoing::Destination;
use super::super::protocol::ReceiverId;

/// Attempts of a receiver that are remembered to have let go.
const LEFT: usize = 4096;

/// The receivers that a sender has greeted.
#[derive(Debug, Default)]
pub(super) struct Receivers(Mutex<BTreeMap<ReceiverId, Known>>);

#[derive(Debug, Default)]
struct Known {
    /// `None` until its engine was found to fit.
    greeted: Option<(u32, Destination)>,
    silence: Silence,
    /// Connections over which it has asked.
    connections: u32,
    /// Attempts that want nothing any more; a question of theirs that comes late must not count.
    left: BTreeSet<u64>,
}

/// Who asks for a room.
#[derive(Debug)]
pub(super) enum Reader {
    Unknown,
    /// It has let go.
    Left,
    Reads {
        rank: u32,
        destination: Destination,
    },
}

impl Receivers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ReceiverId, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    pub(super) fn knows(&self, receiver: ReceiverId) -> bool {
        self.lock().get(&receiver).is_some_and(|known| known.greeted.is_some())
    }

    /// It has asked something, over a connection that is new or not.
    pub(super) fn heard(&self, receiver: ReceiverId, first: bool) {
        let mut all = self.lock();
        let known = all.entry(receiver).or_default();
        known.silence.heard();
        known.connections += u32::from(first);
    }

    pub(super) fn greet(&self, receiver: ReceiverId, rank: u32, destination: Destination) {
        let mut all = self.lock();
        all.entry(receiver).or_default().greeted = Some((rank, destination));
    }

    pub(super) fn reader(&self, receiver: ReceiverId, attempt: u64) -> Reader {
        let all = self.lock();
        match all.get(&receiver) {
            Some(known) if known.left.contains(&attempt) => Reader::Left,
            Some(Known {
                greeted: Some((rank, destination)),
                ..
            }) => Reader::Reads {
                rank: *rank,
                destination: destination.clone(),
            },
            _ => Reader::Unknown,
        }
    }

    pub(super) fn leaves(&self, receiver: ReceiverId, attempt: u64) {
        let mut all = self.lock();
        let left = &mut all.entry(receiver).or_default().left;
        left.insert(attempt);
        if left.len() > LEFT {
            left.pop_first();
        }
    }

    /// A connection of it has ended. True where that was the last one.
    pub(super) fn hangs_up(&self, receiver: ReceiverId) -> bool {
        let mut all = self.lock();
        all.get_mut(&receiver).is_some_and(|known| {
            known.connections = known.connections.saturating_sub(1);
            known.connections == 0
        })
    }

    /// Forgets a receiver that has no connection. True where it had none.
    pub(super) fn forget_away(&self, receiver: ReceiverId) -> bool {
        let mut all = self.lock();
        let away = all.get(&receiver).is_some_and(|known| known.connections == 0);
        away && all.remove(&receiver).is_some()
    }

    /// Forgets those that have said nothing for too long.
    pub(super) fn forget_silent(&self, heartbeat: &Heartbeat) -> Vec<ReceiverId> {
        let mut all = self.lock();
        let silent = all.iter().filter(|(_, known)| known.silence.goes_on(heartbeat));
        let silent: Vec<ReceiverId> = silent.map(|(receiver, _)| *receiver).collect();
        // Its connections stand; they count again once it has greeted anew.
        for receiver in &silent {
            if let Some(known) = all.get_mut(receiver) {
                known.greeted = None;
                known.silence.heard();
            }
        }
        silent
    }
}
