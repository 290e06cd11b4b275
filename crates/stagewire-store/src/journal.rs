//! What a store must still know after its process was killed: an append-only file.
//!
//! A record is in the page cache when [`Journal::append`] returns, so that it outlives the process, though not the
//! machine. That is enough for objects in memory, which die with the machine anyway. What is about a spill file is
//! synced before anybody relies on it, by [`Journal::sync`], which callers share.

mod error;
mod frame;
mod record;

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stagewire_transfer::SegmentName;

pub use error::JournalError;
#[cfg(test)]
pub(crate) use record::Kept;
pub(crate) use record::{Entry, Ledger, Place, Record};

use frame::{Found, Frames};

const NAME: &str = "index.journal";
/// A journal shorter than this is not worth summing up.
const SHORT: u64 = 256 << 10;
/// How many times as long as its sum a journal may become.
const LONG: u64 = 4;

/// The journal of one store, open for appending.
pub(crate) struct Journal {
    path: PathBuf,
    state: Mutex<State>,
    /// Held while syncing. Records up to this number are safe from a loss of power.
    synced: Mutex<u64>,
}

struct State {
    file: Arc<File>,
    /// Bytes that are good.
    len: u64,
    /// Length that the sum of everything would have.
    sum: u64,
    ledger: Ledger,
    /// Records appended so far.
    count: u64,
    /// What could not be written when it happened.
    unwritten: Vec<u8>,
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Journal")
            .field("path", &self.path)
            .field("len", &state.len)
            .field("objects", &state.ledger.entries().len())
            .finish_non_exhaustive()
    }
}

/// What an append asks of its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Appended {
    /// Nothing more: it is about memory.
    Done,
    /// [`Journal::sync`] before anybody relies on it.
    Sync,
    /// There is no such object; nothing was written.
    Unknown,
}

