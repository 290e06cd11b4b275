//! What connections and owners do to one table at the same time, in the orders that loom finds. Run by `make loom`.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use stagewire_core::{Device, RegionRef};

use super::{Pins, RegionKey, Registration, Table};
use crate::sync::{model, spawn};
use crate::wire::{Kind, Refusal};
use crate::{Borrowed, Memory};

/// Stands for registered memory: holds whether it was given back. Peers read it while they hold a pin, without any
/// reference to it, and it is written when its owner is dropped; loom fails the model where the two have no order.
struct Page(UnsafeCell<bool>);

// SAFETY: shared on purpose; loom reports every access that is not ordered with the others.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    fn new() -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(false)))
    }

    fn is_given_back(&self) -> bool {
        // SAFETY: loom checks.
        self.0.with(|given_back| unsafe { *given_back })
    }

    /// A registration of so many bytes that nobody reads in a model.
    fn registration(self: &Arc<Self>, len: usize) -> Registration {
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(Owner(self.clone()));
        // SAFETY: never read.
        let memory = Memory::from(unsafe { Borrowed::new(NonNull::dangling(), len, owner) });
        Registration {
            kind: Kind::Cma,
            memory,
            device: Device::Cpu,
            guard: None,
        }
    }
}

struct Owner(Arc<Page>);

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: loom checks.
        let again = self
            .0
            .0
            .with_mut(|given_back| unsafe { std::mem::replace(&mut *given_back, true) });
        assert!(!again, "given back twice");
    }
}

fn key(reference: &RegionRef) -> RegionKey {
    RegionKey {
        region: reference.region,
        generation: reference.generation,
    }
}

/// What a connection does for a reader; the reader looks at the page while the pin is held. Says whether it was.
fn pin_and_read(table: &Arc<Table>, reference: &RegionRef, page: &Page) -> bool {
    let mut pins = Pins::new(table.clone(), 0, None);
    match pins.pin(Kind::Cma, key(reference), &reference.capability) {
        Ok(hold) => {
            assert_eq!(hold.memory().len(), reference.len, "another region's memory");
            // Whoever serves the bytes may hold on for longer than the connection.
            assert_eq!(pins.end().len(), 1);
            assert!(!page.is_given_back(), "read after it was given back");
            true
        }
        Err(Refusal::Released | Refusal::Generation { .. }) => false,
        Err(other) => panic!("{other:?}"),
    }
}

#[test]
fn memory_goes_once_after_release_and_all_pins() {
    model(|| {
        let (table, page) = (Arc::new(Table::default()), Page::new());
        let reference = table.register(page.registration(64)).expect("open");
        let readers = [(); 2].map(|()| {
            let (table, page, reference) = (table.clone(), page.clone(), reference.clone());
            spawn(move || pin_and_read(&table, &reference, &page))
        });
        table.release(key(&reference));
        assert!(!pin_and_read(&table, &reference, &page), "pinned after the release");
        for reader in readers {
            reader.join().expect("a reader");
        }
        assert!(page.is_given_back(), "released, without pins, and kept");
        assert_eq!((table.stats().regions, table.stats().pins_held), (0, 0));
    });
}

#[test]
fn a_number_used_again_never_shows_the_other_memory() {
    model(|| {
        let (table, old, new) = (Arc::new(Table::default()), Page::new(), Page::new());
        let reference = table.register(old.registration(64)).expect("open");
        let reader = spawn({
            let (table, old, reference) = (table.clone(), old.clone(), reference.clone());
            move || pin_and_read(&table, &reference, &old)
        });
        table.release(key(&reference));
        let next = table.register(new.registration(65)).expect("open");
        assert!(pin_and_read(&table, &next, &new), "a new region was refused");
        reader.join().expect("the reader");
        assert!(old.is_given_back() && !new.is_given_back());
        table.release(key(&next));
        assert!(new.is_given_back());
    });
}

#[test]
fn whoever_waits_for_the_last_pin_is_woken() {
    model(|| {
        let (table, page) = (Arc::new(Table::default()), Page::new());
        let reference = table.register(page.registration(64)).expect("open");
        let mut pins = Pins::new(table.clone(), 0, None);
        let granted = pins.pin(Kind::Cma, key(&reference), &reference.capability);
        let pin = granted.map(|hold| hold.pin()).expect("not released");
        let ending = spawn(move || {
            assert!(pins.unpin(pin).is_some());
            assert!(pins.unpin(pin).is_none());
        });
        // A wake-up that is lost is a deadlock, which loom reports.
        loom::future::block_on(table.idle(key(&reference)));
        assert!(table.is_idle(key(&reference)));
        ending.join().expect("the ending thread");
    });
}

#[test]
fn a_released_region_is_idle_only_when_its_memory_is_gone() {
    model(|| {
        let (table, page) = (Arc::new(Table::default()), Page::new());
        let reference = table.register(page.registration(64)).expect("open");
        let mut pins = Pins::new(table.clone(), 0, None);
        let granted = pins.pin(Kind::Cma, key(&reference), &reference.capability);
        let pin = granted.map(|hold| hold.pin()).expect("not released");
        let ending = spawn(move || drop(pins.unpin(pin)));
        table.release(key(&reference));
        loom::future::block_on(table.idle(key(&reference)));
        assert!(page.is_given_back(), "idle before the memory was given back");
        ending.join().expect("the ending thread");
    });
}

#[test]
fn a_table_that_closes_takes_nothing_in_any_more() {
    model(|| {
        let (table, page) = (Arc::new(Table::default()), Page::new());
        let registering = spawn({
            let (table, page) = (table.clone(), page.clone());
            move || table.register(page.registration(64)).is_ok()
        });
        table.close();
        let regions = table.stats().regions;
        let registered = registering.join().expect("the registering thread");
        assert_eq!(table.stats().regions, regions, "registered after the close");
        assert_eq!((regions == 1, page.is_given_back()), (registered, !registered));
    });
}
