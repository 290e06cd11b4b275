use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use stagewire_api::{RunDir, RunDirError};

use super::check::{Check, State};
use crate::output::bytes;

const NAME: &str = "run-dir";

/// The longest name that a process gives to a socket below the run directory, from when it makes it.
const SOCKET: &str = "/peers/0123456789abcdef.data.new";

/// What the kernel takes as the path of a Unix socket.
const MAX_PATH: usize = 107;

const ADVICE: &str = "give another directory with --run-dir, on a local file system";

pub(super) fn look(run_dir: &RunDir) -> Vec<Check> {
    vec![judge(run_dir)]
}

fn judge(run_dir: &RunDir) -> Check {
    let path = run_dir.path();
    let (place, state) = match run_dir.check() {
        Ok(()) => (path, "there"),
        Err(RunDirError::NoServer { .. }) => (existing(path), "to be made"),
        Err(error) => {
            let source = std::error::Error::source(&error).map_or_else(String::new, |source| format!(": {source}"));
            return Check::missing(NAME, path.display().to_string(), format!("{error}{source}"), ADVICE)
                .with("path", path.display().to_string());
        }
    };
    let check = Check::ok(NAME, format!("{}, {state}", path.display()))
        .with("path", path.display().to_string())
        .with("exists", state == "there");
    let len = path.as_os_str().as_bytes().len() + SOCKET.len();
    if len > MAX_PATH {
        let why = format!("its sockets would have paths of {len} bytes, and the kernel takes {MAX_PATH}");
        return check.but(
            State::Missing,
            why,
            "give a directory with a shorter path with --run-dir",
        );
    }
    match try_socket(place) {
        Ok(()) => free_space(check, place),
        Err(error) => {
            let why = format!("a Unix socket cannot be made in {}: {error}", place.display());
            check.but(State::Missing, why, ADVICE)
        }
    }
}

/// The directory itself, else the nearest above it that is there.
fn existing(path: &Path) -> &Path {
    let found = path.ancestors().find(|path| path.is_dir());
    found
        .filter(|path| !path.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Makes a directory and a socket in it, and removes both.
fn try_socket(place: &Path) -> std::io::Result<()> {
    let dir = tempfile::Builder::new().prefix(".doctor-").tempdir_in(place)?;
    UnixListener::bind(dir.path().join("s"))?;
    dir.close()
}

/// Logs of workers lie there, and the journal where nothing else is said.
fn free_space(check: Check, place: &Path) -> Check {
    const SCARCE: u64 = 64 << 20;
    let Ok(found) = rustix::fs::statvfs(place) else {
        return check;
    };
    let free = found.f_bavail * found.f_frsize;
    let mut check = check.with("free_bytes", free);
    check.value = format!("{}, {} free", check.value, bytes(free));
    if free < SCARCE {
        return check.but(
            State::Note,
            "logs of workers lie there",
            "free space, or give another with --run-dir",
        );
    }
    check
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn judged(path: &Path) -> Check {
        look(&RunDir::locate(Some(path))).remove(0)
    }

    #[test]
    fn a_directory_is_tried_and_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let (there, absent) = (dir.path().join("run"), dir.path().join("a/b"));
        RunDir::locate(Some(&there)).create().unwrap();
        let before = std::fs::read_dir(&there).unwrap().count();
        assert_ne!(judged(&there).state, State::Missing);
        assert_eq!(judged(&there).data["exists"], true);
        assert_eq!(std::fs::read_dir(&there).unwrap().count(), before);
        assert_eq!(judged(&absent).data["exists"], false);
        assert!(!dir.path().join("a").exists(), "nothing was made");
    }

    #[test]
    fn what_cannot_be_used_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let open = dir.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o755)).unwrap();
        let check = judged(&open);
        assert_eq!(check.state, State::Missing);
        assert!(check.why.unwrap().contains("chmod 700"));
        let long = judged(&dir.path().join("x".repeat(100)));
        assert_eq!(long.state, State::Missing);
        assert!(long.why.unwrap().contains("107"));
        let check = judged(Path::new("/proc/stagewire"));
        assert_eq!(check.state, State::Missing);
        assert!(check.why.unwrap().contains("cannot be made in /proc"));
    }
}
