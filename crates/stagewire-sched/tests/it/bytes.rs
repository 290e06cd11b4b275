//! Credits in bytes: what is resident stays under what is advertised, admission stops first, nothing waits for ever.

use stagewire_core::{ByteCount, Classify, ErrorClass, Incarnation, PayloadId, Token};
use stagewire_sched::{EdgeSpec, Input, Limits, StageKind, StageSpec, Topology, Urgency, WaitCause};

use crate::world::{World, name, payload_info, stream, whole};

/// What [`payload_info`] says of each payload.
const SIZE: u64 = 1 << 20;

fn world(stages: &[&str], edges: Vec<EdgeSpec>, credits: u64, max_payload: Option<u64>) -> World {
    let spec = |stage: &&str| StageSpec {
        max_held: 1_000,
        max_payload: max_payload.map(ByteCount),
        kind: if *stage == "denoise" {
            StageKind::Admission
        } else {
            StageKind::WorkQueue
        },
        ..StageSpec::new(name(stage))
    };
    let topology = Topology::new(stages.iter().map(spec).collect(), edges).expect("an allowed pipeline");
    let limits = Limits {
        payload_bytes: Some(ByteCount(credits * SIZE)),
        ..Limits::default()
    };
    World::with_limits(topology, limits)
}

fn chain() -> Vec<EdgeSpec> {
    vec![whole("encode", "denoise"), stream("denoise", "decode")]
}

/// Publishes an output of so many bytes.
fn publish(world: &mut World, worker: Incarnation, token: Token, nbytes: u64) {
    let mut payload = payload_info(PayloadId(world.id()), false);
    payload.nbytes = ByteCount(nbytes);
    world.does(Input::Published { worker, token, payload });
}

fn resident(world: &World) -> u64 {
    let tally = |stage: &StageSpec| world.sched.tally(&stage.name).expect("it exists").payload_bytes;
    world.sched.topology().stages().iter().map(tally).sum()
}

/// One decoder that takes ten times as long as all the others together: what is resident never goes above the credits, and
/// it is denoise that waits.
#[test]
fn behind_a_slow_decoder_denoise_is_throttled_first() {
    const CREDITS: u64 = 7;
    let mut world = world(&["encode", "denoise", "decode"], chain(), CREDITS, Some(SIZE));
    let encoders = [(); 2].map(|()| world.attach("encode", 2));
    let denoisers = [(); 4].map(|()| world.attach("denoise", 1));
    let decoder = world.attach("decode", 1);
    let jobs = [(); 60].map(|()| world.submit());
    let (mut throttled, mut most) = (0, 0);
    let mut decoding: Option<Token> = None;
    for step in 0..4_000 {
        // Each finishes what it runs in a step; the decoder in ten.
        for worker in encoders.into_iter().chain(denoisers) {
            if world.offer(worker).is_some() {
                let token = world.accept(worker);
                publish(&mut world, worker, token, SIZE);
                world.complete(worker, token);
            }
        }
        if decoding.is_none() && world.offer(decoder).is_some() {
            decoding = Some(world.accept(decoder));
        }
        if step % 10 == 9
            && let Some(token) = decoding.take()
        {
            world.complete(decoder, token);
        }
        let credit = world.sched.byte_credit().expect("there is a bound");
        assert_eq!((credit.held.0, credit.over), (resident(&world), ByteCount(0)));
        assert!(credit.held.0 + credit.reserved.0 <= CREDITS * SIZE, "{credit:?}");
        most = most.max(credit.held.0);
        let waits = |stage: &str| {
            let mut causes = jobs.iter().flat_map(|job| world.sched.explain(world.now, *job));
            causes.any(|waits| {
                waits.stage == Some(name(stage))
                    && matches!(waits.cause, WaitCause::Bytes { free, needed, .. } if free < needed)
            })
        };
        if world.sched.queued(&name("denoise")) > 0 && waits("denoise") {
            throttled += 1;
        }
        if jobs.iter().all(|job| world.state(*job) == "succeeded") {
            break;
        }
    }
    assert!(
        jobs.iter().all(|job| world.state(*job) == "succeeded"),
        "it does not end"
    );
    assert!(throttled > 100, "denoise waited for bytes in {throttled} steps");
    assert!(most >= (CREDITS - 1) * SIZE, "credits are used: {most}");
    assert_eq!(resident(&world), 0);
}

