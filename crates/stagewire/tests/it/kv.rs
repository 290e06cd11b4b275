use crate::world::World;

const GEOMETRY: &str = "\
[[component]]
name = \"full\"
layers = 18
kv-heads = 8
k-dim = 64
v-dim = 64
dtype = \"bfloat16\"

[[component]]
name = \"swa\"
layers = 18
kv-heads = 8
k-dim = 64
v-dim = 64
dtype = \"bfloat16\"
window = 127

[prefill]
tp-size = 1
page-size = 64

[decode]
tp-size = 4
page-size = 64
num-pages = { swa = 300 }
";

fn run(world: &World, command: &str, text: &str, more: &[&str]) -> (i32, String, String) {
    let file = world.file("geometry.toml", text);
    let mut args = vec!["kv", command, file.to_str().unwrap()];
    args.extend(more);
    let done = world.run(args);
    (done.code, done.stdout, done.stderr)
}

#[test]
fn a_check_shows_who_sends_what() {
    let (code, stdout, stderr) = run(&World::new(), "check", GEOMETRY, &[]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    insta::assert_snapshot!(stdout, @r"
    SRC  DST  COMPONENT  SRC HEADS  DST HEADS
    0    0    full       0 to 1     0 to 1
    0    0    swa        0 to 1     0 to 1
    0    1    full       2 to 3     0 to 1
    0    1    swa        2 to 3     0 to 1
    0    2    full       4 to 5     0 to 1
    0    2    swa        4 to 5     0 to 1
    0    3    full       6 to 7     0 to 1
    0    3    swa        6 to 7     0 to 1
    ");
}

#[test]
fn a_plan_shows_what_moves() {
    let (code, stdout, stderr) = run(&World::new(), "plan", GEOMETRY, &["--seq-len", "8192"]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(
        stderr,
        "total     292.5 MiB in 288 records, 1198080 runs of bytes without them\n"
    );
    insta::assert_snapshot!(stdout, @r"
    SRC  DST  COMPONENT  TOKENS        PACK    RECORDS  RUNS    BYTES
    0    0    full       0 to 8191     gather  36       294912  72.0 MiB
    0    0    swa        8065 to 8191  gather  36       4608    1.1 MiB
    0    1    full       0 to 8191     gather  36       294912  72.0 MiB
    0    1    swa        8065 to 8191  gather  36       4608    1.1 MiB
    0    2    full       0 to 8191     gather  36       294912  72.0 MiB
    0    2    swa        8065 to 8191  gather  36       4608    1.1 MiB
    0    3    full       0 to 8191     gather  36       294912  72.0 MiB
    0    3    swa        8065 to 8191  gather  36       4608    1.1 MiB
    ");
}

#[test]
fn a_plan_as_json_counts_every_route() {
    let room = format!("{GEOMETRY}\n[room]\nseq-len = 100\nexact-window = true\nsrc-pages = {{ full = [7, 3] }}\n");
    let (code, stdout, stderr) = run(&World::new(), "plan", &room, &["--json"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let document: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    let routes = document["routes"].as_array().unwrap();
    assert_eq!(routes.len(), 8);
    assert_eq!(routes[0]["records"], 2 * 2 * 18);
    assert_eq!(routes[1]["records"], 2 * 18);
    let moved: u64 = routes.iter().map(|route| route["nbytes"].as_u64().unwrap()).sum();
    assert_eq!(moved, 100 * 8 * 64 * 2 * 2 * 36);
}

#[test]
fn a_refusal_has_both_sides_values_and_the_reason() {
    let text = GEOMETRY.replacen("page-size = 64", "page-size = 32", 1);
    let (code, stdout, stderr) = run(&World::new(), "check", &text, &[]);
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert_eq!(
        stderr,
        "error: page_size is 32 at prefill and 64 at decode; start both engines with the same [unsupported: kv.page_size]\n"
    );
}

#[test]
fn wrong_files_and_rooms_are_usage_errors() {
    let world = World::new();
    let (code, _, stderr) = run(&world, "check", &format!("{GEOMETRY}tp = 4\n"), &[]);
    assert_eq!(code, 2);
    assert!(stderr.contains("unknown field `tp`"), "{stderr}");
    let (code, _, stderr) = run(&world, "plan", GEOMETRY, &[]);
    assert_eq!(code, 2);
    assert!(stderr.contains("give --seq-len"), "{stderr}");
    let (code, _, stderr) = run(&world, "plan", GEOMETRY, &["--seq-len", "30000"]);
    assert_eq!(code, 2);
    assert!(
        stderr.contains("whose pool ends with page 299 [invalid: kv.past_pool]"),
        "{stderr}"
    );
}
