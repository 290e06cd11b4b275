use super::check::{Check, State};
use super::root::Root;
use super::status_file::{CAP_IPC_LOCK, Rights};
use crate::output::bytes;

const FILES: &str = "open-files";
const MEMLOCK: &str = "memlock";

/// A server with some hundred workers and clients stays below.
const FILES_WANTED: u64 = 4096;

/// What an RDMA device pins is at least the arena.
const MEMLOCK_WANTED: u64 = 256 << 20;

pub(super) fn look(root: &Root) -> Vec<Check> {
    let path = "/proc/self/limits";
    let text = match root.read(path) {
        Ok(Some(text)) => text,
        Ok(None) => return unknown(&format!("there is no {path}"), "mount /proc"),
        Err(why) => return unknown(&why, "run it where /proc can be read"),
    };
    let rdma = matches!(root.names("/sys/class/infiniband"), Ok(Some(devices)) if !devices.is_empty());
    vec![
        open_files(Limit::parse(&text, "Max open files")),
        memlock(
            Limit::parse(&text, "Max locked memory"),
            Rights::of(root).has(CAP_IPC_LOCK),
            rdma,
        ),
    ]
}

fn unknown(why: &str, advice: &str) -> Vec<Check> {
    let names = [FILES, MEMLOCK].into_iter();
    names.map(|name| Check::unknown(name, why, advice)).collect()
}

/// Soft and hard limit; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limit {
    soft: Option<u64>,
    hard: Option<u64>,
}

impl Limit {
    fn parse(text: &str, name: &str) -> Option<Self> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let mut words = line.split_whitespace();
        let mut number = || match words.next()? {
            "unlimited" => Some(None),
            digits => digits.parse().ok().map(Some),
        };
        let (soft, hard) = (number()?, number()?);
        Some(Self { soft, hard })
    }

    fn value(self, show: impl Fn(u64) -> String) -> String {
        let shown = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), &show);
        format!("{} (soft), {} (hard)", shown(self.soft), shown(self.hard))
    }

    fn below(self, wanted: u64) -> bool {
        self.soft.is_some_and(|soft| soft < wanted)
    }
}

fn open_files(limit: Option<Limit>) -> Check {
    let Some(limit) = limit else {
        let why = "/proc/self/limits has no line of it";
        return Check::unknown(FILES, why, "ask `ulimit -n`");
    };
    let check = Check::ok(FILES, limit.value(|count| count.to_string()))
        .with("soft", limit.soft)
        .with("hard", limit.hard);
    if !limit.below(FILES_WANTED) {
        return check;
    }
    let why = "every peer, worker and client takes descriptors";
    let advice = if limit.hard.is_some_and(|hard| hard < FILES_WANTED) {
        format!("have the hard limit raised: LimitNOFILE={FILES_WANTED} of systemd, --ulimit nofile of docker")
    } else {
        format!("`ulimit -n {FILES_WANTED}` before you start it")
    };
    check.but(State::Note, why, advice)
}

fn memlock(limit: Option<Limit>, exempt: Option<bool>, rdma: bool) -> Check {
    let Some(limit) = limit else {
        let why = "/proc/self/limits has no line of it";
        return Check::unknown(MEMLOCK, why, "ask `ulimit -l`");
    };
    let exempt = exempt == Some(true);
    let mut value = limit.value(bytes);
    if exempt {
        value += ", but CAP_IPC_LOCK lifts it";
    }
    let check = Check::ok(MEMLOCK, value)
        .with("soft_bytes", limit.soft)
        .with("hard_bytes", limit.hard)
        .with("exempt", exempt);
    if exempt || !limit.below(MEMLOCK_WANTED) {
        return check;
    }
    let why = if rdma {
        "an RDMA device pins what is registered with it, and registration fails beyond the limit"
    } else {
        "only RDMA pins memory, and there is no such device here"
    };
    let advice = if rdma {
        "`ulimit -l unlimited`, LimitMEMLOCK=infinity of systemd, --ulimit memlock=-1 of docker"
    } else {
        "nothing: shm, cma and tcp pin none"
    };
    check.but(State::Note, why, advice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::root::Fixture;

    const LIMITS: &str = "\
Limit                     Soft Limit           Hard Limit           Units     
Max cpu time              unlimited            unlimited            seconds   
Max open files            1024                 524288               files     
Max locked memory         8388608              unlimited            bytes     
";

    #[test]
    fn low_limits_are_noted_with_what_raises_them() {
        let fixture = Fixture::new(&[("/proc/self/limits", LIMITS)]);
        let [files, memlock] = &look(&fixture.root())[..] else {
            panic!("two")
        };
        assert_eq!(files.value, "1024 (soft), 524288 (hard)");
        assert_eq!(
            (files.state, files.advice.as_deref()),
            (State::Note, Some("`ulimit -n 4096` before you start it"))
        );
        assert_eq!(memlock.value, "8.0 MiB (soft), unlimited (hard)");
        assert!(memlock.why.as_deref().unwrap().contains("no such device"));
        fixture.directory("/sys/class/infiniband/mlx5_0");
        assert!(
            look(&fixture.root())[1]
                .advice
                .as_deref()
                .unwrap()
                .contains("ulimit -l unlimited")
        );
    }

    #[test]
    fn a_capability_lifts_the_limit_of_locked_memory() {
        let status = ("/proc/self/status", "CapEff:\t0000000000004000\n");
        let fixture = Fixture::new(&[("/proc/self/limits", LIMITS), status]);
        let check = &look(&fixture.root())[1];
        assert_eq!((check.state, &check.data["exempt"]), (State::Ok, &true.into()));
    }

    #[test]
    fn a_low_hard_limit_is_for_somebody_else_to_raise() {
        let limit = Limit {
            soft: Some(256),
            hard: Some(1024),
        };
        assert!(open_files(Some(limit)).advice.unwrap().contains("hard limit"));
        let endless = Limit { soft: None, hard: None };
        assert_eq!(open_files(Some(endless)).state, State::Ok);
        assert_eq!(open_files(None).state, State::Unknown);
    }

    #[test]
    fn without_proc_nothing_is_claimed() {
        let fixture = Fixture::new(&[]);
        let states = |root| look(&root).iter().map(|check| check.state).collect::<Vec<_>>();
        assert_eq!(states(fixture.root()), [State::Unknown; 2]);
        fixture.refuse_file("/proc/self/limits");
        assert_eq!(states(fixture.root()), [State::Unknown; 2]);
    }
}
