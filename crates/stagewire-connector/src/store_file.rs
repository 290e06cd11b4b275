//! Where the store of a run directory is, for processes that nobody tells.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use stagewire_core::Peer;

/// How long a store that has died is looked for, while it may be starting anew: short of the second within which
/// consumers learn of what is lost.
pub(crate) const ANEW_WITHIN: Duration = Duration::from_millis(900);
/// Pause between two looks.
pub(crate) const PAUSE: Duration = Duration::from_millis(20);

/// Version of the file: magic, then postcard of the store's address.
const MAGIC: &[u8] = b"SWS1";

/// The address file of one run directory.
#[derive(Debug)]
pub(crate) struct StoreFile {
    run_dir: PathBuf,
    path: PathBuf,
    /// What was read last, of a file that is still there as long as its stamp is: reading it anew with every put took as
    /// long as the exchange with the store.
    known: Mutex<Option<(Stamp, Arc<Peer>)>>,
}

/// Tells a file from the one that takes its place: each is a new one, written once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    modified: (i64, i64),
}

impl StoreFile {
    pub(crate) fn of(run_dir: PathBuf) -> Self {
        Self {
            path: run_dir.join("store.addr"),
            run_dir,
            known: Mutex::default(),
        }
    }

    pub(crate) fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// Says that the store of this run directory is `peer` from now on. Whoever reads sees the old address or the new one.
    pub(crate) fn announce(&self, peer: &Peer) -> io::Result<()> {
        let body = postcard::to_stdvec(peer).map_err(io::Error::other)?;
        let draft = self
            .path
            .with_extension(format!("addr.{}", peer.incarnation.0.simple()));
        let mut options = fs::OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&draft)?;
        file.write_all(MAGIC)?;
        file.write_all(&body)?;
        fs::rename(&draft, &self.path)
    }

    /// The store of this run directory, alive or not; `None` where there was none.
    pub(crate) fn find(&self) -> Option<Arc<Peer>> {
        // First: what is read then is at least as new.
        let found = fs::metadata(&self.path).ok()?;
        let stamp = Stamp {
            device: found.dev(),
            inode: found.ino(),
            modified: (found.mtime(), found.mtime_nsec()),
        };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        match &*known {
            Some((at, peer)) if *at == stamp => Some(Arc::clone(peer)),
            _ => {
                let peer = Arc::new(self.read()?);
                *known = Some((stamp, Arc::clone(&peer)));
                Some(peer)
            }
        }
    }

    fn read(&self) -> Option<Peer> {
        let bytes = fs::read(&self.path).ok()?;
        let peer = bytes.strip_prefix(MAGIC).map(postcard::from_bytes);
        match peer {
            Some(Ok(peer)) => Some(peer),
            _ => {
                tracing::warn!(path = %self.path.display(), "the address of the store does not decode");
                None
            }
        }
    }

    /// Takes the address of `peer` away, unless another store is there by now.
    pub(crate) fn withdraw(&self, peer: &Peer) {
        if self.find().is_some_and(|found| found.incarnation == peer.incarnation) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::{Incarnation, ProcessRef};
    use uuid::Uuid;

    use super::*;

    fn peer(id: u128) -> Peer {
        Peer {
            incarnation: Incarnation(Uuid::from_u128(id)),
            process: ProcessRef { pid: 1, started: 2 },
            socket: "/run/x".to_owned(),
            transports: Vec::new(),
        }
    }

    #[test]
    fn the_last_store_that_was_announced_is_found() {
        let dir = tempfile::tempdir().expect("a directory");
        // Of two processes: one tells, one looks.
        let [told, file] = [(); 2].map(|()| StoreFile::of(dir.path().to_owned()));
        assert_eq!(file.find(), None);
        for id in [1, 2, 1] {
            told.announce(&peer(id)).expect("written");
            let found = [file.find(), file.find()];
            assert_eq!(
                found.map(|found| found.map(|found| (*found).clone())),
                [(); 2].map(|()| Some(peer(id)))
            );
        }
        told.withdraw(&peer(2));
        assert_eq!(
            file.find().as_deref(),
            Some(&peer(1)),
            "another store's address was taken away"
        );
        told.withdraw(&peer(1));
        assert_eq!(file.find(), None);
        assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 0);
        fs::write(&told.path, "SWS1").expect("written");
        assert_eq!(file.find(), None);
    }
}
