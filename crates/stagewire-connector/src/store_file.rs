//! Where the store of a run directory is, for processes that nobody tells.

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use stagewire_core::Peer;

/// How long a store that has died is looked for, while it may be starting anew: short of the second within which
/// consumers learn of what is lost.
pub(crate) const ANEW_WITHIN: Duration = Duration::from_millis(900);
/// Pause between two looks.
pub(crate) const PAUSE: Duration = Duration::from_millis(20);

/// Version of the file: magic, then postcard of the store's address.
const MAGIC: &[u8] = b"SWS1";

fn path(run_dir: &Path) -> PathBuf {
    run_dir.join("store.addr")
}

/// Says that the store of this run directory is `peer` from now on. Whoever reads sees the old address or the new one.
pub(crate) fn announce(run_dir: &Path, peer: &Peer) -> io::Result<()> {
    let body = postcard::to_stdvec(peer).map_err(io::Error::other)?;
    let draft = run_dir.join(format!("store.addr.{}", peer.incarnation.0.simple()));
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(&draft)?;
    file.write_all(MAGIC)?;
    file.write_all(&body)?;
    std::fs::rename(&draft, path(run_dir))
}

/// The store of this run directory, alive or not; `None` where there was none.
pub(crate) fn find(run_dir: &Path) -> Option<Peer> {
    let bytes = std::fs::read(path(run_dir)).ok()?;
    let peer = bytes.strip_prefix(MAGIC).map(postcard::from_bytes);
    match peer {
        Some(Ok(peer)) => Some(peer),
        _ => {
            tracing::warn!(path = %path(run_dir).display(), "the address of the store does not decode");
            None
        }
    }
}

/// Takes the address of `peer` away, unless another store is there by now.
pub(crate) fn withdraw(run_dir: &Path, peer: &Peer) {
    if find(run_dir).is_some_and(|found| found.incarnation == peer.incarnation) {
        let _ = std::fs::remove_file(path(run_dir));
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
        assert_eq!(find(dir.path()), None);
        announce(dir.path(), &peer(1)).expect("written");
        announce(dir.path(), &peer(2)).expect("written");
        assert_eq!(find(dir.path()), Some(peer(2)));
        withdraw(dir.path(), &peer(1));
        assert_eq!(
            find(dir.path()),
            Some(peer(2)),
            "another store's address was taken away"
        );
        withdraw(dir.path(), &peer(2));
        assert_eq!(std::fs::read_dir(dir.path()).expect("a directory").count(), 0);
        std::fs::write(path(dir.path()), "SWS1").expect("written");
        assert_eq!(find(dir.path()), None);
    }
}
