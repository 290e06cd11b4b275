//! Dead letters that go where their inputs are in the way of others.

use std::collections::{BTreeMap, BTreeSet};

use stagewire_core::JobId;
use stagewire_sched::{Discard, Input};

use super::{Needed, charge};
use crate::driver::{DriveError, Driver};
use crate::inputs::{InputError, InputName, Inputs, lock};

/// A dead letter, and the inputs that it refers to.
#[derive(Debug)]
pub(super) struct Dead {
    pub(super) job: JobId,
    pub(super) names: BTreeSet<InputName>,
}

impl Inputs {
    /// Discards the dead letters that died first, of those that alone keep inputs, until so many more bytes fit once inputs
    /// are dropped that nobody needs, and tells whether they do then. Where they would not, it discards none.
    pub(super) async fn crowd_out(&self, more: u64, driver: &Driver) -> Result<bool, InputError> {
        let (needed, dead) = self.referred(driver).await?;
        let Some(going) = self.crowded(more, &needed, &dead) else {
            return Ok(false);
        };
        for job in going {
            let why = Discard::Crowded;
            match driver.decide(Input::Discard { job, why }).await {
                Ok(_) => tracing::warn!(%job, "discarded a dead letter: its inputs took the room of others"),
                // Somebody has redriven or discarded it meanwhile.
                Err(DriveError::Refused(_)) => {}
                Err(stopped) => return Err(stopped.into()),
            }
        }
        Ok(true)
    }

    /// Those that go, where that is enough.
    fn crowded(&self, more: u64, needed: &Needed, dead: &[Dead]) -> Option<Vec<JobId>> {
        let state = lock(&self.state);
        // Inputs that dead letters alone keep, and how many of them do.
        let mut kept = BTreeMap::new();
        for name in dead.iter().flat_map(|letter| &letter.names) {
            let entry = state.entries.get(name);
            if entry.is_some_and(|entry| !needed.is(name, entry)) {
                *kept.entry(name).or_insert(0_usize) += 1;
            }
        }
        let stays = state.entries.iter();
        let stays = stays.filter(|(name, entry)| kept.contains_key(name) || needed.is(name, entry));
        let stays: u64 = stays.map(|(_, entry)| charge(entry.nbytes)).sum();
        let mut taken = state.reserved + stays + more;
        let mut going = Vec::new();
        for letter in dead {
            if taken <= self.bounds.total.0 {
                break;
            }
            for name in &letter.names {
                let Some(letters) = kept.get_mut(name) else { continue };
                *letters -= 1;
                if *letters == 0 {
                    taken -= charge(state.entries[name].nbytes);
                }
            }
            going.push(letter);
        }
        // Not those whose inputs all stay.
        going.retain(|letter| letter.names.iter().any(|name| kept.get(name) == Some(&0)));
        let enough = taken <= self.bounds.total.0;
        enough.then(|| going.iter().map(|letter| letter.job).collect())
    }
}
