//! What `stagewire bench rfc` says where there is no GPU, and where there is no Python.

use serde_json::Value;

use crate::world::World;

fn rows(only: &str) -> Vec<Value> {
    let world = World::new();
    let mut command = world.command(["bench", "rfc", "--quick", "--json", "--only", only]);
    let done = world.done(command.env("STAGEWIRE_PYTHON", "/nowhere/python").output().unwrap());
    assert_eq!(done.code, 0, "{}", done.stderr);
    let report: Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(report["bench"], "rfc");
    report["rows"].as_array().unwrap().clone()
}

#[test]
fn at_equal_speeds_stages_apart_are_said_to_lose() {
    let rows = rows("simulated, 8 GPUs, equal speeds: apart");
    let ratio = rows[0]["ratio"].as_f64().unwrap();
    assert!((0.87..0.91).contains(&ratio), "{rows:?}");
}

#[test]
fn what_needs_a_python_that_is_not_there_says_so() {
    let rows = rows("measured");
    assert_eq!(rows.len(), 8, "{rows:?}");
    for row in rows {
        let skipped = row["skipped"].as_str().unwrap();
        assert!(skipped.starts_with("cannot run Python /nowhere/python"), "{skipped}");
        assert!(!skipped.contains('\n'), "{skipped}");
    }
}

#[test]
fn a_row_that_there_is_not_is_answered_with_those_that_there_are() {
    let done = World::new().run(["bench", "rfc", "--quick", "--only", "nothing"]);
    assert_eq!(done.code, 2);
    for row in ["14.3 MB over 250 MB/s", "24 denoisers", "1 denoiser and 1 decoder"] {
        assert!(done.stderr.contains(row), "{}", done.stderr);
    }
}
