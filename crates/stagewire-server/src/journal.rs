//! What the server must not forget, in one file: batches of bytes, each there entirely or not at all.

mod error;

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use redb::backends::FileBackend;
use redb::{Builder, Database, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition, WriteTransaction};
use stagewire_core::Epoch;
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

pub use error::JournalError;

/// Version of the layout below and of what the server writes into batches.
const FORMAT: u64 = 4;

/// What the journal is, by [`Meta`].
const META: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("meta");
/// Batches by their number: xxh3-64 of the bytes (u64 LE), then the bytes.
const BATCHES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("batches");

/// Memory that the reader of the file may use: a journal is written, and read once.
const CACHE: usize = 16 << 20;

#[derive(Clone, Copy)]
enum Meta {
    Format = 0,
    Deployment = 1,
    Epoch = 2,
    Scope = 3,
}

/// An append-only list of batches in a redb file.
///
/// A batch that [`Journal::append`] returned `Ok` for is there after any crash, whole; one that it did not return for
/// is there whole or not at all. Batches come back in the order in which they went in.
pub(crate) struct Journal {
    database: Database,
    next: u64,
    deployment: Uuid,
    epoch: Epoch,
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal")
            .field("next", &self.next)
            .field("deployment", &self.deployment)
            .field("epoch", &self.epoch)
            .finish_non_exhaustive()
    }
}

impl Journal {
    /// Opens `dir/journal.redb`, or begins it, and adds one to the epoch.
    ///
    /// `scope` says what the batches are about; a journal about something else is refused.
    pub(crate) fn open(dir: &Path, scope: &str) -> Result<Self, JournalError> {
        let path = dir.join("journal.redb");
        let io = |source| JournalError::Io {
            path: path.clone(),
            source,
        };
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(io)?;
        match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => {
                let backend = FileBackend::new(file).map_err(|error| JournalError::open(&path, error))?;
                Self::open_backend(backend, path, scope)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::make(dir, &path, scope),
            Err(error) => Err(io(error)),
        }
    }

