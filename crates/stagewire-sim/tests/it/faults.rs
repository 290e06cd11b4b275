//! The orchestrator under faults: the very scheduler, the very journal, and everything that can go wrong around them.
//!
//! A [`World`] is a server (the driver's own core over a redb journal on a disk that fails), workers, clients and a
//! network, in one agenda that a seed decides. Messages get lost, come twice, overtake each other, are held up; workers
//! die, stand still, lose their connection, ignore what they are told and go on when they were given up; links are slow,
//! clocks jump, payloads vanish; the server stands still, is killed, loses its power in the middle of a write, and crashes
//! while it recovers from that. After each step the invariants hold, by the scheduler's own account and by that of a
//! [`ledger::Ledger`] kept outside. When the faults stop, everything ends, and nothing is left.
//!
//! 50 seeds by default, 1,000 with `STAGEWIRE_SOAK=1`. `STAGEWIRE_SEED=N` runs that one.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test tells which seed fails, and what it tried"
)]

mod agent;
mod ledger;
mod scenario;
mod world;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use ledger::Tally;
use scenario::{Mutant, Scenario};
use world::World;

/// Seeds that found a defect once, with what it was.
const FOUND: &[(u64, &str)] = &[(
    33,
    "power failed while the journal was first made, and what was left of it was refused as damaged",
)];

fn soak() -> bool {
    std::env::var_os("STAGEWIRE_SOAK").is_some_and(|value| !value.is_empty())
}

/// Runs one scenario; a failure names its seed.
fn run(scenario: Scenario) -> (u64, Tally) {
    let (seed, crash) = (scenario.seed, scenario.first_crash);
    let result = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(scenario);
        world.run();
        (world.ledger.trace(), world.ledger.tally)
    }));
    result.unwrap_or_else(|panic| {
        eprintln!("seed {seed} fails (its disk after {crash:?} operations): run it with STAGEWIRE_SEED={seed}");
        resume_unwind(panic)
    })
}

#[test]
fn promises_hold_whatever_happens() {
    let one = std::env::var("STAGEWIRE_SEED").ok();
    let one: Option<u64> = one.map(|seed| seed.parse().expect("STAGEWIRE_SEED is a number"));
    let seeds = match one {
        Some(seed) => seed..seed + 1,
        None => 0..if soak() { 1_000 } else { 50 },
    };
    let mut tally = Tally::default();
    for seed in seeds {
        tally.add(run(Scenario::of(seed)).1);
    }
    println!("{tally:#?}");
    if one.is_none() {
        let happened = [
            tally.crashes_writing,
            tally.crashes_otherwise,
            tally.crashes_starting,
            tally.power_failures,
            tally.lost,
            tally.twice,
            tally.deaths,
            tally.evictions,
            tally.zombies,
            tally.inputs_lost,
            tally.clock_jumps,
            tally.yields,
            tally.resumed,
        ];
        assert!(
            happened.iter().all(|count| *count > 0),
            "some fault did not happen: {tally:?}"
        );
        assert!(
            tally.succeeded * 2 > tally.jobs,
            "most jobs should succeed all the same: {tally:?}"
        );
    }
}

#[test]
fn seeds_that_found_a_defect_once() {
    for (seed, what) in FOUND {
        println!("seed {seed}: {what}");
        run(Scenario::of(*seed));
    }
}

/// The server dies at every single operation on its disk, in five seeds; a short run tries a part of them.
#[test]
fn a_crash_at_any_write_breaks_no_promise() {
    let stride = if soak() { 1 } else { 61 };
    for seed in 0..5 {
        let mut crashes = 0;
        for after in (0..).step_by(stride) {
            let (_, tally) = run(Scenario::crashing_once(seed, Some(after)));
            if tally.crashes_writing + tally.crashes_starting == 0 {
                break;
            }
            crashes += 1;
        }
        println!("seed {seed}: {crashes} crashes");
        assert!(crashes > 2, "seed {seed} has hardly any writes");
    }
}

#[test]
fn a_seed_decides_everything() {
    let traces = || (100..104).map(|seed| run(Scenario::of(seed)).0).collect::<Vec<_>>();
    let first = traces();
    assert_eq!(first, traces());
    assert_eq!(first.iter().collect::<BTreeSet<_>>().len(), first.len());
}

/// The harness itself: a server that breaks a promise is found out within a few seeds.
#[test]
fn broken_promises_are_found() {
    let found = |mutant, expected: &[&str]| {
        let mut failures = (0..300).filter_map(|seed| {
            let scenario = Scenario {
                mutant: Some(mutant),
                ..Scenario::of(seed)
            };
            let panic = catch_unwind(AssertUnwindSafe(|| World::new(scenario).run())).err()?;
            let message = panic.downcast::<String>();
            Some((seed, message.map_or_else(|_| "?".to_owned(), |message| *message)))
        });
        let failure = failures.next();
        let (seed, failure) = failure.unwrap_or_else(|| panic!("{mutant:?} was not found in 300 seeds"));
        println!("{mutant:?} is found by seed {seed}: {failure:.200}");
        assert!(
            expected.iter().any(|expected| failure.contains(expected)),
            "{mutant:?}: {failure}"
        );
    };
    let early = [
        "was acknowledged and is not there",
        "to another state",
        "does not start",
    ];
    found(Mutant::EarlyAck, &early);
    found(Mutant::StaleToken, &["and its worker never completed it"]);
    found(Mutant::NoLoss, &["it does not end"]);
    found(Mutant::EagerRelease, &["was released while attempt"]);
}
