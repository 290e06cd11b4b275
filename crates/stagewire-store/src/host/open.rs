//! Taking over what the process before left.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use stagewire_core::{ByteCount, PayloadId};
use stagewire_transfer::{AdoptError, Arena, Extent, Host, Inherited, Location, SegmentName};

use super::durable::Durable;
use super::object::{About, HostObject};
use super::rooms::in_pages;
use super::{HostStore, Inner, index};
use crate::journal::{Entry, Place, Record};
use crate::spill::Spill;
use crate::{Digest, ObjectState, OpenError, Recovery, StoreOptions, Survivor};

/// Segments of a durable store are this part of its limit: each goes, after a restart, once nothing of it is in use.
const SEGMENTS: u64 = 8;
/// Smallest segment.
const SEGMENT: u64 = 4 << 20;

/// Milliseconds since 1970.
pub(super) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl HostStore {
    /// A store in the arena of `host`: see [`HostStore::arena_limit`]. A durable one begins with everything that was
    /// sealed and not deleted when the process before ended, however it ended.
    ///
    /// # Errors
    /// [`OpenError`]; what the process before left stays as it is then.
    ///
    /// # Cancel safety
    /// A dropped future leaves everything as it was for the next one to open.
    ///
    /// # Panics
    /// Where it is not called on a tokio runtime.
    pub async fn open(host: &Arc<Host>, options: StoreOptions) -> Result<(Self, Recovery), OpenError> {
        let StoreOptions {
            limit,
            gate,
            durable,
            spill,
        } = options;
        let begin = Instant::now();
        let found = match durable {
            Some(durable) => Some(blocking(move || Durable::open(&durable)).await?),
            None => None,
        };
        let files = found.as_ref().map(|found| named(&found.durable)).unwrap_or_default();
        let id = found.as_ref().map(|found| found.durable.id.clone());
        let spill = match spill {
            Some(spill) => Some(blocking(move || Spill::open(&spill, &files, id.as_deref())).await?),
            None if files.is_empty() => None,
            None => return Err(OpenError::NoSpill { files: files.len() }),
        };
        let mut inner = Inner::new(host, limit, gate, spill);
        let Some(found) = found else {
            return Ok((Self::start(inner), Recovery::default()));
        };
        host.arena().segments_of(ByteCount((limit.0 / SEGMENTS).max(SEGMENT)));
        inner.durable = Some(Arc::new(found.durable));
        let store = Self::start(inner);
        let mut recovery = Recovery {
            torn_bytes: found.torn_bytes,
            ..Recovery::default()
        };
        let (inner, segments) = (Arc::clone(&store.inner), found.segments);
        // Copying may take a while.
        let mut recovery = blocking(move || {
            inner.recover(segments, &mut recovery)?;
            inner.recover_files(&mut recovery)?;
            Ok::<_, OpenError>(recovery)
        })
        .await?;
        recovery.took = begin.elapsed();
        if let Some(durable) = &store.inner.durable {
            durable.watch(host.arena());
        }
        Ok((store, recovery))
    }
}

pub(super) async fn blocking<T: Send + 'static, E: Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

/// The files that the index names.
fn named(durable: &Durable) -> BTreeSet<String> {
    let ledger = durable.journal.ledger();
    let files = ledger.entries().values().filter_map(|entry| match &entry.place {
        Place::File { name, .. } => Some(name.clone()),
        Place::Memory(_) => None,
    });
    files.collect()
}

/// What the index knows of one object in memory.
struct Remembered {
    payload: PayloadId,
    entry: Entry,
    locations: Vec<Option<Location>>,
}

