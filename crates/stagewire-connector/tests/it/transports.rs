//! Payloads go over the transports that the operator names, and over no other.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use stagewire_connector::{Carrier, Connector, ConsumeError, ConsumeOptions, Owner, StartError};
use stagewire_core::{Classify, DType, EntryValue, ErrorClass};
use stagewire_transfer::NixlLibrary;

use crate::bundle::{Bundle, spec};
use crate::second::{Ask, Second};
use crate::transfer::{TAKES, take_all};
use crate::{PATIENCE, World, all_gone, options};

/// NIXL in the environment of the peers' wheels, where there is one.
pub(crate) fn nixl_library() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let peers = std::env::var_os("STAGEWIRE_PEERS").map_or_else(|| root.join(".peers"), PathBuf::from);
    let versions = std::fs::read_dir(peers.join("lib")).ok()?;
    versions.flatten().find_map(|version| {
        let path = version
            .path()
            .join("site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so");
        path.exists().then_some(path)
    })
}

/// Whether this host has a transport; says so where not.
#[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
pub(crate) fn is_here(world: Option<&World>, carrier: Carrier) -> bool {
    let missing = match carrier {
        // Loaded once for the process, where every connector finds it.
        Carrier::Nixl => NixlLibrary::open(nixl_library().as_deref()).map(drop).map_err(|error| {
            let required = std::env::var_os("STAGEWIRE_REQUIRE_PEERS").is_some_and(|required| required == "1");
            assert!(!required, "STAGEWIRE_REQUIRE_PEERS is set, and {error}");
            error.to_string()
        }),
        Carrier::Cma => match world {
            Some(world) => world
                .connector
                .host()
                .cma()
                .map(drop)
                .map_err(|error| error.to_string()),
            None => Ok(()),
        },
        _ => Ok(()),
    };
    missing.inspect_err(|why| eprintln!("skipped: {why}")).is_ok()
}

