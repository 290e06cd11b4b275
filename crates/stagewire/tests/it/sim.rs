//! What `stagewire sim` prints, and what the documentation says that it prints.

use crate::world::{Done, World};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

const SMALL: &str = "\
arrivals = { jobs = 40, rate-per-s = 1.0 }
class = [{ name = 'standard', slo-s = 10.0 }]
stage = [
    { name = 'denoise', workers = 4, time-s = 1.0, output-bytes = '1MB' },
    { name = 'decode', workers = 1, time-s = 1.5 },
]
";

fn sim(command: &str, text: &str, more: &[&str]) -> Done {
    let world = World::new();
    let file = world.file("experiment.toml", text);
    let mut args = vec!["sim", command, file.to_str().unwrap()];
    args.extend(more);
    world.run(args)
}

/// Line by line; `...` in the documentation stands for what is left out.
#[test]
fn the_documentation_shows_what_is_printed() {
    let docs = std::fs::read_to_string(format!("{ROOT}/docs/simulator.md")).unwrap();
    let shown = docs
        .split("```")
        .find_map(|block| block.strip_prefix("console\n$ stagewire sim run examples/sim/equal-gpus.toml\n"))
        .expect("docs/simulator.md shows it");
    let done = World::new().run(["sim", "run", &format!("{ROOT}/examples/sim/equal-gpus.toml")]);
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
    let mut printed = done.stdout.lines();
    for line in shown.lines() {
        let begins = line.split("...").next().unwrap_or_default();
        assert!(
            begins.is_empty() || printed.any(|printed| printed.starts_with(begins)),
            "{line:?} is shown, and not printed:\n{}",
            done.stdout
        );
    }
}

#[test]
fn a_plan_says_how_many_are_enough_or_that_none_are() {
    let done = sim("plan", SMALL, &["--target", "0.57"]);
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
    assert_eq!(
        done.stdout.lines().last(),
        Some("2 workers of decode are enough for 57 %")
    );
    let done = sim("plan", SMALL, &["--target", "0.57", "--most", "1"]);
    assert_eq!((done.code, done.stderr.as_str()), (1, ""));
    assert_eq!(
        done.stdout.lines().last(),
        Some("1 workers of decode are not enough for 57 %")
    );
}

#[test]
fn results_are_written_where_they_are_asked_for() {
    let world = World::new();
    let file = world.file("experiment.toml", SMALL);
    let out = file.with_file_name("results");
    let done = world.run([
        "sim",
        "run",
        file.to_str().unwrap(),
        "--json",
        "--out",
        out.to_str().unwrap(),
    ]);
    assert_eq!(done.code, 0, "{}", done.stderr);
    let reports: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(reports[0]["succeeded"], 40);
    for name in ["jobs.csv", "levels.csv", "latency.svg", "queues.svg"] {
        assert!(out.join(format!("disaggregated-{name}")).is_file(), "{name}");
    }
    let jobs = std::fs::read_to_string(out.join("disaggregated-jobs.csv")).unwrap();
    assert_eq!(jobs.lines().count(), 41, "a header and a line for each job");
}

#[test]
fn what_is_wrong_with_an_experiment_is_said_with_its_file() {
    for (from, to, words) in [
        ("workers = 4", "workers = 0", "workers of stage denoise is 0"),
        ("slo-s = 10.0", "slo-s = -1.0", "slo-s of class standard is -1"),
    ] {
        let done = sim("run", &SMALL.replacen(from, to, 1), &[]);
        assert_eq!((done.code, done.stdout.as_str()), (2, ""));
        assert!(
            done.stderr.contains(words) && done.stderr.contains("experiment.toml"),
            "{}",
            done.stderr
        );
    }
}
