//! Files that objects move to when memory is short.
//!
//! One file per object: its parts one after the other, each from a multiple of [`BLOCK`] on. Files are named by payload
//! and a random generation, never by what a request says, and are opened relative to the directory's descriptor, without
//! following links. A file counts only once its bytes, its length and its name are on the disk.

mod buffer;
mod directory;
mod fault;
mod file;
mod workers;

use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use stagewire_core::ByteCount;
use tokio::sync::oneshot;
use tokio::time::Instant;

use directory::Directory;
pub use fault::SpillFault;
use file::BLOCK;
pub use file::Digest;
pub(crate) use file::{ReadError, Sink};
use workers::{Turn, Workers};

use crate::journal::Place;
use crate::{Object, SpillUsage};

/// Where objects go when memory is short.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpillOptions {
    /// A directory of this store alone, made with mode 0700 where it is missing.
    pub dir: PathBuf,
    /// Bytes of files at most.
    pub quota: ByteCount,
}

/// Writes that wait for a thread at most; what does not fit waits in memory, where it can still be deleted.
const MAX_WRITES: usize = 16;

/// After a write has failed, no other is begun for so long.
const PAUSE: Duration = Duration::from_secs(1);

/// The files of one store, and the threads that write and read them.
pub(crate) struct Spill {
    shared: Arc<Shared>,
}

struct Shared {
    directory: Directory,
    quota: u64,
    workers: Workers,
    books: Mutex<Books>,
    /// Reads and writes end at the next piece.
    closing: AtomicBool,
    /// Whether files outlive the store.
    stays: bool,
}

#[derive(Debug, Default)]
struct Books {
    used: u64,
    writes: usize,
    /// Of the last write; `None` once another one went well.
    fault: Option<SpillFault>,
    paused: Option<Instant>,
}

impl Books {
    fn is_paused(&self) -> bool {
        self.paused.is_some_and(|until| Instant::now() < until)
    }
}

impl Shared {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }
}

/// Bytes of the quota, given back on drop.
pub(crate) struct Charge {
    shared: Arc<Shared>,
    nbytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shared.books().used -= self.nbytes;
    }
}

/// A complete file. It is removed when this is dropped.
pub(crate) struct SpillFile {
    name: String,
    digest: Digest,
    /// Taken on drop.
    charge: Option<Charge>,
    abandoned: AtomicBool,
}

impl SpillFile {
    /// Where the object is, for the index of a durable store.
    pub(crate) fn place(&self) -> Place {
        Place::File {
            name: self.name.clone(),
            digest: self.digest.0,
        }
    }

    pub(crate) const fn digest(&self) -> Digest {
        self.digest
    }

    /// Its length.
    pub(crate) fn nbytes(&self) -> ByteCount {
        ByteCount(self.charge.as_ref().map_or(0, |charge| charge.nbytes))
    }
}

impl SpillFile {
    /// Leaves it where it is; the next start sweeps it. Its share of the quota is not free before.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }
}

impl Drop for SpillFile {
    fn drop(&mut self) {
        let Some(mut charge) = self.charge.take() else { return };
        if *self.abandoned.get_mut() {
            charge.nbytes = 0;
            return;
        }
        let (shared, name) = (Arc::clone(&charge.shared), std::mem::take(&mut self.name));
        // The quota is free once the file is gone. A store that closes removes all files itself.
        let remove = Box::new(move |_: &mut _| {
            if let Err(fault) = charge.shared.directory.remove(&name) {
                charge.shared.books().fault = Some(fault);
            }
            drop(charge);
        });
        shared.workers.submit(Turn::Remove, remove);
    }
}

impl fmt::Debug for SpillFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpillFile({}, {}, {})", self.name, self.nbytes(), self.digest)
    }
}

impl Spill {
    /// Opens the directory, which no other store may use, and removes the files that an earlier one left in it, apart from
    /// those to `keep`. The files of a store with an `id` outlive this; no other store removes them.
    pub(crate) fn open(options: &SpillOptions, keep: &BTreeSet<String>, id: Option<&str>) -> Result<Self, SpillFault> {
        let directory = Directory::open(&options.dir)?;
        directory.claim(id)?;
        directory.sweep(keep)?;
        Ok(Self {
            shared: Arc::new(Shared {
                directory,
                quota: options.quota.0,
                workers: Workers::start(&options.dir)?,
                books: Mutex::default(),
                closing: AtomicBool::new(false),
                stays: id.is_some(),
            }),
        })
    }

