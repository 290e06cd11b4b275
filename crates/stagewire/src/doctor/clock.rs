use std::hint::black_box;
use std::time::{Duration, Instant};

use super::check::{Check, State};
use super::root::Root;

const NAME: &str = "clock";

/// Clock sources that are read without a system call.
const FAST: [&str; 6] = [
    "tsc",
    "kvm-clock",
    "hyperv_clocksource_tsc_page",
    "arch_sys_counter",
    "timebase",
    "riscv_clocksource",
];

pub(super) fn look(root: &Root) -> Vec<Check> {
    vec![judge(root, cost())]
}

fn judge(root: &Root, cost: Duration) -> Check {
    let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let nanos = u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX);
    let source = match root.read(path) {
        Ok(Some(source)) => source,
        Ok(None) => return unknown(format!("there is no {path}"), nanos),
        Err(why) => return unknown(why, nanos),
    };
    let check = Check::ok(NAME, format!("{source}, {nanos} ns per reading"))
        .with("source", source.as_str())
        .with("reading_ns", nanos);
    if FAST.contains(&source.as_str()) {
        return check;
    }
    let why = format!("the clock source {source} is read by a system call, and every deadline and timeline reads it");
    check.but(
        State::Note,
        why,
        format!("see what {} offers", path.replace("current", "available")),
    )
}

fn unknown(why: String, nanos: u64) -> Check {
    Check::unknown(NAME, why, "nothing, if a reading is quick").with("reading_ns", nanos)
}

/// What one reading of the monotonic clock takes: the quickest of some rounds, as others may run in between.
fn cost() -> Duration {
    const READINGS: u32 = 1000;
    let round = |_| {
        let begin = Instant::now();
        for _ in 0..READINGS {
            black_box(Instant::now());
        }
        begin.elapsed() / READINGS
    };
    (0..5).map(round).min().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::root::Fixture;

    const PATH: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";

    #[test]
    fn slow_sources_are_noted() {
        let judged = |source| judge(&Fixture::new(&[(PATH, source)]).root(), Duration::from_nanos(25));
        assert_eq!(judged("tsc\n").value, "tsc, 25 ns per reading");
        assert_eq!(judged("tsc\n").state, State::Ok);
        let slow = judged("hpet\n");
        assert_eq!(slow.state, State::Note);
        assert!(slow.advice.unwrap().contains("available_clocksource"));
    }

    #[test]
    fn without_sys_the_cost_is_still_measured() {
        let fixture = Fixture::new(&[]);
        fixture.refuse_file(PATH);
        let check = &look(&fixture.root())[0];
        assert_eq!(check.state, State::Unknown);
        assert!(check.data["reading_ns"].as_u64() > Some(0));
    }
}
