use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::world::{World, names};

/// `stagewire serve`, from the moment it serves.
fn serve(world: &World) -> (Child, serde_json::Value) {
    let pipeline = world.pipeline();
    let mut command = world.command(["serve", pipeline.to_str().unwrap(), "--json"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    let ready = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
    (child, ready)
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn an_interrupted_server_leaves_nothing_but_the_token() {
    for (how, code) in [(Signal::INT, 130), (Signal::TERM, 0)] {
        let world = World::new();
        let (child, ready) = serve(&world);
        assert_eq!(ready["pid"], child.id());
        assert!(
            ready["url"].as_str().unwrap().starts_with("http://127.0.0.1:"),
            "{ready}"
        );
        signal(&child, how);
        let done = world.done(child.wait_with_output().unwrap());
        assert_eq!(done.code, code, "{}", done.stderr);
        assert_eq!(names(&world.run_dir()), ["worker.token"]);
    }
}

#[test]
fn a_second_server_in_the_same_place_is_refused() {
    let world = World::new();
    let (mut child, ready) = serve(&world);
    let done = world.run(["serve", world.pipeline().to_str().unwrap()]);
    assert_eq!(done.code, 1);
    let url = ready["url"].as_str().unwrap();
    assert!(
        done.stderr.contains("already runs in DIR/run") && done.stderr.contains(url),
        "{}",
        done.stderr
    );
    signal(&child, Signal::TERM);
    child.wait().unwrap();
}
