//! What a store must still know after its process was killed: an append-only file.
//!
//! A record is in the page cache when [`Journal::append`] returns, so that it outlives the process, though not the
//! machine. That is enough for objects in memory, which die with the machine anyway. What is about a spill file is
//! synced before anybody relies on it, by [`Journal::sync`], which callers share.

mod error;
#[cfg(test)]
pub(crate) mod faults;
mod file;
mod frame;
mod record;

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stagewire_transfer::SegmentName;

pub use error::JournalError;
#[cfg(test)]
pub(crate) use record::Kept;
pub(crate) use record::{Entry, Ledger, Place, Record};

use file::{JournalFile, sync_dir};
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
    /// Held while syncing, and while another file takes the place of this one.
    synced: Mutex<Synced>,
    #[cfg(test)]
    pub(crate) disk: faults::Disk,
}

#[derive(Debug, Default)]
struct Synced {
    /// Records up to this number are safe from a loss of power.
    count: u64,
    /// The file has its name, though a loss of power may give that back to the one before.
    renamed: bool,
    /// A sync has failed. What it should have written may count as written from then on: only another file is safe.
    failed: bool,
}

struct State {
    file: Arc<JournalFile>,
    /// Bytes that are good.
    len: u64,
    /// What a failed write has left may follow them.
    overhangs: bool,
    /// Length that the sum of everything would have.
    sum: u64,
    ledger: Ledger,
    /// Records appended so far.
    count: u64,
    /// What could not be written when it happened.
    unwritten: Vec<u8>,
    /// Somebody was told that it is long.
    shortening: bool,
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
        #[cfg(test)]
        let disk = faults::Disk::default();
        let path = dir.join(NAME);
        let failed = |what| {
            let path = path.clone();
            move |source| JournalError::Io { what, path, source }
        };
        let mut file = JournalFile::open(
            &path,
            false,
            #[cfg(test)]
            &disk,
        )
        .map_err(failed("open"))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed("read"))?;
        let fresh = frame::file_header().starts_with(&bytes);
        if fresh {
            file.write_all_at(&frame::file_header(), 0).map_err(failed("begin"))?;
            file.sync_data().map_err(failed("sync"))?;
            sync_dir(
                dir,
                #[cfg(test)]
                &disk,
            )
            .map_err(failed("sync the directory of"))?;
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
            overhangs: false,
            sum: 0,
            ledger,
            count: 0,
            unwritten: Vec::new(),
            shortening: false,
        };
        state.sum = state.encode().len() as u64;
        let journal = Self {
            path,
            state: Mutex::new(state),
            synced: Mutex::default(),
            #[cfg(test)]
            disk,
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
        let sealed = matches!(record, Record::Sealed(..)).then_some((frame::HEADER + body.len()) as u64);
        if state.ledger.apply(record).is_err() {
            return Ok(Appended::Unknown);
        }
        let sync = was || durable(&state);
        let mut bytes = std::mem::take(&mut state.unwritten);
        let earlier = bytes.len();
        frame::encode(&body, &mut bytes);
        if let Err(source) = state.write(&bytes) {
            if undo {
                state.unwritten = bytes;
            } else {
                bytes.truncate(earlier);
                state.unwritten = bytes;
                state.restore(payload, before);
            }
            return Err(self.failed("write")(source));
        }
        state.count += 1;
        let after = sealed.unwrap_or_else(|| weight(payload, state.ledger.get(payload)));
        state.sum = (state.sum + after).saturating_sub(weight(payload, before.as_ref()));
        Ok(if sync { Appended::Sync } else { Appended::Done })
    }

    /// Writes what could not be written when it happened.
    ///
    /// # Errors
    /// [`JournalError::Io`]; it is still to be written.
    pub(crate) fn retry(&self) -> Result<(), JournalError> {
        self.lock().retry().map_err(self.failed("write"))
    }

    /// Returns once everything appended before is safe from a loss of power. Blocks; callers at the same time share the
    /// work.
    ///
    /// # Errors
    /// [`JournalError::Io`].
    pub(crate) fn sync(&self) -> Result<(), JournalError> {
        let wanted = self.lock().count;
        let mut synced = self.lock_synced();
        if synced.count >= wanted && !synced.renamed {
            return Ok(());
        }
        if synced.failed {
            return self.replace(&mut synced);
        }
        let (file, count) = {
            let state = self.lock();
            (Arc::clone(&state.file), state.count)
        };
        if let Err(source) = file.sync_data() {
            synced.failed = true;
            return Err(self.failed("sync")(source));
        }
        self.sync_name(&mut synced)?;
        synced.count = count;
        Ok(())
    }

    /// Whether it is much longer than what it says, see [`Journal::shorten`]. Tells one caller at a time.
    pub(crate) fn is_long(&self) -> bool {
        let mut state = self.lock();
        let long = state.len > SHORT && state.len > LONG * state.sum && !state.shortening;
        state.shortening |= long;
        long
    }

    /// Puts one record for each object in the place of everything that was said. Blocks, and others append meanwhile.
    ///
    /// # Errors
    /// [`JournalError::Io`]; the journal says what it said.
    pub(crate) fn shorten(&self) -> Result<(), JournalError> {
        let shortened = self.replace(&mut self.lock_synced());
        let mut state = self.lock();
        state.shortening = false;
        if shortened.is_err() {
            // The long one is as good. Another try once it is that much longer.
            state.sum = state.len;
        }
        shortened
    }

    /// Puts a file that says the same in the place of this one, and has it on the disk.
    fn replace(&self, synced: &mut Synced) -> Result<(), JournalError> {
        let new = self.path.with_extension("new");
        let (sum, begin) = {
            let mut state = self.lock();
            // What is not in the file must not be in the sum either: it is written once.
            state.retry().map_err(self.failed("write"))?;
            (state.encode(), state.len)
        };
        let write = || {
            let file = JournalFile::open(
                &new,
                true,
                #[cfg(test)]
                &self.disk,
            )?;
            file.write_all_at(&sum, 0)?;
            file.sync_data()?;
            Ok(file)
        };
        let file = write().map_err(self.failed("replace"))?;
        let mut state = self.lock();
        let rename = || {
            // What was appended meanwhile.
            let mut rest = vec![0; usize::try_from(state.len - begin).map_err(io::Error::other)?];
            state.file.read_exact_at(&mut rest, begin)?;
            file.write_all_at(&rest, sum.len() as u64)?;
            std::fs::rename(&new, &self.path)?;
            file.named();
            Ok((sum.len() + rest.len()) as u64)
        };
        // From here on the new file is the journal, whatever else fails.
        state.len = rename().map_err(self.failed("replace"))?;
        let file = Arc::new(file);
        state.file = Arc::clone(&file);
        state.overhangs = false;
        state.sum = state.encode().len() as u64;
        let count = state.count;
        drop(state);
        // Whoever appends need not wait for that. Nobody was promised what was appended meanwhile: that needs `synced`.
        (synced.renamed, synced.failed) = (true, true);
        file.sync_data().map_err(self.failed("sync"))?;
        synced.failed = false;
        self.sync_name(synced)?;
        synced.count = count;
        Ok(())
    }

    /// Has the name of a file that took the place of another on the disk.
    fn sync_name(&self, synced: &mut Synced) -> Result<(), JournalError> {
        if let Some(dir) = self.path.parent().filter(|_| synced.renamed) {
            sync_dir(
                dir,
                #[cfg(test)]
                &self.disk,
            )
            .map_err(self.failed("sync the directory of"))?;
            synced.renamed = false;
        }
        Ok(())
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

    fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> JournalError {
        let path = self.path.clone();
        move |source| JournalError::Io { what, path, source }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_synced(&self) -> MutexGuard<'_, Synced> {
        self.synced.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Appends bytes, all of them or none.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        // What is left of a failed write must not follow a shorter one.
        if self.overhangs {
            self.file.set_len(self.len)?;
            self.overhangs = false;
        }
        if let Err(error) = self.file.write_all_at(bytes, self.len) {
            self.overhangs = self.file.set_len(self.len).is_err();
            return Err(error);
        }
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Writes what could not be written when it happened.
    fn retry(&mut self) -> io::Result<()> {
        let bytes = std::mem::take(&mut self.unwritten);
        if bytes.is_empty() {
            return Ok(());
        }
        let written = self.write(&bytes);
        if written.is_err() {
            self.unwritten = bytes;
        } else {
            self.count += 1;
        }
        written
    }

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
