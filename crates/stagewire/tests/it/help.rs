use crate::world::World;

const COMMANDS: [&str; 20] = [
    "up", "serve", "store", "worker", "submit", "jobs", "job", "explain", "cancel", "dlq", "status", "stages", "pools",
    "drain", "pause", "resume", "doctor", "kv", "sim", "bench",
];

fn help(args: &[&str]) -> String {
    let done = World::new().run(args);
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
    done.stdout
}

#[test]
fn the_first_screen_teaches() {
    insta::assert_snapshot!("stagewire", help(&["--help"]));
}

#[test]
fn every_command_teaches() {
    for command in COMMANDS {
        insta::assert_snapshot!(command, help(&[command, "--help"]));
    }
}

#[test]
fn what_kv_does_is_taught() {
    for command in ["check", "plan"] {
        insta::assert_snapshot!(format!("kv_{command}"), help(&["kv", command, "--help"]));
    }
}

#[test]
fn what_sim_does_is_taught() {
    for command in ["run", "plan"] {
        insta::assert_snapshot!(format!("sim_{command}"), help(&["sim", command, "--help"]));
    }
}

#[test]
fn what_dlq_does_is_taught() {
    for command in ["list", "show", "redrive", "discard"] {
        insta::assert_snapshot!(format!("dlq_{command}"), help(&["dlq", command, "--help"]));
    }
}

#[test]
fn every_command_is_listed_and_has_the_exit_statuses() {
    let first = help(&["--help"]);
    for command in COMMANDS {
        assert!(first.contains(&format!("\n  {command} ")), "{command} is not listed");
        assert!(help(&[command, "--help"]).contains("130  interrupted"), "{command}");
    }
}

#[test]
fn without_arguments_the_help_is_printed_as_an_error() {
    let done = World::new().run::<&str>([]);
    assert_eq!(done.code, 2);
    assert!(done.stderr.contains("Usage: stagewire"), "{}", done.stderr);
}
