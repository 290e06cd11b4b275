use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use stagewire_core::{Classify, ErrorClass};

use super::*;
use crate::ArenaStats;

const MIB: u64 = 1 << 20;

fn arena() -> Arena {
    let arena = Arena::new(ByteCount(64 * MIB));
    arena.segments_of(ByteCount(4 * MIB));
    arena
}

fn filled(arena: &Arena, len: u64, byte: u8) -> Extent {
    let mut extent = arena.allocate(len).expect("room");
    extent.fill(byte);
    extent.freeze()
}

fn inherited(extent: &Extent) -> Inherited {
    let lent = extent.lend();
    Inherited {
        name: lent.name,
        len: lent.len,
        descriptor: lent.descriptor.try_clone_to_owned().expect("a descriptor"),
    }
}

#[test]
fn extents_are_read_in_place_after_their_maker_is_gone() {
    let old = arena();
    let (first, hole, last) = (filled(&old, 5000, 1), filled(&old, MIB, 2), filled(&old, 1, 3));
    let places = [last.location(), first.location()];
    let segment = inherited(&first);
    drop((first, hole, last, old));

    let new = arena();
    let extents = new
        .adopt(segment, &places.map(|place| (place.offset, place.len)))
        .expect("sealed and of that size");
    assert_eq!(extents[0].bytes(), Some([3].as_slice()));
    assert_eq!(extents[1].bytes(), Some([1; 5000].as_slice()));
    assert_eq!(extents.iter().map(Extent::location).collect::<Vec<_>>(), places);
    let stats = new.stats();
    assert_eq!((stats.segments, stats.allocated_bytes), (1, 3 * GRANULE));
    assert_eq!(
        stats.resident_bytes,
        MIB + 3 * GRANULE,
        "the hole is still there, the untouched end is not"
    );
}

#[test]
fn nothing_of_an_adopted_segment_is_used_again() {
    let old = arena();
    let (first, last) = (filled(&old, MIB, 1), filled(&old, MIB, 2));
    let places = [&first, &last].map(|extent| (extent.location().offset, extent.len()));
    let segment = inherited(&first);
    let name = segment.name;
    drop((first, last, old));
    let new = arena();
    let retired = new.retired();
    let mut extents = new.adopt(segment, &places).expect("sealed and of that size");
    drop(extents.pop());
    let fresh = filled(&new, MIB, 9);
    assert_ne!(
        fresh.location().segment,
        name,
        "a reader of the dead process may still look at it"
    );
    assert_eq!(extents[0].bytes().expect("whole")[0], 1);
    assert_eq!(new.segment_names().len(), 2);
    drop(extents);
    assert_eq!(
        (new.segment_names(), *retired.borrow()),
        (vec![fresh.location().segment], 1)
    );
    drop(fresh);
    new.trim();
    assert_eq!(new.stats(), ArenaStats::default());
}

#[test]
fn adopted_memory_counts_against_the_limit() {
    let old = Arena::new(ByteCount(8 * MIB));
    let (kept, gone) = (filled(&old, MIB, 1), filled(&old, 5 * MIB, 2));
    let (segment, place) = (inherited(&kept), (kept.location().offset, kept.len()));
    drop((kept, gone, old));
    let new = Arena::new(ByteCount(8 * MIB));
    let extents = new.adopt(segment, &[place]).expect("sealed and of that size");
    assert!(new.allocate(3 * MIB).is_err(), "6 MiB of 8 are taken");
    drop(new.allocate(2 * MIB).expect("the rest is free"));
    drop(extents);
    new.allocate(8 * MIB).expect("all is free");

    // A limit that was lowered in between is kept from then on.
    let old = Arena::new(ByteCount(8 * MIB));
    let large = filled(&old, 4 * MIB, 1);
    let (segment, place) = (inherited(&large), (0, large.len()));
    drop((large, old));
    let new = Arena::new(ByteCount(MIB));
    let extents = new.adopt(segment, &[place]).expect("it is there");
    assert!(new.allocate(1).is_err());
    drop(extents);
    new.allocate(MIB).expect("all is free");
}

#[test]
fn only_segments_that_nobody_can_change_are_adopted() {
    let arena = arena();
    let memfd = |seals| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let descriptor = memfd_create("test", flags).expect("a memfd");
        ftruncate(&descriptor, MIB).expect("sized");
        fcntl_add_seals(&descriptor, seals).expect("sealed");
        let (name, len) = (SegmentName(1), ByteCount(MIB));
        Inherited { name, len, descriptor }
    };
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    for missing in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::FUTURE_WRITE] {
        let error = arena.adopt(memfd(all - missing), &[(0, 1)]).expect_err("not sealed");
        assert_eq!(error.class(), ErrorClass::Corrupt, "{error}");
    }
    let short = Inherited {
        len: ByteCount(2 * MIB),
        ..memfd(all)
    };
    let error = arena.adopt(short, &[(0, 1)]).expect_err("another length than recorded");
    let AdoptError::Segment { error, .. } = error else {
        panic!("{error}")
    };
    assert!(
        error.to_string().contains("1048576 bytes, its owner said 2097152"),
        "{error}"
    );
    let file = std::fs::File::open("/dev/null").expect("there");
    let file = Inherited {
        descriptor: file.into(),
        ..memfd(all)
    };
    assert!(arena.adopt(file, &[(0, 1)]).is_err(), "not a memfd");
    assert_eq!(arena.stats(), ArenaStats::default());
    arena.adopt(memfd(all), &[(0, 1)]).map(drop).expect("as it must be");
}

#[test]
fn extents_that_cannot_be_are_refused() {
    let old = arena();
    let extent = filled(&old, MIB, 1);
    let new = arena();
    for outside in [
        (0, 0),
        (1, 1),
        (4 * MIB, 1),
        (4 * MIB - GRANULE, GRANULE + 1),
        (GRANULE, u64::MAX),
        (u64::MAX, 1),
    ] {
        let error = new.adopt(inherited(&extent), &[outside]).expect_err("outside");
        assert!(matches!(error, AdoptError::Outside { .. }), "{outside:?}: {error}");
    }
    let overlap = [(8192, 5000), (0, 8192), (12288, 1)];
    let error = new.adopt(inherited(&extent), &overlap).expect_err("overlapping");
    assert!(
        matches!(
            error,
            AdoptError::Overlap {
                offset: 8192,
                other: 12288,
                ..
            }
        ),
        "{error}"
    );
    assert!(new.adopt(inherited(&extent), &[]).expect("nothing in use").is_empty());
    assert_eq!(new.stats(), ArenaStats::default());
    let kept = new.adopt(inherited(&extent), &[(0, 1)]).expect("it is there");
    let twice = new
        .adopt(inherited(&extent), &[(0, 1)])
        .expect_err("it is there already");
    assert!(matches!(twice, AdoptError::Twice { .. }), "{twice}");
    drop(kept);
}

#[test]
fn who_has_the_descriptor_cannot_write_through_it() {
    let old = arena();
    let extent = filled(&old, MIB, 1);
    let new = arena();
    let adopted = new.adopt(inherited(&extent), &[(0, MIB)]).expect("it is there");
    let lent = adopted[0].lend();
    assert!(rustix::io::write(lent.descriptor.as_fd(), b"x").is_err());
    let path = format!("/proc/self/fd/{}", lent.descriptor.as_raw_fd());
    let again = std::fs::OpenOptions::new()
        .write(true)
        .open(path)
        .expect("the kernel lets the owner reopen it");
    assert!(rustix::io::write(&again, b"x").is_err());
    assert!(again.set_len(0).is_err() && again.set_len(8 * MIB).is_err());
}