    /// Makes a journal for this user alone. It gets its name once it is one, so that what a crash leaves of it before is not
    /// taken for a damaged journal.
    fn make(dir: &Path, path: &Path, scope: &str) -> Result<Self, JournalError> {
        let io = |source| JournalError::Io {
            path: path.to_owned(),
            source,
        };
        let unnamed = dir.join(format!("journal.redb.{}", Uuid::new_v4().simple()));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600);
        let file = file.open(&unnamed).map_err(io)?;
        let made = FileBackend::new(file)
            .map_err(|error| JournalError::open(path, error))
            .and_then(|backend| Self::open_backend(backend, path.to_owned(), scope))
            .and_then(|journal| match fs::hard_link(&unnamed, path) {
                Ok(()) => Ok(journal),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    Err(JournalError::InUse { path: path.to_owned() })
                }
                Err(error) => Err(io(error)),
            });
        // It has a better name, or is of no use. That name must survive a crash as well as the content.
        fs::remove_file(&unnamed).map_err(io)?;
        File::open(dir).and_then(|dir| dir.sync_all()).map_err(io)?;
        made
    }

    /// The same on any storage; `path` stands in messages.
    pub(crate) fn open_backend(backend: impl StorageBackend, path: PathBuf, scope: &str) -> Result<Self, JournalError> {
        let mut builder = Builder::new();
        builder.set_cache_size(CACHE).set_check_integrity_on_open(true);
        let database = builder
            .create_with_backend(backend)
            .map_err(|error| JournalError::open(&path, error))?;
        let mut journal = Self {
            database,
            next: 0,
            deployment: Uuid::nil(),
            epoch: Epoch(0),
        };
        journal.begin_epoch(&path, scope)?;
        Ok(journal)
    }

    /// Checks what the file is, and writes that one more server has started on it.
    fn begin_epoch(&mut self, path: &Path, scope: &str) -> Result<(), JournalError> {
        let write = self.database.begin_write().map_err(JournalError::write)?;
        {
            let mut meta = write.open_table(META).map_err(JournalError::write)?;
            let read = |key: Meta| -> Result<Option<Vec<u8>>, JournalError> {
                let value = meta.get(key as u64).map_err(JournalError::write)?;
                Ok(value.map(|value| value.value().to_vec()))
            };
            let damaged = |what| JournalError::Corrupt {
                path: path.to_owned(),
                what,
            };
            let number = |bytes: Option<Vec<u8>>, what: &str| -> Result<Option<u64>, JournalError> {
                let number = bytes.map(|bytes| bytes.try_into().map(u64::from_le_bytes));
                number
                    .transpose()
                    .map_err(|_| damaged(format!("its {what} is not a number")))
            };
            if let Some(found) = number(read(Meta::Format)?, "format version")?.filter(|found| *found != FORMAT) {
                return Err(JournalError::Version {
                    path: path.to_owned(),
                    found,
                    expected: FORMAT,
                });
            }
            if let Some(found) = read(Meta::Scope)?.filter(|found| found != scope.as_bytes()) {
                return Err(JournalError::Scope {
                    path: path.to_owned(),
                    found: String::from_utf8_lossy(&found).into_owned(),
                    expected: scope.to_owned(),
                });
            }
            self.deployment = match read(Meta::Deployment)? {
                Some(bytes) => {
                    Uuid::from_slice(&bytes).map_err(|_| damaged("its deployment id is not an id".to_owned()))?
                }
                None => Uuid::new_v4(),
            };
            self.epoch = Epoch(number(read(Meta::Epoch)?, "epoch")?.unwrap_or(0) + 1);
            let mut put = |key: Meta, value: &[u8]| meta.insert(key as u64, value).map(drop);
            put(Meta::Format, &FORMAT.to_le_bytes()).map_err(JournalError::write)?;
            put(Meta::Scope, scope.as_bytes()).map_err(JournalError::write)?;
            put(Meta::Deployment, self.deployment.as_bytes()).map_err(JournalError::write)?;
            put(Meta::Epoch, &self.epoch.0.to_le_bytes()).map_err(JournalError::write)?;
            let batches = write.open_table(BATCHES).map_err(JournalError::write)?;
            let last = batches.last().map_err(JournalError::write)?;
            self.next = last.map_or(0, |(number, _)| number.value() + 1);
        }
        write.commit().map_err(JournalError::write)
    }

    /// Stays the same as long as the file does.
    pub(crate) const fn deployment(&self) -> Uuid {
        self.deployment
    }

    /// How often the journal was opened, this time included.
    pub(crate) const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Gives every batch to `take`, in the order in which they were appended.
    ///
    /// # Errors
    /// [`JournalError::Corrupt`] where one is missing or damaged, or `take` cannot read it and says why.
    pub(crate) fn replay(
        &self,
        path: &Path,
        mut take: impl FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<(), JournalError> {
        let read = self.database.begin_read().map_err(JournalError::write)?;
        let batches = read.open_table(BATCHES).map_err(JournalError::write)?;
        for (expected, row) in (0_u64..).zip(batches.iter().map_err(JournalError::write)?) {
            let (number, bytes) = row.map_err(JournalError::write)?;
            let number = number.value();
            let damaged = |what: String| JournalError::Corrupt {
                path: path.to_owned(),
                what: format!("batch {number} {what}"),
            };
            if number != expected {
                return Err(damaged(format!("stands where {expected} should")));
            }
            let Some((checksum, batch)) = bytes.value().split_first_chunk() else {
                return Err(damaged("is too short".to_owned()));
            };
            if u64::from_le_bytes(*checksum) != xxh3_64(batch) {
                return Err(damaged("does not match its checksum".to_owned()));
            }
            take(batch).map_err(|error| damaged(format!("cannot be read: {error}")))?;
        }
        Ok(())
    }

    /// Appends one batch and returns once the disk has it.
    ///
    /// # Errors
    /// [`JournalError::Write`]. What the disk has then is unknown: the caller must stop.
    pub(crate) fn append(&mut self, batch: &[u8]) -> Result<(), JournalError> {
        let write = self.database.begin_write().map_err(JournalError::write)?;
        insert(&write, self.next, batch)?;
        write.commit().map_err(JournalError::write)?;
        self.next += 1;
        Ok(())
    }

    /// Puts one batch in the place of all that are there, which it must sum up.
    ///
    /// # Errors
    /// As [`Journal::append`].
    pub(crate) fn replace(&mut self, batch: &[u8]) -> Result<(), JournalError> {
        let write = self.database.begin_write().map_err(JournalError::write)?;
        write.delete_table(BATCHES).map_err(JournalError::write)?;
        insert(&write, 0, batch)?;
        write.commit().map_err(JournalError::write)?;
        self.next = 1;
        Ok(())
    }

    /// Number of batches.
    pub(crate) const fn batches(&self) -> u64 {
        self.next
    }
}

fn insert(write: &WriteTransaction, number: u64, batch: &[u8]) -> Result<(), JournalError> {
    let mut batches = write.open_table(BATCHES).map_err(JournalError::write)?;
    let mut bytes = Vec::with_capacity(size_of::<u64>() + batch.len());
    bytes.extend_from_slice(&xxh3_64(batch).to_le_bytes());
    bytes.extend_from_slice(batch);
    batches.insert(number, bytes.as_slice()).map_err(JournalError::write)?;
    Ok(())
}

#[cfg(test)]
mod tests;
