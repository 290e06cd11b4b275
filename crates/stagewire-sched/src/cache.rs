//! Outputs that are kept for jobs that would make the same again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use stagewire_core::{JobId, PayloadId, Token};

use crate::PayloadInfo;
use crate::job::{CacheUse, Job};
use crate::topology::{StageIndex, Topology};

/// Of all bytes, what outputs that no job needs at present may take.
const IDLE_SHARE: u64 = 4;
/// Outputs that are kept for nobody in particular.
const MAX_IDLE: usize = 1024;

/// Names all that the output of a stage depends on: jobs with the same key would make the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CacheKey(pub u128);

impl fmt::Display for CacheKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// What is cached, as people count it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheTally {
    /// Outputs that are kept.
    pub payloads: u64,
    /// Bytes of those that some job needs at present. They count as held.
    pub used_bytes: u64,
    /// Bytes of the others, which go when room is needed.
    pub idle_bytes: u64,
}

/// An output that is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) payload: PayloadInfo,
    /// The attempt that made it.
    pub(crate) token: Token,
    /// Grows with each use.
    used: u64,
}

/// What there is to say of it after a restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub(crate) struct Kept {
    clock: u64,
    entries: BTreeMap<CacheKey, Entry>,
}

/// Who has to do with a key.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Party {
    /// Jobs whose output it is.
    users: BTreeSet<JobId>,
    /// Jobs that have not begun to make it. Those among them that wait for the one that makes it stand in `awaiting`.
    idle: BTreeSet<(JobId, StageIndex)>,
    awaiting: BTreeSet<(JobId, StageIndex)>,
    /// Jobs that make it.
    making: BTreeSet<JobId>,
}

/// Every output that is kept, by key. But for its entries and their order, all follows from the jobs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Cache {
    kept: Kept,
    by_payload: BTreeMap<PayloadId, CacheKey>,
    parties: BTreeMap<CacheKey, Party>,
    /// Entries without users, the one that was used longest ago first.
    idle: BTreeSet<(u64, CacheKey)>,
    idle_bytes: u64,
    used_bytes: u64,
    /// Keys with a job that need not wait any more.
    due: BTreeSet<CacheKey>,
}

