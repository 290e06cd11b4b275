use stagewire_core::{Classify, ErrorClass, StageName, TransferMode};

use super::{EdgeSpec, Flow, StageSpec, Topology, TopologyError};

fn name(name: &str) -> StageName {
    StageName::new(name).expect("an allowed name")
}

fn build(stages: &[&str], edges: &[(&str, &str)]) -> Result<Topology, TopologyError> {
    let stages = stages.iter().map(|stage| StageSpec::new(name(stage))).collect();
    Topology::new(stages, edges.iter().map(|(from, to)| edge(from, to)).collect())
}

fn edge(from: &str, to: &str) -> EdgeSpec {
    EdgeSpec {
        from: name(from),
        to: name(to),
        flow: Flow::Whole,
        mode: TransferMode::P2p,
    }
}

fn reason(result: Result<Topology, TopologyError>) -> (&'static str, String) {
    let error = result.expect_err("refused");
    assert_eq!(error.class(), ErrorClass::Invalid);
    (error.reason(), error.to_string())
}

#[test]
fn pipelines_of_all_shapes_are_allowed() {
    type Shape = (&'static [&'static str], &'static [(&'static str, &'static str)]);
    let shapes: [Shape; 6] = [
        (&["fused"], &[]),
        (&["d", "v"], &[("d", "v")]),
        (&["e", "d", "v"], &[("e", "d"), ("d", "v")]),
        (&["e", "d1", "d2", "v"], &[("e", "d1"), ("d1", "d2"), ("d2", "v")]),
        (
            &["e", "d", "v", "a", "mux"],
            &[("e", "d"), ("d", "v"), ("d", "a"), ("v", "mux"), ("a", "mux")],
        ),
        (
            &["text", "image", "d", "v"],
            &[("text", "d"), ("image", "d"), ("d", "v")],
        ),
    ];
    for (stages, edges) in shapes {
        let topology = build(stages, edges).expect("allowed");
        let order: Vec<_> = topology
            .upstream_first()
            .iter()
            .map(|stage| topology.name(*stage).as_str())
            .collect();
        for (from, to) in edges {
            let place = |stage: &str| order.iter().position(|other| *other == stage);
            assert!(place(from) < place(to), "{from} comes after {to} in {order:?}");
        }
    }
}

#[test]
fn what_cannot_run_is_refused_with_names() {
    let (reason_key, message) = reason(build(&[], &[]));
    assert_eq!(reason_key, "topology.invalid", "{message}");
    let (reason_key, message) = reason(build(&["a", "a"], &[]));
    assert_eq!(reason_key, "topology.duplicate", "{message}");
    let (reason_key, message) = reason(build(&["a", "b"], &[("a", "b"), ("a", "b")]));
    assert_eq!(reason_key, "topology.duplicate", "{message}");
    let (reason_key, message) = reason(build(&["encode", "denoise"], &[("encode", "denoize")]));
    assert_eq!(reason_key, "stage.unknown");
    assert!(
        message.contains("denoize") && message.contains("encode, denoise"),
        "{message}"
    );
    let (reason_key, message) = reason(build(&["a", "b", "c", "d"], &[("a", "b"), ("c", "d")]));
    assert_eq!(reason_key, "topology.disconnected");
    assert!(message.contains("c, d with a, b"), "{message}");
}

#[test]
fn cycles_are_shown() {
    let (reason_key, message) = reason(build(&["a"], &[("a", "a")]));
    assert_eq!(reason_key, "topology.cycle");
    assert!(message.contains("a -> a"), "{message}");
    let edges = [("in", "a"), ("a", "b"), ("b", "c"), ("c", "a"), ("c", "out")];
    let error = build(&["in", "a", "b", "c", "out"], &edges).expect_err("refused");
    let TopologyError::Cycle { stages } = error else {
        panic!("not a cycle: {error}");
    };
    let shown: Vec<_> = stages.iter().map(StageName::as_str).collect();
    assert_eq!(shown.first(), shown.last());
    for pair in shown.windows(2) {
        assert!(edges.contains(&(pair[0], pair[1])), "{pair:?} is no edge: {shown:?}");
    }
}

#[test]
fn bounds_of_zero_and_too_many_stages_are_refused() {
    let changes: [fn(&mut StageSpec); 3] = [
        |stage| stage.max_held = 0,
        |stage| stage.max_attempts = 0,
        |stage| stage.no_progress = std::time::Duration::ZERO,
    ];
    for change in changes {
        let mut stage = StageSpec::new(name("a"));
        change(&mut stage);
        assert!(matches!(
            Topology::new(vec![stage], vec![]),
            Err(TopologyError::ZeroBound { .. })
        ));
    }
    let names: Vec<String> = (0..=Topology::MAX_STAGES).map(|number| format!("s{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let edges: Vec<_> = names.windows(2).map(|pair| (pair[0], pair[1])).collect();
    assert!(build(&names[..Topology::MAX_STAGES], &edges[..Topology::MAX_STAGES - 1]).is_ok());
    assert!(matches!(
        build(&names, &edges),
        Err(TopologyError::TooManyStages { count: 65 })
    ));
}

#[test]
fn the_edges_of_a_stage_agree() {
    let stages = || ["a", "b", "c"].map(|stage| StageSpec::new(name(stage))).to_vec();
    let with = |first: EdgeSpec, second: EdgeSpec| Topology::new(stages(), vec![first, second]);
    let stream = |from, to, chunks| EdgeSpec {
        flow: Flow::Stream { chunks, chunk_dim: 2 },
        ..edge(from, to)
    };
    let stored = EdgeSpec {
        mode: TransferMode::Store,
        ..edge("a", "c")
    };
    assert!(matches!(
        with(edge("a", "b"), stored),
        Err(TopologyError::MixedModes { .. })
    ));
    let mixed = with(stream("a", "b", 3), stream("a", "c", 4));
    assert!(matches!(
        mixed,
        Err(TopologyError::MixedChunks {
            first: 3,
            second: 4,
            ..
        })
    ));
    let none = with(stream("a", "b", 0), edge("a", "c"));
    assert!(matches!(none, Err(TopologyError::ChunkCount { chunks: 0, .. })));
    let topology = with(edge("a", "b"), stream("a", "c", 3)).expect("one may stream and the other wait");
    let output = topology.output(&name("a")).expect("a stage");
    assert_eq!(
        (output.publish, output.stored, output.chunks, output.chunk_dim),
        (true, false, 3, 2)
    );
    assert!(!topology.output(&name("b")).expect("a stage").publish);
    assert_eq!(topology.output(&name("z")), None);
}
