//! What goes on after `publish` has returned: the way into the store, and the watch over the consumer.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, Handle, Peer, TransferMode};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::begun::Begun;
use crate::connector::{Moving, Shared};
use crate::link::{Link, Reserved};
use crate::live::{Gone, Live};
use crate::put::{self, Put};
use crate::wire::End;
use crate::{ModeReason, PutError, PutPlace};

/// Pause before a store that could not be reached is asked again.
const PAUSE: Duration = Duration::from_millis(50);

/// How a publication came out: where the payload is now.
pub(super) type Outcome = Result<Arc<Handle>, Arc<PutError>>;

/// Which way a payload goes, and why.
pub(super) type Way = (TransferMode, ModeReason);

/// Follows a payload until it is where it is to be.
#[derive(Debug)]
pub(crate) struct Settling {
    way: Mutex<Way>,
    /// Where it is, once it is in the store.
    stored: OnceLock<Arc<Handle>>,
    outcome: watch::Sender<Option<Outcome>>,
    task: Mutex<Option<Arc<Begun>>>,
    /// The connection over which a store answers soon.
    over: Mutex<Weak<Link>>,
}

/// What is still to be done for a payload.
#[derive(Debug)]
pub(crate) enum Plan {
    /// It stays where it is.
    Stay,
    /// It goes to the store as soon as it is complete.
    Store,
    /// It goes there when this process ends before the payload does.
    StoreWithout(Peer),
}

impl Settling {
    pub(crate) fn new(mode: TransferMode, reason: ModeReason) -> Arc<Self> {
        Arc::new(Self {
            way: Mutex::new((mode, reason)),
            stored: OnceLock::new(),
            outcome: watch::Sender::new(None),
            task: Mutex::default(),
            over: Mutex::default(),
        })
    }

    /// It is where it is to be.
    pub(crate) fn stay(&self, live: &Live) {
        self.settle(Ok(Arc::clone(live.handle())));
    }

    /// Begins. `wait` bounds how long the store may take.
    pub(crate) fn begin(self: &Arc<Self>, shared: &Arc<Shared>, live: &Arc<Live>, plan: Plan, wait: Duration) {
        let all = Arc::clone(shared);
        let (shared, live, settling) = (Arc::clone(shared), Arc::clone(live), Arc::clone(self));
        // What can go at once is on its way before this returns.
        let task = match plan {
            Plan::Stay => return self.stay(&live),
            Plan::Store => {
                let storing = async move { settling.store(&shared, &live, wait).await };
                Begun::new(all.runtime(), all.track_move(storing))
            }
            Plan::StoreWithout(consumer) => {
                let guarding = async move { settling.guard(&shared, &live, &consumer, wait).await };
                Begun::new(all.runtime(), all.track_move(guarding))
            }
        };
        *lock(&self.task) = task;
    }

    /// Which way the payload goes, as far as it is known now.
    pub(super) fn way(&self) -> Way {
        *lock(&self.way)
    }

    /// The handle that leads straight to the store, once the payload is there.
    pub(super) fn stored(&self) -> Option<&Handle> {
        self.stored.get().map(|stored| &**stored)
    }

    /// The first outcome stays. Returns whether this is it.
    fn settle(&self, outcome: Outcome) -> bool {
        self.outcome.send_if_modified(|current| {
            let first = current.is_none();
            if first {
                *current = Some(outcome);
            }
            first
        })
    }

    pub(super) fn outcome(&self) -> Option<Outcome> {
        self.outcome.borrow().clone()
    }

    pub(super) async fn settled(&self) -> Outcome {
        let over = lock(&self.over).upgrade();
        match over {
            Some(link) => link.attended(self.came_out()).await,
            None => self.came_out().await,
        }
    }

    async fn came_out(&self) -> Outcome {
        let mut outcomes = self.outcome.subscribe();
        loop {
            if let Some(outcome) = outcomes.borrow_and_update().clone() {
                return outcome;
            }
            // The sender is in `self`.
            let _ = outcomes.changed().await;
        }
    }

    /// Gives up, unless it is settled, or a store has taken it. The payload ends, here and in a store that is about to take
    /// it: who ends it here has decided that.
    pub(super) fn cancel(&self, shared: &Arc<Shared>, live: &Arc<Live>) -> bool {
        let cancelled = self.outcome.send_if_modified(|outcome| {
            let first = outcome.is_none() && shared.table().release_this(live, Gone::Released);
            if first {
                let at = PutPlace::new(live.handle(), None);
                *outcome = Some(Err(Arc::new(PutError::Cancelled { at })));
            }
            first
        });
        if cancelled && let Some(task) = lock(&self.task).take() {
            // Stores that may be taking it hear of it as the task is dropped.
            task.abort();
        }
        cancelled
    }

