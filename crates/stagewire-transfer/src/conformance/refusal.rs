//! What is wrong is refused with a typed error, and nothing is written.

use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::join;
use stagewire_core::{Capability, Classify, Device, ErrorClass, Record, RegionRef};

use super::{Checked, Pair, Violation, ensure, is, pattern, violation};
use crate::{Borrowed, ConnectOptions, MAX_ROWS, RegisterOptions, Target, TransferOptions};

fn target(len: u64) -> Result<Target, Violation> {
    Target::allocate(len).map_err(violation)
}

/// Expects that pinning fails with this class and reason.
async fn refused(pair: &Pair, region: &RegionRef, class: ErrorClass, reason: &str) -> Checked {
    match pair.remote.pin(region, TransferOptions::default()).await {
        Ok(_) => Err(Violation(format!("pinned, expected {class}: {reason}"))),
        Err(error) => is(&error, class, reason),
    }
}

pub(super) async fn a_wrong_capability_is_denied(pair: &Pair) -> Checked {
    let region = pair.register(&[1; 100])?;
    let wrong = RegionRef {
        capability: Capability::from_random([7; 16]),
        ..region.reference()
    };
    refused(pair, &wrong, ErrorClass::Denied, "transfer.capability").await?;
    ensure!(region.is_idle(), "a refused pin is held");
    pair.pin(&region.reference()).await.map(drop)
}

pub(super) async fn a_stale_generation_is_not_found(pair: &Pair) -> Checked {
    let old = pair.register(&[1; 100])?;
    let reference = old.reference();
    drop(old);
    let class = ErrorClass::NotFound;
    refused(pair, &reference, class, "transfer.region_released").await?;
    let new = pair.register(&[2; 100])?;
    if new.reference().region == reference.region {
        refused(pair, &reference, class, "transfer.generation").await?;
    }
    let future = RegionRef {
        generation: new.reference().generation + 1,
        ..new.reference()
    };
    refused(pair, &future, class, "transfer.region_unknown").await
}

pub(super) async fn an_unknown_region_is_not_found(pair: &Pair) -> Checked {
    let region = pair.register(&[1; 100])?;
    for number in [region.reference().region + 1, u64::MAX] {
        let unknown = RegionRef {
            region: number,
            ..region.reference()
        };
        refused(pair, &unknown, ErrorClass::NotFound, "transfer.region_unknown").await?;
    }
    Ok(())
}

pub(super) async fn a_wrong_length_is_invalid(pair: &Pair) -> Checked {
    let region = pair.register(&[1; 100])?;
    for len in [0, 99, 101, u64::MAX] {
        let wrong = RegionRef {
            len,
            ..region.reference()
        };
        refused(pair, &wrong, ErrorClass::Invalid, "transfer.length").await?;
    }
    region.idle().await;
    Ok(())
}

pub(super) async fn a_region_of_another_transport_is_invalid(pair: &Pair) -> Checked {
    let region = pair.register(&[1; 100])?;
    let other = RegionRef {
        transport: "pigeon".to_owned(),
        ..region.reference()
    };
    refused(pair, &other, ErrorClass::Invalid, "transfer.transport").await
}

pub(super) async fn records_outside_source_or_target_write_nothing(pair: &Pair) -> Checked {
    let region = pair.register(&pattern(1000, 1))?;
    let pinned = pair.pin(&region.reference()).await?;
    let target = target(1000)?;
    let strided = |rows, src_pitch, dst_pitch| Record {
        src_offset: 0,
        dst_offset: 0,
        width: 10,
        rows,
        src_pitch,
        dst_pitch,
    };
    let good = Record::contiguous(0, 0, 10);
    for bad in [
        Record::contiguous(1, 20, 1000),
        Record::contiguous(0, 991, 10),
        Record::contiguous(u64::MAX, 20, 10),
        Record::contiguous(0, u64::MAX - 5, 10),
        strided(101, 10, 10),
        strided(u64::MAX, 10, 10),
        strided(3, u64::MAX / 2, 10),
        strided(11, 10, 100),
    ] {
        match pinned.pull(&[good, bad], &target, TransferOptions::default()).await {
            Ok(()) => return Err(Violation(format!("{bad:?} was pulled"))),
            Err(error) => is(&error, ErrorClass::Invalid, "transfer.bounds")?,
        }
        ensure!(
            target.slice(0..10).is_err(),
            "the good record beside {bad:?} was written"
        );
    }
    Ok(())
}

pub(super) async fn overlapping_records_write_nothing(pair: &Pair) -> Checked {
    let region = pair.register(&pattern(1000, 1))?;
    let pinned = pair.pin(&region.reference()).await?;
    let target = target(1000)?;
    let records = [Record::contiguous(0, 100, 50), Record::contiguous(500, 149, 10)];
    match pinned.pull(&records, &target, TransferOptions::default()).await {
        Ok(()) => Err(Violation("two records wrote the same byte".to_owned())),
        Err(error) => is(&error, ErrorClass::Invalid, "transfer.overlap"),
    }
}

