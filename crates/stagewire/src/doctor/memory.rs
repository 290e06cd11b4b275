use std::path::PathBuf;

use super::check::{Check, State};
use super::root::Root;
use crate::output::bytes;

const NAME: &str = "memory";

/// Below this share of what may be used, a payload of some hundred MiB may not fit.
const SCARCE: u64 = 512 << 20;

pub(super) fn look(root: &Root) -> Vec<Check> {
    let path = "/proc/meminfo";
    let info = match root.read(path) {
        Ok(Some(info)) => info,
        Ok(None) => return vec![Check::unknown(NAME, format!("there is no {path}"), "mount /proc")],
        Err(why) => return vec![Check::unknown(NAME, why, "run it where /proc can be read")],
    };
    let (Some(total), Some(available)) = (kib(&info, "MemTotal:"), kib(&info, "MemAvailable:")) else {
        let why = format!("{path} has no MemTotal and MemAvailable");
        return vec![Check::unknown(NAME, why, "nothing, if all else is ok")];
    };
    let group = limit(root).filter(|limit| *limit < total);
    let value = match group {
        Some(limit) => format!(
            "{}, {} available; the control group allows {}",
            bytes(total),
            bytes(available),
            bytes(limit)
        ),
        None => format!("{}, {} available", bytes(total), bytes(available)),
    };
    let check = Check::ok(NAME, value)
        .with("total_bytes", total)
        .with("available_bytes", available)
        .with("group_limit_bytes", group);
    let room = available.min(group.unwrap_or(u64::MAX));
    vec![if room < SCARCE {
        let why = format!(
            "{} is little for payloads; the arena refuses what does not fit",
            bytes(room)
        );
        check.but(State::Note, why, "free memory, or raise the limit of the container")
    } else if group.is_some() {
        let why = "shared memory counts against the control group, and beyond its limit the kernel kills";
        check.but(
            State::Note,
            why,
            "nothing, if that suffices; else raise it, as with `docker run --memory`",
        )
    } else {
        check
    }]
}

/// The value of a field in KiB, in bytes.
pub(super) fn kib(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The tightest memory limit of the control groups that this process is in, of either version.
fn limit(root: &Root) -> Option<u64> {
    let groups = root.text("/proc/self/cgroup")?;
    let limits = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        match controllers {
            "" => tightest(root, "/sys/fs/cgroup", path, "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                tightest(root, "/sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
            }
            _ => None,
        }
    });
    limits.min()
}

/// The smallest limit from a group up to the top. A container may show its own group as the top: then the deeper paths
/// are not there.
fn tightest(root: &Root, mount: &str, group: &str, file: &str) -> Option<u64> {
    let group = PathBuf::from(group.trim_start_matches('/'));
    let limits = group.ancestors().filter_map(|group| {
        let path = PathBuf::from(mount).join(group).join(file);
        root.text(path.to_str()?)?.parse::<u64>().ok()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::root::Fixture;

    const INFO: (&str, &str) = (
        "/proc/meminfo",
        "MemTotal:       24731708 kB\nMemFree:          213044 kB\nMemAvailable:   11068456 kB\n",
    );

    #[test]
    fn the_tightest_group_of_version_2_counts() {
        let fixture = Fixture::new(&[
            INFO,
            ("/proc/self/cgroup", "0::/kubepods/pod1/c1\n"),
            ("/sys/fs/cgroup/kubepods/pod1/c1/memory.max", "max\n"),
            ("/sys/fs/cgroup/kubepods/pod1/memory.max", "4294967296\n"),
            ("/sys/fs/cgroup/kubepods/memory.max", "8589934592\n"),
        ]);
        let check = &look(&fixture.root())[0];
        assert_eq!(check.state, State::Note);
        assert_eq!(check.data["group_limit_bytes"], 4_u64 << 30);
        assert_eq!(
            check.value,
            "23.6 GiB, 10.6 GiB available; the control group allows 4.0 GiB"
        );
    }

    #[test]
    fn the_group_of_version_1_counts_and_no_limit_is_none() {
        let cgroup = ("/proc/self/cgroup", "4:memory:/box/a\n3:cpuset:/\n0::/\n");
        let fixture = Fixture::new(&[
            INFO,
            cgroup,
            // As a container sees it, which has its own group mounted as the top.
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
        ]);
        assert_eq!(limit(&fixture.root()), Some(1 << 30));
        let endless = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        let check = &look(&Fixture::new(&[INFO, cgroup, endless]).root())[0];
        assert_eq!(
            (check.state, &check.data["group_limit_bytes"]),
            (State::Ok, &serde_json::Value::Null)
        );
    }

    #[test]
    fn scarce_memory_is_noted() {
        let fixture = Fixture::new(&[("/proc/meminfo", "MemTotal: 2000000 kB\nMemAvailable: 1000 kB\n")]);
        assert_eq!(look(&fixture.root())[0].state, State::Note);
    }

    #[test]
    fn without_meminfo_nothing_is_claimed() {
        let fixture = Fixture::new(&[]);
        assert_eq!(look(&fixture.root())[0].state, State::Unknown);
        fixture.refuse_file("/proc/meminfo");
        assert_eq!(look(&fixture.root())[0].state, State::Unknown);
    }
}
