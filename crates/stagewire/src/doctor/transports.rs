use serde::Serialize;

use super::check::{Check, State};

/// Whether one transport can be used here, concluded from the checks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Way {
    pub(crate) name: &'static str,
    /// Between processes of this host; `None` where that could not be told.
    pub(crate) same_host: Option<bool>,
    /// Between this host and others.
    pub(crate) other_hosts: Option<bool>,
    /// What goes with it, or why not.
    pub(crate) remark: Option<String>,
}

/// Every transport that this build has.
pub(crate) fn conclude(checks: &[Check]) -> Vec<Way> {
    ["shm", "cma"].map(|name| on_one_host(name, checks)).into()
}

/// A transport whose check has its name, and which reaches no other host.
fn on_one_host(name: &'static str, checks: &[Check]) -> Way {
    let check = checks.iter().find(|check| check.name == name);
    Way {
        name,
        same_host: check.and_then(usable),
        other_hosts: Some(false),
        remark: check.and_then(|check| check.why.clone()),
    }
}

fn usable(check: &Check) -> Option<bool> {
    match check.state {
        State::Ok | State::Note => Some(true),
        State::Missing => Some(false),
        State::Unknown => None,
    }
}

/// Those that reach so far, with their remarks, for people.
pub(crate) fn listed(ways: &[Way], reaches: impl Fn(&Way) -> Option<bool>) -> String {
    let name = |way: &Way| match (reaches(way), &way.remark) {
        (Some(true), None) => Some(way.name.to_owned()),
        (Some(true), Some(remark)) => Some(format!("{} ({remark})", way.name)),
        (None, _) => Some(format!("{} (cannot be told)", way.name)),
        (Some(false), _) => None,
    };
    let names: Vec<String> = ways.iter().filter_map(name).collect();
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_tried_is_listed_and_what_was_not_says_so() {
        let ways = conclude(&[Check::ok("shm", ""), Check::unknown("cma", "late", "again")]);
        assert_eq!(listed(&ways, |way| way.same_host), "shm, cma (cannot be told)");
        assert_eq!(listed(&ways, |way| way.other_hosts), "none");
        let ways = conclude(&[Check::ok("shm", ""), Check::missing("cma", "", "forbidden", "")]);
        assert_eq!(listed(&ways, |way| way.same_host), "shm");
        assert_eq!(ways[1].remark.as_deref(), Some("forbidden"));
    }
}
