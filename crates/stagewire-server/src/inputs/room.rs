//! Room for what comes, and what goes for it.

mod crowd;

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stagewire_core::ByteCount;
use tokio_util::sync::CancellationToken;

use self::crowd::Dead;
use super::{InputError, InputName, Inputs, lock};
use crate::driver::{DriveError, Driver};

/// What an input counts for at least, so that the bound of their bytes is one of their number, too.
pub(crate) const LEAST: u64 = 64 << 10;
/// How often inputs that nobody needs are looked for, at most and at least.
const SWEEPS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_mins(1));

/// What an input of so many bytes counts for.
pub(super) fn charge(nbytes: u64) -> u64 {
    nbytes.max(LEAST)
}

/// Room that an upload has taken; free again when dropped.
#[derive(Debug)]
pub(super) struct Room {
    inputs: Arc<Inputs>,
    bytes: u64,
}

impl Room {
    pub(super) const fn none(inputs: Arc<Inputs>) -> Self {
        Self { inputs, bytes: 0 }
    }

    /// Sees to it that there is room for an input of so many bytes, for which others may go that nobody needs, the oldest
    /// first, and then the dead letters that died first, with theirs; none goes where that would not be enough.
    ///
    /// # Errors
    /// [`InputError::Room`]; [`InputError::Store`]; [`InputError::Drive`] where the server stops.
    pub(super) async fn hold(&mut self, nbytes: u64, driver: &Driver) -> Result<(), InputError> {
        let more = charge(nbytes).saturating_sub(self.bytes);
        while more > 0 && !self.try_grow(more) {
            let made = self.inputs.make_room(more, driver).await? > 0;
            if !made && !self.inputs.crowd_out(more, driver).await? {
                // What was being sent may have ended meanwhile.
                return if self.try_grow(more) {
                    Ok(())
                } else {
                    Err(self.refusal(more))
                };
            }
        }
        Ok(())
    }

    fn try_grow(&mut self, more: u64) -> bool {
        let mut state = lock(&self.inputs.state);
        let fits = state.taken() + more <= self.inputs.bounds.total.0;
        if fits {
            state.reserved += more;
            self.bytes += more;
        }
        fits
    }

    fn refusal(&self, more: u64) -> InputError {
        InputError::Room {
            need: ByteCount(more),
            used: ByteCount(lock(&self.inputs.state).taken()),
            limit: self.inputs.bounds.total,
        }
    }

    /// The input is there, and has the room from now on.
    pub(super) fn fill(mut self, name: InputName, nbytes: u64, media_type: String) {
        let mut state = lock(&self.inputs.state);
        state.reserved -= std::mem::take(&mut self.bytes);
        state.insert(name, nbytes, media_type);
        drop(state);
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        lock(&self.inputs.state).reserved -= self.bytes;
    }
}

/// What jobs need, as far as they had been submitted at a time.
struct Needed {
    names: BTreeSet<InputName>,
    /// Uses of inputs until then. One that was used later may have a job that is not seen here.
    uses: u64,
}

impl Needed {
    fn is(&self, name: &InputName, entry: &super::Entry) -> bool {
        entry.pins > 0 || entry.used > self.uses || self.names.contains(name)
    }
}

impl Inputs {
    /// What jobs need that have not ended, and what dead letters do, the first to die first.
    async fn referred(&self, driver: &Driver) -> Result<(Needed, Vec<Dead>), DriveError> {
        let uses = lock(&self.state).uses;
        let look = driver.look(|sched, _| {
            let live = sched.jobs().filter(|job| job.outcome().is_none());
            let live: Vec<_> = live.map(|job| Arc::clone(job.params())).collect();
            let dead = sched.dead_letters().map(|letter| letter.job);
            let dead: Vec<_> = dead.map(|job| (job.id(), Arc::clone(job.params()))).collect();
            (live, dead)
        });
        let (live, dead) = look.await?;
        let names = live.iter().flat_map(|params| InputName::all_in(params)).collect();
        let dead = dead.into_iter().map(|(job, params)| Dead {
            job,
            names: InputName::all_in(&params).collect(),
        });
        Ok((Needed { names, uses }, dead.collect()))
    }

    /// Dead letters count, since they may be redriven.
    async fn needed(&self, driver: &Driver) -> Result<Needed, DriveError> {
        let (mut needed, dead) = self.referred(driver).await?;
        needed.names.extend(dead.into_iter().flat_map(|letter| letter.names));
        Ok(needed)
    }

    /// Drops inputs that nobody needs, the oldest first, until so many more bytes fit, and tells how many. Where they would
    /// not fit without any of those, it drops none.
    async fn make_room(self: &Arc<Self>, more: u64, driver: &Driver) -> Result<usize, InputError> {
        let needed = self.needed(driver).await?;
        self.dropping(move |inputs| inputs.drop_oldest(more, &needed)).await
    }

    fn drop_oldest(&self, more: u64, needed: &Needed) -> usize {
        self.drop_those(|state| {
            let mut unused: Vec<_> = state
                .entries
                .iter()
                .filter(|(name, entry)| !needed.is(name, entry))
                .collect();
            unused.sort_by_key(|(_, entry)| entry.used);
            let mut taken = state.taken() + more;
            let mut going = Vec::new();
            for (name, entry) in unused {
                if taken <= self.bounds.total.0 {
                    break;
                }
                taken -= charge(entry.nbytes);
                going.push(name.clone());
            }
            if taken <= self.bounds.total.0 {
                going
            } else {
                Vec::new()
            }
        })
    }

    /// Drops what nobody has needed for its time.
    fn drop_idle(&self, now: Instant, needed: &Needed) -> usize {
        self.drop_those(|state| {
            let mut going = Vec::new();
            for (name, entry) in &mut state.entries {
                if needed.is(name, entry) {
                    entry.idle = None;
                } else if now.saturating_duration_since(*entry.idle.get_or_insert(now)) >= self.bounds.idle {
                    going.push(name.clone());
                }
            }
            going
        })
    }

    /// On a thread that may wait for the disk.
    async fn dropping(
        self: &Arc<Self>,
        drop: impl FnOnce(&Self) -> usize + Send + 'static,
    ) -> Result<usize, InputError> {
        let this = Arc::clone(self);
        let dropped = tokio::task::spawn_blocking(move || drop(&this)).await;
        dropped.map_err(|error| InputError::store("drop", io::Error::other(error)))
    }

    fn drop_those(&self, choose: impl FnOnce(&mut super::State) -> Vec<InputName>) -> usize {
        let _files = lock(&self.files);
        let mut state = lock(&self.state);
        let going = choose(&mut state);
        going.iter().for_each(|name| state.remove(name));
        drop(state);
        for path in going.iter().flat_map(|name| [self.path(name), self.type_path(name)]) {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path = %path.display(), %error, "cannot delete an input");
                }
                _ => {}
            }
        }
        going.len()
    }

    /// Drops what nobody has needed for its time, until told to stop.
    pub(crate) async fn sweep(self: Arc<Self>, driver: Driver, stop: CancellationToken) {
        let pause = (self.bounds.idle / 8).clamp(SWEEPS.0, SWEEPS.1);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            if lock(&self.state).entries.is_empty() {
                continue;
            }
            let Ok(needed) = self.needed(&driver).await else { return };
            let now = Instant::now();
            if let Err(error) = self.dropping(move |inputs| inputs.drop_idle(now, &needed)).await {
                tracing::error!(%error, "cannot drop inputs that nobody needs");
            }
        }
    }
}

#[cfg(test)]
mod tests;
