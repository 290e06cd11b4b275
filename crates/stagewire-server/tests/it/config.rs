//! Messages for a `stagewire.toml` that is wrong: file, line, key, and what to write instead.

use stagewire_core::{Classify, ErrorClass};
use stagewire_sched::{Flow, StageKind};
use stagewire_server::Config;

const GOOD: &str = r#"[pipeline]
name = "wan"
module = "pipeline.py"

[pipeline.params.prompt]
type = "string"
[pipeline.params.steps]
type = "integer"
default = 4
min = 1
max = 100

[[stage]]
name = "encode"
[[stage]]
name = "denoise"
kind = "admission"
no-progress = "5m"
[[stage]]
name = "decode"
slots = 2

[[edge]]
from = "encode"
to = "denoise"
[[edge]]
from = "denoise"
to = "decode"
handover = "stream"
chunks = 3
chunk-dim = 2

[server]
listen = "127.0.0.1:0"
store-bytes = "1.5GiB"
"#;

#[test]
fn a_good_file_is_read_with_its_defaults() {
    let config = Config::parse(GOOD, "/etc/wan/stagewire.toml").unwrap();
    assert_eq!(config.pipeline.module.to_str(), Some("/etc/wan/pipeline.py"));
    let denoise = config.stage("denoise").unwrap();
    assert_eq!(
        (denoise.kind, denoise.no_progress.as_secs(), denoise.slots),
        (StageKind::Admission, 300, 1)
    );
    assert_eq!(config.stage("decode").unwrap().slots, 2);
    assert_eq!(config.topology.edges()[0].flow, Flow::Whole);
    assert_eq!(
        config.topology.edges()[1].flow,
        Flow::Stream {
            chunks: 3,
            chunk_dim: 2
        }
    );
    assert_eq!(config.server.store_bytes.0, 3 << 29);
    assert_eq!(config.server.max_queued, 10_000);
}

/// The message for `GOOD` with `from` replaced by `to`.
fn error(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from), "{from:?} is not in the file");
    let text = GOOD.replacen(from, to, 1);
    Config::parse(&text, "stagewire.toml").unwrap_err().to_string()
}

