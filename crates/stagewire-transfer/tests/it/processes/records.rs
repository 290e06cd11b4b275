//! Batches of very many records.

use stagewire_core::{Classify, Record};
use stagewire_transfer::{Target, TransferError, TransferOptions};

use super::child::{Owner, Release};
use super::{End, for_each_transport, seeded};

for_each_transport! {
    a_batch_of_5000_records_arrives_exactly_or_not_at_all: shm cma tcp mooncake nixl;
}

const RECORDS: u64 = 5000;

/// Bytes of a record, and from one to the next at the owner.
const WIDTH: u64 = 1000;
const PITCH: u64 = 3000;

async fn a_batch_of_5000_records_arrives_exactly_or_not_at_all(end: End) {
    let len = (RECORDS * PITCH) as usize;
    let (mut owner, source) = (Owner::start(&end), seeded(7, len));
    let offer = owner.register(7, len, Release::WhenAsked).await;
    let pinned = end.pin(&offer).await;
    let target = Target::allocate(RECORDS * WIDTH).expect("memory");
    // In reverse, so that no two are one.
    let record = |number| Record::contiguous(number * PITCH, (RECORDS - 1 - number) * WIDTH, WIDTH);
    let mut records: Vec<Record> = (0..RECORDS).map(record).collect();

    let good = std::mem::replace(&mut records[4321], Record::contiguous(len as u64 - 1, 0, 2));
    let refused = pinned.pull(&records, &target, TransferOptions::default()).await;
    let error = refused.expect_err("one leaves the region");
    assert!(matches!(error, TransferError::Record { index: 4321, .. }), "{error}");
    assert_eq!(error.reason(), "transfer.bounds", "{error}");
    assert!(target.is_idle(), "something is still written");
    for number in 0..RECORDS {
        let at = number * WIDTH;
        assert!(target.slice(at..at + 1).is_err(), "a record counts as written");
    }

    records[4321] = good;
    let pulled = pinned.pull(&records, &target, TransferOptions::default()).await;
    pulled.expect("pulled");
    let found = target.as_slice().expect("pulled").chunks(WIDTH as usize).rev();
    for (number, (found, row)) in found.zip(source.chunks(PITCH as usize)).enumerate() {
        assert!(found == &row[..WIDTH as usize], "record {number}: other bytes");
    }
}
