//! Bundles come through exact, whatever is in them and on whichever way.

use std::sync::Arc;

use proptest::prelude::*;
use stagewire_connector::{Carrier, ConsumeError, ConsumeOptions, Fetched, Owner, ViewMemory};
use stagewire_core::{Classify, DType, Device, EntryValue, ErrorClass, Handle};
use stagewire_transfer::{Borrowed, Memory, Target, Writable};

use crate::bundle::{Bundle, bundles, spec};
use crate::second::Second;
use crate::{PATIENCE, World, all_gone};

/// How the consumer takes the bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Take {
    Views,
    Private,
    Destination,
}

pub(crate) const TAKES: [Take; 3] = [Take::Views, Take::Private, Take::Destination];

fn options(take: Take, handle: &Handle) -> ConsumeOptions {
    let mut options = ConsumeOptions::within(PATIENCE);
    match take {
        Take::Views => {}
        Take::Private => options.private = true,
        Take::Destination => {
            let targets = handle
                .manifest
                .tensors()
                .map(|tensor| Target::allocate(tensor.nbytes().0).map(Arc::new));
            options.destinations = Some(targets.collect::<Result<_, _>>().expect("memory"));
        }
    }
    options
}

/// Takes a payload chunk by chunk and then whole; checks every byte.
pub(crate) async fn take_all(world: &World, bundle: &Bundle, handle: &Handle, take: Take) {
    let mut consumer = world
        .connector
        .consume(handle.clone(), options(take, handle))
        .expect("a consumer");
    for index in 0..handle.manifest.chunks() {
        let chunk = consumer.next().await.expect("the producer lives").expect("a chunk");
        assert_eq!((chunk.index, chunk.count), (index, handle.manifest.chunks()));
        assert_eq!(chunk.handover.nbytes, handle.manifest.chunk_nbytes(index).0);
        assert!(chunk.handover.begin <= chunk.handover.end);
        bundle.check(&chunk.tensors, Some(index));
        for view in &chunk.tensors {
            let mapped = matches!(view.memory(), ViewMemory::Mapped(_));
            assert!(
                !mapped || (matches!(take, Take::Views) && bundle.arena),
                "mapped though a copy was asked for"
            );
        }
    }
    assert!(consumer.next().await.expect("the end").is_none());
    assert!(consumer.next().await.expect("still the end").is_none());

    let mut consumer = world
        .connector
        .consume(handle.clone(), options(take, handle))
        .expect("a consumer");
    let Fetched { tensors, handovers } = consumer.fetch_all().await.expect("the producer lives");
    assert_eq!(handovers.len() as u32, handle.manifest.chunks());
    bundle.check(&tensors, None);
}

