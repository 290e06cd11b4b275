use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::live::{Barred, Claim, Live};
use crate::wire::Refusal;

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
    Finished(Result<(), Refusal>),
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
            Slot::Finishing => *slot = Slot::Finished(claim.finish()),
            Slot::Waiting => *slot = Slot::Held(claim),
            Slot::Held(_) | Slot::Finished(_) | Slot::Left => {}
        }
        Ok(live)
    }

    /// The consumer has every byte. Returns what came of that; `None` where it is not let in yet, and will be told once it is.
    pub(super) fn finish(&self) -> Option<Result<(), Refusal>> {
        let mut slot = self.lock();
        let (next, finished) = match std::mem::replace(&mut *slot, Slot::Left) {
            Slot::Held(claim) => {
                let finished = claim.finish();
                (Slot::Finished(finished.clone()), Some(finished))
            }
            Slot::Waiting | Slot::Finishing => (Slot::Finishing, None),
            Slot::Finished(finished) => (Slot::Finished(finished.clone()), Some(finished)),
            Slot::Left => (Slot::Left, Some(Ok(()))),
        };
        *slot = next;
        finished
    }

    /// What came of its end, where it was let in with that.
    pub(super) fn finished(&self) -> Option<Result<(), Refusal>> {
        match &*self.lock() {
            Slot::Finished(finished) => Some(finished.clone()),
            _ => None,
        }
    }

    /// It is not let in. Should it have said already that it has every byte, or say so before it hears this, that is what
    /// it is answered, too.
    pub(super) fn refuse(&self, refusal: Refusal) {
        let slot = std::mem::replace(&mut *self.lock(), Slot::Finished(Err(refusal)));
        drop(slot);
    }

    pub(super) fn leave(&self) {
        let slot = std::mem::replace(&mut *self.lock(), Slot::Left);
        drop(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_refused_has_finished_nothing() {
        for early in [true, false] {
            let watched = Watched::default();
            if early {
                assert!(watched.finish().is_none(), "it is not known yet");
            }
            watched.refuse(Refusal::Claimed);
            for _ in 0..2 {
                assert!(matches!(watched.finish(), Some(Err(Refusal::Claimed))), "{watched:?}");
            }
        }
    }
}
