//! Directories that somebody else has put in the place of ours.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};
use std::path::Path;

use stagewire_api::{RunDir, RunDirError};

/// A user that is not the one of this test.
const OTHER: u32 = 65_534;

/// Only root can make what belongs to somebody else.
#[expect(clippy::print_stderr, reason = "a skip must be visible")]
fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: only root can make files of another user");
    }
    root
}

/// Whether `dir` is refused as another user's, and left as it was.
fn is_refused(dir: &Path) -> bool {
    let error = RunDir::locate(Some(dir)).create().expect_err("it is another user's");
    let other = matches!(
        error,
        RunDirError::Owner {
            owner: OTHER,
            me: 0,
            ..
        }
    );
    other && fs::read_dir(dir).expect("it is there").count() == 0
}

fn private_dir(path: &Path) {
    fs::create_dir(path).expect("made");
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).expect("ours");
}

#[test]
fn a_directory_of_another_user_is_refused() {
    if is_root() {
        let parent = tempfile::tempdir().expect("a folder");
        let dir = parent.path().join("run");
        private_dir(&dir);
        chown(&dir, Some(OTHER), None).expect("root may");
        assert!(is_refused(&dir));
    }
}

#[test]
fn a_link_of_another_user_is_refused_and_one_of_ours_is_not() {
    if is_root() {
        let parent = tempfile::tempdir().expect("a folder");
        let (target, link) = (parent.path().join("private"), parent.path().join("run"));
        private_dir(&target);
        symlink(&target, &link).expect("made");
        lchown(&link, Some(OTHER), None).expect("root may");
        assert!(is_refused(&link));
        lchown(&link, Some(0), None).expect("root may");
        RunDir::locate(Some(&link)).create().expect("both are ours");
    }
}
