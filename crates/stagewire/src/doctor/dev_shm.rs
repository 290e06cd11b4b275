use super::check::{Check, State};
use super::root::Root;
use crate::output::bytes;

const NAME: &str = "dev-shm";

/// What containers get where nobody asks for more.
const TIGHT: u64 = 64 << 20;

pub(super) fn look(root: &Root) -> Vec<Check> {
    let path = root.path("/dev/shm");
    vec![match rustix::fs::statvfs(&path) {
        Ok(found) => judge(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize),
        Err(rustix::io::Errno::NOENT) => Check::missing(
            NAME,
            "there is none",
            "no tmpfs is mounted at /dev/shm",
            "nothing for Stagewire, whose segments are memfds; torch and UCX may want it",
        ),
        Err(error) => Check::unknown(NAME, format!("/dev/shm: {error}"), "see `df /dev/shm`"),
    }]
}

fn judge(size: u64, free: u64) -> Check {
    let check = Check::ok(NAME, format!("{}, {} free", bytes(size), bytes(free)))
        .with("size_bytes", size)
        .with("free_bytes", free);
    if size > TIGHT {
        return check;
    }
    let why = "Stagewire does not use it, its segments are memfds; but torch's loaders and UCX may run out of it";
    check.but(
        State::Note,
        why,
        "docker run --shm-size=8g, or an emptyDir of medium Memory at /dev/shm",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::root::Fixture;

    #[test]
    fn the_default_of_containers_is_noted() {
        assert_eq!(judge(64 << 20, 1 << 20).state, State::Note);
        let check = judge(24 << 30, 12 << 30);
        assert_eq!(
            (check.state, check.value.as_str()),
            (State::Ok, "24.0 GiB, 12.0 GiB free")
        );
    }

    #[test]
    fn present_absent_and_odd() {
        let fixture = Fixture::new(&[]);
        assert_eq!(look(&fixture.root())[0].state, State::Missing);
        fixture.directory("/dev/shm");
        assert!(look(&fixture.root())[0].data["size_bytes"].as_u64() > Some(0));
        let odd = Fixture::new(&[("/dev", "")]);
        assert_eq!(look(&odd.root())[0].state, State::Unknown);
    }
}
