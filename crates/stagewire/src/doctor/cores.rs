use super::check::{Check, State};
use super::root::Root;

const NAME: &str = "cores";

pub(super) fn look(root: &Root) -> Vec<Check> {
    let usable = std::thread::available_parallelism().ok().map(usize::from);
    let online = root.text("/sys/devices/system/cpu/online");
    vec![judge(usable, online.as_deref().and_then(count))]
}

fn judge(usable: Option<usize>, online: Option<usize>) -> Check {
    let Some(usable) = usable else {
        let why = "the kernel does not say how many cores this process may use";
        return Check::unknown(NAME, why, "nothing, if all else is ok");
    };
    let check = match online {
        Some(online) => Check::ok(NAME, format!("{usable} of {online}")),
        None => Check::ok(NAME, usable.to_string()),
    };
    let check = check.with("usable", usable).with("online", online);
    if usable == 1 {
        let why = "large copies are made by two threads, which here take turns";
        return check.but(State::Note, why, "give the process a second core");
    }
    match online {
        Some(online) if usable < online => {
            let why = "an affinity mask or a quota of the control group keeps the others away";
            check.but(
                State::Note,
                why,
                "nothing, if that is meant; see taskset and the container's --cpus",
            )
        }
        _ => check,
    }
}

/// How many a list such as `0-3,8,10-11` names.
fn count(list: &str) -> Option<usize> {
    list.split(',')
        .map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            Some(last.checked_sub(first)? + 1)
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::root::Fixture;

    #[test]
    fn lists_are_counted() {
        assert_eq!(count("0-3,8,10-11"), Some(7));
        assert_eq!(count("0"), Some(1));
        assert_eq!(count(""), None);
        assert_eq!(count("3-1"), None);
    }

    #[test]
    fn a_quota_or_a_single_core_is_noted() {
        assert_eq!(judge(Some(2), Some(2)).state, State::Ok);
        assert_eq!(judge(Some(2), None).state, State::Ok);
        assert_eq!(judge(Some(2), Some(16)).state, State::Note);
        assert_eq!(judge(Some(1), Some(1)).state, State::Note);
        assert_eq!(judge(None, Some(1)).state, State::Unknown);
    }

    #[test]
    fn without_sys_the_own_cores_are_still_known() {
        let check = &look(&Fixture::new(&[]).root())[0];
        assert!(check.data["usable"].as_u64() > Some(0));
        assert!(check.data["online"].is_null());
    }
}
