use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::live::{Barred, Claim, Live};

/// What one consumer has of one payload. Its claim ends at once when it leaves, whatever is still told to it.
#[derive(Debug, Clone, Default)]
pub(super) struct Watched(Arc<Mutex<Slot>>);

#[derive(Debug, Default)]
enum Slot {
    /// It may be let in.
    #[default]
    Waiting,
    Held(Claim),
    /// It said that it has every byte before it was let in.
    Finishing,
    Finished,
    Left,
}

impl Watched {
    fn lock(&self) -> MutexGuard<'_, Slot> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the claim of a consumer that was let in, for as long as it is there.
    pub(super) fn admit(&self, claim: Result<Claim, Barred>) -> Result<Arc<Live>, Barred> {
        let claim = claim?;
        let live = Arc::clone(claim.live());
        let mut slot = self.lock();
        match &*slot {
            Slot::Finishing => {
                *slot = Slot::Finished;
                drop(slot);
                claim.finish();
            }
            Slot::Waiting => *slot = Slot::Held(claim),
            Slot::Held(_) | Slot::Finished | Slot::Left => {}
        }
        Ok(live)
    }

    /// The consumer has every byte. Returns whether that is done; else it is once the consumer is let in.
    pub(super) fn finish(&self) -> bool {
        let mut slot = self.lock();
        match std::mem::replace(&mut *slot, Slot::Finished) {
            Slot::Held(claim) => {
                drop(slot);
                claim.finish();
                true
            }
            Slot::Waiting | Slot::Finishing => {
                *slot = Slot::Finishing;
                false
            }
            Slot::Finished | Slot::Left => true,
        }
    }

    pub(super) fn has_finished(&self) -> bool {
        matches!(&*self.lock(), Slot::Finished)
    }

    pub(super) fn leave(&self) {
        let slot = std::mem::replace(&mut *self.lock(), Slot::Left);
        drop(slot);
    }
}
