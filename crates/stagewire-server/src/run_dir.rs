//! The server's part of the run directory: the lock, the worker token, `server.json`, and sweeping after the dead.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rand::TryRngCore;
use rustix::fs::{FlockOperation, flock};
use stagewire_api::{RunDir, RunDirError, SERVER_FILE_SCHEMA, ServerFile};
use stagewire_core::{Classify, ErrorClass, Incarnation};

use crate::secret::Secret;

/// Why a server cannot have a run directory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum OccupyError {
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    #[error(
        "a server already runs in {}{}; stop it first, or give this one another --run-dir",
        path.display(),
        who.as_ref().map(|who| format!(" (process {}, http://{}, pipeline {})", who.process.pid, who.http, who.pipeline)).unwrap_or_default()
    )]
    AlreadyRunning {
        path: PathBuf,
        who: Option<Box<ServerFile>>,
    },
    #[error("cannot {what} {}", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl Classify for OccupyError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::RunDir(error) => error.class(),
            Self::AlreadyRunning { .. } => ErrorClass::Conflict,
            Self::Io { .. } => ErrorClass::Unavailable,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::RunDir(error) => error.reason(),
            Self::AlreadyRunning { .. } => "server.already_running",
            Self::Io { .. } => "server.run_dir",
        }
    }
}

/// A run directory that this server has to itself, until dropped.
#[derive(Debug)]
pub(crate) struct Occupied {
    dir: RunDir,
    /// Holds the lock; the kernel frees it when the process ends, however it ends.
    _lock: File,
}

impl Occupied {
    /// Makes the directory where it is missing, takes the lock, and sweeps after dead processes.
    pub(crate) fn occupy(dir: RunDir) -> Result<Self, OccupyError> {
        dir.create()?;
        let lock = lock(&dir)?;
        // What another server left that was killed.
        remove(&dir.join("server.json"));
        sweep_dead(&dir.join("peers"));
        Ok(Self { dir, _lock: lock })
    }

    pub(crate) const fn dir(&self) -> &RunDir {
        &self.dir
    }

    /// The token that workers of this deployment present; made where there is none.
    pub(crate) fn worker_token(&self) -> Result<Secret, OccupyError> {
        match self.dir.worker_token() {
            Ok(token) if token.len() >= 32 => return Ok(Secret::new(token)),
            Ok(_) | Err(RunDirError::NoServer { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let mut random = [0_u8; 32];
        let path = self.dir.join("worker.token");
        rand::rngs::OsRng
            .try_fill_bytes(&mut random)
            .map_err(|error| OccupyError::Io {
                what: "get random bytes for",
                path,
                source: io::Error::other(error),
            })?;
        let token: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        self.dir.write_private("worker.token", token.as_bytes())?;
        Ok(Secret::new(token))
    }

    /// Tells the world where the server listens.
    pub(crate) fn announce(&self, http: String, pipeline: String, epoch: u64) -> Result<(), OccupyError> {
        Ok(self.dir.announce(&ServerFile {
            schema: SERVER_FILE_SCHEMA,
            process: stagewire_transfer::this_process().map_err(|source| OccupyError::Io {
                what: "read the start time of this process from",
                path: "/proc/self/stat".into(),
                source,
            })?,
            http,
            pipeline,
            epoch,
        })?)
    }

    /// Sweeps after the dead once more. What remains is the token, the logs, and what living processes use.
    pub(crate) fn leave(self) {
        sweep_dead(&self.dir.join("peers"));
    }
}

impl Drop for Occupied {
    fn drop(&mut self) {
        remove(&self.dir.join("server.json"));
        for folder in ["peers", "workers", "logs"] {
            // Fails where something is in it, as it should.
            let _ = fs::remove_dir(self.dir.join(folder));
        }
        // Removed while it is locked, so that nobody locks a file that is about to go: see `lock`.
        remove(&self.dir.join("server.lock"));
    }
}

/// Removes the sockets of a process that is known to be dead.
pub(crate) fn sweep_incarnation(peers: &Path, incarnation: Incarnation) {
    let name = incarnation.0.simple().to_string();
    for kind in ["data", "ctl"] {
        remove(&peers.join(format!("{}.{kind}", &name[..16])));
    }
}

/// Removes the sockets of processes that died without removing them.
fn sweep_dead(peers: &Path) {
    match stagewire_transfer::sweep(peers) {
        Ok(removed) if removed.is_empty() => {}
        Ok(removed) => tracing::debug!(?removed, "swept after dead processes"),
        Err(error) => tracing::warn!(path = %peers.display(), %error, "cannot sweep sockets"),
    }
}

fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "cannot remove a file of the run directory");
        }
        _ => {}
    }
}

