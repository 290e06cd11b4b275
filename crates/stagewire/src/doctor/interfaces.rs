use serde_json::json;

use super::check::{Check, State};
use super::root::Root;

const NAME: &str = "interfaces";

pub(super) fn look(root: &Root) -> Vec<Check> {
    // Of the network namespace that this process is in; /sys may show another one's.
    let path = "/proc/net/dev";
    let names = match root.read(path) {
        Ok(Some(text)) => names(&text),
        Ok(None) => {
            return vec![Check::unknown(
                NAME,
                format!("there is no {path}"),
                "mount /proc; see `ip address`",
            )];
        }
        Err(why) => return vec![Check::unknown(NAME, why, "see `ip address`")],
    };
    let mut shown = Vec::new();
    let mut data = Vec::new();
    for name in names.iter().filter(|name| name.as_str() != "lo") {
        let read = |file| root.text(&format!("/sys/class/net/{name}/{file}"));
        let state = read("operstate").unwrap_or_else(|| "state unknown".to_owned());
        // Virtual devices have none, and say -1 or refuse.
        let speed = read("speed").and_then(|speed| speed.parse::<u64>().ok());
        let mtu = read("mtu").and_then(|mtu| mtu.parse::<u64>().ok());
        let rate = speed.map_or_else(String::new, |speed| format!(", {} Gb/s", speed as f64 / 1e3));
        shown.push(format!("{name} ({state}{rate})"));
        data.push(json!({"name": name, "state": state, "speed_mbit_per_s": speed, "mtu_bytes": mtu}));
    }
    let addresses = addresses(root);
    let reachable = !addresses.is_empty();
    if reachable {
        shown.push(format!("addresses {}", addresses.join(", ")));
    }
    let check = Check::ok(NAME, shown.join(", "))
        .with("interfaces", data)
        .with("addresses", addresses);
    vec![if reachable {
        check
    } else {
        let value = if shown.is_empty() {
            "loopback alone".to_owned()
        } else {
            check.value.clone()
        };
        let why = "no interface has an address that other hosts could reach; link-local ones do not count";
        Check { value, ..check }.but(
            State::Note,
            why,
            "nothing on one host; else give the host or container a network",
        )
    }]
}

/// The names before the colons, below a header of two lines.
fn names(text: &str) -> Vec<String> {
    let lines = text.lines().skip(2);
    let names = lines.filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned()));
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// Addresses of this host, without those of loopback and links.
fn addresses(root: &Root) -> Vec<String> {
    let v4 = root.text("/proc/net/fib_trie").map(|text| local_v4(&text));
    let v6 = root.text("/proc/net/if_inet6").map(|text| global_v6(&text));
    v4.into_iter().chain(v6).flatten().collect()
}

/// Addresses that the routing table marks as this host's: `|-- 10.0.0.5` followed by `/32 host LOCAL`.
fn local_v4(trie: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut last = None;
    for line in trie.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<std::net::Ipv4Addr>().ok();
        } else if line.starts_with("/32 host LOCAL")
            && let Some(address) = last.filter(|address| !address.is_loopback() && !address.is_link_local())
        {
            let address = address.to_string();
            if !found.contains(&address) {
                found.push(address);
            }
        }
    }
    found
}

/// Lines such as `fd00…0005 02 40 00 80 eth0`, whose fourth field is the scope: 00 is global.
fn global_v6(text: &str) -> Vec<String> {
    let address = |line: &str| {
        let mut fields = line.split_whitespace();
        let digits = u128::from_str_radix(fields.next()?, 16).ok()?;
        let global = fields.nth(2)? == "00";
        let address = std::net::Ipv6Addr::from_bits(digits);
        (global && !address.is_loopback()).then(|| address.to_string())
    };
    text.lines().filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::root::Fixture;

    const DEV: &str = "/proc/net/dev";

    fn dev(names: &[&str]) -> String {
        let lines = names.iter().map(|name| format!("{name:>6}: 1520 16 0 0 0 0 0 0\n"));
        "Inter-|   Receive\n face |bytes packets\n".to_owned() + &lines.collect::<String>()
    }

    const TRIE: &str = "\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 10.0.0.0
        /24 link UNICAST
Local:
     |-- 10.0.0.5
        /32 host LOCAL
     |-- 10.0.0.255
        /32 link BROADCAST
           |-- 127.0.0.1
              /32 host LOCAL
     |-- 10.0.0.5
        /32 host LOCAL
";
    const INET6: &str = "\
fe800000000000000000000000000005 02 40 20 80     eth0
fd000000000000000000000000000005 02 40 00 80     eth0
00000000000000000000000000000001 01 80 10 80       lo
";

    #[test]
    fn interfaces_and_addresses_are_listed() {
        let fixture = Fixture::new(&[
            (DEV, &dev(&["lo", "eth0", "veth1"])),
            ("/sys/class/net/eth0/operstate", "up\n"),
            ("/sys/class/net/eth0/speed", "25000\n"),
            ("/sys/class/net/eth0/mtu", "9000\n"),
            ("/sys/class/net/veth1/operstate", "down\n"),
            ("/sys/class/net/eth7/operstate", "of another network namespace\n"),
            ("/sys/class/net/veth1/speed", "-1\n"),
            ("/proc/net/fib_trie", TRIE),
            ("/proc/net/if_inet6", INET6),
        ]);
        let check = &look(&fixture.root())[0];
        assert_eq!(
            check.value,
            "eth0 (up, 25 Gb/s), veth1 (down), addresses 10.0.0.5, fd00::5"
        );
        assert_eq!(check.state, State::Ok);
        assert_eq!(check.data["addresses"], json!(["10.0.0.5", "fd00::5"]));
        assert_eq!(check.data["interfaces"][0]["mtu_bytes"], 9000);
    }

    #[test]
    fn loopback_alone_is_noted() {
        let fixture = Fixture::new(&[(DEV, &dev(&["lo"]))]);
        let check = &look(&fixture.root())[0];
        assert_eq!((check.state, check.value.as_str()), (State::Note, "loopback alone"));
    }

    #[test]
    fn without_proc_nothing_is_claimed() {
        let fixture = Fixture::new(&[]);
        assert_eq!(look(&fixture.root())[0].state, State::Unknown);
        fixture.refuse_file(DEV);
        assert_eq!(look(&fixture.root())[0].state, State::Unknown);
    }
}
