//! The rights of those who are at a payload.

use std::sync::Arc;

use stagewire_core::{Capability, Peer};

use super::{Gone, Live, Table};
use crate::Owner;
use crate::wire::Refusal;

/// Why a consumer is not let in.
#[derive(Debug)]
pub(crate) enum Barred {
    Refused(Refusal),
    /// Not before it is known whether the payload stays here.
    Moving(Arc<Live>),
}

impl From<Refusal> for Barred {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// Lets a store take a payload over, until it is dropped.
#[derive(Debug)]
pub(crate) struct Move {
    live: Arc<Live>,
    right: Capability,
}

impl Move {
    pub(super) const fn new(live: Arc<Live>, right: Capability) -> Self {
        Self { live, right }
    }
}

impl Drop for Move {
    fn drop(&mut self) {
        self.live
            .moves
            .send_modify(|moves| moves.retain(|(right, _)| *right != self.right));
    }
}

/// Who alone may read a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claimant {
    Consumer,
    /// A store, by the right that it was given.
    Store(Capability),
}

impl Claimant {
    pub(super) fn of(mover: Option<&Mover>) -> Self {
        mover.map_or(Self::Consumer, |mover| Self::Store(mover.right))
    }
}

/// The store that a consumer is.
#[derive(Debug)]
pub(super) struct Mover {
    pub(super) right: Capability,
    pub(super) store: Arc<Peer>,
}

/// A consumer's right to one payload, given back on drop.
#[derive(Debug)]
pub(crate) struct Claim {
    table: Arc<Table>,
    live: Arc<Live>,
    mover: Option<Mover>,
}

impl Claim {
    pub(super) const fn new(table: Arc<Table>, live: Arc<Live>, mover: Option<Mover>) -> Self {
        Self { table, live, mover }
    }

    pub(crate) const fn live(&self) -> &Arc<Live> {
        &self.live
    }

    /// The consumer has everything: a payload that is deleted on consume is, and one that a store has is there from now on.
    ///
    /// # Errors
    /// Only for a store: it is not to keep the payload, which has ended, or which it was asked too long ago to take.
    pub(crate) fn finish(self) -> Result<(), Refusal> {
        let Some(Mover { right, store }) = &self.mover else {
            if self.live.owner.is_exclusive() {
                self.table.release_this(&self.live, Gone::Consumed);
            }
            return Ok(());
        };
        let mut taken = false;
        // Who asked the store gives up under the same lock: one of the two is first.
        self.live.moves.send_if_modified(|moves| {
            taken = moves.iter().any(|(given, _)| given == right)
                && if self.live.owner == Owner::Orchestrator {
                    // It stays until the store has answered: one that dies before is asked again.
                    self.table.has(&self.live)
                } else {
                    self.table.release_this(&self.live, Gone::Moved(Arc::clone(store)))
                };
            false
        });
        if taken {
            return Ok(());
        }
        let gone = self.table.gone(self.live.handle.payload);
        Err(gone.map_or(Refusal::Unknown, |gone| gone.refusal()))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.live.owner.is_exclusive() {
            let mine = Claimant::of(self.mover.as_ref());
            // A store whose right was over may have been replaced.
            self.live
                .claimed
                .send_if_modified(|claimed| claimed.take_if(|claimed| *claimed == mine).is_some());
        }
    }
}
