use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::{env, fs};

use serde::{Deserialize, Serialize};
use stagewire_core::{Classify, ErrorClass, ProcessRef};

/// The directory where the processes of one deployment find each other: mode 0700, owned by the caller.
///
/// | path | what |
/// | --- | --- |
/// | `server.json` | where the server listens: [`ServerFile`] |
/// | `server.lock` | held locked by the server |
/// | `worker.token` | what a worker must present, mode 0600 |
/// | `peers/` | Unix sockets of the processes that hold payloads |
/// | `workers/` | what `stagewire up` knows of the workers that it started |
/// | `logs/` | what those workers print |
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDir {
    path: PathBuf,
}

/// Why a run directory cannot be used, or has no server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum RunDirError {
    #[error("cannot use the run directory {path}")]
    Io { path: PathBuf, source: io::Error },
    #[error("the run directory {path} belongs to user {owner}, not to you (user {me}); give another with --run-dir")]
    Owner { path: PathBuf, owner: u32, me: u32 },
    #[error("the run directory {path} is open to other users (mode {mode:o}); run `chmod 700 {path}`")]
    Mode { path: PathBuf, mode: u32 },
    #[error("no server runs in {path}; start one with `stagewire up FILE`, or name its directory with --run-dir")]
    NoServer { path: PathBuf },
    #[error("{path} is not a server file of this version: {error}")]
    ServerFile { path: PathBuf, error: String },
}

impl Classify for RunDirError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Io { .. } | Self::NoServer { .. } => ErrorClass::Unavailable,
            Self::Owner { .. } | Self::Mode { .. } => ErrorClass::Denied,
            Self::ServerFile { .. } => ErrorClass::Unsupported,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::NoServer { .. } => "server.none",
            _ => "server.run_dir",
        }
    }
}

/// Version of the layout of [`ServerFile`].
pub const SERVER_FILE_SCHEMA: u32 = 1;

/// What `server.json` says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFile {
    /// [`SERVER_FILE_SCHEMA`].
    pub schema: u32,
    /// The server process.
    pub process: ProcessRef,
    /// Address that serves both HTTP and gRPC, such as `127.0.0.1:40123`.
    pub http: String,
    /// Name of the pipeline.
    pub pipeline: String,
    /// Epoch of the server.
    pub epoch: u64,
}

impl RunDir {
    /// The directory that is meant: the one given, else `STAGEWIRE_RUN_DIR`, else `stagewire` in `XDG_RUNTIME_DIR`,
    /// else `/tmp/stagewire-UID`. Does not touch the file system.
    pub fn locate(given: Option<&Path>) -> Self {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let path = given
            .map(Path::to_owned)
            .or_else(|| variable("STAGEWIRE_RUN_DIR"))
            .or_else(|| variable("XDG_RUNTIME_DIR").map(|dir| dir.join("stagewire")))
            .unwrap_or_else(|| env::temp_dir().join(format!("stagewire-{}", rustix::process::getuid().as_raw())));
        Self { path }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path inside the directory.
    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }

    /// Makes the directory and its folders where they are missing, and checks owner and mode.
    ///
    /// # Errors
    /// [`RunDirError::Io`], [`RunDirError::Owner`], [`RunDirError::Mode`]; nothing is made in a directory of others.
    pub fn create(&self) -> Result<(), RunDirError> {
        self.make(&self.path)?;
        self.check()?;
        ["peers", "workers", "logs"]
            .iter()
            .try_for_each(|folder| self.make(&self.join(folder)))
    }

    fn make(&self, folder: &Path) -> Result<(), RunDirError> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|source| RunDirError::Io {
            path: self.path.clone(),
            source,
        })
    }

    /// Checks owner and mode of a directory that must be there.
    ///
    /// # Errors
    /// As [`RunDir::create`].
    pub fn check(&self) -> Result<(), RunDirError> {
        let path = self.path.clone();
        let both = fs::symlink_metadata(&path).and_then(|link| Ok((link, fs::metadata(&path)?)));
        let (link, metadata) = match both {
            Ok(both) => both,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(RunDirError::NoServer { path }),
            Err(source) => return Err(RunDirError::Io { path, source }),
        };
        let (me, mode) = (rustix::process::geteuid().as_raw(), metadata.mode() & 0o7777);
        // In /tmp anybody can put a link to some directory of ours in this one's place.
        let owner = if link.uid() == me { metadata.uid() } else { link.uid() };
        if owner != me {
            return Err(RunDirError::Owner { path, owner, me });
        }
        if mode & 0o077 != 0 {
            return Err(RunDirError::Mode { path, mode });
        }
        Ok(())
    }

    /// Reads `server.json`. That it is there does not prove that the server lives.
    ///
    /// # Errors
    /// [`RunDirError::NoServer`] where there is none; else as [`RunDir::check`] and [`RunDirError::ServerFile`].
    pub fn server(&self) -> Result<ServerFile, RunDirError> {
        self.check()?;
        let path = self.join("server.json");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(RunDirError::NoServer {
                    path: self.path.clone(),
                });
            }
            Err(source) => return Err(RunDirError::Io { path, source }),
        };
        let file: ServerFile = serde_json::from_str(&text).map_err(|error| RunDirError::ServerFile {
            path: path.clone(),
            error: error.to_string(),
        })?;
        if file.schema == SERVER_FILE_SCHEMA {
            return Ok(file);
        }
        let error = format!("schema {}, this build reads {SERVER_FILE_SCHEMA}", file.schema);
        Err(RunDirError::ServerFile { path, error })
    }

    /// Writes `server.json` so that a reader sees the old or the new one, never a part.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub fn announce(&self, file: &ServerFile) -> Result<(), RunDirError> {
        let text = serde_json::to_string(file).expect("a server file has nothing that JSON cannot hold");
        self.write_private("server.json", text.as_bytes())
    }

    /// Writes a file of mode 0600, whole or not at all.
    ///
    /// # Errors
    /// [`RunDirError::Io`].
    pub fn write_private(&self, name: &str, bytes: &[u8]) -> Result<(), RunDirError> {
        let (path, new) = (self.join(name), self.join(format!("{name}.new")));
        let write = || {
            let mut file = fs::OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&new)?;
            file.write_all(bytes)?;
            fs::rename(&new, &path)
        };
        write().map_err(|source| RunDirError::Io {
            path: path.clone(),
            source,
        })
    }

    /// What a worker must present to this deployment's server.
    ///
    /// # Errors
    /// [`RunDirError::NoServer`] where there is no token file, else [`RunDirError::Io`].
    pub fn worker_token(&self) -> Result<String, RunDirError> {
        let path = self.join("worker.token");
        match fs::read_to_string(&path) {
            Ok(token) => Ok(token.trim().to_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(RunDirError::NoServer {
                path: self.path.clone(),
            }),
            Err(source) => Err(RunDirError::Io { path, source }),
        }
    }
}

/// Names this host and pid namespace: two processes with the same text can watch each other by pid.
pub fn host_id() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}
