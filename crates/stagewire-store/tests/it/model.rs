//! Random steps on a whole store, with memory and files, against a model that knows nothing of how it works.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use stagewire_core::ByteCount;
use stagewire_store::{HostStore, NewObject, Object, Reservation, Retention, Store, StoreError};

use crate::world::{PAGE, PATIENCE, World, check, count, fetch, id, pattern, until};

const PAGES: u64 = 12;

#[derive(Debug, Clone)]
enum Step {
    Put {
        key: u8,
        parts: Vec<u64>,
        retention: Retention,
        end: End,
    },
    /// Keeps what it got.
    Get {
        key: u8,
    },
    LetGo {
        reader: prop::sample::Index,
    },
    Fetch {
        key: u8,
    },
    Delete {
        key: u8,
    },
    Reserve {
        pages: u64,
    },
    Unreserve,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Seal,
    Abort,
    /// Sealed, and over at once.
    Expire,
}

fn step() -> impl Strategy<Value = Step> {
    let key = 0_u8..10;
    let part = prop_oneof![Just(0), 1..PAGE, Just(PAGE), PAGE + 1..3 * PAGE];
    let cost = (0_u64..50).prop_map(|millis| Retention::Cached {
        cost: Duration::from_millis(millis),
    });
    let retention = prop_oneof![4 => Just(Retention::Held), 2 => cost, 1 => Just(Retention::SoftPinned)];
    let end = prop_oneof![8 => Just(End::Seal), 1 => Just(End::Abort), 1 => Just(End::Expire)];
    let put = (key.clone(), prop::collection::vec(part, 0..4), retention, end);
    let put = put.prop_map(|(key, parts, retention, end)| Step::Put {
        key,
        parts,
        retention,
        end,
    });
    prop_oneof![
        8 => put,
        3 => key.clone().prop_map(|key| Step::Get { key }),
        2 => any::<prop::sample::Index>().prop_map(|reader| Step::LetGo { reader }),
        3 => key.clone().prop_map(|key| Step::Fetch { key }),
        2 => key.prop_map(|key| Step::Delete { key }),
        1 => (1..PAGES / 2).prop_map(|pages| Step::Reserve { pages }),
        1 => Just(Step::Unreserve),
    ]
}

fn pages(parts: &[u64]) -> u64 {
    parts.iter().map(|len| len.div_ceil(PAGE)).sum()
}

#[derive(Debug, Clone)]
struct Known {
    seed: u64,
    parts: Vec<u64>,
    retention: Retention,
    /// Whether something needed more room than there was since it came.
    pressed: bool,
}

impl Known {
    /// Whether it may have been evicted, if nobody reads it.
    fn may_be_gone(&self) -> bool {
        self.retention != Retention::Held && self.pressed
    }
}

#[derive(Default)]
struct Model {
    objects: BTreeMap<u8, Known>,
    readers: Vec<(u64, Vec<u64>, Arc<dyn Object>)>,
    reservations: Vec<Reservation>,
    seed: u64,
}

impl Model {
    /// Pages that cannot leave the memory now.
    fn fixed(&self) -> u64 {
        let mut read: Vec<_> = self
            .readers
            .iter()
            .map(|(_, parts, object)| (Arc::as_ptr(object).cast::<()>(), pages(parts)))
            .collect();
        read.sort_unstable();
        read.dedup();
        let reserved: u64 = self.reservations.iter().map(|room| room.nbytes().0 / PAGE).sum();
        read.iter().map(|(_, pages)| pages).sum::<u64>() + reserved
    }

    /// Notes that so many more pages are asked for.
    fn press(&mut self, wanted: u64) {
        let all: u64 = self.objects.values().map(|known| pages(&known.parts)).sum();
        if all + self.fixed() + wanted > PAGES {
            self.objects.values_mut().for_each(|known| known.pressed = true);
        }
    }

    fn is_read(&self, known: &Known) -> bool {
        self.readers.iter().any(|(seed, ..)| *seed == known.seed)
    }

    /// The object was not found: forgets it, if that may be.
    fn missed(&mut self, key: u8) {
        if let Some(known) = self.objects.remove(&key) {
            assert!(
                known.may_be_gone() && !self.is_read(&known),
                "{key} was lost: {known:?}"
            );
        }
    }

