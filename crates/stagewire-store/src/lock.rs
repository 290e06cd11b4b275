//! Directories that one store at a time has.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};

use crate::OpenError;

/// One store's right to a directory. It ends when it is dropped, and with the process.
#[derive(Debug)]
pub struct StoreLock {
    _locked: File,
    /// A file that goes when the lock does: nothing stays behind in a run directory.
    leaves: Option<PathBuf>,
}

impl Drop for StoreLock {
    fn drop(&mut self) {
        if let Some(path) = &self.leaves {
            // While it is locked: who locks it after that finds that it is not there any more, and makes another.
            let _ = fs::remove_file(path);
        }
    }
}

/// Why there is none.
enum Taken {
    /// By this process, where it has said so.
    By(Option<u32>),
    Unknown(io::Error),
}

impl StoreLock {
    /// The right to be the store of a run directory, where those who publish look for one.
    ///
    /// # Errors
    /// [`OpenError::Served`], which names the process that has it; [`OpenError::Dir`].
    pub fn of_run_dir(dir: &Path) -> Result<Self, OpenError> {
        let path = dir.join("store.addr.lock");
        let mut lock = Self::take(&path).map_err(|taken| match taken {
            Taken::By(pid) => OpenError::Served {
                dir: dir.to_owned(),
                pid,
            },
            Taken::Unknown(source) => unlockable(dir, source),
        })?;
        lock.leaves = Some(path);
        Ok(lock)
    }

    /// The right to a data directory.
    pub(crate) fn of_data_dir(dir: &Path) -> Result<Self, OpenError> {
        Self::take(&dir.join("store.lock")).map_err(|taken| match taken {
            Taken::By(pid) => OpenError::InUse {
                dir: dir.to_owned(),
                pid,
            },
            Taken::Unknown(source) => unlockable(dir, source),
        })
    }

    fn take(path: &Path) -> Result<Self, Taken> {
        use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
        let no_follow = i32::try_from(OFlags::NOFOLLOW.bits()).expect("a flag of open(2)");
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        let file = options.mode(0o600).custom_flags(no_follow).open(path);
        let mut file = file.map_err(Taken::Unknown)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut pid = String::new();
                let read = file.read_to_string(&mut pid);
                return Err(Taken::By(read.ok().and_then(|_| pid.trim().parse().ok())));
            }
            locked => locked.map_err(|error| Taken::Unknown(error.into()))?,
        }
        let locked = file.metadata().map_err(Taken::Unknown)?.ino();
        if !fs::symlink_metadata(path).is_ok_and(|there| there.ino() == locked) {
            // Whoever had it has left between the two, and the file with it.
            return Self::take(path);
        }
        // For the message of who comes second.
        let named = file.set_len(0);
        let named = named.and_then(|()| file.write_all(std::process::id().to_string().as_bytes()));
        named.map_err(Taken::Unknown)?;
        Ok(Self {
            _locked: file,
            leaves: None,
        })
    }
}

fn unlockable(dir: &Path, source: io::Error) -> OpenError {
    OpenError::Dir {
        what: "lock",
        dir: dir.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_second_is_told_who_was_first() {
        let dir = tempfile::tempdir().expect("a directory");
        let me = Some(std::process::id());
        let first = StoreLock::of_run_dir(dir.path()).expect("nobody has it");
        match StoreLock::of_run_dir(dir.path()) {
            Err(error @ OpenError::Served { pid, .. }) => {
                assert_eq!(pid, me);
                assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
            }
            other => panic!("{other:?}"),
        }
        // Which may be the same one, however unwise.
        let data = StoreLock::of_data_dir(dir.path()).expect("another right");
        match StoreLock::of_data_dir(dir.path()) {
            Err(OpenError::InUse { pid, .. }) => assert_eq!(pid, me),
            other => panic!("{other:?}"),
        }
        drop((first, data));
        StoreLock::of_run_dir(dir.path()).expect("free again");
        StoreLock::of_data_dir(dir.path()).expect("free again");
    }
}