async fn round_trip(world: &World, second: &mut Second, bundle: &Bundle) {
    let handle = second.publish(bundle, Owner::Orchestrator).await;
    for take in TAKES {
        take_all(world, bundle, &handle, take).await;
    }
    second
        .done(crate::second::Ask::Release {
            payload: handle.payload,
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_dtype_comes_through_from_both_kinds_of_memory() {
    let world = World::new().await;
    let mut second = world.second().await;
    for dtype in DType::all() {
        let bundle = Bundle::many(vec![EntryValue::Tensor(spec(dtype, &[3, 5, 7]))]).cut(1, 2);
        round_trip(&world, &mut second, &bundle).await;
        round_trip(&world, &mut second, &bundle.borrowed()).await;
    }
    second.all_gone().await;
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bundles_of_nones_lists_scalars_and_empty_tensors_come_through() {
    let world = World::new().await;
    let mut second = world.second().await;
    let bundles = [
        Bundle::many(Vec::new()),
        Bundle::many(vec![EntryValue::None, EntryValue::List(Vec::new())]),
        Bundle::many(vec![EntryValue::Tensor(spec(DType::F64, &[]))]),
        Bundle::many(vec![EntryValue::Tensor(spec(DType::F32, &[4, 0, 3]))]),
        Bundle::many(vec![
            EntryValue::Tensor(spec(DType::BF16, &[2, 77, 64])),
            EntryValue::None,
            EntryValue::List(vec![
                spec(DType::I64, &[3]),
                spec(DType::Bool, &[0]),
                spec(DType::U8, &[]),
            ]),
            EntryValue::Tensor(spec(DType::C64, &[100_000])),
        ]),
    ];
    for bundle in bundles {
        round_trip(&world, &mut second, &bundle).await;
        round_trip(&world, &mut second, &bundle.borrowed()).await;
    }
    second.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_latent_is_cut_along_every_dimension_evenly_or_not() {
    let world = World::new().await;
    let mut second = world.second().await;
    for (dim, count) in [(0, 1), (1, 3), (1, 16), (2, 8), (2, 21), (3, 7), (4, 5)] {
        let latent = vec![
            EntryValue::Tensor(spec(DType::BF16, &[1, 16, 21, 12, 10])),
            EntryValue::Tensor(spec(DType::U8, &[2, 16, 31, 9, 5])),
        ];
        let bundle = Bundle::many(latent).cut(dim, count);
        round_trip(&world, &mut second, &bundle).await;
        round_trip(&world, &mut second, &bundle.borrowed()).await;
    }
    second.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_may_not_be_borrowed_is_copied_once() {
    let world = World::new().await;
    let mut second = Second::start(&world.run_dir(), &[Carrier::Shm]).await;
    let bundle = Bundle::one(&[4, 9, 1000]).cut(1, 4).borrowed();
    let handle = second.publish(&bundle, Owner::Orchestrator).await;
    assert!(handle.regions.iter().all(|region| region.transport == "shm"));
    for take in TAKES {
        take_all(
            &world,
            &Bundle {
                arena: true,
                ..bundle.clone()
            },
            &handle,
            take,
        )
        .await;
    }
    // Chunk by chunk as well: what is not ready is not copied yet.
    let handle = second.open(&bundle, Owner::Orchestrator).await;
    let mut consumer = world
        .connector
        .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    for chunk in 0..4 {
        second.ready(&handle, chunk).await;
        second.ready(&handle, chunk).await;
        let chunk = consumer.next().await.expect("alive").expect("a chunk");
        bundle.check(&chunk.tensors, Some(chunk.index));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_consumes_its_own_payloads() {
    let world = World::new().await;
    for bundle in [
        Bundle::one(&[5, 6]).cut(0, 2),
        Bundle::one(&[5, 6]).cut(0, 2).borrowed(),
    ] {
        let spec = stagewire_connector::PublishSpec::new("own", bundle.manifest(), Owner::Orchestrator);
        let memory = bundle.memory(world.connector.host().arena());
        let publication = world.connector.publish(spec, memory).expect("published");
        for take in TAKES {
            take_all(&world, &bundle, publication.handle(), take).await;
        }
        world.connector.release(publication.handle().payload);
        publication.released().await;
    }
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn destinations_must_fit() {
    let world = World::new().await;
    let mut second = world.second().await;
    let handle = second.publish(&Bundle::one(&[10]), Owner::Orchestrator).await;
    let with = |destinations: Vec<u64>| ConsumeOptions {
        destinations: Some(
            destinations
                .into_iter()
                .map(|len| Arc::new(Target::allocate(len).expect("memory")))
                .collect(),
        ),
        ..ConsumeOptions::default()
    };
    let error = world
        .connector
        .consume(handle.clone(), with(vec![]))
        .expect_err("too few");
    assert!(
        matches!(error, ConsumeError::DestinationCount { expected: 1, found: 0 }),
        "{error}"
    );
    let error = world
        .connector
        .consume(handle.clone(), with(vec![39]))
        .expect_err("too small");
    assert!(
        error.to_string().contains("39 B") && error.to_string().contains("40 B"),
        "{error}"
    );
    assert_eq!(error.class(), ErrorClass::Invalid);
    let mut foreign = handle;
    foreign.regions[0].transport = "rdma".to_owned();
    let error = world
        .connector
        .consume(foreign, ConsumeOptions::default())
        .expect_err("no such transport");
    assert_eq!(error.class(), ErrorClass::Unsupported);
    assert!(
        error.to_string().contains("rdma") && error.to_string().contains("shm"),
        "{error}"
    );
    all_gone(&world.connector).await;
}

#[test]
fn random_bundles_come_through() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let world = runtime.block_on(World::new());
    let second = std::sync::Mutex::new(runtime.block_on(world.second()));
    proptest!(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() }, |(bundle in bundles(prop::collection::vec(1..9_u64, 1..5)))| {
        let mut second = second.lock().expect("one test at a time");
        runtime.block_on(round_trip(&world, &mut second, &bundle));
    });
    runtime.block_on(async {
        second.into_inner().expect("no test is left").all_gone().await;
        all_gone(&world.connector).await;
    });
}

/// Whatever it was registered with, `tcp` reads what the transports of one host cannot reach.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_out_of_reach_of_one_host_is_read_over_tcp() {
    let world = World::new().await;
    let mut second = world.second().await;
    let cut = Bundle::one(&[1, 16, 21, 30, 52]).cut(2, 8);
    for bundle in [cut.clone().seeded(1), cut.borrowed().seeded(2)] {
        let mut handle = second.publish(&bundle, Owner::Orchestrator).await;
        handle.holder.transports.retain(|address| address.transport == "tcp");
        for take in TAKES {
            let mut consumer = world
                .connector
                .consume(handle.clone(), options(take, &handle))
                .expect("a consumer");
            let Fetched { tensors, handovers } = consumer.fetch_all().await.expect("the producer lives");
            bundle.check(&tensors, None);
            assert!(handovers.iter().all(|handover| handover.path == "tcp"), "{handovers:?}");
        }
    }
}

/// The error is about the transport that the region is registered with, not about the one that could stand in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_out_of_reach_of_every_transport_is_an_error_of_the_first() {
    let world = World::new().await;
    let mut second = world.second().await;
    let mut handle = second.publish(&Bundle::one(&[100]), Owner::Orchestrator).await;
    handle.holder.transports.clear();
    let options = options(Take::Views, &handle);
    let mut consumer = world.connector.consume(handle, options).expect("a consumer");
    let error = consumer.next().await.expect_err("nothing is offered");
    assert_eq!(error.class(), ErrorClass::Unsupported, "{error}");
    let ConsumeError::Connect { source, .. } = error else {
        panic!("{error}");
    };
    assert!(source.to_string().contains("offers no shm"), "{source}");
}

/// What cannot be offered is refused for its own reason, however memory outside the arena is offered otherwise.
#[expect(unsafe_code, reason = "there is no safe way to name memory of a device")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_peers_may_write_and_memory_of_a_device_is_not_published() {
    for transports in [&Carrier::DEFAULT[..], &[Carrier::Shm]] {
        let world = World::with(|options| options.transports = transports.to_vec()).await;
        let bundle = Bundle::one(&[16]);
        let len = spec(DType::F32, &[16]).nbytes().0;
        let publish = |memory: Memory| {
            let spec = stagewire_connector::PublishSpec::new("r", bundle.manifest(), Owner::Orchestrator);
            let refused = world.connector.publish(spec, vec![memory]).map(drop);
            refused.expect_err("refused").reason().to_owned()
        };
        let writable = Writable::allocate(len).expect("memory");
        assert_eq!(publish(writable.into()), "publish.writable");
        let owner: Arc<Vec<u8>> = Arc::new(vec![0; len as usize]);
        let address = std::ptr::NonNull::from(owner.as_slice()).cast();
        // SAFETY: nobody reads it: it is said to be where only a driver could.
        let device = unsafe { Borrowed::on_device(Device::Cuda(0), address, len as usize, owner) };
        assert_eq!(publish(device.into()), "register.device");
        all_gone(&world.connector).await;
    }
}
