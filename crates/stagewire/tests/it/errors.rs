use crate::world::{PIPELINE, World, names};

/// One line of stderr and the exit status.
fn refused(world: &World, args: &[&str]) -> (i32, String) {
    let done = world.run(args);
    assert_eq!(done.stdout, "");
    (done.code, done.stderr)
}

#[test]
fn without_a_server_every_command_says_how_to_start_one() {
    let world = World::new();
    for args in [
        &["jobs"][..],
        &["status"],
        &["stages"],
        &["job", "x"],
        &["cancel", "x"],
        &["submit", "a cat"],
    ] {
        let (code, text) = refused(&world, args);
        assert_eq!(code, 3, "{args:?}: {text}");
        assert!(
            text.contains("no server runs in DIR/run; start one with `stagewire up FILE`"),
            "{text}"
        );
    }
}

#[test]
fn a_server_that_does_not_answer_is_named() {
    let world = World::new();
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    drop(socket);
    let (code, text) = refused(&world, &["status", "--url", &url]);
    assert_eq!(code, 3);
    assert!(
        text.starts_with(&format!("error: no server answers at {url}: ")),
        "{text}"
    );
    let (code, text) = refused(&world, &["status", "--url", "localhost:1"]);
    assert_eq!(
        (code, text.as_str()),
        (2, "error: --url localhost:1 must start with http://\n")
    );
}

#[test]
fn a_typo_in_the_file_is_shown_with_its_line_and_the_nearest_key() {
    let world = World::new();
    world.pipeline();
    let file = world.file("typo.toml", &PIPELINE.replace("[[edge]]\nfrom", "[[edge]]\nfrmo"));
    for command in ["serve", "up"] {
        let done = world.run([command, file.to_str().unwrap()]);
        assert_eq!(done.code, 2, "{}", done.stderr);
        assert!(
            done.stderr.contains("typo.toml:12: unknown key \"frmo\""),
            "{}",
            done.stderr
        );
        assert!(done.stderr.contains("did you mean \"from\"?"), "{}", done.stderr);
    }
    assert!(!world.run_dir().exists(), "nothing was started");
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let world = World::new();
    for args in [
        &["serve", "nowhere.toml"][..],
        &["worker", "--pipeline", "nowhere.toml", "--stage", "x"],
    ] {
        let (code, text) = refused(&world, args);
        assert_eq!(code, 2);
        assert!(text.contains("nowhere.toml"), "{text}");
    }
}

#[test]
fn a_port_in_use_is_named_and_nothing_is_left() {
    let world = World::new();
    let pipeline = world.pipeline();
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap().to_string();
    let (code, text) = refused(&world, &["serve", pipeline.to_str().unwrap(), "--listen", &address]);
    assert_eq!(code, 1);
    assert!(
        text.starts_with(&format!("error: {address} is in use by another program; ")),
        "{text}"
    );
    let left: Vec<String> = names(&world.run_dir())
        .into_iter()
        .filter(|name| name != "worker.token")
        .collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

#[test]
fn a_python_without_the_package_is_told_what_to_do() {
    let world = World::new();
    let pipeline = world.pipeline();
    let python = world.file(
        "python",
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'stagewire'\" >&2\nexit 1\n",
    );
    std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let python = python.to_str().unwrap();
    for args in [
        &["up", pipeline.to_str().unwrap(), "--python", python][..],
        &[
            "worker",
            "--pipeline",
            pipeline.to_str().unwrap(),
            "--stage",
            "decode",
            "--python",
            python,
        ],
    ] {
        let (code, text) = refused(&world, args);
        assert_eq!(code, 2);
        assert!(
            text.starts_with(
                "error: Python DIR/python (from --python) cannot import the package stagewire: ModuleNotFoundError"
            ),
            "{text}"
        );
        assert!(text.contains("make setup") && text.contains("--python"), "{text}");
    }
    assert!(!world.run_dir().exists(), "nothing was started");
}

#[test]
fn outputs_that_cannot_be_written_are_refused_before_anything_is_asked() {
    let world = World::new();
    let (code, text) = refused(&world, &["submit", "a cat", "--out", "/nowhere/cat.mp4"]);
    assert_eq!((code, text.as_str()), (2, "error: there is no directory /nowhere\n"));
    let (code, text) = refused(&world, &["submit", "a cat", "--timeline", "cat.txt"]);
    assert_eq!(
        (code, text.as_str()),
        (2, "error: --timeline cat.txt must end in .html or .json\n")
    );
}
