use std::sync::Arc;

use super::*;
use crate::Borrowed;

fn memory() -> (Memory, std::sync::Weak<dyn std::any::Any + Send + Sync>) {
    let bytes: Arc<dyn std::any::Any + Send + Sync> = Arc::new(vec![7_u8; 64]);
    let weak = Arc::downgrade(&bytes);
    let ptr = bytes.downcast_ref::<Vec<u8>>().expect("a Vec").as_ptr();
    let ptr = std::ptr::NonNull::new(ptr.cast_mut()).expect("not null");
    // SAFETY: the Vec is kept by its owner and never changed.
    (unsafe { Borrowed::new(ptr, 64, bytes) }.into(), weak)
}

fn cma(memory: Memory) -> Registration {
    Registration {
        kind: Kind::Cma,
        memory,
        device: Device::Cpu,
        guard: None,
    }
}

fn key(reference: &RegionRef) -> RegionKey {
    RegionKey {
        region: reference.region,
        generation: reference.generation,
    }
}

#[test]
fn memory_goes_only_after_release_and_the_last_pin() {
    let table = Arc::new(Table::default());
    let (memory, alive) = memory();
    let reference = table.register(cma(memory)).expect("open");
    let (mut one, mut two) = (Pins::new(table.clone(), 0, None), Pins::new(table.clone(), 0, None));
    let first = one
        .pin(Kind::Cma, key(&reference), &reference.capability)
        .expect("pinned")
        .pin();
    two.pin(Kind::Cma, key(&reference), &reference.capability)
        .expect("pinned");
    table.release(key(&reference));
    assert_eq!(
        one.pin(Kind::Cma, key(&reference), &reference.capability).err(),
        Some(Refusal::Released)
    );
    one.unpin(first);
    one.unpin(first);
    assert!(alive.upgrade().is_some(), "freed under a pin");
    two.end();
    assert!(alive.upgrade().is_none(), "not freed");
    assert_eq!(table.stats().pins_held, 0);
    assert_eq!(table.stats().regions, 0);
}

#[test]
fn a_number_used_again_is_another_generation() {
    let table = Arc::new(Table::default());
    let old = table.register(cma(memory().0)).expect("open");
    table.release(key(&old));
    let mut pins = Pins::new(table.clone(), 0, None);
    let mut refusal = |kind, key, capability: &Capability| pins.pin(kind, key, capability).err();
    assert_eq!(refusal(Kind::Cma, key(&old), &old.capability), Some(Refusal::Released));
    let new = table.register(cma(memory().0)).expect("open");
    assert_eq!(new.region, old.region);
    let current = new.generation;
    assert_eq!(
        refusal(Kind::Cma, key(&old), &old.capability),
        Some(Refusal::Generation { current })
    );
    assert_eq!(
        refusal(Kind::Cma, key(&new), &old.capability),
        Some(Refusal::Capability)
    );
    let registered = Some(Refusal::Registered { kind: Kind::Cma });
    assert_eq!(refusal(Kind::Shm, key(&new), &new.capability), registered);
    let later = RegionKey {
        generation: current + 1,
        ..key(&new)
    };
    assert_eq!(refusal(Kind::Cma, later, &new.capability), Some(Refusal::Unknown));
    let elsewhere = RegionKey {
        region: 99,
        ..key(&new)
    };
    assert_eq!(refusal(Kind::Cma, elsewhere, &new.capability), Some(Refusal::Unknown));
}

#[test]
fn pins_whose_end_nobody_saw_are_held_for_ever() {
    let table = Arc::new(Table::default());
    let (memory, alive) = memory();
    let reference = table.register(cma(memory)).expect("open");
    let mut pins = Pins::new(table.clone(), 0, None);
    pins.pin(Kind::Cma, key(&reference), &reference.capability)
        .expect("pinned");
    drop(pins);
    table.release(key(&reference));
    drop(table);
    assert!(alive.upgrade().is_some(), "memory given back while a reader may use it");
}