    /// Has the store take the payload once it is complete.
    async fn store(&self, shared: &Arc<Shared>, live: &Arc<Live>, wait: Duration) {
        sealed(live).await;
        let moving = Moving::new(shared, live);
        let outcome = match move_to_store(shared, live, wait, (None, &self.over)).await {
            Ok(stored) => {
                let stored = self.stored.get_or_init(|| Arc::new(stored));
                Ok(Arc::clone(stored))
            }
            Err(error) => {
                // Nobody else would end it, and consumers are told why it is gone.
                shared.table().release_this(live, Gone::Failed(error.to_failure()));
                Err(Arc::new(error))
            }
        };
        drop(moving);
        self.settle(outcome);
    }

    /// Keeps room in the store, and moves the payload there when its consumer ends before it does.
    async fn guard(&self, shared: &Arc<Shared>, live: &Arc<Live>, consumer: &Peer, wait: Duration) {
        let reserved = match shared.has_store() {
            true => tokio::select! {
                reserved = put::reserve(shared, live, wait) => {
                    if let Err(error) = &reserved {
                        // Its consumer can read it all the same.
                        tracing::warn!(%error, "no room in the store for a payload that is handed over directly");
                        shared.modes().add_unreserved();
                    }
                    reserved.ok()
                }
                // Nobody needs the room any more, or needs it now.
                () = ended(live) => None,
                () = shared.lost(consumer) => None,
            },
            false => None,
        };
        self.settle(Ok(Arc::clone(live.handle())));
        tokio::select! {
            () = ended(live) => {}
            () = shared.lost(consumer) => self.fall_back(shared, live, wait, reserved).await,
        }
    }

    async fn fall_back(&self, shared: &Arc<Shared>, live: &Arc<Live>, wait: Duration, reserved: Option<Reserved>) {
        sealed(live).await;
        let payload = live.handle().payload;
        let _moving = Moving::new(shared, live);
        match move_to_store(shared, live, wait, (reserved.as_ref(), &self.over)).await {
            Ok(stored) if stored.mode == TransferMode::Store => {
                tracing::info!(%payload, "the consumer was lost; the payload went to the store");
                let fallen = (TransferMode::Store, ModeReason::ConsumerLost);
                // Whoever sees the new way sees the new handle and the new counts, too.
                let mut way = lock(&self.way);
                let _ = self.stored.set(Arc::new(stored));
                shared.modes().change(*way, fallen);
                *way = fallen;
            }
            // Somebody has consumed it.
            Ok(_) => {}
            // It stays here, for as long as its lease says.
            Err(error) => {
                tracing::warn!(%payload, %error, "the consumer was lost, and the store has not taken its payload");
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until every chunk is there, or none comes any more.
async fn sealed(live: &Live) {
    // The sender is in `live`.
    let _ = live.subscribe().wait_for(|state| state.end.is_some()).await;
}

/// Waits until nobody can consume the payload here any more.
async fn ended(live: &Live) {
    let over = |end: &Option<End>| matches!(end, Some(End::Released | End::Failed(_)));
    let _ = live.subscribe().wait_for(|state| over(&state.end)).await;
}

/// Puts until the store has the payload, it ends otherwise, or the time is over. A store that is starting anew is waited
/// for, and so is a consumer that has the payload in its hands: that may take any time, and none of that of the store.
async fn move_to_store(
    shared: &Arc<Shared>,
    live: &Arc<Live>,
    wait: Duration,
    (reserved, over): (Option<&Reserved>, &Mutex<Weak<Link>>),
) -> Result<Handle, PutError> {
    let mut begin = Instant::now();
    loop {
        if shared.is_closed() {
            let at = PutPlace::new(live.handle(), None);
            return Err(PutError::Cancelled { at });
        }
        let put = Put {
            token: None,
            wait: wait.saturating_sub(begin.elapsed()),
            reserved,
            over: Some(over),
        };
        let error = match put::put(shared, live, put).await {
            Ok(stored) => return Ok(stored),
            Err(error) => error,
        };
        if !shared.table().has(live) {
            return match shared.table().gone(live.handle().payload) {
                Some(Gone::Consumed) => Ok(Handle::clone(live.handle())),
                _ => Err(error),
            };
        }
        let left = wait.saturating_sub(begin.elapsed());
        let claimed = matches!(&error, PutError::Refused { failure, .. } if failure.reason == "payload.claimed");
        if claimed {
            tokio::select! {
                () = live.unclaimed() => {}
                () = ended(live) => {}
            }
            begin = Instant::now();
        } else if error.class() == ErrorClass::Unavailable && !left.is_zero() {
            tokio::time::sleep(PAUSE.min(left)).await;
        } else {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests;
