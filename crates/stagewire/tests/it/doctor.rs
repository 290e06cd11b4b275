use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::world::{Done, World};

const CHECKS: [&str; 21] = [
    "kernel",
    "cores",
    "memory",
    "clock",
    "container",
    "shm",
    "cma",
    "tcp",
    "mooncake",
    "run-dir",
    "huge-pages",
    "shm-huge-pages",
    "hugetlb",
    "dev-shm",
    "interfaces",
    "congestion",
    "rdma",
    "gpu",
    "python",
    "mooncake-engine",
    "nixl",
];
const LIMITS: [&str; 2] = ["open-files", "memlock"];

fn document(done: &Done) -> Value {
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
    serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {}", done.stdout))
}

fn check<'a>(document: &'a Value, name: &str) -> &'a Value {
    let checks = document["checks"].as_array().unwrap();
    checks.iter().find(|check| check["name"] == name).unwrap()
}

#[test]
fn every_check_answers_and_says_why_where_it_is_not_ok() {
    let world = World::new();
    let document = document(&world.run(["doctor", "--json"]));
    assert_eq!(document["schema"], 1);
    let checks = document["checks"].as_array().unwrap();
    let names: Vec<&str> = checks.iter().map(|check| check["name"].as_str().unwrap()).collect();
    assert_eq!(names, [&CHECKS[..], &LIMITS].concat());
    for check in checks {
        let state = check["state"].as_str().unwrap();
        assert!(["ok", "note", "missing", "unknown"].contains(&state), "{check}");
        assert!(!check["value"].as_str().unwrap().is_empty(), "{check}");
        for field in ["why", "do"] {
            let said = check[field].as_str().is_some_and(|text| !text.is_empty());
            assert_eq!(said, state != "ok", "{field} of {check}");
        }
        assert!(check["data"].is_object(), "{check}");
    }
    for way in document["transports"].as_array().unwrap() {
        assert!(way["name"].is_string(), "{way}");
        for reach in ["same_host", "other_hosts"] {
            assert!(way[reach].is_boolean() || way[reach].is_null(), "{way}");
        }
    }
    assert!(!world.run_dir().exists(), "the run directory was only looked at");
}

#[test]
fn what_the_other_tests_use_is_found_to_work() {
    let document = document(&World::new().run(["doctor", "--json"]));
    assert_eq!(check(&document, "shm")["state"], "ok", "{document}");
    assert_eq!(check(&document, "run-dir")["state"], "ok", "{document}");
    for name in ["tcp", "mooncake"] {
        assert_eq!(check(&document, name)["state"], "ok", "{document}");
    }
    for (index, name) in [(0, "shm"), (2, "tcp"), (3, "mooncake")] {
        let way = &document["transports"][index];
        assert_eq!((&way["name"], &way["same_host"]), (&name.into(), &true.into()));
    }
}

#[test]
fn people_get_a_line_for_each_check_and_a_conclusion() {
    let done = World::new().run(["doctor"]);
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
    let shown = |name: &str| {
        let line = done
            .stdout
            .lines()
            .find(|line| line.split_whitespace().nth(1) == Some(name));
        line.unwrap_or_else(|| panic!("{name} is not in {}", done.stdout));
    };
    CHECKS.iter().chain(&LIMITS).for_each(|name| shown(name));
    let conclusion = done.stdout.split("\ntransports\n").nth(1).unwrap();
    assert!(conclusion.starts_with("  same host    shm"), "{conclusion}");
    assert!(conclusion.contains("\n  other hosts  "), "{conclusion}");
}

/// A program in place of Python.
fn python(world: &World, script: &str) -> String {
    let path = world.file("python", &format!("#!/bin/sh\n{script}\n"));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_probe_that_hangs_is_given_up_and_ended() {
    let world = World::new();
    let pids = world.path("pids");
    let python = python(&world, &format!("echo $$ >>{}; exec sleep 1000", pids.display()));
    let begin = Instant::now();
    let done = world.run(["doctor", "--json", "--timeout", "2", "--python", &python]);
    assert!(begin.elapsed() < Duration::from_secs(60), "it hung");
    let document = document(&done);
    for name in ["python", "mooncake-engine"] {
        let check = check(&document, name);
        assert_eq!(check["state"], "unknown", "{check}");
        assert_eq!(check["why"], "the probe did not answer within 2.0 s");
    }
    for pid in std::fs::read_to_string(pids).unwrap().lines() {
        let gone = || !Path::new("/proc").join(pid).join("exe").exists();
        let deadline = Instant::now() + Duration::from_secs(10);
        while !gone() {
            assert!(Instant::now() < deadline, "process {pid} was left behind");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn a_python_that_workers_cannot_use_is_named() {
    let world = World::new();
    let python = python(&world, "echo 'out of order' >&2; exit 3");
    let document = document(&world.run(["doctor", "--json", "--python", &python]));
    let found = check(&document, "python");
    assert_eq!(found["state"], "missing");
    let why = found["why"].as_str().unwrap();
    assert!(why.contains("DIR/python") && why.ends_with("out of order"), "{why}");
    let peers = check(&document, "mooncake-engine");
    assert_eq!(
        (&peers["state"], &peers["do"]),
        (&"unknown".into(), &"see python".into())
    );
}

#[test]
fn a_run_directory_that_others_can_enter_is_reported_and_left_alone() {
    let world = World::new();
    std::fs::create_dir(world.run_dir()).unwrap();
    std::fs::set_permissions(world.run_dir(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let document = document(&world.run(["doctor", "--json"]));
    let found = check(&document, "run-dir");
    assert_eq!(found["state"], "missing");
    assert!(found["why"].as_str().unwrap().contains("chmod 700 DIR/run"), "{found}");
    assert!(crate::world::names(&world.run_dir()).is_empty());
}