#[test]
fn an_upstream_stage_leaves_room_for_those_after_it() {
    let mut world = world(&["encode", "denoise", "decode"], chain(), 3, Some(SIZE));
    let encoder = world.attach("encode", 8);
    let jobs = [(); 8].map(|()| world.submit());
    let first = world.accept(encoder);
    let second = world.accept(encoder);
    assert!(world.offer(encoder).is_none(), "the last credit is for the latents");
    let waiting = world.sched.explain(world.now, jobs[2]);
    let expected = WaitCause::Bytes {
        ahead: 0,
        others: 0,
        needed: ByteCount(2 * SIZE),
        free: ByteCount(SIZE),
        reserved: ByteCount(2 * SIZE),
        held: ByteCount(0),
        advertised: ByteCount(3 * SIZE),
    };
    assert_eq!(waiting[0].cause, expected);
    // Smaller than said: what was set aside for nothing is free, and later ones are taken to be as small.
    for token in [first, second] {
        publish(&mut world, encoder, token, SIZE / 4);
        world.complete(encoder, token);
    }
    let credit = world.sched.byte_credit().expect("there is a bound");
    assert_eq!(credit.held, ByteCount(SIZE / 2));
    assert_eq!(
        credit.reserved,
        ByteCount(6 * SIZE / 4),
        "six more fit beside the latents: {credit:?}"
    );
}

#[test]
fn what_ends_gives_its_bytes_back() {
    let mut world = world(&["encode", "decode"], vec![whole("encode", "decode")], 1, Some(SIZE));
    let encoder = world.attach("encode", 1);
    let [first, second] = [(); 2].map(|()| world.submit());
    let token = world.accept(encoder);
    assert_eq!(token.job, first);
    world.fail(encoder, token, ErrorClass::Internal);
    assert_eq!(world.accept(encoder).job, second);
    world.lose(encoder);
    let other = world.attach("encode", 1);
    assert_eq!(
        world.run(other).job,
        second,
        "the bytes of an attempt that is lost are free"
    );
    world.cancel(second);
    let credit = world.sched.byte_credit().expect("there is a bound");
    assert_eq!(
        (credit.held, credit.reserved, credit.free.0),
        (ByteCount(0), ByteCount(0), SIZE)
    );
}

/// Whatever an attempt that was superseded had set aside or published, its worker may have until it has stopped: nobody
/// else gets those bytes before.
#[test]
fn what_has_not_stopped_keeps_its_bytes() {
    for published in [None, Some(SIZE), Some(3 * SIZE)] {
        for evicted in [false, true] {
            let mut world = world(&["encode", "decode"], vec![whole("encode", "decode")], 1, Some(SIZE));
            let encoder = world.attach("encode", 1);
            let job = world.submit();
            let token = world.accept(encoder);
            if let Some(nbytes) = published {
                publish(&mut world, encoder, token, nbytes);
            }
            let other = world.attach("encode", 1);
            let credit = |world: &World| world.sched.byte_credit().expect("there is a bound");
            assert_eq!(world.jump(), "attempt.renewal");
            assert!(world.was_cancelled(token));
            let kept = published.unwrap_or(SIZE);
            assert_eq!((credit(&world).reserved.0, credit(&world).held.0), (kept, 0));
            let waits = &world.sched.explain(world.now, job)[0].cause;
            assert!(
                matches!(waits, WaitCause::Bytes { reserved, .. } if reserved.0 == kept),
                "{waits:?}"
            );
            assert!(world.offer(other).is_none(), "the bytes are in use");
            if evicted {
                while world
                    .sched
                    .worker(encoder)
                    .is_some_and(|worker| worker.info().is_some())
                {
                    world.jump();
                }
            } else {
                world.stop(encoder, token);
            }
            let again = if world.offer(other).is_some() { other } else { encoder };
            let token = world.accept(again);
            assert_eq!((token.job, credit(&world).reserved.0), (job, SIZE));
            world.publish(again, token);
            world.complete(again, token);
            assert_eq!((world.phase(job, "encode"), credit(&world).held.0), ("done", SIZE));
        }
    }
}

/// A worker that comes back with an attempt that nobody waits for any more has its bytes, too.
#[test]
fn what_comes_back_in_vain_has_its_bytes_until_it_stops() {
    let mut world = world(&["encode", "decode"], vec![whole("encode", "decode")], 2, Some(SIZE));
    let encoder = world.attach("encode", 1);
    let job = world.submit();
    let token = world.accept(encoder);
    world.away(encoder);
    world.cancel(job);
    assert_eq!(world.state(job), "cancelled");
    let reserved = |world: &World| world.sched.byte_credit().expect("there is a bound").reserved.0;
    assert_eq!(reserved(&world), 0, "nobody knows whether it lives");
    world.attach_as(encoder, "encode", 1, vec![token], vec![]);
    assert_eq!(reserved(&world), SIZE);
    world.stop(encoder, token);
    assert_eq!(reserved(&world), 0);
}

#[test]
fn an_output_that_is_larger_than_any_before_is_let_through_alone_and_drains() {
    let mut world = world(&["encode", "denoise", "decode"], chain(), 4, Some(SIZE));
    let workers = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 2));
    let jobs = [(); 6].map(|()| world.submit_to("standard", 7));
    for _ in 0..200 {
        for worker in workers {
            if let Some(output) = world.offer(worker).map(|offer| offer.output) {
                let token = world.accept(worker);
                if output.publish {
                    publish(&mut world, worker, token, 9 * SIZE);
                }
                world.complete(worker, token);
            }
        }
    }
    for job in jobs {
        assert_eq!(world.state(job), "succeeded");
    }
    let input = |shape| {
        let urgency = Urgency {
            shape,
            ..Default::default()
        };
        Input::Submit {
            job: stagewire_core::JobId(uuid::Uuid::from_u128(u128::from(shape) + 1_000_000)),
            params: "{}".into(),
            key: None,
            urgency,
        }
    };
    let refusal = world.refused(input(7));
    assert_eq!(
        (refusal.class(), refusal.reason()),
        (ErrorClass::Invalid, "credit.payload_bytes")
    );
    world.does(input(8));
}

