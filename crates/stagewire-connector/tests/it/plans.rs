//! Chunk plans, whatever carries their bytes.

use proptest::prelude::*;
use stagewire_connector::{Carrier, Owner};

use crate::bundle::{Bundle, bundles};
use crate::second::{Ask, Second};
use crate::transfer::{TAKES, take_all};
use crate::transports::is_here;
use crate::{World, all_gone};

/// Extents, some of tensors large enough for several threads, with rows of a few bytes and of many by where they are cut.
fn shapes() -> impl Strategy<Value = Vec<u64>> {
    let small = prop::collection::vec(1..9_u64, 1..6);
    let large = (1..3_u64, 1..9_u64, 4..12_u64, 20..60_u64, 20..60_u64);
    prop_oneof![9 => small, 1 => large.prop_map(|(b, c, t, h, w)| vec![b, c, t, h, w])]
}

/// A consumer and a producer that have one transport.
struct Pair {
    carrier: Carrier,
    world: World,
    second: Second,
}

impl Pair {
    async fn new(carrier: Carrier) -> Self {
        let world = World::with(|options| options.transports = vec![carrier]).await;
        let second = Second::start(&world.run_dir(), &[carrier]).await;
        Self { carrier, world, second }
    }

    async fn carries(&mut self, bundle: &Bundle) {
        let handle = self.second.publish(bundle, Owner::Orchestrator).await;
        let carried = handle.regions.iter().filter(|region| region.len > 0);
        let carriers: Vec<_> = carried.map(|region| region.transport.as_str()).collect();
        assert!(carriers.iter().all(|name| *name == self.carrier.name()), "{carriers:?}");
        // What only shm carries is mapped from wherever it was.
        let arena = bundle.arena || self.carrier == Carrier::Shm;
        let bundle = Bundle {
            arena,
            ..bundle.clone()
        };
        for take in TAKES {
            take_all(&self.world, &bundle, &handle, take).await;
        }
        let payload = handle.payload;
        self.second.done(Ask::Release { payload }).await;
    }
}

/// The same bundle over each of them: the bytes are those that were published, chunk by chunk and whole.
#[test]
fn every_plan_is_carried_by_shm_cma_and_tcp_alike() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let pairs = runtime.block_on(async {
        let any = World::new().await;
        let mut pairs = Vec::new();
        for carrier in [Carrier::Shm, Carrier::Cma, Carrier::Tcp] {
            if is_here(Some(&any), carrier) {
                pairs.push(Pair::new(carrier).await);
            }
        }
        std::sync::Mutex::new(pairs)
    });
    let cases = u32::try_from(crate::rounds(480)).expect("few");
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(bundle in bundles(shapes()))| {
        let mut pairs = pairs.lock().expect("one case at a time");
        for pair in pairs.iter_mut() {
            runtime.block_on(pair.carries(&bundle));
        }
    });
    runtime.block_on(async {
        for mut pair in pairs.into_inner().expect("no case is left") {
            pair.second.all_gone().await;
            all_gone(&pair.world.connector).await;
        }
    });
}
