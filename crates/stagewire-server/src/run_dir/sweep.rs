//! Removes the sockets of processes that died without removing them.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use stagewire_core::Incarnation;

/// A socket that refuses is asked once more after this time: it may have been bound but not yet listening.
const SECOND_LOOK: Duration = Duration::from_millis(50);

/// Removes every socket in `dir` that nobody listens on.
pub(crate) async fn sweep(dir: &Path) {
    let refusing: Vec<PathBuf> = sockets(dir).filter(|path| nobody_listens(path)).collect();
    if refusing.is_empty() {
        return;
    }
    tokio::time::sleep(SECOND_LOOK).await;
    for path in refusing.iter().filter(|path| nobody_listens(path)) {
        remove(path);
    }
}

/// Removes the sockets of a process that is known to be dead.
pub(crate) fn sweep_incarnation(dir: &Path, incarnation: Incarnation) {
    let name = incarnation.0.simple().to_string();
    for path in sockets(dir) {
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        if stem == &name[..16] {
            remove(&path);
        }
    }
}

fn sockets(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
        .map(|entry| entry.path())
}

fn nobody_listens(path: &Path) -> bool {
    let Ok(address) = SocketAddrUnix::new(path) else {
        return false;
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None) else {
        return false;
    };
    // Anything but a refusal is somebody: also a full backlog, and a socket of another type.
    connect(&socket, &address) == Err(Errno::CONNREFUSED)
}

fn remove(path: &Path) {
    match fs::remove_file(path) {
        Ok(()) => tracing::debug!(socket = %path.display(), "swept after a dead process"),
        Err(error) => tracing::warn!(socket = %path.display(), %error, "cannot sweep a socket"),
    }
}
