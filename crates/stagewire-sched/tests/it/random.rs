//! Workers that die, hang, lie about nothing but forget a lot, over streams that break; a server that restarts; clients
//! that cancel. More cases with `PROPTEST_CASES`. After each step everything is checked; when the faults stop, everything
//! ends and nothing is left.

mod agent;
mod model;

use proptest::prelude::*;
use stagewire_core::ByteCount;
use stagewire_sched::{Limits, Sched, StageKind, StageSpec, Topology};

use crate::world::{name, stored, stream, whole};
use model::{Model, Op};

/// Shapes that differ in what may go wrong.
fn shapes() -> Vec<Topology> {
    let shape = |stages: &[&str], edges| {
        let spec = |stage: &&str| StageSpec {
            kind: if *stage == "denoise" {
                StageKind::Admission
            } else {
                StageKind::WorkQueue
            },
            max_held: 1,
            max_attempts: 2,
            checkpoint: *stage == "denoise",
            ..StageSpec::new(name(stage))
        };
        Topology::new(stages.iter().map(spec).collect(), edges).expect("an allowed pipeline")
    };
    vec![
        shape(&["fused"], vec![]),
        shape(
            &["encode", "denoise", "decode"],
            vec![whole("encode", "denoise"), stream("denoise", "decode")],
        ),
        shape(
            &["encode", "denoise", "decode"],
            vec![stored(whole("encode", "denoise")), stored(stream("denoise", "decode"))],
        ),
        shape(
            &["encode", "denoise", "video", "audio", "mux"],
            vec![
                stored(whole("encode", "denoise")),
                stream("denoise", "video"),
                whole("denoise", "audio"),
                whole("video", "mux"),
                stored(whole("audio", "mux")),
            ],
        ),
        shape(
            &["split", "left", "prepare", "right", "join"],
            vec![
                whole("split", "left"),
                stream("split", "prepare"),
                stream("prepare", "right"),
                stream("left", "join"),
                whole("right", "join"),
            ],
        ),
    ]
}

fn limits() -> Limits {
    Limits {
        max_ended: 1_000,
        max_dead_letters: 2,
        // Room for three outputs, so that jobs wait for it.
        payload_bytes: Some(ByteCount(3 << 20)),
        // Bounds that end jobs would hide what goes wrong in those that go on.
        max_killed_workers: 1_000,
        max_expired: 1_000,
        max_lost_inputs: 1_000,
        ..Limits::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        max_shrink_iters: 20_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn whatever_happens(shape in 0..5usize, ops in prop::collection::vec(op(), 1..250)) {
        let mut model = Model::new(shapes().swap_remove(shape), limits());
        for op in ops {
            model.step(op);
        }
        model.finish();
    }

    #[test]
    fn whatever_happens_within_the_usual_bounds(shape in 0..5usize, ops in prop::collection::vec(op(), 1..250)) {
        let mut model = Model::new(shapes().swap_remove(shape), Limits::default());
        for op in ops {
            model.step(op);
        }
        model.finish();
    }

    #[test]
    fn events_in_any_order_do_no_harm(
        shape in 0..5usize,
        ops in prop::collection::vec(op(), 1..100),
        order in prop::collection::vec(any::<prop::sample::Index>(), 1..400),
    ) {
        let mut model = Model::new(shapes().swap_remove(shape), limits());
        for op in ops {
            model.step(op);
        }
        let history = model.history();
        let mut sched = Sched::new(shapes().swap_remove(shape), limits());
        for index in order {
            let (at, event) = index.get(history);
            sched.apply(*at, event);
            // Jobs may be left half done, but nothing is counted wrongly.
            prop_assert_eq!(sched.check_index(), Ok(()));
        }
    }
}

fn op() -> impl Strategy<Value = Op> {
    let pick = || any::<u8>();
    prop_oneof![
        4 => (pick(), prop::option::weighted(0.2, 1..90_u64)).prop_map(|(class, deadline)| Op::Submit(class, deadline)),
        1 => pick().prop_map(Op::Cancel),
        1 => pick().prop_map(Op::Redrive),
        1 => pick().prop_map(Op::Discard),
        4 => (pick(), 1..4u32).prop_map(|(stage, slots)| Op::Start(stage, slots)),
        20 => pick().prop_map(Op::Deliver),
        20 => pick().prop_map(Op::Hear),
        20 => (pick(), pick()).prop_map(|(agent, what)| Op::Act(agent, what)),
        2 => pick().prop_map(Op::Repeat),
        2 => pick().prop_map(Op::Swap),
        2 => pick().prop_map(Op::Stale),
        2 => pick().prop_map(Op::Break),
        3 => pick().prop_map(Op::Reconnect),
        1 => pick().prop_map(Op::Die),
        1 => pick().prop_map(Op::DieUnnoticed),
        1 => Just(Op::Restart),
        1 => pick().prop_map(Op::LosePayload),
        1 => (pick(), prop::option::of(0..60_u64)).prop_map(|(agent, seconds)| Op::Drain(agent, seconds)),
        2 => (pick(), pick()).prop_map(|(agent, which)| Op::Move(agent, which)),
        1 => any::<bool>().prop_map(Op::Pause),
        4 => (0..3_000u64).prop_map(Op::Wait),
        1 => (0..120_000u64).prop_map(Op::Wait),
    ]
}