impl Journal {
    /// Opens the journal in `dir`, or begins one. Returns the bytes of a torn end as well, which is cut off.
    ///
    /// # Errors
    /// [`JournalError`]; the file is left as it is then.
    pub(crate) fn open(dir: &Path) -> Result<(Self, u64), JournalError> {
        let path = dir.join(NAME);
        let failed = |what| {
            let path = path.clone();
            move |source| JournalError::Io { what, path, source }
        };
        let mut file = open(&path, false).map_err(failed("open"))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed("read"))?;
        let fresh = frame::file_header().starts_with(&bytes);
        if fresh {
            file.write_all_at(&frame::file_header(), 0).map_err(failed("begin"))?;
            file.sync_data().map_err(failed("sync"))?;
            sync_dir(dir).map_err(failed("sync the directory of"))?;
        } else {
            check_header(&path, &bytes)?;
        }
        let (ledger, len, torn) = replay(&path, &bytes)?;
        if torn > 0 {
            file.set_len(len).map_err(failed("cut"))?;
            tracing::warn!(path = %path.display(), bytes = torn, "cut off the torn end of the store's index");
        }
        let mut state = State {
            file: Arc::new(file),
            len,
            sum: 0,
            ledger,
            count: 0,
            unwritten: Vec::new(),
        };
        state.sum = state.encode().len() as u64;
        let journal = Self {
            path,
            state: Mutex::new(state),
            synced: Mutex::new(0),
        };
        Ok((journal, torn))
    }

    /// Writes what happened. A record about an object that is gone already is not written.
    ///
    /// # Errors
    /// [`JournalError::Io`]. That something is gone is true all the same, and written with the next record; anything
    /// else did not happen.
    pub(crate) fn append(&self, record: Record) -> Result<Appended, JournalError> {
        let mut state = self.lock();
        let (body, undo) = (record::encode(&record), matches!(record, Record::Gone(_)));
        let payload = match &record {
            Record::Sealed(payload, _) | Record::Moved(payload, _) | Record::Gone(payload) => *payload,
        };
        let durable = |state: &State| state.ledger.get(payload).is_some_and(|entry| entry.place.is_durable());
        let before = state.ledger.get(payload).cloned();
        let was = durable(&state);
        if state.ledger.apply(record).is_err() {
            return Ok(Appended::Unknown);
        }
        let sync = was || durable(&state);
        let mut bytes = std::mem::take(&mut state.unwritten);
        let earlier = bytes.len();
        frame::encode(&body, &mut bytes);
        if let Err(source) = state.file.write_all_at(&bytes, state.len) {
            // Whatever came of it is beyond the good bytes, and is written over.
            let _ = state.file.set_len(state.len);
            if undo {
                state.unwritten = bytes;
            } else {
                bytes.truncate(earlier);
                state.unwritten = bytes;
                state.restore(payload, before);
            }
            return Err(self.failed("write")(source));
        }
        state.len += bytes.len() as u64;
        state.count += 1;
        let after = weight(payload, state.ledger.get(payload));
        state.sum = (state.sum + after).saturating_sub(weight(payload, before.as_ref()));
        if state.len > SHORT && state.len > LONG * state.sum {
            let sum = state.encode();
            state.sum = sum.len() as u64;
            if state.len > SHORT && state.len > LONG * state.sum {
                // The long one is as good.
                if let Err(error) = self.replace(&mut state, &sum) {
                    tracing::warn!(%error, "the store's index could not be shortened");
                    state.sum = state.len;
                }
            }
        }
        Ok(if sync { Appended::Sync } else { Appended::Done })
    }

    /// Writes what could not be written when it happened.
    ///
    /// # Errors
    /// [`JournalError::Io`]; it is still to be written.
    pub(crate) fn retry(&self) -> Result<(), JournalError> {
        let mut state = self.lock();
        if let Err(source) = state.file.write_all_at(&state.unwritten, state.len) {
            let _ = state.file.set_len(state.len);
            return Err(self.failed("write")(source));
        }
        state.len += state.unwritten.len() as u64;
        state.unwritten.clear();
        Ok(())
    }

    /// Returns once everything appended before is safe from a loss of power. Blocks; callers at the same time share the
    /// work.
    ///
    /// # Errors
    /// [`JournalError::Io`].
    pub(crate) fn sync(&self) -> Result<(), JournalError> {
        let wanted = self.lock().count;
        let mut synced = self.synced.lock().unwrap_or_else(PoisonError::into_inner);
        if *synced >= wanted {
            return Ok(());
        }
        let (file, count) = {
            let state = self.lock();
            (Arc::clone(&state.file), state.count)
        };
        file.sync_data().map_err(self.failed("sync"))?;
        *synced = count;
        Ok(())
    }

    /// Puts one record for each object in the place of everything that was said.
    ///
    /// # Errors
    /// [`JournalError::Io`]; the journal is as it was.
    pub(crate) fn compact(&self) -> Result<(), JournalError> {
        let mut state = self.lock();
        let sum = state.encode();
        state.sum = sum.len() as u64;
        self.replace(&mut state, &sum)
    }

    /// The segments that hold something.
    pub(crate) fn segments(&self) -> BTreeSet<SegmentName> {
        let state = self.lock();
        let places = state.ledger.entries().values().map(|entry| &entry.place);
        let locations = places.flat_map(|place| match place {
            Place::Memory(locations) => locations.as_slice(),
            Place::File { .. } => &[],
        });
        locations.flatten().map(|location| location.segment).collect()
    }

    /// Whether there is nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().ledger.entries().is_empty()
    }

    /// Everything that there is.
    pub(crate) fn ledger(&self) -> Ledger {
        self.lock().ledger.clone()
    }

    fn replace(&self, state: &mut State, sum: &[u8]) -> Result<(), JournalError> {
        let new = self.path.with_extension("new");
        let durable = state.ledger.entries().values().any(|entry| entry.place.is_durable());
        let replace = || -> io::Result<File> {
            let file = open(&new, true)?;
            file.write_all_at(sum, 0)?;
            // A file that is replaced by an empty one after a loss of power would take spilled objects with it.
            if durable {
                file.sync_data()?;
            }
            std::fs::rename(&new, &self.path)?;
            Ok(file)
        };
        let file = replace().map_err(self.failed("replace"))?;
        // From here on the new file is the journal, whatever else fails.
        state.file = Arc::new(file);
        state.len = sum.len() as u64;
        state.unwritten.clear();
        if let Some(dir) = self.path.parent().filter(|_| durable)
            && let Err(error) = sync_dir(dir)
        {
            tracing::warn!(path = %self.path.display(), %error, "a loss of power may bring back the longer index");
        }
        Ok(())
    }

    fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> JournalError {
        let path = self.path.clone();
        move |source| JournalError::Io { what, path, source }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The file that says the same in the fewest records.
    fn encode(&self) -> Vec<u8> {
        let mut file = frame::file_header().to_vec();
        for (payload, entry) in self.ledger.entries() {
            frame::encode(&record::encode(&Record::Sealed(*payload, entry.clone())), &mut file);
        }
        file
    }

    /// Takes back what could not be written.
    fn restore(&mut self, payload: stagewire_core::PayloadId, before: Option<Entry>) {
        let _ = self.ledger.apply(Record::Gone(payload));
        if let Some(entry) = before {
            let _ = self.ledger.apply(Record::Sealed(payload, entry));
        }
    }
}

