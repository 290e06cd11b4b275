//! The keeper: a process of one thread that holds the memory of a store while the store's process is dead.
//!
//! A store's arena lies in memfds, which the kernel frees with their last descriptor. The keeper has a second descriptor
//! of each, and gives all of them to the next process that proves to own the data directory: it has this uid, and knows
//! the secret that only this user can read there. The keeper never maps them.
//!
//! There is at most one for each data directory: it holds a lock there. It ends when it is told to, or when no owner has
//! come for [`LINGER`].

mod error;
mod link;
mod message;
mod secret;
mod serve;
mod socket;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

pub use error::KeeperError;
pub(crate) use link::Link;
#[cfg(test)]
pub(crate) use link::tests::command as test_command;
pub use serve::run;

/// How long a keeper waits for the next owner.
pub const LINGER: Duration = Duration::from_secs(600);

const SOCKET: &str = "keeper.sock";
const LOCK: &str = "keeper.lock";

/// Names the data directory to a keeper.
const DIR: &str = "STAGEWIRE_KEEPER_DIR";
/// Milliseconds for which a keeper waits for the next owner, where that is not [`LINGER`].
const LINGER_MS: &str = "STAGEWIRE_KEEPER_LINGER_MS";

/// How a keeper is started: a program that calls [`run`] with [`KeeperOptions::from_env`] and does nothing else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeeperCommand {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// How long the keeper waits for the next owner.
    pub linger: Duration,
}

impl KeeperCommand {
    /// `program args…`, which waits for [`LINGER`].
    pub fn new(program: impl Into<PathBuf>, args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        Self {
            program: program.into(),
            args: args.into_iter().map(Into::into).collect(),
            linger: LINGER,
        }
    }

    /// A process for `dir`, with nothing of this one but its environment.
    fn command(&self, dir: &std::path::Path) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .env_remove(serve::ALONE)
            .env(DIR, dir)
            .env(LINGER_MS, self.linger.as_millis().to_string())
            .current_dir("/")
            // What reads the store's output must not wait for the keeper's end.
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }
}

/// What a keeper needs to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeeperOptions {
    /// The data directory.
    pub dir: PathBuf,
    /// How long to wait for an owner.
    pub linger: Duration,
}

impl KeeperOptions {
    /// What the process that started this one said; `None` where it was started by hand.
    pub fn from_env() -> Option<Self> {
        let dir = PathBuf::from(std::env::var_os(DIR)?);
        let linger = std::env::var(LINGER_MS).ok().and_then(|text| text.parse().ok());
        let linger = linger.map_or(LINGER, Duration::from_millis);
        Some(Self { dir, linger })
    }
}