/// Bytes for an input or an output, but not for both: with its input held there was never room for the output, unless
/// nothing at all ran. Here something always runs that neither holds nor needs bytes.
#[test]
fn a_job_whose_input_and_output_do_not_fit_together_goes_alone() {
    const EACH: u64 = 6 * SIZE;
    let mut world = world(&["encode", "denoise", "decode"], chain(), 10, None);
    let light = Urgency {
        skip: ["encode", "denoise"].map(name).to_vec(),
        ..Urgency::default()
    };
    let light = world.submit_as(light).expect("something is left to do");
    let other = world.attach("decode", 1);
    assert_eq!(world.accept(other).job, light);
    let workers = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 4));
    // Nobody knows how large they are, so that all of the first ones are encoded together, and go far above the bound.
    for bound in [4 * EACH + EACH, 2 * EACH] {
        let jobs = [(); 4].map(|()| world.submit_to("standard", 7));
        let mut most = 0;
        while let Some(worker) = workers.into_iter().find(|worker| world.offer(*worker).is_some()) {
            let publishes = world.offer(worker).is_some_and(|offer| offer.output.publish);
            let token = world.accept(worker);
            if publishes {
                publish(&mut world, worker, token, EACH);
            }
            most = most.max(resident(&world));
            world.complete(worker, token);
        }
        assert_eq!(jobs.map(|job| world.state(job)), ["succeeded"; 4]);
        assert!(most <= bound, "{most} bytes at once");
        assert_eq!(resident(&world), 0);
    }
    assert_eq!(world.phase(light, "decode"), "running");
}

/// One that is much larger than all the others, or claims to be, takes the room of others for a while and not for ever.
#[test]
fn an_output_out_of_all_proportion_is_forgotten_and_one_that_was_not_completed_counts_nothing() {
    let mut world = world(&["encode", "decode"], vec![whole("encode", "decode")], 8, Some(SIZE));
    let encoder = world.attach("encode", 8);
    let decoder = world.attach("decode", 8);
    let at_once = |world: &mut World, nbytes: u64| {
        let jobs = [(); 8].map(|()| world.submit_to("standard", 7));
        let offered = jobs
            .iter()
            .filter(|job| world.phase(**job, "encode") == "offered")
            .count();
        while world.offer(encoder).is_some() || world.offer(decoder).is_some() {
            if world.offer(encoder).is_some() {
                let token = world.accept(encoder);
                publish(world, encoder, token, nbytes);
                world.complete(encoder, token);
            }
            while world.offer(decoder).is_some() {
                world.run(decoder);
            }
        }
        assert_eq!(jobs.map(|job| world.state(job)), ["succeeded"; 8]);
        offered
    };
    assert_eq!(at_once(&mut world, SIZE), 8);
    world.submit_to("standard", 7);
    let token = world.accept(encoder);
    publish(&mut world, encoder, token, 1_000 * SIZE);
    world.fail(encoder, token, ErrorClass::Internal);
    assert_eq!(at_once(&mut world, SIZE), 8, "a failure teaches nothing");
    at_once(&mut world, 1_000 * SIZE);
    let later = [(); 5].map(|()| at_once(&mut world, SIZE));
    assert_eq!((later[0], later[4]), (1, 8), "{later:?}");
}

#[test]
fn reservations_and_sizes_survive_a_restart() {
    let mut world = world(&["encode", "decode"], vec![whole("encode", "decode")], 8, None);
    let encoder = world.attach("encode", 3);
    for _ in 0..3 {
        world.submit_to("standard", 7);
    }
    let first = world.accept(encoder);
    publish(&mut world, encoder, first, 2 * SIZE);
    world.complete(encoder, first);
    let second = world.accept(encoder);
    let before = world.sched.byte_credit().expect("there is a bound");
    world.restart();
    let after = world.sched.byte_credit().expect("there is a bound");
    assert_eq!(after.held, before.held);
    let running = world.sched.job(second.job).expect("it is remembered").stages()[0]
        .phase()
        .clone();
    assert!(matches!(running, stagewire_sched::Phase::Running(attempt) if attempt.nbytes == after.reserved.0));
    // What is learnt is as it was.
    world.attach_as(encoder, "encode", 3, vec![second], vec![]);
    let offered = world.offer(encoder).expect("a slot is free").token;
    let phase = world.sched.job(offered.job).expect("it is remembered").stages()[0]
        .phase()
        .clone();
    assert!(matches!(phase, stagewire_sched::Phase::Offered(offer) if offer.nbytes == 2 * SIZE));
}
