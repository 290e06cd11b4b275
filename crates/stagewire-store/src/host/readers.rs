//! Who keeps the bytes of objects that are gone.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::object::HostObject;
use crate::{Reading, Usage};

/// Objects that are gone, for as long as somebody reads them.
#[derive(Debug, Default)]
pub(super) struct Leaving(Mutex<Vec<Weak<HostObject>>>);

impl Leaving {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<HostObject>>> {
        let mut leaving = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        leaving.retain(|object| object.strong_count() > 0);
        leaving
    }

    pub(super) fn add(&self, object: &Arc<HostObject>) {
        self.lock().push(Arc::downgrade(object));
    }

    /// Who reads them, those with most bytes first.
    pub(super) fn readers(&self) -> Vec<Reading> {
        let objects: Vec<_> = self.lock().iter().filter_map(Weak::upgrade).collect();
        let mut readers: BTreeMap<Option<u32>, Reading> = BTreeMap::new();
        for object in &objects {
            let mut here: BTreeMap<Option<u32>, Duration> = BTreeMap::new();
            for reader in object.each_region().flat_map(|region| region.readers()) {
                let since = here.entry(reader.pid).or_default();
                *since = reader.since.elapsed().max(*since);
            }
            for (pid, since) in here {
                let reading = readers.entry(pid).or_insert_with(|| Reading {
                    pid,
                    stopped: pid.is_some_and(is_stopped),
                    objects: 0,
                    nbytes: Default::default(),
                    since,
                });
                reading.objects += 1;
                reading.nbytes += object.about().nbytes();
                reading.since = reading.since.max(since);
            }
        }
        let mut readers: Vec<_> = readers.into_values().collect();
        readers.sort_by_key(|reading| Reverse(reading.nbytes));
        readers.truncate(Usage::LARGEST);
        readers
    }
}

/// Whether a process is stopped, for all that the kernel tells.
fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name of the program is in parentheses, and may have some itself.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('T' | 't'))
}
