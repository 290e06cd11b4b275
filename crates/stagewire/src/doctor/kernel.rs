use super::check::{Check, State};
use super::root::Root;

const NAME: &str = "kernel";

/// Peers are watched through pidfds, which came with this version.
const NEEDED: (u32, u32) = (5, 3);

pub(super) fn look(root: &Root) -> Vec<Check> {
    let path = "/proc/sys/kernel/osrelease";
    let release = match root.read(path) {
        Ok(Some(release)) => release,
        Ok(None) => return vec![Check::unknown(NAME, format!("there is no {path}"), "mount /proc")],
        Err(why) => return vec![Check::unknown(NAME, why, "run it where /proc can be read")],
    };
    let architecture = std::env::consts::ARCH;
    let check = Check::ok(NAME, format!("Linux {release}, {architecture}"))
        .with("release", release.as_str())
        .with("architecture", architecture);
    vec![match version(&release) {
        None => {
            let why = format!("{release:?} is no version that can be compared");
            check.but(State::Unknown, why, "nothing, if all else is ok")
        }
        Some(found) if found < NEEDED => {
            let why = format!(
                "Stagewire watches peers through pidfds, which Linux {}.{} brought",
                NEEDED.0, NEEDED.1
            );
            check.but(State::Missing, why, "boot a newer kernel")
        }
        Some(_) => check,
    }]
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::root::Fixture;

    fn state(release: &str) -> State {
        let fixture = Fixture::new(&[("/proc/sys/kernel/osrelease", release)]);
        look(&fixture.root())[0].state
    }

    #[test]
    fn old_kernels_lack_pidfds() {
        assert_eq!(state("6.18.44-fc-v657\n"), State::Ok);
        assert_eq!(state("5.3.0-1-amd64"), State::Ok);
        assert_eq!(state("4.18.0-553.el8_10.x86_64"), State::Missing);
        assert_eq!(state("next"), State::Unknown);
    }

    #[test]
    fn without_proc_nothing_is_claimed() {
        let fixture = Fixture::new(&[]);
        assert_eq!(look(&fixture.root())[0].state, State::Unknown);
        fixture.refuse_file("/proc/sys/kernel/osrelease");
        let check = &look(&fixture.root())[0];
        assert_eq!(check.state, State::Unknown);
        assert!(check.why.as_deref().unwrap().contains("cannot be read"));
    }
}