    async fn take(&mut self, store: &HostStore, step: Step) {
        match step {
            Step::Put {
                key,
                parts,
                retention,
                end,
            } => self.put(store, key, parts, retention, end).await,
            Step::Get { key } => {
                let Some(known) = self.objects.get(&key).cloned() else {
                    let missing = store.get(id(key.into())).await;
                    assert!(matches!(missing, Err(StoreError::NotFound { .. })), "{missing:?}");
                    return;
                };
                let wanted = pages(&known.parts);
                if self.fixed() + wanted > PAGES {
                    return self.fetch(store, key).await;
                }
                self.press(wanted);
                match store.get(id(key.into())).await {
                    Ok(object) => {
                        check(&*object, known.seed, &known.parts);
                        self.readers.push((known.seed, known.parts, object));
                    }
                    Err(StoreError::NotFound { .. }) => self.missed(key),
                    Err(other) => panic!("{other}"),
                }
            }
            Step::LetGo { reader } => {
                if !self.readers.is_empty() {
                    let (seed, parts, object) = self.readers.swap_remove(reader.index(self.readers.len()));
                    check(&*object, seed, &parts);
                }
            }
            Step::Fetch { key } => self.fetch(store, key).await,
            Step::Delete { key } => match store.delete(id(key.into()), None).await {
                Ok(()) => assert!(self.objects.remove(&key).is_some(), "{key} was deleted out of nowhere"),
                Err(StoreError::NotFound { .. }) => self.missed(key),
                Err(other) => panic!("{other}"),
            },
            Step::Reserve { pages } => {
                let fits = self.fixed() + pages <= PAGES;
                self.press(pages);
                match store.reserve(ByteCount(pages * PAGE), wait(fits)).await {
                    Ok(room) if fits => self.reservations.push(room),
                    Err(StoreError::Unreserved { .. }) if !fits => {}
                    other => panic!("{other:?}"),
                }
            }
            Step::Unreserve => drop(self.reservations.pop()),
        }
    }

    async fn put(&mut self, store: &HostStore, key: u8, parts: Vec<u64>, retention: Retention, end: End) {
        self.seed += 10;
        let (seed, wanted) = (self.seed, pages(&parts));
        let fits = self.fixed() + wanted <= PAGES;
        let known = self.objects.get(&key).cloned();
        if known.is_none() {
            self.press(wanted);
        }
        let mut object = NewObject::new(id(key.into()), parts.iter().copied().map(ByteCount));
        object.retention = retention;
        object.wait = wait(fits);
        object.expires = (end == End::Expire).then_some(Duration::ZERO);
        let mut draft = match store.create(object).await {
            Ok(draft) => draft,
            Err(StoreError::Exists { sealed: true, .. }) => {
                assert!(known.is_some(), "{key} is there out of nowhere");
                return;
            }
            Err(StoreError::Exhausted { .. }) if !fits => {
                // It was gone, or the key was not looked at before: either way no bytes came.
                if known.is_some() {
                    self.missed(key);
                    self.press(wanted);
                }
                return;
            }
            Err(StoreError::TooLarge { .. }) if wanted > PAGES => return,
            Err(other) => panic!("{other}"),
        };
        assert!(fits, "{wanted} pages out of nowhere");
        self.missed(key);
        self.press(wanted);
        for (part, len) in parts.iter().enumerate() {
            let bytes = draft.bytes_mut(part).expect("it is there");
            bytes.copy_from_slice(&pattern(seed + part as u64, *len));
        }
        if end == End::Abort {
            return;
        }
        check(&*draft.seal().await.expect("complete"), seed, &parts);
        if end == End::Seal {
            let pressed = false;
            self.objects.insert(
                key,
                Known {
                    seed,
                    parts,
                    retention,
                    pressed,
                },
            );
        }
    }

    async fn fetch(&mut self, store: &HostStore, key: u8) {
        let Some(known) = self.objects.get(&key).cloned() else {
            return;
        };
        match fetch(store, id(key.into()), known.seed, &known.parts).await {
            Ok(()) => {}
            Err(StoreError::NotFound { .. }) => self.missed(key),
            Err(other) => panic!("{other}"),
        }
    }
}

/// What fits comes in time; what does not need not be waited for.
fn wait(fits: bool) -> Duration {
    if fits { PATIENCE } else { Duration::from_millis(15) }
}

async fn run(steps: Vec<Step>) {
    let world = World::new().await;
    let store = world.spilling(PAGES, 1 << 20).await;
    let mut model = Model::default();
    for step in steps {
        model.take(&store, step).await;
        let usage = store.usage();
        assert!(usage.used().0 <= PAGES * PAGE, "{usage}");
        assert!(world.host.stats().allocated_bytes <= PAGES * PAGE, "{usage}");
    }
    model.readers.clear();
    model.reservations.clear();
    let keys: Vec<u8> = model.objects.keys().copied().collect();
    for key in keys {
        model.fetch(&store, key).await;
    }
    for (key, known) in std::mem::take(&mut model.objects) {
        let deleted = store.delete(id(key.into()), None).await;
        assert!(deleted.is_ok() || known.may_be_gone(), "{key}: {deleted:?}");
    }
    until("nothing is left", || {
        let usage = store.usage();
        let files = usage.spill.as_ref().map(|spill| spill.used);
        usage.used() == ByteCount(0) && files == Some(ByteCount(0))
    })
    .await;
    assert_eq!((world.host.stats().allocated_bytes, world.host.stats().regions), (0, 0));
    assert!(world.files().is_empty(), "files are left");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(count(24, 400)))]

    #[test]
    fn the_store_does_what_its_model_does(steps in prop::collection::vec(step(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        runtime.expect("a runtime").block_on(run(steps));
    }
}
