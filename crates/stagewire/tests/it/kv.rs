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

/// The file that `--help` shows is one that can be read.
#[test]
fn the_example_of_the_help_is_a_geometry() {
    let world = World::new();
    let help = world.run(["kv", "--help"]).stdout;
    let (_, example) = help.split_once("geometry.toml:\n").expect("the help has an example");
    let lines = example
        .lines()
        .take_while(|line| line.is_empty() || line.starts_with("  "));
    let text: Vec<_> = lines.map(str::trim_start).collect();
    let (code, stdout, stderr) = run(&world, "check", &text.join("\n"), &[]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert_eq!(stdout.lines().count(), 1 + 4, "{stdout}");
}

/// A pool of the window holds what the window needs, not the whole prompt.
#[test]
fn made_up_tables_fit_a_pool_of_the_window() {
    let sized = GEOMETRY.replace("[decode]", "num-pages = { full = 4096, swa = 64 }\n\n[decode]");
    let (code, stdout, stderr) = run(&World::new(), "plan", &sized, &["--seq-len", "8192"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(
        stdout.contains("swa        8065 to 8191  gather  36       4608"),
        "{stdout}"
    );
    let small = sized.replace("swa = 64", "swa = 2");
    let (code, _, stderr) = run(&World::new(), "plan", &small, &["--seq-len", "8192"]);
    assert_eq!(code, 2);
    assert!(
        stderr.contains("logical page 127 is page 2 at prefill, whose pool ends with page 1"),
        "{stderr}"
    );
}

/// Stages hand over their own layers: what a plan does not move, a check does not show.
#[test]
fn a_check_shows_what_a_plan_moves() {
    let layers = "layers = 2\nkv-heads = 2\nk-dim = 4\nv-dim = 4\ndtype = \"uint8\"\n";
    let side = |side: &str, ids: &str| {
        let full = format!("[[{side}.components]]\nname = \"full\"\nlayer-ids = {ids}\n{layers}");
        let swa = format!("[[{side}.components]]\nname = \"swa\"\n{layers}");
        format!("[{side}]\ntp-size = 2\npage-size = 4\npp-size = 2\n\n{full}\n{swa}\n")
    };
    let text = side("prefill", "[0, 1]") + &side("decode", "[1, 0]");
    let world = World::new();
    let (code, checked, stderr) = run(&world, "check", &text, &[]);
    assert_eq!(code, 0, "{stderr}");
    let (code, planned, stderr) = run(&world, "plan", &text, &["--seq-len", "10"]);
    assert_eq!(code, 0, "{stderr}");
    let routes = |table: &str| -> Vec<Vec<String>> {
        let rows = table.lines().skip(1).map(str::split_whitespace);
        rows.map(|cells| cells.take(3).map(str::to_owned).collect()).collect()
    };
    assert_eq!(routes(&checked), routes(&planned));
    assert_eq!(routes(&checked).len(), 8);
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
    let small = GEOMETRY.replace("swa = 300", "full = 300");
    let (code, _, stderr) = run(&world, "plan", &small, &["--seq-len", "30000"]);
    assert_eq!(code, 2);
    assert!(
        stderr.contains("whose pool ends with page 299 [invalid: kv.past_pool]"),
        "{stderr}"
    );
}

/// One component, with what is special about it.
fn component(name: &str, special: &str) -> String {
    let usual = [
        "layers = 4",
        "kv-heads = 8",
        "k-dim = 64",
        "v-dim = 64",
        "dtype = \"bfloat16\"",
    ];
    let key = |line: &str| line.split(' ').next().unwrap().to_owned();
    let special: Vec<&str> = special.split(", ").filter(|line| !line.is_empty()).collect();
    let kept = usual
        .iter()
        .filter(|line| special.iter().all(|other| key(other) != key(line)));
    let lines: Vec<&str> = kept.copied().chain(special.iter().copied()).collect();
    format!("{{ name = \"{name}\", {} }}", lines.join(", "))
}

/// A geometry whose sides have components, sizes and whatever else of their own.
fn sides(sides: [(&[String], u32, &str); 2]) -> String {
    let side = |name: &str, (components, tp, more): (&[String], u32, &str)| {
        let page = if more.contains("page-size") {
            ""
        } else {
            "page-size = 64\n"
        };
        let components = components.join(", ");
        format!("[{name}]\ntp-size = {tp}\n{page}{more}\ncomponents = [{components}]\n")
    };
    let [prefill, decode] = sides;
    side("prefill", prefill) + &side("decode", decode)
}

/// What every row of the table of refusals says, for both commands: nothing but the error, with both sides' values.
#[test]
fn everything_that_cannot_work_is_refused_with_both_values() {
    let full = || component("full", "");
    let swa = || component("swa", "window = 127");
    let with = |special: &str| component("full", special);
    let both = |components: &[String], sizes: [u32; 2]| sides(sizes.map(|tp| (components, tp, "")));
    let differ = |one: String, other: String| sides([(&[one], 2, ""), (&[other], 2, "")]);
    let sized = |one: &str, other: &str| sides([(&[full()], 1, one), (&[full()], 1, other)]);
    let stages = |components: &[String]| sides([(components, 1, "pp-size = 2"), (components, 4, "")]);
    let refused = [
        (sized("page-size = 64", "page-size = 32"), "kv.page_size", ["64", "32"]),
        (
            differ(full(), with("dtype = \"float8_e4m3fn\"")),
            "kv.dtype",
            ["bfloat16", "float8_e4m3fn"],
        ),
        (stages(&[full(), swa()]), "kv.state_pipeline", ["2", "1"]),
        (
            both(&[with("layout = \"page_major\"")], [1, 4]),
            "kv.layout_tp",
            ["1", "4"],
        ),
        (
            both(&[with("layout = \"page_major\", window = 127")], [1, 4]),
            "kv.layout_tp",
            ["1", "4"],
        ),
        (
            both(&[with("layout = \"vectorized_5d\"")], [1, 4]),
            "kv.layout_tp",
            ["1", "4"],
        ),
        (
            both(
                &[full(), component("swa", "window = 127, layout = \"vectorized_5d\"")],
                [4, 1],
            ),
            "kv.layout_tp",
            ["4", "1"],
        ),
        (
            differ(full(), with("layout = \"vectorized_5d\"")),
            "kv.layout",
            ["nhd", "vectorized_5d"],
        ),
        (differ(with("layout = \"hnd\""), full()), "kv.layout", ["hnd", "nhd"]),
        (
            both(
                &[with("kind = \"block_scale\", dtype = \"uint8\", scales = 32")],
                [2, 1],
            ),
            "kv.block_scale",
            ["2", "1"],
        ),
        (
            both(
                &[
                    full(),
                    component(
                        "scales",
                        "kind = \"block_scale\", dtype = \"uint8\", scales = 32, window = 127",
                    ),
                ],
                [1, 2],
            ),
            "kv.block_scale",
            ["1", "2"],
        ),
        (both(&[with("kind = \"dsa\"")], [2, 1]), "kv.state", ["2", "1"]),
        (both(&[with("kind = \"mamba\"")], [2, 1]), "kv.state", ["2", "1"]),
        (
            sides([
                (&[with("kind = \"dsa\"")], 1, "pp-size = 2"),
                (&[with("kind = \"dsa\"")], 1, ""),
            ]),
            "kv.state_pipeline",
            ["2", "1"],
        ),
        (sized("pp-size = 4", "pp-size = 2"), "kv.pipeline", ["4", "2"]),
        (sized("pp-size = 3", ""), "kv.pipeline_split", ["3", "1"]),
        (sized("", "cp-size = 2"), "kv.context", ["1", "2"]),
        (both(&[with("kv-heads = 6")], [4, 2]), "kv.head_split", ["4", "2"]),
        (both(&[with("kv-heads = 6")], [2, 4]), "kv.head_split", ["2", "4"]),
        (
            sides([(&[full(), swa()], 1, ""), (&[swa(), full()], 1, "")]),
            "kv.components",
            ["full (mha), swa (mha)", "swa (mha), full (mha)"],
        ),
        (differ(full(), with("kv-heads = 4")), "kv.model", ["8", "4"]),
        (differ(full(), with("layers = 5")), "kv.layers", ["0 to 3", "0 to 4"]),
    ];
    let world = World::new();
    for (text, reason, values) in &refused {
        for (command, more) in [("check", &[][..]), ("plan", &["--seq-len", "300"])] {
            let (code, stdout, stderr) = run(&world, command, text, more);
            assert_eq!((code, stdout.as_str()), (1, ""), "{command}: {stderr}\n{text}");
            assert!(
                stderr.ends_with(&format!("[unsupported: {reason}]\n")),
                "{stderr}\n{text}"
            );
            for value in values {
                assert!(stderr.contains(value), "{value}: {stderr}");
            }
        }
    }
    let mxfp8 = || with("scales = 32, dtype = \"float8_e4m3fn\"");
    let latent = || component("latent", "kind = \"mla\", kv-heads = 1, k-dim = 576, v-dim = 0");
    let accepted = [
        both(&[full(), swa()], [1, 4]),
        both(&[full(), swa()], [4, 1]),
        both(&[mxfp8()], [2, 2]),
        both(&[latent()], [8, 2]),
        both(&[with("layout = \"hnd\"")], [1, 4]),
        both(&[with("kv-heads = 6")], [2, 3]),
        both(&[with("k-dim = 192, v-dim = 128")], [1, 4]),
        sized("num-pages = { full = 100 }", "num-pages = { full = 50 }"),
    ];
    for text in &accepted {
        for (command, more) in [("check", &[][..]), ("plan", &["--seq-len", "300"])] {
            let (code, _, stderr) = run(&world, command, text, more);
            assert_eq!(code, 0, "{command}: {stderr}\n{text}");
        }
    }
}
