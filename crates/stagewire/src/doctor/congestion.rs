use rustix::net::sockopt::set_tcp_congestion;
use rustix::net::{AddressFamily, SocketType, socket};

use super::check::{Check, State};
use super::root::Root;

const NAME: &str = "congestion";

/// What suits loopback: nothing there is lost or queued, so that pacing only costs.
const LOOPBACK: &str = "reno";

pub(super) fn look(root: &Root) -> Vec<Check> {
    vec![judge(root, &try_out(LOOPBACK))]
}

/// Whether this process may choose it for a socket.
fn try_out(name: &str) -> Result<(), String> {
    socket(AddressFamily::INET, SocketType::STREAM, None)
        .and_then(|socket| set_tcp_congestion(&socket, name))
        .map_err(|error| error.to_string())
}

fn judge(root: &Root, loopback: &Result<(), String>) -> Check {
    let path = "/proc/sys/net/ipv4/tcp_congestion_control";
    let current = match root.read(path) {
        Ok(Some(current)) => current,
        Ok(None) => return Check::unknown(NAME, format!("there is no {path}"), "see `sysctl net.ipv4`"),
        Err(why) => return Check::unknown(NAME, why, "see `sysctl net.ipv4`"),
    };
    let list = |which| {
        let text = root.text(&format!("/proc/sys/net/ipv4/tcp_{which}_congestion_control"))?;
        Some(text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    };
    let (available, allowed) = (list("available"), list("allowed"));
    let shown = |list: &Option<Vec<String>>| list.as_ref().map_or("unknown".to_owned(), |list| list.join(" "));
    let value = format!(
        "{current}; available {}; allowed {}",
        shown(&available),
        shown(&allowed)
    );
    let check = Check::ok(NAME, value)
        .with("current", current.as_str())
        .with("available", available)
        .with("allowed", allowed)
        .with("loopback_choice_allowed", loopback.is_ok());
    match loopback {
        _ if !current.starts_with("bbr") => check,
        Ok(()) => check.but(
            State::Note,
            format!("{current} is slower than {LOOPBACK} over loopback, where it has no loss or queue to measure"),
            format!("nothing: tcp chooses {LOOPBACK} over loopback, which this process may, as was tried"),
        ),
        Err(error) => check.but(
            State::Note,
            format!("{current} is slower than {LOOPBACK} over loopback, and a socket may not choose that: {error}"),
            format!("as root: sysctl net.ipv4.tcp_allowed_congestion_control=\"{current} {LOOPBACK}\""),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::root::Fixture;

    fn machine(current: &str) -> Fixture {
        Fixture::new(&[
            ("/proc/sys/net/ipv4/tcp_congestion_control", current),
            (
                "/proc/sys/net/ipv4/tcp_available_congestion_control",
                "reno bbr cubic\n",
            ),
            ("/proc/sys/net/ipv4/tcp_allowed_congestion_control", "reno bbr\n"),
        ])
    }

    #[test]
    fn bbr_is_noted_for_loopback() {
        let check = judge(&machine("bbr\n").root(), &Ok(()));
        assert_eq!(check.value, "bbr; available reno bbr cubic; allowed reno bbr");
        assert_eq!(check.state, State::Note);
        let refused = judge(&machine("bbr\n").root(), &Err("Operation not permitted".to_owned()));
        assert!(refused.advice.unwrap().contains("sysctl"));
        assert_eq!(judge(&machine("cubic\n").root(), &Ok(())).state, State::Ok);
    }

    #[test]
    fn an_unknown_algorithm_is_refused_by_this_kernel() {
        assert!(try_out("no-such-algorithm").is_err());
    }

    #[test]
    fn without_proc_nothing_is_claimed() {
        let fixture = Fixture::new(&[]);
        assert_eq!(look(&fixture.root())[0].state, State::Unknown);
        fixture.refuse_file("/proc/sys/net/ipv4/tcp_congestion_control");
        assert_eq!(look(&fixture.root())[0].state, State::Unknown);
    }
}
