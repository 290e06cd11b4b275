//! The payloads that this process holds for others.

mod asked;
mod claim;
mod keep;
mod table;
mod tombstones;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use stagewire_core::{Capability, Failure, Handle, Incarnation, PayloadLife, PayloadPhase, Peer, RegionRef};
use tokio::sync::watch;
use tokio::time::Instant;

use asked::Asked;
use claim::Claimant;
pub(crate) use claim::{Barred, Claim, Move};
pub(crate) use keep::{Brought, Keep};
pub(crate) use table::Table;
pub(crate) use tombstones::Gone;

use crate::Owner;
use crate::complete::Complete;
use crate::wire::End;

/// One payload that this process holds.
#[derive(Debug)]
pub(crate) struct Live {
    handle: Arc<Handle>,
    owner: Owner,
    /// When it expires; set once, as it is taken in.
    expires: OnceLock<Instant>,
    life: Mutex<PayloadLife>,
    shown: watch::Sender<Shown>,
    keep: Mutex<Option<Arc<dyn Keep>>>,
    unread: Shared<BoxFuture<'static, ()>>,
    /// Who is at a payload that is deleted on consume.
    claimed: watch::Sender<Option<Claimant>>,
    /// The rights of stores that are asked to take the payload: to pull it, or, where its bytes went along, of this process in
    /// their place. None but them consumes it meanwhile where it is deleted on consume.
    moves: watch::Sender<Vec<(Capability, Arc<Peer>)>>,
    asked: Asked,
    /// Who has it once it is not here any more.
    keeper: OnceLock<Option<Incarnation>>,
    /// In a store: the rights of the puts that brought it, or found it there, where they may still be undone.
    puts: Mutex<Option<Vec<Capability>>>,
}

impl Live {
    pub(crate) fn new(handle: impl Into<Arc<Handle>>, owner: Owner, keep: Arc<dyn Keep>) -> Self {
        let handle = handle.into();
        let life = PayloadLife::new(handle.manifest.chunks());
        let mut shown = Shown {
            stored: keep.is_stored(),
            ..Shown::none_of(handle.manifest.chunks())
        };
        shown.end = end(&life);
        Self {
            handle,
            owner,
            expires: OnceLock::new(),
            shown: watch::Sender::new(shown),
            unread: keep.unread().shared(),
            life: Mutex::new(life),
            keep: Mutex::new(Some(keep)),
            claimed: watch::Sender::new(None),
            moves: watch::Sender::default(),
            asked: Asked::default(),
            keeper: OnceLock::new(),
            puts: Mutex::default(),
        }
    }