pub(super) async fn bytes_are_written_once_between_resets(pair: &Pair) -> Checked {
    let source = pattern(1000, 1);
    let region = pair.register(&source)?;
    let pinned = pair.pin(&region.reference()).await?;
    let mut target = target(1000)?;
    let whole = [Record::contiguous(0, 0, 1000)];
    let options = TransferOptions::default();
    pinned.pull(&whole, &target, options.clone()).await.map_err(violation)?;
    match pinned.pull(&whole, &target, options.clone()).await {
        Ok(()) => return Err(Violation("bytes that were shown were written again".to_owned())),
        Err(error) => is(&error, ErrorClass::Conflict, "target.written")?,
    }
    target.reset().map_err(violation)?;
    pinned.pull(&whole, &target, options).await.map_err(violation)?;
    ensure!(
        target.as_slice().map_err(violation)? == source,
        "other bytes after a reset"
    );
    Ok(())
}

pub(super) async fn a_foreign_incarnation_is_refused(pair: &Pair) -> Checked {
    let mut peer = pair.owner.peer.clone();
    peer.incarnation = pair.reader.peer.incarnation;
    match pair.reader.transport.connect(&peer, ConnectOptions::default()).await {
        Ok(_) => Err(Violation(
            "another life of the peer was taken for the one meant".to_owned(),
        )),
        Err(error) => is(&error, ErrorClass::Unavailable, "peer.incarnation"),
    }
}

pub(super) async fn a_peer_without_the_transport_is_unsupported(pair: &Pair) -> Checked {
    let mut peer = pair.owner.peer.clone();
    peer.transports.clear();
    match pair.reader.transport.connect(&peer, ConnectOptions::default()).await {
        Ok(_) => {
            return Err(Violation(
                "connected over a transport that the peer does not offer".to_owned(),
            ));
        }
        Err(error) => is(&error, ErrorClass::Unsupported, "connect.not_offered")?,
    }
    peer.transports = pair.owner.peer.transports.clone();
    for address in &mut peer.transports {
        address.address.truncate(3);
    }
    match pair.reader.transport.connect(&peer, ConnectOptions::default()).await {
        Ok(_) => Err(Violation("connected to half an address".to_owned())),
        Err(error) => is(&error, ErrorClass::Invalid, "connect.address"),
    }
}

pub(super) async fn empty_and_device_memory_is_not_registered(pair: &Pair) -> Checked {
    let empty = crate::Borrowed::from(Vec::new()).into();
    match pair.owner.transport.register(empty, RegisterOptions::default()) {
        Ok(_) => return Err(Violation("an empty region was registered".to_owned())),
        Err(error) => is(&error, ErrorClass::Invalid, "register.empty")?,
    }
    let device = Device::Cuda(0);
    let memory = (pair.owner.memory)(&[1; 10]);
    match pair.owner.transport.register(memory, RegisterOptions { device }) {
        Ok(_) => Ok(()),
        Err(error) => is(&error, ErrorClass::Unsupported, "register.device"),
    }
}

pub(super) async fn memory_that_is_not_mapped_is_not_registered(pair: &Pair) -> Checked {
    // The lowest page belongs to nobody.
    let nowhere = std::ptr::without_provenance_mut(4096);
    let nowhere = std::ptr::NonNull::new(nowhere).expect("not null");
    // SAFETY: the contract is broken on purpose; it must be found out without a look at the bytes.
    let memory = unsafe { Borrowed::new(nowhere, 8192, std::sync::Arc::new(())) };
    match pair.owner.transport.register(memory.into(), RegisterOptions::default()) {
        Ok(_) => Err(Violation("memory that is not mapped was registered".to_owned())),
        // What takes memory of its own making only, refuses this for that.
        Err(error) if error.class() == ErrorClass::Unsupported => Ok(()),
        Err(error) => is(&error, ErrorClass::Invalid, "register.unmapped"),
    }
}

pub(super) async fn a_batch_above_the_row_limit_is_refused(pair: &Pair) -> Checked {
    let region = pair.register(&[1; 100])?;
    let pinned = pair.pin(&region.reference()).await?;
    let rows = Record {
        src_offset: 0,
        dst_offset: 0,
        width: 1,
        rows: MAX_ROWS + 1,
        src_pitch: 0,
        dst_pitch: 2,
    };
    let target = target(2 * (MAX_ROWS + 1))?;
    match pinned.pull(&[rows], &target, TransferOptions::default()).await {
        Ok(()) => Err(Violation(format!("{} rows were pulled at once", MAX_ROWS + 1))),
        Err(error) => is(&error, ErrorClass::Invalid, "transfer.too_many_rows"),
    }
}