fn lock(dir: &RunDir) -> Result<File, OccupyError> {
    let path = dir.join("server.lock");
    let io = |what, source| OccupyError::Io {
        what,
        path: path.clone(),
        source,
    };
    loop {
        let mut options = OpenOptions::new();
        let mut file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(|source| io("open", source))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(OccupyError::AlreadyRunning {
                    path: dir.path().to_owned(),
                    who: dir.server().ok().map(Box::new),
                });
            }
            Err(error) => return Err(io("lock", error.into())),
        }
        // The owner before may have removed the file between our open and our lock: then the lock guards nothing.
        let mine = file.metadata().map_err(|source| io("read", source))?.ino();
        if fs::metadata(&path).is_ok_and(|there| there.ino() == mine) {
            let pid = std::process::id();
            file.set_len(0)
                .and_then(|()| writeln!(file, "{pid}"))
                .map_err(|source| io("write", source))?;
            return Ok(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn fresh() -> (tempfile::TempDir, RunDir) {
        let temp = tempfile::tempdir().unwrap();
        let dir = RunDir::locate(Some(&temp.path().join("run")));
        (temp, dir)
    }

    #[test]
    fn one_server_at_a_time_and_nothing_left() {
        let (_temp, dir) = fresh();
        let first = Occupied::occupy(dir.clone()).unwrap();
        first.announce("127.0.0.1:7".to_owned(), "wan".to_owned(), 3).unwrap();
        let error = Occupied::occupy(dir.clone()).unwrap_err().to_string();
        assert!(
            error.contains("already runs") && error.contains("http://127.0.0.1:7"),
            "{error}"
        );
        assert_eq!(dir.server().unwrap().epoch, 3, "the refused one changed nothing");
        first.leave();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        drop(Occupied::occupy(dir).unwrap());
    }

    #[test]
    fn the_worker_token_is_private_and_stays() {
        let (_temp, dir) = fresh();
        let server = Occupied::occupy(dir.clone()).unwrap();
        server.worker_token().unwrap();
        let token = dir.worker_token().unwrap();
        assert_eq!(token.len(), 64);
        let mode = fs::metadata(dir.join("worker.token")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        server.leave();
        let server = Occupied::occupy(dir.clone()).unwrap();
        server.worker_token().unwrap();
        assert_eq!(dir.worker_token().unwrap(), token);
    }

    #[test]
    fn sockets_of_the_dead_are_swept_and_those_of_the_living_kept() {
        let (_temp, dir) = fresh();
        dir.create().unwrap();
        let (dead, alive) = (dir.join("peers/dead.data"), dir.join("peers/alive.data"));
        drop(UnixListener::bind(&dead).unwrap());
        let listener = UnixListener::bind(&alive).unwrap();
        fs::write(dir.join("server.json"), "left by a server that was killed").unwrap();
        let server = Occupied::occupy(dir.clone()).unwrap();
        assert!(!dead.exists() && alive.exists());
        assert!(matches!(dir.server(), Err(RunDirError::NoServer { .. })));
        drop(listener);
        server.leave();
        assert!(!dir.join("peers").exists());
    }

    #[test]
    fn the_sockets_of_one_process_go_and_no_others() {
        let (_temp, dir) = fresh();
        dir.create().unwrap();
        let peers = dir.join("peers");
        let dead: Incarnation = "0123456789abcdef0123456789abcdef".parse().unwrap();
        for name in ["0123456789abcdef.data", "0123456789abcdef.ctl", "fedcba9876543210.ctl"] {
            fs::write(peers.join(name), "").unwrap();
        }
        sweep_incarnation(&peers, dead);
        sweep_incarnation(&peers, dead);
        let left: Vec<_> = fs::read_dir(&peers)
            .unwrap()
            .flatten()
            .map(|entry| entry.file_name())
            .collect();
        assert_eq!(left, ["fedcba9876543210.ctl"]);
    }

    #[test]
    fn a_directory_open_to_others_is_refused() {
        let (_temp, dir) = fresh();
        dir.create().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let error = Occupied::occupy(dir).unwrap_err();
        assert!(error.to_string().contains("chmod 700"), "{error}");
    }
}
