//! What is checked before anything is started.

use std::env;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{self, Path, PathBuf};

use stagewire_core::ByteCount;

use super::{ServerOptions, StartError};
use crate::config::ServerSettings;
use crate::secret::Secret;

/// Shortest token that clients may be asked for, in bytes.
const TOKEN: usize = 16;

/// Bounds that cannot be kept are refused now, not when the memory is gone.
pub(super) fn memory(settings: &ServerSettings) -> Result<(), StartError> {
    let Some(available) = total_memory() else { return Ok(()) };
    let bounds = [
        ("store-bytes", settings.store_bytes),
        ("arena-bytes", settings.arena_bytes),
    ];
    match bounds.into_iter().find(|(_, wanted)| *wanted > available) {
        Some((key, wanted)) => Err(StartError::Memory { key, wanted, available }),
        None => Ok(()),
    }
}

/// Memory of the host, from `/proc/meminfo`; `None` where it does not say.
fn total_memory() -> Option<ByteCount> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(ByteCount(kib << 10))
}

/// The token that clients must send, where the file names one or the address requires one.
pub(super) fn token(settings: &ServerSettings, address: SocketAddr) -> Result<Option<Secret>, StartError> {
    match &settings.token_file {
        Some(path) => read_token(path).map(Some),
        None if address.ip().is_loopback() => Ok(None),
        None => Err(StartError::TokenRequired { address }),
    }
}

fn read_token(path: &Path) -> Result<Secret, StartError> {
    let refuse = |problem: String| StartError::TokenFile {
        path: path.to_owned(),
        problem,
    };
    let mode = fs::metadata(path).map_err(|error| refuse(error.to_string()))?.mode();
    if mode & 0o077 != 0 {
        let (mode, path) = (mode & 0o777, path.display());
        return Err(refuse(format!(
            "other users may read it (mode {mode:o}); run `chmod 600 {path}`"
        )));
    }
    let text = fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
    let token = text.trim();
    if token.len() < TOKEN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(refuse(format!(
            "it must hold at least {TOKEN} visible ASCII characters; make one with `openssl rand -hex 32`"
        )));
    }
    Ok(Secret::new(token.to_owned()))
}

/// Where journal, results and inputs are kept; absolute, as workers are told of it that run elsewhere.
pub(super) fn data_dir(options: &ServerOptions) -> Result<PathBuf, StartError> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let usual = || {
        let state = variable("XDG_STATE_HOME").or_else(|| variable("HOME").map(|home| home.join(".local/state")))?;
        Some(state.join("stagewire").join(options.config.pipeline.name.as_str()))
    };
    let given = options.data_dir.as_ref().or(options.config.server.data_dir.as_ref());
    let dir = given.cloned().or_else(usual).ok_or(StartError::NoDataDir)?;
    path::absolute(&dir).map_err(|source| StartError::DataDir { path: dir, source })
}