pub(super) async fn a_target_on_a_device_is_refused(pair: &Pair) -> Checked {
    let region = pair.register(&[1; 100])?;
    let pinned = pair.pin(&region.reference()).await?;
    let mut bytes = vec![0_u8; 100];
    let address = std::ptr::NonNull::new(bytes.as_mut_ptr()).expect("not null");
    // SAFETY: memory of the host, which nobody else uses; whoever takes the wrong way copies into it and no further.
    let target = unsafe { Target::on_device(Device::Cuda(0), address, 100, std::sync::Arc::new(())) };
    let whole = [Record::contiguous(0, 0, 100)];
    match pinned.pull(&whole, &target, TransferOptions::default()).await {
        Ok(()) => Err(Violation(
            "bytes were pulled to a device without the ability".to_owned(),
        )),
        Err(error) => is(&error, ErrorClass::Unsupported, "transfer.device"),
    }
}

/// All that this process can get wrong about the regions of another one, as whole requests.
async fn errors_of_all_kinds(pair: &Pair, region: &RegionRef) -> Checked {
    let options = TransferOptions::default;
    let wrong = [
        RegionRef {
            capability: Capability::from_random([7; 16]),
            ..region.clone()
        },
        RegionRef {
            generation: region.generation + 1,
            ..region.clone()
        },
        RegionRef {
            region: u64::MAX,
            ..region.clone()
        },
        RegionRef {
            len: region.len + 1,
            ..region.clone()
        },
        RegionRef {
            transport: "pigeon".to_owned(),
            ..region.clone()
        },
    ];
    for wrong in &wrong {
        // Where the owner does not check, the reference may be taken as it is.
        let checked = pair.reader.transport.abilities().checked;
        let pinned = pair.remote.pin(wrong, options()).await;
        ensure!(pinned.is_err() || !checked, "pinned by {wrong:?}");
    }
    let pinned = pair.pin(region).await?;
    let (len, target) = (region.len, target(region.len)?);
    let good = Record::contiguous(0, 0, 10);
    let rows = Record {
        rows: MAX_ROWS + 1,
        width: 1,
        src_pitch: 0,
        dst_pitch: 2,
        ..good
    };
    for bad in [
        Record::contiguous(1, 20, len),
        Record::contiguous(u64::MAX, 20, 10),
        Record::contiguous(20, 5, 10),
        rows,
    ] {
        let pulled = pinned.pull(&[good, bad], &target, options()).await;
        ensure!(pulled.is_err(), "{bad:?} was pulled");
        ensure!(target.slice(0..1).is_err(), "the record beside {bad:?} was written");
        let pushed = pinned
            .push(&[good, bad], &(pair.reader.memory)(&[0; 10]), options())
            .await;
        ensure!(
            pushed.is_err(),
            "{bad:?} was pushed into a region that may only be read"
        );
    }
    let mut peer = pair.owner.peer.clone();
    peer.incarnation = pair.reader.peer.incarnation;
    let connected = pair.reader.transport.connect(&peer, ConnectOptions::default()).await;
    ensure!(
        connected.is_err(),
        "another life of the peer was taken for the one meant"
    );
    Ok(())
}

pub(super) async fn what_is_refused_disturbs_no_other_peer(pair: &Pair) -> Checked {
    let other = pair.other.as_ref().ok_or_else(|| violation("no third side"))?;
    let source = pattern(100_000, 3);
    let region = pair.register(&source)?;
    let reference = region.reference();
    let remote = other
        .transport
        .connect(&pair.owner.peer, ConnectOptions::default())
        .await;
    let remote = remote.map_err(violation)?;
    let pinned = remote
        .pin(&reference, TransferOptions::default())
        .await
        .map_err(violation)?;
    let over = AtomicBool::new(false);
    let errors = async {
        let outcome = async {
            for _ in 0..10 {
                errors_of_all_kinds(pair, &reference).await?;
            }
            Ok(())
        };
        let outcome = outcome.await;
        over.store(true, Ordering::Relaxed);
        outcome
    };
    let pulls = async {
        let (mut target, whole) = (target(100_000)?, [Record::contiguous(0, 0, 100_000)]);
        loop {
            let last = over.load(Ordering::Relaxed);
            let pulled = pinned.pull(&whole, &target, TransferOptions::default()).await;
            pulled.map_err(violation)?;
            ensure!(
                target.as_slice().map_err(violation)? == source,
                "another peer got other bytes"
            );
            if last {
                return Ok(());
            }
            target.reset().map_err(violation)?;
            tokio::task::yield_now().await;
        }
    };
    let (errors, pulls) = join(errors, pulls).await;
    errors?;
    pulls?;
    ensure!(remote.is_alive(), "another peer was cut off");
    // Who was refused is served as before.
    drop(pair.pin(&reference).await?);
    drop((pinned, region));
    pair.regions_become(0).await
}
