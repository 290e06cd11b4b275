//! Sockets in a private directory.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};
use rustix::process::geteuid;
use tokio::net::UnixListener;

use super::Listener;
use crate::StartError;

/// Bytes of a socket path, without the final zero.
const MAX_PATH: usize = 107;

const BACKLOG: i32 = 1024;

/// A socket gets its name only once it listens, so that nobody can take a starting process for a dead one. Until then it
/// has this extension.
const UNNAMED: &str = "new";

/// A socket that is still unnamed after so long belongs to a process that died in between.
const UNNAMED_FOR: Duration = Duration::from_secs(10);

/// The name of a listening socket in the file system, removed when this is dropped.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// A fork of this process must not remove it.
    owner: u32,
    removed: AtomicBool,
}

impl SocketFile {
    fn new(path: PathBuf) -> Self {
        Self {
            path,
            owner: std::process::id(),
            removed: AtomicBool::new(false),
        }
    }

    /// Its path, without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it now. A fork of the process that listens removes nothing, neither so nor by dropping this.
    pub fn remove(&self) {
        if self.owner == std::process::id() && !self.removed.swap(true, Ordering::AcqRel) {
            // Gone already is as good.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Listens at `path` for packets.
pub(super) fn data_socket(path: &Path) -> Result<(Listener, SocketFile), StartError> {
    listen_at(path, SocketType::SEQPACKET)
}

/// Listens at `path` for streams, with the same care as for data sockets: the directory is made with mode 0700 or must
/// have it, the socket of a dead process is replaced, and [`sweep`] never takes a starting process for a dead one.
///
/// # Errors
/// [`StartError`].
pub fn listen_unix(path: &Path) -> Result<(UnixListener, SocketFile), StartError> {
    let (listener, file) = listen_at(path, SocketType::STREAM)?;
    let listener = UnixListener::from_std(listener.into()).map_err(failed("wait on", file.path()))?;
    Ok((listener, file))
}

fn listen_at(path: &Path, kind: SocketType) -> Result<(Listener, SocketFile), StartError> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(failed("listen at", path)(rustix::io::Errno::INVAL));
    };
    let dir = if dir.as_os_str().is_empty() {
        Path::new(".")
    } else {
        dir
    };
    private_dir(dir)?;
    let path = fs::canonicalize(dir).map_err(failed("find", dir))?.join(name);
    let mut unnamed = path.clone().into_os_string();
    unnamed.push(".");
    unnamed.push(UNNAMED);
    let unnamed = PathBuf::from(unnamed);
    let len = unnamed.as_os_str().len();
    if len > MAX_PATH {
        let max = MAX_PATH;
        return Err(StartError::PathTooLong {
            path: unnamed,
            len,
            max,
        });
    }
    if path.exists() && !is_dead(&path, kind).map_err(failed("try", &path))? {
        return Err(StartError::InUse { path });
    }
    // Left by an earlier try of this very process.
    let _ = fs::remove_file(&unnamed);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = socket_with(AddressFamily::UNIX, kind, flags, None).map_err(failed("make a socket for", &path))?;
    let address = SocketAddrUnix::new(&unnamed).map_err(failed("name", &unnamed))?;
    bind(&listener, &address).map_err(failed("bind", &unnamed))?;
    let named = listen(&listener, BACKLOG)
        .map_err(io::Error::from)
        .and_then(|()| fs::rename(&unnamed, &path));
    if let Err(error) = named {
        let _ = fs::remove_file(&unnamed);
        return Err(failed("listen at", &path)(error));
    }
    Ok((listener, SocketFile::new(path)))
}

/// Makes the directory, or proves that nobody else can enter it.
fn private_dir(dir: &Path) -> Result<(), StartError> {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder.create(dir).map_err(failed("make", dir))?;
    let found = fs::metadata(dir).map_err(failed("examine", dir))?;
    let problem = if !found.is_dir() {
        "it is not a directory".to_owned()
    } else if found.uid() != geteuid().as_raw() {
        format!(
            "it belongs to user {}, this process runs as {}",
            found.uid(),
            geteuid().as_raw()
        )
    } else if found.mode() & 0o077 != 0 {
        format!("its mode is {:o}", found.mode() & 0o777)
    } else {
        return Ok(());
    };
    Err(StartError::Insecure {
        path: dir.to_owned(),
        problem,
    })
}

/// Whether nobody listens at this socket any more.
fn is_dead(path: &Path, kind: SocketType) -> io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None)?;
    match connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(rustix::io::Errno::CONNREFUSED) => Ok(true),
        // Alive: connected, busy, or of the other type.
        Ok(()) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::PROTOTYPE) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Removes the sockets (`.data`, `.ctl`) of dead processes from a directory, and returns their paths.
///
/// # Errors
/// Whatever reading the directory says; a directory that does not exist holds none.
pub fn sweep(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read?,
    };
    let mut removed = Vec::new();
    for entry in entries {
        let path = entry?.path();
        // Others may start, stop and sweep at the same time: a file that went away needs no sweeping.
        let Ok(found) = fs::symlink_metadata(&path) else {
            continue;
        };
        let age = found.modified().ok().and_then(|modified| modified.elapsed().ok());
        let wanted = match path.extension().and_then(|extension| extension.to_str()) {
            Some("data" | "ctl") => true,
            Some(UNNAMED) => age.is_some_and(|age| age > UNNAMED_FOR),
            _ => false,
        };
        if wanted
            && found.file_type().is_socket()
            && matches!(is_dead(&path, SocketType::SEQPACKET), Ok(true))
            && fs::remove_file(&path).is_ok()
        {
            removed.push(path);
        }
    }
    Ok(removed)
}

fn failed<E: Into<io::Error>>(what: &'static str, path: &Path) -> impl FnOnce(E) -> StartError {
    let path = path.to_owned();
    move |error| StartError::Io {
        what,
        path,
        error: error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_leaves_the_name_to_its_parent() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("socket");
        fs::write(&path, "").expect("written");
        let mut inherited = SocketFile::new(path.clone());
        inherited.owner += 1;
        inherited.remove();
        drop(inherited);
        assert!(path.exists(), "a child took its parent's socket away");
        drop(SocketFile::new(path.clone()));
        assert!(!path.exists());
    }
}