    pub(crate) const fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }

    pub(crate) const fn owner(&self) -> Owner {
        self.owner
    }

    /// Says once how long it lives from now.
    pub(crate) fn expire_in(&self, life: Duration) {
        // What overflows the clock never expires.
        if let Some(at) = Instant::now().checked_add(life) {
            let _ = self.expires.set(at);
        }
    }

    /// How long it has left; `None` where it does not expire.
    pub(crate) fn left(&self) -> Option<Duration> {
        let expires = self.expires.get()?;
        Some(expires.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Shown> {
        self.shown.subscribe()
    }

    pub(crate) fn phase(&self) -> PayloadPhase {
        lock(&self.life).phase().clone()
    }

    /// Marks chunk `index` as complete.
    pub(crate) fn ready(&self, index: u32) {
        let keep = lock(&self.keep).clone();
        let digest = keep.as_ref().and_then(|keep| self.complete(&**keep, index));
        let sealed = self.advance(|life| {
            if life.ready(index) {
                self.shown.borrow().complete.add(index, digest);
            }
            *life.phase() == PayloadPhase::Sealed
        });
        if let Some(keep) = keep.filter(|_| sealed) {
            keep.sealed();
        }
    }

    /// Marks every chunk as complete.
    pub(crate) fn seal(&self) {
        let keep = lock(&self.keep).clone();
        let chunks = 0..self.handle.manifest.chunks();
        let digest = |index| keep.as_ref().and_then(|keep| self.complete(&**keep, index));
        let digests: Vec<_> = chunks.clone().map(digest).collect();
        if let Some(keep) = keep {
            keep.sealed();
        }
        self.advance(|life| {
            let shown = self.shown.borrow();
            for (index, digest) in chunks.zip(digests) {
                if life.ready(index) {
                    shown.complete.add(index, digest);
                }
            }
        });
    }

    /// The last that is done with a chunk before it is shown. Returns its digest, where it is to be compared; done twice, the
    /// first one stays.
    fn complete(&self, keep: &dyn Keep, index: u32) -> Option<u64> {
        keep.complete(index);
        if self.shown.borrow().complete.has(index) {
            return None;
        }
        keep.digest(index)
    }

    /// Resolves when nobody reads the memory of the payload.
    pub(crate) fn unread(&self) -> Shared<BoxFuture<'static, ()>> {
        self.unread.clone()
    }

    /// Says that the bytes are somewhere else than the handle says, now and from now on.
    fn move_to(&self, regions: Vec<RegionRef>) {
        self.shown.send_if_modified(|shown| {
            let moved = *shown.regions.as_ref().unwrap_or(&self.handle.regions) != regions;
            if moved {
                shown.regions = Some(regions);
            }
            moved
        });
    }

    /// Brings the bytes to where consumers read them, and keeps them there as long as the result lives.
    pub(crate) async fn bring(&self) -> Result<Option<Brought>, Failure> {
        let keep = lock(&self.keep).clone();
        let Some(keep) = keep else { return Ok(None) };
        let brought = keep.bring().await?;
        if let Some(brought) = &brought {
            self.move_to(brought.regions.clone());
        }
        Ok(brought)
    }

    /// Lets `store` take the payload with `right`, to keep it from then on.
    pub(crate) fn begin_move(self: &Arc<Self>, right: Capability, store: Arc<Peer>) -> Move {
        self.moves.send_modify(|moves| moves.push((right, store)));
        Move::new(Arc::clone(self), right)
    }

    /// The stores that may have taken it.
    pub(crate) const fn asked(&self) -> &Asked {
        &self.asked
    }

    /// Who has it now: this process, a store that it went to, or nobody.
    pub(crate) fn keeper(&self) -> Option<Incarnation> {
        let here = self.handle.holder.incarnation;
        self.keeper.get().copied().unwrap_or(Some(here))
    }

    /// Has `end` send `store` the word that it is not to keep the payload; `None` where it is to, or is being asked to take
    /// it: a put that begins meanwhile is sent after that word.
    pub(crate) fn end_at<T>(&self, store: Incarnation, end: impl FnOnce() -> T) -> Option<T> {
        // Locked until it is sent.
        let moves = self.moves.borrow();
        let moving = moves.iter().any(|(_, to)| to.incarnation == store);
        (!moving && self.keeper() != Some(store)).then(end)
    }

    /// Whether every chunk is complete, and none is to be compared with a digest.
    pub(crate) fn is_exact(&self) -> bool {
        self.phase() == PayloadPhase::Sealed && !self.shown.borrow().complete.has_digests()
    }

    /// All of its bytes, where there are some, at most `limit`, and this process can read them.
    pub(crate) fn bytes(&self, limit: u64) -> Option<Vec<u8>> {
        if !(1..=limit).contains(&self.handle.manifest.nbytes().0) {
            return None;
        }
        let keep = lock(&self.keep).clone();
        keep?.bytes()
    }

    /// Says that its producer may undo the put of this right.
    pub(crate) fn put_with(self, right: Capability) -> Self {
        *lock(&self.puts) = Some(vec![right]);
        self
    }

    /// Says that another put has found it: one that may be undone by this right, or one that relies on it, after which none
    /// is undone. Whether the former is so, it returns.
    pub(crate) fn found_by(&self, right: Option<Capability>) -> bool {
        let mut puts = lock(&self.puts);
        match (puts.as_mut(), right) {
            (Some(rights), Some(right)) => rights.push(right),
            _ => *puts = None,
        }
        puts.is_some()
    }

    /// Whether the payload is this one's alone from now on. A store whose right is over keeps it from nobody: it cannot finish
    /// any more, and may not have heard of that yet.
    fn claim(&self, by: Claimant) -> bool {
        let moves = self.moves.borrow();
        self.claimed.send_if_modified(|claimed| {
            let free = match claimed {
                None => true,
                Some(Claimant::Consumer) => false,
                Some(Claimant::Store(right)) => moves.iter().all(|(given, _)| given != right),
            };
            if free {
                *claimed = Some(by);
            }
            free
        })
    }

    /// Waits until nobody moves the payload any more.
    pub(crate) async fn not_moving(&self) {
        // The sender is in `self`.
        let _ = self.moves.subscribe().wait_for(Vec::is_empty).await;
    }

    /// Waits until no consumer is at a payload that is deleted on consume.
    pub(crate) async fn unclaimed(&self) {
        let _ = self.claimed.subscribe().wait_for(Option::is_none).await;
    }

    /// Changes the life and shows the change. Watchers see changes in the order in which they happened, because the
    /// life stays locked until the change is shown.
    fn advance<T>(&self, change: impl FnOnce(&mut PayloadLife) -> T) -> T {
        let mut life = lock(&self.life);
        let before = self.shown.borrow().complete.len();
        let result = change(&mut life);
        self.shown.send_if_modified(|shown| {
            let end = end(&life);
            let changed = shown.complete.len() != before || shown.end != end;
            shown.end = end;
            changed
        });
        result
    }

    /// Lets nobody read it who does not yet. Called before the end is shown: who is told of that may ask at once whether
    /// somebody reads.
    fn close(&self) {
        let keep = lock(&self.keep).clone();
        if let Some(keep) = keep {
            keep.close();
        }
    }

    /// Leaves it to the next process, where that can be.
    fn leave(&self) {
        if let Some(keep) = lock(&self.keep).as_ref() {
            keep.leave();
        }
    }

    /// Gives up the memory; it goes when the last pin ends.
    fn forget(&self) {
        let keep = lock(&self.keep).take();
        // Somebody may be bringing the bytes back, and drop it later: the end is told before.
        if let Some(keep) = keep {
            keep.end();
        }
    }
}

/// What consumers may know of a payload. Cloning shares what is complete.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shown {
    pub(crate) complete: Arc<Complete>,
    pub(crate) end: Option<End>,
    /// A store has it, and not the memory of its producer.
    pub(crate) stored: bool,
    /// Where its bytes are, where that is not what the handle says.
    pub(crate) regions: Option<Vec<RegionRef>>,
}

impl Shown {
    /// Of so many chunks, none is complete.
    pub(crate) fn none_of(chunks: u32) -> Self {
        Self {
            complete: Arc::new(Complete::none_of(chunks)),
            ..Self::default()
        }
    }
}

/// Why no more chunks come, where that is so.
fn end(life: &PayloadLife) -> Option<End> {
    match life.phase() {
        PayloadPhase::Open => None,
        PayloadPhase::Sealed => Some(End::Sealed),
        PayloadPhase::Failed(failure) => Some(End::Failed(failure.clone())),
        PayloadPhase::Released => Some(End::Released),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