impl Cache {
    /// As it is for these jobs.
    pub(crate) fn of<'a>(kept: Kept, topology: &Topology, jobs: impl Iterator<Item = &'a Job>) -> Self {
        let mut cache = Self::default();
        for (key, entry) in &kept.entries {
            cache.insert(*key, entry.payload.clone(), entry.token);
        }
        for job in jobs {
            cache.move_job(job.id(), &[], &job.cache_uses(topology));
        }
        cache.idle.clear();
        for (key, entry) in &kept.entries {
            if cache.users(*key).next().is_none() {
                cache.idle.insert((entry.used, *key));
            }
        }
        cache.kept = kept;
        cache
    }

    pub(crate) const fn kept(&self) -> &Kept {
        &self.kept
    }

    pub(crate) const fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    pub(crate) fn tally(&self) -> CacheTally {
        CacheTally {
            payloads: self.kept.entries.len() as u64,
            used_bytes: self.used_bytes,
            idle_bytes: self.idle_bytes,
        }
    }

    pub(crate) fn get(&self, key: CacheKey) -> Option<&Entry> {
        self.kept.entries.get(&key)
    }

    /// The key under which this payload is kept.
    pub(crate) fn key_of(&self, payload: PayloadId) -> Option<CacheKey> {
        self.by_payload.get(&payload).copied()
    }

    pub(crate) fn payloads(&self) -> impl Iterator<Item = PayloadId> {
        self.by_payload.keys().copied()
    }

    /// Those that no job uses.
    pub(crate) fn idle(&self) -> impl Iterator<Item = PayloadId> {
        let idle = self.idle.iter().filter_map(|(_, key)| self.get(*key));
        idle.map(|entry| entry.payload.id)
    }

    /// Jobs whose output is what is kept under this key.
    pub(crate) fn users(&self, key: CacheKey) -> impl Iterator<Item = JobId> {
        let party = self.parties.get(&key).into_iter();
        party.flat_map(|party| party.users.iter().copied())
    }

    /// A job that makes what the key names.
    pub(crate) fn maker(&self, key: CacheKey) -> Option<JobId> {
        self.parties.get(&key)?.making.first().copied()
    }

    /// A job that need not wait any more, and what is kept for it; `None` where it may have to make it itself.
    pub(crate) fn first_due(&self) -> Option<(JobId, StageIndex, Option<&Entry>)> {
        let key = self.due.first()?;
        let party = self.parties.get(key)?;
        match self.get(*key) {
            Some(entry) => party.idle.first().map(|(job, stage)| (*job, *stage, Some(entry))),
            None => party.awaiting.first().map(|(job, stage)| (*job, *stage, None)),
        }
    }

    /// The entry that goes next, where there are too many for nobody: `limit` is what all outputs together may take, and
    /// `taken` what those of jobs take.
    pub(crate) fn surplus(&self, limit: Option<u64>, taken: u64) -> Option<PayloadId> {
        let fits = |limit: u64| self.idle_bytes <= limit / IDLE_SHARE && self.idle_bytes <= limit.saturating_sub(taken);
        if self.idle.len() <= MAX_IDLE && limit.is_none_or(fits) {
            return None;
        }
        let (_, key) = self.idle.first()?;
        Some(self.get(*key)?.payload.id)
    }

    /// Keeps a payload that nobody uses yet. Returns false where there is one under this key, or under another key this one.
    pub(crate) fn insert(&mut self, key: CacheKey, payload: PayloadInfo, token: Token) -> bool {
        if self.kept.entries.contains_key(&key) || self.by_payload.contains_key(&payload.id) {
            return false;
        }
        self.by_payload.insert(payload.id, key);
        self.idle_bytes += payload.nbytes.0;
        let used = self.tick();
        self.idle.insert((used, key));
        self.kept.entries.insert(key, Entry { payload, token, used });
        self.judge(key);
        true
    }

    /// Forgets a payload. Returns false where it is not there, or is used.
    pub(crate) fn remove(&mut self, payload: PayloadId) -> bool {
        let Some(key) = self.key_of(payload).filter(|key| self.users(*key).next().is_none()) else {
            return false;
        };
        if let Some(entry) = self.kept.entries.remove(&key) {
            self.by_payload.remove(&payload);
            self.idle.remove(&(entry.used, key));
            self.idle_bytes -= entry.payload.nbytes.0;
        }
        self.judge(key);
        true
    }

    const fn tick(&mut self) -> u64 {
        self.kept.clock += 1;
        self.kept.clock
    }

    /// Takes note of what a job has to do with its keys now, and had before.
    pub(crate) fn move_job(&mut self, job: JobId, before: &[CacheUse], after: &[CacheUse]) {
        // A job that goes on using a payload has not used it again.
        for one in before.iter().filter(|one| !after.contains(one)) {
            self.set(job, one, false);
        }
        for one in after.iter().filter(|one| !before.contains(one)) {
            self.set(job, one, true);
        }
    }

    fn set(&mut self, job: JobId, what: &CacheUse, there: bool) {
        fn put<T: Ord>(set: &mut BTreeSet<T>, item: T, there: bool) -> bool {
            if there { set.insert(item) } else { set.remove(&item) }
        }
        let (key, stage) = match *what {
            CacheUse::Idle { key, stage, awaiting } => {
                let party = self.parties.entry(key).or_default();
                put(&mut party.idle, (job, stage), there);
                if awaiting {
                    put(&mut party.awaiting, (job, stage), there);
                }
                (key, None)
            }
            CacheUse::Making { key } => {
                put(&mut self.parties.entry(key).or_default().making, job, there);
                (key, None)
            }
            CacheUse::Using { key } => {
                let users = &mut self.parties.entry(key).or_default().users;
                put(users, job, there);
                (key, Some(users.len()))
            }
        };
        match (stage, there) {
            (Some(1), true) => self.begin_use(key),
            (Some(0), false) => self.end_use(key),
            _ => (),
        }
        if self.parties.get(&key).is_some_and(|party| *party == Party::default()) {
            self.parties.remove(&key);
        }
        self.judge(key);
    }

    /// The first job uses it.
    fn begin_use(&mut self, key: CacheKey) {
        if let Some(entry) = self.kept.entries.get(&key) {
            self.idle.remove(&(entry.used, key));
            self.idle_bytes -= entry.payload.nbytes.0;
            self.used_bytes += entry.payload.nbytes.0;
        }
    }

    /// The last job that used it does not any more.
    fn end_use(&mut self, key: CacheKey) {
        let used = self.tick();
        if let Some(entry) = self.kept.entries.get_mut(&key) {
            entry.used = used;
            self.idle.insert((used, key));
            self.idle_bytes += entry.payload.nbytes.0;
            self.used_bytes -= entry.payload.nbytes.0;
        }
    }

    /// Whether somebody who waits for this key need not.
    fn judge(&mut self, key: CacheKey) {
        let due = self.parties.get(&key).is_some_and(|party| {
            let stranded = party.making.is_empty() && !party.awaiting.is_empty();
            (self.kept.entries.contains_key(&key) && !party.idle.is_empty()) || stranded
        });
        if due {
            self.due.insert(key);
        } else {
            self.due.remove(&key);
        }
    }
}
