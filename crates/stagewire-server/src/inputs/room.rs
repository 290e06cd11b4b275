//! Room for what comes, and what goes for it.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use stagewire_core::ByteCount;
use tokio_util::sync::CancellationToken;

use super::{InputError, InputName, Inputs, lock};
use crate::driver::{DriveError, Driver};

/// How often inputs that nobody needs are looked for, at most and at least.
const SWEEPS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_mins(1));

/// Room that an upload has taken; free again when dropped.
#[derive(Debug)]
pub(super) struct Room {
    inputs: Arc<Inputs>,
    pub(super) bytes: u64,
}

impl Room {
    pub(super) const fn none(inputs: Arc<Inputs>) -> Self {
        Self { inputs, bytes: 0 }
    }

    /// Takes so much more, for which inputs may go that nobody needs, the oldest first.
    ///
    /// # Errors
    /// [`InputError::Room`]; [`InputError::Drive`] where the server stops.
    pub(super) async fn grow(&mut self, more: u64, driver: &Driver) -> Result<(), InputError> {
        while !self.try_grow(more) {
            let inputs = Arc::clone(&self.inputs);
            if inputs.drop_unused(driver, Wanted::Bytes(more)).await? == 0 && !self.try_grow(more) {
                let state = lock(&inputs.state);
                return Err(InputError::Room {
                    need: ByteCount(more),
                    used: ByteCount(state.held + state.reserved),
                    limit: inputs.bounds.total,
                });
            }
        }
        Ok(())
    }

    fn try_grow(&mut self, more: u64) -> bool {
        let mut state = lock(&self.inputs.state);
        let fits = state.held + state.reserved + more <= self.inputs.bounds.total.0;
        if fits {
            state.reserved += more;
            self.bytes += more;
        }
        fits
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        lock(&self.inputs.state).reserved -= self.bytes;
    }
}

/// Which inputs go.
#[derive(Debug, Clone, Copy)]
enum Wanted {
    /// The oldest, until so many more bytes fit.
    Bytes(u64),
    /// Those that nobody has needed for so long.
    Idle(Duration),
}

/// An input that may go, unless it is used in the meantime.
#[derive(Debug)]
struct Candidate {
    name: InputName,
    used: u64,
}

impl Inputs {
    /// Drops inputs that nobody needs, and tells how many.
    async fn drop_unused(self: &Arc<Self>, driver: &Driver, wanted: Wanted) -> Result<usize, DriveError> {
        let candidates = self.candidates(wanted);
        if candidates.is_empty() {
            return Ok(0);
        }
        // A submission that this look does not see yet has pinned, and so used, what it refers to.
        let live = driver.look(|sched, _| {
            let live = sched.jobs().filter(|job| job.outcome().is_none());
            live.map(|job| Arc::clone(job.params())).collect::<Vec<_>>()
        });
        let live = live.await?;
        let this = Arc::clone(self);
        let dropped = tokio::task::spawn_blocking(move || {
            let needed: BTreeSet<_> = live.iter().flat_map(|params| InputName::all_in(params)).collect();
            this.drop_candidates(&candidates, &needed, wanted)
        });
        Ok(dropped.await.unwrap_or(0))
    }

    /// What may go, the oldest first.
    fn candidates(&self, wanted: Wanted) -> Vec<Candidate> {
        let state = lock(&self.state);
        let unused = state.entries.iter().filter(|(_, entry)| {
            entry.pins == 0
                && match wanted {
                    Wanted::Bytes(_) => true,
                    Wanted::Idle(time) => entry.idle.elapsed() >= time,
                }
        });
        let mut candidates: Vec<_> = unused
            .map(|(name, entry)| Candidate {
                name: name.clone(),
                used: entry.used,
            })
            .collect();
        candidates.sort_by_key(|candidate| candidate.used);
        candidates
    }

    fn drop_candidates(&self, candidates: &[Candidate], needed: &BTreeSet<InputName>, wanted: Wanted) -> usize {
        let _files = lock(&self.files);
        let mut dropped = 0;
        for Candidate { name, used } in candidates {
            let mut state = lock(&self.state);
            if let Wanted::Bytes(more) = wanted
                && state.held + state.reserved + more <= self.bounds.total.0
            {
                break;
            }
            let unused = |entry: &&mut super::Entry| entry.used == *used && entry.pins == 0;
            let Some(entry) = state.entries.get_mut(name).filter(unused) else {
                continue;
            };
            if needed.contains(name) {
                entry.idle = std::time::Instant::now();
                continue;
            }
            state.held -= entry.nbytes;
            state.entries.remove(name);
            drop(state);
            dropped += 1;
            for path in [self.path(name), self.type_path(name)] {
                match std::fs::remove_file(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        tracing::warn!(path = %path.display(), %error, "cannot delete an input");
                    }
                    _ => {}
                }
            }
        }
        dropped
    }

    /// Drops what nobody has needed for its time, until told to stop.
    pub(crate) async fn sweep(self: Arc<Self>, driver: Driver, stop: CancellationToken) {
        let idle = self.bounds.idle;
        let pause = (idle / 8).clamp(SWEEPS.0, SWEEPS.1);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            if self.drop_unused(&driver, Wanted::Idle(idle)).await.is_err() {
                return;
            }
        }
    }
}
