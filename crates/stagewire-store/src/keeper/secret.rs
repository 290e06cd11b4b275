//! What proves that a process may read the data directory.

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::KeeperError;

const NAME: &str = "keeper.secret";
const LEN: usize = 32;

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Secret([u8; LEN]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    #[cfg(test)]
    pub(super) const fn new(bytes: [u8; LEN]) -> Self {
        Self(bytes)
    }

    /// The secret of `dir`, made where there is none. Only the owner of the directory's lock may call this.
    pub(super) fn make(dir: &Path) -> Result<Self, KeeperError> {
        if let Some(secret) = Self::read(dir)? {
            return Ok(secret);
        }
        let failed = |source| KeeperError::Io {
            what: "write keeper.secret",
            dir: dir.to_owned(),
            source,
        };
        let secret = Self(rand::random());
        let new = dir.join("keeper.secret.new");
        let _ = std::fs::remove_file(&new);
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&new)
            .map_err(failed)?;
        file.write_all(&secret.0).map_err(failed)?;
        std::fs::rename(&new, dir.join(NAME)).map_err(failed)?;
        Ok(secret)
    }

    /// The secret of `dir`; `None` where there is none.
    pub(super) fn read(dir: &Path) -> Result<Option<Self>, KeeperError> {
        let path = dir.join(NAME);
        let failed = |source| KeeperError::Io {
            what: "read keeper.secret",
            dir: dir.to_owned(),
            source,
        };
        let no_follow = i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).expect("a flag of open(2)");
        let mut file = match OpenOptions::new().read(true).custom_flags(no_follow).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(failed)?,
        };
        let found = file.metadata().map_err(failed)?;
        let (mode, owner, me) = (found.mode() & 0o777, found.uid(), rustix::process::geteuid().as_raw());
        if mode & 0o077 != 0 || owner != me {
            let problem = format!("it has mode {mode:03o} and belongs to user {owner}");
            return Err(KeeperError::Insecure { path, problem });
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed)?;
        let secret = bytes.try_into().map_err(|_| KeeperError::Insecure {
            path,
            problem: format!("it does not hold {LEN} bytes"),
        })?;
        Ok(Some(Self(secret)))
    }

    /// Whether it is the same, in a time that does not depend on where they differ.
    pub(super) fn is(&self, other: &Self) -> bool {
        let differ = self.0.iter().zip(&other.0).fold(0, |differ, (a, b)| differ | (a ^ b));
        differ == 0
    }
}