    /// Takes bytes of the quota for an object with parts of these sizes; `None` where too few are left, or nothing should
    /// be written now.
    pub(crate) fn admit(&self, parts: &[ByteCount]) -> Option<Charge> {
        let nbytes = file::length(parts)?;
        let mut books = self.shared.books();
        let used = books.used.checked_add(nbytes)?;
        if self.shared.is_closing() || books.is_paused() || books.writes >= MAX_WRITES || used > self.shared.quota {
            return None;
        }
        books.used = used;
        Some(Charge {
            shared: Arc::clone(&self.shared),
            nbytes,
        })
    }

    /// Writes an object to a file of its own. `done` is called on the thread that wrote it, unless the store closes.
    pub(crate) fn write(
        &self,
        object: Arc<dyn Object>,
        charge: Charge,
        done: impl FnOnce(Result<SpillFile, SpillFault>) + Send + 'static,
    ) {
        let shared = Arc::clone(&self.shared);
        shared.books().writes += 1;
        let name = file::name(object.payload(), rand::random());
        let write = Box::new(move |buffer: &mut _| {
            let shared = &charge.shared;
            let write = || file::write(&shared.directory, &name, &*object, buffer, &|| shared.is_closing());
            let written = catch_unwind(AssertUnwindSafe(write));
            let written = written.unwrap_or_else(|_| Err(shared.directory.panicked("writing", &name)));
            let mut books = shared.books();
            books.writes -= 1;
            let failed = written.as_ref().err();
            books.fault = failed.cloned();
            books.paused = failed.map(|_| Instant::now() + PAUSE);
            drop(books);
            drop(object);
            let file = written.map(|digest| SpillFile {
                name,
                digest,
                charge: Some(charge),
                abandoned: AtomicBool::new(false),
            });
            done(file);
        });
        self.shared.workers.submit(Turn::Write, write);
    }

    /// Reads a file into one sink for each part, and checks the digest.
    ///
    /// # Cancel safety
    /// A read under way ends at the next piece, and then the sinks are dropped.
    pub(crate) async fn read<S: Sink>(&self, file: &Arc<SpillFile>, mut sinks: Vec<S>) -> Result<Vec<S>, ReadError> {
        let (done, read) = oneshot::channel();
        let (shared, file) = (Arc::clone(&self.shared), Arc::clone(file));
        let job = Box::new(move |buffer: &mut _| {
            let given_up = || done.is_closed() || shared.is_closing();
            let (directory, name) = (&shared.directory, &file.name);
            let read = || file::read(directory, name, file.digest, &mut sinks, buffer, &given_up);
            let outcome = catch_unwind(AssertUnwindSafe(read));
            let outcome = outcome.unwrap_or_else(|_| Err(ReadError::Fault(directory.panicked("reading", name))));
            // The reader may have gone.
            let _ = done.send(outcome.map(|()| sinks));
        });
        self.shared.workers.submit(Turn::Read, job);
        let fault = || SpillFault::new("read", self.shared.directory.path(), Errno::CANCELED);
        read.await.unwrap_or_else(|_| Err(ReadError::Fault(fault())))
    }

    /// Where a file is.
    pub(crate) fn path(&self, file: &SpillFile) -> PathBuf {
        self.shared.directory.path().join(&file.name)
    }

    /// Bytes of the quota that are left; none while nothing should be written.
    pub(crate) fn left(&self) -> u64 {
        let books = self.shared.books();
        if books.is_paused() {
            return 0;
        }
        self.shared.quota.saturating_sub(books.used)
    }

    /// Begins no write for a while, and tells why.
    pub(crate) fn pause(&self, fault: SpillFault) {
        let mut books = self.shared.books();
        books.fault = Some(fault);
        books.paused = Some(Instant::now() + PAUSE);
    }

    /// Begins no write for a while, because of a defect while a file took the place of an object in memory.
    pub(crate) fn defect(&self, file: &SpillFile) {
        self.pause(self.shared.directory.panicked("moving a payload to", &file.name));
    }

    /// Whether no more writes are admitted before one has ended.
    pub(crate) fn is_busy(&self) -> bool {
        self.shared.books().writes >= MAX_WRITES
    }

    pub(crate) fn usage(&self) -> SpillUsage {
        let books = self.shared.books();
        SpillUsage {
            quota: ByteCount(self.shared.quota),
            used: ByteCount(books.used),
            queue: books.writes as u64,
            direct: self.shared.directory.is_direct(),
            fault: books.fault.clone(),
        }
    }

    /// Stops writing, reading and removing. The files stay, if they are to outlive this, whatever is dropped afterwards.
    pub(crate) fn leave(&self) {
        if self.shared.stays {
            self.stop();
        } else {
            self.end();
        }
    }

