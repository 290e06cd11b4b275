//! A reader stops or dies, an owner stands still.

use std::time::Duration;

use tokio::time::timeout;

use super::child::{Owner, Reader, Release};
use super::{End, for_each_transport};
use crate::support::{rounds, until};

for_each_transport! {
    a_reader_that_stops_keeps_its_pin_until_it_dies: shm cma tcp mooncake nixl;
    a_reader_that_dies_while_it_reads_leaves_nothing: shm cma tcp mooncake nixl;
    waiting_for_an_owner_that_stands_still_costs_no_cpu: shm cma tcp mooncake;
}

const LEN: usize = 4 << 20;
const NOTICED_WITHIN: Duration = Duration::from_secs(1);

async fn a_reader_that_stops_keeps_its_pin_until_it_dies(end: End) {
    let (first, offer) = end.offer(1, LEN);
    let (second, other_offer) = end.offer(2, LEN);
    let mut stopped = Reader::start(&end, &offer).await;
    stopped.reads(1).await;
    let mut other = Reader::start(&end, &other_offer).await;
    stopped.0.stop().await;
    first.release();
    other.reads(2).await;
    assert_eq!(
        other.refused(&offer).await.as_deref(),
        Some("transfer.region_released"),
        "for whoever comes now, it is gone"
    );
    assert!(!first.is_idle(), "given up under the pin of a reader that may go on");
    assert_eq!((end.side.regions)(), 2);
    stopped.0.go_on();
    stopped.reads(1).await;
    stopped.0.stop().await;
    stopped.0.kill();
    timeout(NOTICED_WITHIN, first.idle()).await.expect("noticed");
    drop(first);
    until("its memory is given back", || (end.side.regions)() == 1).await;
    other.reads(2).await;
    drop(second);
}

async fn a_reader_that_dies_while_it_reads_leaves_nothing(end: End) {
    for round in 0..rounds(4, 20) {
        let (region, offer) = end.offer(round, 6 * LEN);
        let mut reader = Reader::start(&end, &offer).await;
        let mut other = Reader::start(&end, &offer).await;
        reader.reads_on().await;
        // At another point of a transfer in each round.
        tokio::time::sleep(Duration::from_micros(700 * round as u64)).await;
        reader.0.kill();
        reader.0.gone().await;
        other.reads(round).await;
        region.release();
        assert!(!region.is_idle(), "the other one holds it");
        other.0.kill();
        timeout(NOTICED_WITHIN, region.idle()).await.expect("noticed");
        drop(region);
        until("its memory is given back", || (end.side.regions)() == 0).await;
    }
}

/// CPU of the process that waits, all its threads. Those of NIXL's own are not ours: it has a test for its thread that is.
async fn waiting_for_an_owner_that_stands_still_costs_no_cpu(end: End) {
    let mut owner = Owner::start(&end);
    let offer = owner.register(3, 16 * LEN, Release::WhenAsked).await;
    let mut reader = Reader::start(&end, &offer).await;
    reader.reads(3).await;
    owner.0.stop().await;
    let (reason, cpu) = reader.waits().await;
    owner.0.go_on();
    assert_eq!(reason.as_deref(), Some("transfer.deadline"));
    assert!(cpu <= Duration::from_millis(20), "{cpu:?} of CPU in 3 s of waiting");
}
