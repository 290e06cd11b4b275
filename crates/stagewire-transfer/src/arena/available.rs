use std::fs;

/// Bytes that this process can still take without swapping or being killed, as far as the kernel tells: the smaller of
/// what the machine has available and what its control group may still use.
pub(super) fn available_memory() -> Option<u64> {
    [machine(), control_group()].into_iter().flatten().min()
}

fn machine() -> Option<u64> {
    parse_meminfo(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// `memory.max` of the process's own group (version 2). Cached file pages count as free: the kernel drops them.
fn control_group() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let read = |file: &str| fs::read_to_string(format!("/sys/fs/cgroup/{path}/{file}")).ok();
    let number = |text: String| text.trim().parse::<u64>().ok();
    let max = read("memory.max").and_then(number)?;
    let used = read("memory.current").and_then(number)?;
    let cached = read("memory.stat")
        .and_then(|stat| field(&stat, "inactive_file"))
        .unwrap_or(0);
    Some(max.saturating_sub(used.saturating_sub(cached)))
}

fn parse_meminfo(text: &str) -> Option<u64> {
    field(text, "MemAvailable:").map(|kib| kib * 1024)
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_in_kib() {
        let text = "MemTotal:       24585216 kB\nMemFree:          213044 kB\nMemAvailable:   11068456 kB\n";
        assert_eq!(parse_meminfo(text), Some(11_068_456 * 1024));
        assert_eq!(parse_meminfo("MemTotal: 1 kB"), None);
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(available_memory().expect("Linux tells") > 0);
    }
}