impl Inner {
    /// Makes everything readable again that is there. Blocks.
    fn recover(&self, segments: Vec<Inherited>, recovery: &mut Recovery) -> Result<(), OpenError> {
        let Some(durable) = &self.durable else { return Ok(()) };
        let Durable { journal, keeping, .. } = &**durable;
        let arena = self.host.arena();
        let now = now();
        let mut there: HashMap<SegmentName, Inherited> =
            segments.into_iter().map(|segment| (segment.name, segment)).collect();
        let (mut kept, mut gone_by_now, mut held) = (Vec::new(), Vec::new(), 0);
        for (payload, entry) in journal.ledger().entries() {
            let nbytes = size(entry);
            let Place::Memory(locations) = &entry.place else {
                continue;
            };
            check_parts(*payload, entry, locations)?;
            let gone = locations
                .iter()
                .flatten()
                .any(|location| !there.contains_key(&location.segment));
            if gone || entry.expires_at.is_some_and(|at| at <= now) {
                let share = if gone {
                    &mut recovery.lost
                } else {
                    &mut recovery.expired
                };
                share.add(nbytes);
                gone_by_now.push(*payload);
                continue;
            }
            held += nbytes.0;
            kept.push(Remembered {
                payload: *payload,
                entry: entry.clone(),
                locations: locations.clone(),
            });
        }
        if held > self.rooms.limit().0 {
            let (held, limit) = (ByteCount(held), self.rooms.limit());
            return Err(OpenError::Smaller { held, limit });
        }
        let mut extents = adopt(arena, &mut there, &kept)?;
        // Only now: where this store cannot be opened, another try finds everything.
        for payload in gone_by_now {
            let _ = journal.append(Record::Gone(payload))?;
        }
        for remembered in kept {
            let Remembered {
                payload,
                entry,
                locations,
            } = remembered;
            let nbytes = size(&entry);
            recovery.adopted.add(nbytes);
            let extents = locations.iter().map(|location| {
                let adopted = |location| extents.remove(location).expect("adopted, and of one object");
                location.as_ref().map(adopted)
            });
            let extents: Vec<_> = extents.collect();
            let parts = extents.into_iter().map(|extent| self.register_part(extent));
            let parts = parts.collect::<Result<_, _>>();
            let parts = parts.map_err(|source| OpenError::Register { payload, source })?;
            let room = self.rooms.try_take(nbytes).ok_or(OpenError::Smaller {
                held: ByteCount(held),
                limit: self.rooms.limit(),
            })?;
            let room = room.give(payload, nbytes);
            room.set(ObjectState::Sealed);
            let about = Arc::new(about(payload, &entry, now));
            let object = Arc::new(HostObject::new(Arc::clone(&about), parts, room));
            self.lock().put(&about, index::Place::Memory(object));
            recovery.survivors.push(survivor(payload, entry, now));
        }
        self.deadlines.notify_one();
        drop(there);
        // Memory that is mostly wasted is not kept. Where there is no room for a copy, the original is as good.
        let mut moved = BTreeSet::new();
        for segment in arena
            .adopted()
            .iter()
            .filter(|segment| segment.used.0 < segment.taken.0 / 2)
        {
            for (payload, nbytes) in self.evacuate(segment) {
                if moved.insert(payload) {
                    recovery.adopted.take(nbytes);
                    recovery.moved.add(nbytes);
                }
            }
        }
        journal.shorten()?;
        keeping.drop_retired(arena, journal);
        Ok(())
    }

    /// Makes everything readable again that is in files. Blocks.
    fn recover_files(&self, recovery: &mut Recovery) -> Result<(), OpenError> {
        let (Some(durable), Some(spill)) = (&self.durable, &self.spill) else {
            return Ok(());
        };
        let now = now();
        for (payload, entry) in durable.journal.ledger().entries() {
            let Place::File { name, digest } = &entry.place else {
                continue;
            };
            let about = Arc::new(about(*payload, entry, now));
            let file = spill.adopt(name.clone(), Digest(*digest), &about.parts)?;
            let expired = entry.expires_at.is_some_and(|at| at <= now);
            match file {
                Some(file) if !expired => {
                    recovery.files.add(about.nbytes());
                    self.lock().put(&about, index::Place::File(Arc::new(file)));
                    recovery.survivors.push(survivor(*payload, entry.clone(), now));
                }
                file => {
                    let share = if file.is_none() {
                        &mut recovery.lost
                    } else {
                        &mut recovery.expired
                    };
                    share.add(about.nbytes());
                    let _ = durable.journal.append(Record::Gone(*payload))?;
                }
            }
        }
        Ok(())
    }
}

fn expires(entry: &Entry, now: u64) -> Option<Duration> {
    entry.expires_at.map(|at| Duration::from_millis(at.saturating_sub(now)))
}

fn about(payload: PayloadId, entry: &Entry, now: u64) -> About {
    let deadline = |after| tokio::time::Instant::now().checked_add(after);
    About {
        payload,
        token: entry.token,
        retention: entry.retention.into(),
        deadline: expires(entry, now).and_then(deadline),
        parts: entry.parts.iter().copied().map(ByteCount).collect(),
        label: entry.label.clone(),
    }
}

fn survivor(payload: PayloadId, entry: Entry, now: u64) -> Survivor {
    Survivor {
        payload,
        token: entry.token,
        expires: expires(&entry, now),
        label: entry.label,
    }
}

/// The extents of segments of the process before.
fn adopt(
    arena: &Arena,
    there: &mut HashMap<SegmentName, Inherited>,
    kept: &[Remembered],
) -> Result<BTreeMap<Location, Extent>, AdoptError> {
    let mut used: BTreeMap<SegmentName, Vec<(u64, u64)>> = BTreeMap::new();
    for location in kept.iter().flat_map(|remembered| remembered.locations.iter().flatten()) {
        let in_use = used.entry(location.segment).or_default();
        in_use.push((location.offset, location.len));
    }
    let mut extents = BTreeMap::new();
    for (segment, in_use) in used {
        let inherited = there.remove(&segment).expect("looked for before");
        let adopted = arena.adopt(inherited, &in_use)?.into_iter();
        extents.extend(adopted.map(|extent| (extent.location(), extent)));
    }
    Ok(extents)
}

fn size(entry: &Entry) -> ByteCount {
    in_pages(&entry.parts.iter().copied().map(ByteCount).collect::<Vec<_>>())
}

fn check_parts(payload: PayloadId, entry: &Entry, locations: &[Option<Location>]) -> Result<(), OpenError> {
    let found = locations
        .iter()
        .map(|location| location.as_ref().map_or(0, |location| location.len));
    if entry.parts.iter().copied().eq(found) {
        Ok(())
    } else {
        let parts = entry.parts.clone();
        Err(OpenError::Parts { payload, parts })
    }
}