#[test]
fn typos_name_file_line_key_and_the_nearest_valid_one() {
    insta::assert_snapshot!(error("slots = 2", "slot = 2"), @r#"stagewire.toml:21: unknown key "slot" in [[stage]]; did you mean "slots"? Valid here: name, kind, workers, slots, max-batch, world, max-held, max-payload, no-progress, max-attempts, backoff, max-backoff, threads, skip-if, cache, cache-version, checkpoint"#);
    insta::assert_snapshot!(error("[server]", "[sever]"), @r#"stagewire.toml:33: unknown key "sever" in this file; did you mean "server"? Valid here: pipeline, class, stage, edge, server"#);
    insta::assert_snapshot!(error("chunk-dim", "chunk_dim"), @r#"stagewire.toml:31: unknown key "chunk_dim" in [[edge]]; did you mean "chunk-dim"? Valid here: from, to, handover, chunks, chunk-dim, mode"#);
    insta::assert_snapshot!(error("min = 1", "colour = 1"), @r#"stagewire.toml:10: unknown key "colour" in [pipeline.params.steps]; valid here: type, help, default, min, max, shape"#);
    insta::assert_snapshot!(error("\"admission\"", "\"admision\""), @r#"stagewire.toml:17: unknown value "admision" in [[stage]]; did you mean "admission"? Valid here: work-queue, admission"#);
    insta::assert_snapshot!(error("\"stream\"", "\"chunked\""), @r#"stagewire.toml:29: unknown value "chunked" in [[edge]]; valid here: whole, stream"#);
    insta::assert_snapshot!(error("\"integer\"", "\"int\""), @r#"stagewire.toml:8: unknown value "int" in [pipeline.params.steps]; did you mean "integer"? Valid here: string, integer, number, boolean, input"#);
}

#[test]
fn the_bounds_of_a_wait_fit_each_other() {
    let waits = |keys: &str| {
        let text = GOOD.replacen("slots = 2", &format!("slots = 2\n{keys}"), 1);
        let config = Config::parse(&text, "stagewire.toml").unwrap();
        let stage = config.stages.iter().find(|stage| stage.slots == 2).unwrap();
        let of_topology = config.topology.stage(&stage.name).unwrap();
        assert_eq!(stage.backoff, of_topology.backoff);
        (stage.backoff.first.as_millis(), stage.backoff.longest.as_millis())
    };
    assert_eq!(waits(""), (1_000, 60_000));
    assert_eq!(waits("backoff = \"250ms\""), (250, 60_000));
    assert_eq!(waits("backoff = \"5m\""), (300_000, 300_000));
    assert_eq!(waits("max-backoff = \"250ms\""), (250, 250));
    assert_eq!(waits("backoff = \"2s\"\nmax-backoff = \"8s\""), (2_000, 8_000));
    insta::assert_snapshot!(
        error("slots = 2", "slots = 2\nbackoff = \"9s\"\nmax-backoff = \"8s\""),
        @r#"stagewire.toml:23: "max-backoff" is 8s, below "backoff", which is 9s"#
    );
}

#[test]
fn wrong_values_say_what_to_write() {
    insta::assert_snapshot!(error("slots = 2", "slots = \"two\""), @r#"stagewire.toml:21: "slots" in [[stage]]: invalid type: string "two", expected a whole number from 0 to 4294967295"#);
    insta::assert_snapshot!(error("slots = 2", "slots = 0"), @r#"stagewire.toml:21: "slots" must be at least 1"#);
    insta::assert_snapshot!(error("slots = 2", "max-batch = 0"), @r#"stagewire.toml:21: "max-batch" must be at least 1"#);
    insta::assert_snapshot!(error("slots = 2", "slots = 2\nmax-batch = 2"), @r#"stagewire.toml:22: "max-batch" is for stages of kind work-queue with one slot; start more workers instead of slots"#);
    insta::assert_snapshot!(error("kind = \"admission\"", "kind = \"admission\"\nmax-batch = 2"), @r#"stagewire.toml:18: "max-batch" is for stages of kind work-queue with one slot; start more workers instead of slots"#);
    insta::assert_snapshot!(error("slots = 2", "world = 2"), @r#"stagewire.toml:21: "world" is for stages of kind admission with one slot: its processes run one attempt together"#);
    insta::assert_snapshot!(error("slots = 2", "max-payload = \"huge\""), @r#"stagewire.toml:21: "max-payload" in [[stage]]: "huge" is not a number of bytes; write for instance "256MiB" or 268435456"#);
    insta::assert_snapshot!(error("kind = \"admission\"", "kind = \"admission\"\nmax-payload = \"2GiB\""), @r#"stagewire.toml:14: "max-payload" of stage encode and of those after it are 2.0 GiB together, and "store-bytes" in [server] is 1.5 GiB: no job could ever run; lower them, or raise "store-bytes""#);
    insta::assert_snapshot!(error("slots = 2", "slots = -2"), @r#"stagewire.toml:21: "slots" in [[stage]]: invalid value: integer "-2", expected a whole number from 0 to 4294967295"#);
    insta::assert_snapshot!(error("\"5m\"", "\"five minutes\""), @r#"stagewire.toml:18: "no-progress" in [[stage]]: "five minutes" is not a span of time; write for instance "300s", "5m" or "250ms""#);
    insta::assert_snapshot!(error("\"1.5GiB\"", "\"1.5 gigs\""), @r#"stagewire.toml:35: "store-bytes" in [server]: "1.5 gigs" is not a number of bytes; write for instance "256MiB" or 268435456"#);
    insta::assert_snapshot!(error("name = \"wan\"", "name = \"Wan 2\""), @r#"stagewire.toml:2: "name" in [pipeline]: "Wan 2" is not a name: use 1 to 64 of a-z, 0-9, '-' and '_', starting with a letter"#);
    insta::assert_snapshot!(error("default = 4", "default = 0"), @r#"stagewire.toml:9: "default" of parameter "steps" must be at least 1; got 0"#);
    insta::assert_snapshot!(error("max = 100", "max = 0"), @r#"stagewire.toml:11: "max" of parameter "steps" is 0, below its "min" 1"#);
    insta::assert_snapshot!(error("type = \"string\"", "type = \"string\"\nmin = 3"), @r#"stagewire.toml:7: "min" is for numbers; parameter "prompt" is a string"#);
    insta::assert_snapshot!(error("127.0.0.1:0", "0.0.0.0:7070"), @r#"stagewire.toml:34: "listen" = 0.0.0.0:7070 can be reached from other hosts, so clients must show a token: set "token-file", or listen on 127.0.0.1"#);
    insta::assert_snapshot!(error("127.0.0.1:0", "localhost"), @r#"stagewire.toml:34: "listen" is "localhost"; write an address and a port, for instance "127.0.0.1:7070" (port 0 takes a free one)"#);
    insta::assert_snapshot!(error("store-bytes = \"1.5GiB\"", "max-body = \"64MiB\""), @r#"stagewire.toml:35: "max-body" is 64.0 MiB; it must be at most 16.0 MiB"#);
    insta::assert_snapshot!(error("store-bytes = \"1.5GiB\"", "max-input = \"5GiB\""), @r#"stagewire.toml:35: "max-input" is 5.0 GiB, more than "input-bytes" has for all inputs together (4.0 GiB)"#);
    insta::assert_snapshot!(error("store-bytes = \"1.5GiB\"", "input-bytes = \"64000B\""), @r#"stagewire.toml:35: "input-bytes" is 62.5 KiB; it must be at least 64.0 KiB, what the smallest input counts for"#);
    insta::assert_snapshot!(error("type = \"string\"", "type = \"input\"\ndefault = \"cat.png\""), @r#"stagewire.toml:7: "default" of parameter "prompt" may only be "", for none: inputs come and go"#);
    insta::assert_snapshot!(error("name = \"wan\"\n", ""), @r#"stagewire.toml:1: in [pipeline]: missing key "name""#);
    insta::assert_snapshot!(error("[[edge]]", "[[edge]"), @r#"stagewire.toml:23: not TOML: unclosed array table, expected "]""#);
}

#[test]
fn classes_take_the_place_of_the_usual_three() {
    let config = Config::parse(GOOD, "stagewire.toml").unwrap();
    assert_eq!(config.topology.classes(), stagewire_sched::ClassSpec::defaults());
    let text = format!(
        "{GOOD}\n[[class]]\nname = \"gold\"\nweight = 3\nqueue-deadline = \"20s\"\n[[class]]\nname = \"tin\"\n"
    );
    let config = Config::parse(&text, "stagewire.toml").unwrap();
    let classes: Vec<_> = config
        .topology
        .classes()
        .iter()
        .map(|class| (class.name.as_str(), class.weight))
        .collect();
    assert_eq!(classes, [("gold", 3), ("tin", 1)]);
    let deadlines = config.topology.classes().iter().map(|class| class.queue_deadline);
    assert_eq!(
        deadlines.collect::<Vec<_>>(),
        [Some(std::time::Duration::from_secs(20)), None]
    );
}

#[test]
fn classes_that_cannot_be_are_refused() {
    let error = |classes: &str| {
        let classes = format!("{classes}\n[server]");
        error("[server]", &classes)
    };
    insta::assert_snapshot!(error("[[class]]\nname = \"gold\"\nweight = 0"), @"stagewire.toml:35: the weight of class gold is 0; it must be 1 to 1000");
    insta::assert_snapshot!(error("[[class]]\nname = \"gold\"\n[[class]]\nname = \"gold\""), @"stagewire.toml:36: class gold is declared twice; each class needs its own name");
    insta::assert_snapshot!(error("[[class]]\nname = \"gold\"\nqueue-deadline = \"-5s\""), @r#"stagewire.toml:35: "queue-deadline" in [[class]]: "-5s" is out of range: 1 ms to 366 days"#);
    insta::assert_snapshot!(error("[[class]]\nname = \"gold\"\nwait = 1"), @r#"stagewire.toml:35: unknown key "wait" in [[class]]; valid here: name, weight, queue-deadline, preempts"#);
}

#[test]
fn a_graph_that_cannot_work_is_refused() {
    insta::assert_snapshot!(error("to = \"decode\"", "to = \"deocde\""), @r#"stagewire.toml:28: "to" names no [[stage]]: "deocde"; did you mean "decode"?"#);
    insta::assert_snapshot!(error("to = \"denoise\"", "to = \"encode\""), @"stagewire.toml:23: the stages wait for each other in a circle: encode -> encode; remove one of these edges");
    insta::assert_snapshot!(error("to = \"decode\"", "to = \"encode\""), @"stagewire.toml:26: the stages wait for each other in a circle: denoise -> encode -> denoise; remove one of these edges");
    insta::assert_snapshot!(error("[server]", "[[stage]]\nname = \"encode\"\n[server]"), @"stagewire.toml:34: stage encode is declared twice; each stage needs its own name");
    insta::assert_snapshot!(error("chunks = 3\n", ""), @r#"stagewire.toml:26: handover = "stream" needs "chunks" (how many) and "chunk-dim" (which dimension is cut)"#);
    insta::assert_snapshot!(error("chunks = 3\n", "chunks = 0\n"), @r#"stagewire.toml:30: "chunks" is 0; it must be 1 to 65536"#);
    insta::assert_snapshot!(error("handover = \"stream\"\n", ""), @r#"stagewire.toml:29: "chunks" and "chunk-dim" go with handover = "stream"; this edge hands over the whole payload"#);
    insta::assert_snapshot!(error("from = \"denoise\"\nto = \"decode\"\n", "from = \"encode\"\nto = \"denoise\"\n"), @"stagewire.toml:26: the edge from encode to denoise is declared twice; remove one");
    insta::assert_snapshot!(error("handover = \"stream\"\nchunks = 3\nchunk-dim = 2\n", "mode = \"store\"\n[[edge]]\nfrom = \"denoise\"\nto = \"encode\"\n"), @"stagewire.toml:30: the stages wait for each other in a circle: denoise -> encode -> denoise; remove one of these edges");
    insta::assert_snapshot!(error("[server]", "[[stage]]\nname = \"upscale\"\n[server]"), @"stagewire.toml:34: no edge connects upscale with encode, denoise, decode; a pipeline is one connected graph");
}

/// The class and reason of that.
fn reason(from: &str, to: &str) -> (ErrorClass, &'static str) {
    let error = Config::parse(&GOOD.replacen(from, to, 1), "stagewire.toml").unwrap_err();
    (error.class(), error.reason())
}

#[test]
fn what_is_wrong_with_a_graph_has_a_reason_of_its_own() {
    for (from, to, expected) in [
        ("to = \"decode\"", "to = \"encode\"", "topology.cycle"),
        (
            "[server]",
            "[[stage]]\nname = \"upscale\"\n[server]",
            "topology.disconnected",
        ),
        (
            "[server]",
            "[[stage]]\nname = \"encode\"\n[server]",
            "topology.duplicate",
        ),
        (
            "from = \"denoise\"\nto = \"decode\"\n",
            "from = \"encode\"\nto = \"denoise\"\n",
            "topology.duplicate",
        ),
        (
            "[server]",
            "[[class]]\nname = \"gold\"\nweight = 0\n[server]",
            "topology.invalid",
        ),
    ] {
        assert_eq!(reason(from, to), (ErrorClass::Invalid, expected), "{to}");
    }
    let nothing = Config::parse("[pipeline]\nname = 'p'\nmodule = 'p.py'\n", "stagewire.toml").unwrap_err();
    assert_eq!(nothing.reason(), "topology.invalid");
}

#[test]
fn a_stage_is_skipped_for_a_parameter_that_can_be_given() {
    let skips = |param: &str| GOOD.replacen("name = \"encode\"", &format!("name = \"encode\"\nskip-if = {param}"), 1);
    Config::parse(&skips("\"prompt\""), "stagewire.toml").unwrap();
    let error = |param: &str| Config::parse(&skips(param), "stagewire.toml").unwrap_err().to_string();
    insta::assert_snapshot!(error("\"promt\""), @r#"stagewire.toml:15: "skip-if" names no parameter of the pipeline: "promt"; did you mean "prompt"?"#);
    insta::assert_snapshot!(error("\"embeddings\""), @r#"stagewire.toml:15: "skip-if" names no parameter of the pipeline: "embeddings"; add [pipeline.params.…] for it"#);
    insta::assert_snapshot!(error("\"steps\""), @r#"stagewire.toml:15: "skip-if" names parameter "steps", which is an integer; name a boolean, which skips the stage where it is true, or an input or a string, which does where it is not empty"#);
}

#[test]
fn what_is_cached_lies_in_the_store_and_depends_on_parameters() {
    let stored = GOOD.replacen("to = \"denoise\"", "to = \"denoise\"\nmode = \"store\"", 1);
    let cache = |text: &str, lines: &str| text.replacen("name = \"encode\"", &format!("name = \"encode\"\n{lines}"), 1);
    Config::parse(
        &cache(&stored, "cache = [\"prompt\"]\ncache-version = \"1\""),
        "stagewire.toml",
    )
    .unwrap();
    let error = |lines: &str| {
        Config::parse(&cache(&stored, lines), "stagewire.toml")
            .unwrap_err()
            .to_string()
    };
    insta::assert_snapshot!(error("cache = [\"promt\"]"), @r#"stagewire.toml:15: "cache" names no parameter of the pipeline: "promt"; did you mean "prompt"?"#);
    insta::assert_snapshot!(error("cache = []"), @r#"stagewire.toml:15: "cache" is empty; name the parameters that what the stage makes depends on"#);
    insta::assert_snapshot!(error("cache-version = \"1\""), @r#"stagewire.toml:15: "cache-version" stands without "cache", which names what is cached"#);
    let p2p = Config::parse(&cache(GOOD, "cache = [\"prompt\"]"), "stagewire.toml").unwrap_err();
    insta::assert_snapshot!(p2p, @r#"stagewire.toml:15: "cache" stands at encode, and the edge to denoise is of mode p2p; only the store keeps what several jobs read: write mode = "store" there"#);
    let last = GOOD.replacen("name = \"decode\"", "name = \"decode\"\ncache = [\"prompt\"]", 1);
    insta::assert_snapshot!(Config::parse(&last, "stagewire.toml").unwrap_err(), @r#"stagewire.toml:21: "cache" stands at decode, a last stage; it is for what other stages read"#);
}

#[test]
fn a_module_that_is_not_there_is_found_when_the_file_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stagewire.toml");
    std::fs::write(&path, GOOD).unwrap();
    let error = Config::load(&path)
        .unwrap_err()
        .to_string()
        .replace(dir.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(error, @r#"DIR/stagewire.toml:3: the pipeline module DIR/pipeline.py is not a file; "module" is relative to this file"#);
    std::fs::write(dir.path().join("pipeline.py"), "").unwrap();
    Config::load(&path).unwrap();
    let missing = Config::load(&dir.path().join("none.toml")).unwrap_err();
    assert_eq!(missing.class(), ErrorClass::NotFound);
}