    /// Stops writing and reading, and removes all files, also those that were to outlive this.
    pub(crate) fn end(&self) {
        self.stop();
        // Where it fails, the next start sweeps.
        let swept = self.shared.directory.sweep(&BTreeSet::new());
        let _ = swept.and_then(|()| self.shared.directory.disown());
    }

    fn stop(&self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        self.shared.workers.close();
    }

    /// A file that an earlier store wrote; `None` where it is gone.
    ///
    /// # Errors
    /// [`SpillFault`] where it may be there, and cannot be opened now.
    pub(crate) fn adopt(
        &self,
        name: String,
        digest: Digest,
        parts: &[ByteCount],
    ) -> Result<Option<SpillFile>, SpillFault> {
        let Some(nbytes) = file::length(parts) else {
            return Ok(None);
        };
        match self.shared.directory.find(&name) {
            Ok(_) => {}
            // Removed, or replaced by a link that nobody follows.
            Err(Errno::NOENT | Errno::LOOP) => return Ok(None),
            Err(error) => return Err(self.shared.directory.fault("open", &name, error)),
        }
        self.shared.books().used += nbytes;
        let charge = Some(Charge {
            shared: Arc::clone(&self.shared),
            nbytes,
        });
        Ok(Some(SpillFile {
            name,
            digest,
            charge,
            abandoned: AtomicBool::new(false),
        }))
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        self.leave();
    }
}

impl fmt::Debug for Spill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Spill({}, {:?})",
            self.shared.directory.path().display(),
            self.usage()
        )
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::{Classify, ErrorClass, PayloadId, RegionRef};

    use super::*;

    /// An object of one byte, or one whose bytes nobody can read.
    #[derive(Debug)]
    struct Byte(Option<[u8; 1]>);

    impl Object for Byte {
        fn payload(&self) -> PayloadId {
            PayloadId(uuid::Uuid::nil())
        }

        fn parts(&self) -> usize {
            1
        }

        fn part(&self, _part: usize) -> Option<&[u8]> {
            Some(self.0.as_ref().expect("on purpose"))
        }

        fn regions(&self) -> Vec<Option<RegionRef>> {
            Vec::new()
        }
    }

    /// Nobody can write to it.
    #[derive(Debug)]
    struct Unwritable;

    impl Sink for Unwritable {
        fn bytes_mut(&mut self) -> &mut [u8] {
            panic!("on purpose")
        }
    }

    #[tokio::test]
    async fn a_panic_is_told_as_a_defect() {
        let dir = tempfile::tempdir().expect("a directory");
        let options = SpillOptions {
            dir: dir.path().join("spill"),
            quota: ByteCount(1 << 20),
        };
        let spill = Spill::open(&options, &BTreeSet::new(), None).expect("it opens");
        let write = async |byte| {
            let charge = spill.admit(&[ByteCount(1)]).expect("there is room");
            let (done, written) = oneshot::channel();
            spill.write(Arc::new(Byte(byte)), charge, |file| {
                done.send(file).expect("somebody waits");
            });
            let written = tokio::time::timeout(Duration::from_secs(20), written).await;
            written.expect("it ends").expect("it is told")
        };
        let defect = |fault: &SpillFault| (fault.class(), fault.reason()) == (ErrorClass::Internal, "spill.defect");
        let file = Arc::new(write(Some([7])).await.expect("there is room"));
        match spill.read(&file, vec![Unwritable]).await {
            Err(ReadError::Fault(fault)) => assert!(defect(&fault), "{fault}"),
            other => panic!("{other:?}"),
        }
        drop(file);
        let fault = write(None).await.expect_err("no file");
        assert!(defect(&fault), "{fault}");
        let usage = spill.usage();
        assert_eq!((usage.queue, usage.fault), (0, Some(fault)));
    }

    #[test]
    fn a_directory_that_cannot_be_used_is_no_lost_payload() {
        let dir = tempfile::tempdir().expect("a directory");
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        std::fs::write(&file, "").expect("written");
        std::os::unix::fs::symlink(dir.path(), &link).expect("made");
        for dir in [file.clone(), file.join("below"), link, dir.path().join("x".repeat(300))] {
            let options = SpillOptions {
                dir,
                quota: ByteCount(1),
            };
            let fault = Spill::open(&options, &BTreeSet::new(), None).expect_err("unusable");
            assert_eq!(
                (fault.class(), fault.reason()),
                (ErrorClass::Invalid, "spill.dir"),
                "{fault}"
            );
        }
    }
}
