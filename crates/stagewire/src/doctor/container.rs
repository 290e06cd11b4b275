use super::check::{Check, State};
use super::root::Root;
use super::status_file::Rights;

const NAME: &str = "container";

const ADVICE: &str = "processes that exchange payloads by shm or cma go into one container, or share run directory, IPC \
                      and PID namespace; others use tcp";

pub(super) fn look(root: &Root) -> Vec<Check> {
    let filtered = Rights::of(root).filtered();
    let filter = if filtered { ", with a seccomp filter" } else { "" };
    let check = match kind(root) {
        Some(kind) => Check::note(
            NAME,
            format!("{kind}{filter}"),
            "what a container forbids looks like a fault of the host",
            ADVICE,
        )
        .with("kind", kind),
        None if filtered => Check::ok(NAME, "none seen")
            .but(
                State::Note,
                "a seccomp filter looks at every system call of this process",
                "nothing, if shm and cma are ok",
            )
            .with("kind", serde_json::Value::Null),
        None => Check::ok(NAME, "none seen").with("kind", serde_json::Value::Null),
    };
    vec![check.with("seccomp_filter", filtered)]
}

/// What marks a container from within. None has to, so that `None` proves nothing.
fn kind(root: &Root) -> Option<&'static str> {
    if root.exists("/run/.containerenv") {
        return Some("podman");
    }
    if root.exists("/.dockerenv") {
        return Some("docker");
    }
    let groups = root.text("/proc/self/cgroup").unwrap_or_default();
    let marks = [
        ("kubepods", "kubernetes"),
        ("/docker", "docker"),
        ("libpod", "podman"),
        ("/lxc", "lxc"),
    ];
    let mark = marks.into_iter().find(|(mark, _)| groups.contains(mark));
    mark.map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::root::Fixture;

    #[test]
    fn containers_are_known_by_their_marks() {
        let seen = |files: &[(&str, &str)]| look(&Fixture::new(files).root()).remove(0);
        assert_eq!(seen(&[("/.dockerenv", "")]).value, "docker");
        assert_eq!(seen(&[("/run/.containerenv", "")]).value, "podman");
        let pod = seen(&[
            ("/proc/self/cgroup", "0::/kubepods.slice/pod1\n"),
            ("/proc/self/status", "Seccomp:\t2\n"),
        ]);
        assert_eq!(
            (pod.state, pod.value.as_str()),
            (State::Note, "kubernetes, with a seccomp filter")
        );
        let none = seen(&[("/proc/self/cgroup", "0::/user.slice\n")]);
        assert_eq!((none.state, none.value.as_str()), (State::Ok, "none seen"));
        assert_eq!(seen(&[("/proc/self/status", "Seccomp:\t2\n")]).state, State::Note);
    }
}
