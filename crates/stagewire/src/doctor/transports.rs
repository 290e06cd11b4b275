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

/// Every transport that this build has, and the one that Python adds.
pub(crate) fn conclude(checks: &[Check]) -> Vec<Way> {
    let networked = checks
        .iter()
        .find(|check| check.name == "interfaces")
        .and_then(|check| {
            let addresses = check.data.get("addresses")?.as_array()?;
            Some(!addresses.is_empty())
        });
    let way = |name, beyond, remark: Option<&str>| {
        let check = checks.iter().find(|check| check.name == name);
        let here = check.and_then(usable);
        let reachable = match (here, networked) {
            (Some(false), _) | (_, Some(false)) => Some(false),
            (Some(true), Some(true)) => Some(true),
            _ => None,
        };
        let why = check.filter(|_| here != Some(true)).and_then(|check| check.why.clone());
        Way {
            name,
            same_host: here,
            other_hosts: if beyond { reachable } else { Some(false) },
            remark: why.or(remark.map(str::to_owned)),
        }
    };
    vec![
        way("shm", false, None),
        way("cma", false, None),
        way("tcp", true, None),
        way("mooncake", true, Some("off until configured")),
        way("mooncake-engine", true, Some("in Python")),
        way("nixl", true, None),
    ]
}

fn usable(check: &Check) -> Option<bool> {
    if let Some(tried) = check.data.get("usable").and_then(serde_json::Value::as_bool) {
        return Some(tried);
    }
    match check.state {
        State::Ok => Some(true),
        // Found, but not where workers look.
        State::Note | State::Missing => Some(false),
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

    fn interfaces(addresses: &[&str]) -> Check {
        Check::ok("interfaces", "").with("addresses", addresses.to_vec())
    }

    fn lists(checks: &[Check]) -> (String, String) {
        let ways = conclude(checks);
        (listed(&ways, |way| way.same_host), listed(&ways, |way| way.other_hosts))
    }

    #[test]
    fn what_was_tried_is_listed_and_what_was_not_says_so() {
        let mut checks = vec![
            Check::ok("shm", ""),
            Check::unknown("cma", "late", "again"),
            Check::ok("tcp", "").with("usable", true),
            Check::ok("mooncake", "").with("usable", true),
            Check::note("mooncake-engine", "not for workers", "", ""),
            Check::missing("nixl", "", "not found", ""),
            interfaces(&["10.0.0.5"]),
        ];
        let (here, there) = lists(&checks);
        assert_eq!(here, "shm, cma (cannot be told), tcp, mooncake (off until configured)");
        assert_eq!(there, "tcp, mooncake (off until configured)");
        checks[6] = interfaces(&[]);
        assert_eq!(lists(&checks).1, "none", "there is no network");
        checks.pop();
        assert_eq!(lists(&checks).1, "tcp (cannot be told), mooncake (cannot be told)");
        let ways = conclude(&[Check::missing("cma", "", "forbidden", "")]);
        assert_eq!(
            (ways[1].same_host, ways[1].remark.as_deref()),
            (Some(false), Some("forbidden"))
        );
    }
}