/// Bytes that an object takes in the sum of everything.
fn weight(payload: stagewire_core::PayloadId, entry: Option<&Entry>) -> u64 {
    entry.map_or(0, |entry| {
        let body = record::encode(&Record::Sealed(payload, entry.clone()));
        (frame::HEADER + body.len()) as u64
    })
}

/// Opens the file for this user alone; never through a symbolic link.
fn open(path: &Path, anew: bool) -> io::Result<File> {
    let no_follow = i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).expect("a flag of open(2)");
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(anew)
        .mode(0o600)
        .custom_flags(no_follow)
        .open(path)
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

fn check_header(path: &Path, bytes: &[u8]) -> Result<(), JournalError> {
    let path = path.to_owned();
    let Some((header, _)) = bytes.split_first_chunk::<{ frame::FILE_HEADER }>() else {
        return Err(JournalError::NotAJournal { path });
    };
    let version = u32::from_le_bytes(header[8..12].try_into().expect("four bytes"));
    if header[..8] != frame::MAGIC {
        Err(JournalError::NotAJournal { path })
    } else if version != frame::VERSION {
        let (found, expected) = (version, frame::VERSION);
        Err(JournalError::Version { path, found, expected })
    } else {
        Ok(())
    }
}

/// What the file says, the bytes of it that are good, and those of its torn end.
fn replay(path: &Path, bytes: &[u8]) -> Result<(Ledger, u64, u64), JournalError> {
    let (mut ledger, mut frames) = (Ledger::default(), Frames::new(bytes));
    loop {
        let good = frames.offset().max(frame::FILE_HEADER as u64);
        match frames.next() {
            Found::End => return Ok((ledger, good, 0)),
            Found::Torn(torn) => return Ok((ledger, good, torn)),
            Found::Damaged {
                offset,
                expected,
                found,
            } => {
                return Err(JournalError::Damaged {
                    path: path.to_owned(),
                    offset,
                    expected,
                    found,
                });
            }
            Found::Frame(offset, body) => {
                let senseless = |what| JournalError::Senseless {
                    path: path.to_owned(),
                    offset,
                    what,
                };
                let record = record::decode(body).map_err(senseless)?;
                let what = format!("{record:?} does not follow from what is before it");
                ledger.apply(record).map_err(|_| senseless(what))?;
            }
        }
    }
}

#[cfg(test)]
mod tests;