/// Bundles of every dtype, whole and in strided chunks, from both kinds of memory.
async fn bundles_go_over(carrier: Carrier) {
    if !is_here(None, carrier) || !is_here(Some(&World::new().await), carrier) {
        return;
    }
    let world = World::with(|options| options.transports = vec![carrier]).await;
    let mut second = Second::start(&world.run_dir(), &[carrier]).await;
    let dtypes: Vec<_> = DType::all()
        .map(|dtype| EntryValue::Tensor(spec(dtype, &[3, 5, 7])))
        .collect();
    let latent = vec![
        EntryValue::Tensor(spec(DType::BF16, &[1, 16, 21, 12, 10])),
        EntryValue::Tensor(spec(DType::U8, &[2, 16, 31, 9, 5])),
    ];
    for bundle in [
        Bundle::many(dtypes.clone()),
        Bundle::many(dtypes).cut(1, 2),
        Bundle::many(latent).cut(2, 8),
        Bundle::many(vec![EntryValue::None, EntryValue::Tensor(spec(DType::F32, &[4, 0, 3]))]),
    ] {
        for bundle in [bundle.clone(), bundle.borrowed()] {
            let handle = second.publish(&bundle, Owner::Orchestrator).await;
            let carried: Vec<_> = handle.regions.iter().filter(|region| region.len > 0).collect();
            assert!(
                carried.iter().all(|region| region.transport == carrier.name()),
                "{carried:?}"
            );
            // What only shm carries is mapped from wherever it was.
            let arena = bundle.arena || carrier == Carrier::Shm;
            let bundle = Bundle { arena, ..bundle };
            for take in TAKES {
                take_all(&world, &bundle, &handle, take).await;
            }
            let options = ConsumeOptions::within(PATIENCE);
            let mut consumer = world.connector.consume(handle.clone(), options).expect("a consumer");
            let fetched = consumer.fetch_all().await.expect("the producer lives");
            let path = if carried.is_empty() { "" } else { carrier.name() };
            assert!(
                fetched.handovers.iter().all(|handover| handover.path == path),
                "{fetched:?}"
            );
            drop((fetched, consumer));
            second
                .done(crate::second::Ask::Release {
                    payload: handle.payload,
                })
                .await;
        }
    }
    second.all_gone().await;
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bundles_go_over_shm() {
    bundles_go_over(Carrier::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bundles_go_over_cma() {
    bundles_go_over(Carrier::Cma).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bundles_go_over_tcp() {
    bundles_go_over(Carrier::Tcp).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bundles_go_over_mooncake() {
    bundles_go_over(Carrier::Mooncake).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bundles_go_over_nixl() {
    bundles_go_over(Carrier::Nixl).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_that_takes_a_memory_carries_it() {
    let named = [Carrier::Shm, Carrier::Mooncake, Carrier::Tcp];
    let world = World::with(|options| options.transports = named.to_vec()).await;
    let mut second = Second::start(&world.run_dir(), &named).await;
    let bundle = Bundle::one(&[10]);
    for (bundle, carrier) in [(bundle.clone(), "shm"), (bundle.borrowed(), "mooncake")] {
        let handle = second.publish(&bundle, Owner::Orchestrator).await;
        assert_eq!(handle.regions[0].transport, carrier);
        let options = ConsumeOptions::within(PATIENCE);
        let mut consumer = world.connector.consume(handle, options).expect("a consumer");
        let fetched = consumer.fetch_all().await.expect("the producer lives");
        assert_eq!(fetched.handovers[0].path, carrier);
    }
}

/// `tcp` reads any memory, for who has nothing better; who names nothing that fits is told so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consumers_use_only_what_they_name() {
    let producer = World::with(|options| options.transports = vec![Carrier::Mooncake, Carrier::Tcp]).await;
    let bundle = Bundle::one(&[10]);
    let spec = stagewire_connector::PublishSpec::new("request", bundle.manifest(), Owner::Orchestrator);
    let memory = bundle.memory(producer.connector.host().arena());
    let publication = producer.connector.publish(spec, memory).expect("published");
    let handle = publication.handle();
    assert_eq!(handle.regions[0].transport, "mooncake");
    let consumer = World::with(|options| options.transports = vec![Carrier::Tcp]).await;
    let options = || ConsumeOptions::within(PATIENCE);
    let mut over_tcp = consumer
        .connector
        .consume(handle.clone(), options())
        .expect("a consumer");
    let fetched = over_tcp.fetch_all().await.expect("the producer lives");
    bundle.check(&fetched.tensors, None);
    assert_eq!(fetched.handovers[0].path, "tcp");

    let consumer = World::with(|options| options.transports = vec![Carrier::Shm]).await;
    let error = consumer
        .connector
        .consume(handle.clone(), options())
        .expect_err("nothing fits");
    assert!(matches!(error, ConsumeError::NoTransport { .. }), "{error}");
    assert!(
        error.to_string().contains("mooncake") && error.to_string().contains("shm"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transport_that_does_not_start_is_an_error_with_its_reason() {
    let dir = tempfile::tempdir().expect("a directory");
    let start = async |transports: &[Carrier], change: fn(&mut stagewire_transfer::NetworkOptions)| {
        let mut options = options(&dir, "decode");
        options.transports = transports.to_vec();
        change(&mut options.network);
        Connector::start(options).await
    };
    let error = start(&[], |_| ()).await.expect_err("nothing is named");
    assert!(matches!(error, StartError::NoTransport), "{error}");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Invalid, "connector.transports")
    );
    let everywhere = |network: &mut stagewire_transfer::NetworkOptions| {
        network.bind = "0.0.0.0:0".parse().expect("an address");
    };
    let error = start(&[Carrier::Mooncake], everywhere).await.expect_err("no token");
    assert_eq!(error.class(), ErrorClass::Unauthenticated, "{error}");
    // Twice named is once started.
    let connector = start(&[Carrier::Mooncake, Carrier::Mooncake], |_| ())
        .await
        .expect("it starts");
    assert_eq!(connector.peer().transports.len(), 1);
    let left = std::fs::read_dir(dir.path().join("run/peers")).expect("made").count();
    assert_eq!(left, 2, "sockets of connectors that did not start");
    connector.close().await;
}

/// 4 MB at 20 MB/s take a fifth of a second, and the first of 4 chunks is there long before the last.
#[tokio::test(flavor = "multi_thread")]
async fn a_throttled_connector_reads_as_slowly_as_it_is_told() {
    let world = World::with(|options| options.throttle.bytes_per_second = NonZeroU64::new(20_000_000)).await;
    let mut second = Second::start(&world.run_dir(), &Carrier::DEFAULT).await;
    let bundle = Bundle::one(&[4, 250_000]).cut(0, 4);
    let handle = second.publish(&bundle, Owner::Orchestrator).await;
    let options = ConsumeOptions {
        private: true,
        ..ConsumeOptions::within(PATIENCE)
    };
    let begin = Instant::now();
    let mut consumer = world.connector.consume(handle.clone(), options).expect("a consumer");
    let mut came = Vec::new();
    for index in 0..4 {
        let chunk = consumer.next().await.expect("alive").expect("ready");
        came.push(begin.elapsed());
        bundle.check(&chunk.tensors, Some(index));
    }
    let each = Duration::from_millis(50);
    assert!((1..).zip(&came).all(|(chunks, at)| *at >= each * chunks), "{came:?}");
    drop(consumer);
    let payload = handle.payload;
    second.done(Ask::Release { payload }).await;
    second.all_gone().await;
}
