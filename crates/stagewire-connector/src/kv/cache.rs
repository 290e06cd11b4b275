//! The memory of one rank: which buffer is where.

use std::collections::BTreeMap;

use stagewire_kv::{Engine, RankBuffer};
use stagewire_transfer::{Memory, Target};

use super::KvError;

/// The memory of a rank's cache: one piece for each buffer, or a few that hold many.
#[derive(Debug)]
pub struct CacheMemory<M> {
    memories: Vec<M>,
    places: Vec<CachePlace>,
}

/// Where one buffer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CachePlace {
    /// Index of the memory that holds it.
    pub memory: usize,
    /// Its first byte there: that of page 0.
    pub offset: u64,
    /// Its bytes, pages without a gap.
    pub nbytes: u64,
}

impl<M> CacheMemory<M> {
    /// `places` in the order of [`Engine::buffers`]: by component, K before V, layer after layer.
    pub fn new(memories: impl Into<Vec<M>>, places: impl Into<Vec<CachePlace>>) -> Self {
        Self {
            memories: memories.into(),
            places: places.into(),
        }
    }
}

impl<M: HasLen> CacheMemory<M> {
    /// One memory for each buffer, in the order of [`Engine::buffers`].
    pub fn one_each(memories: impl Into<Vec<M>>) -> Self {
        let memories = memories.into();
        let place = |(memory, held): (usize, &M)| CachePlace {
            memory,
            offset: 0,
            nbytes: held.nbytes(),
        };
        let places = memories.iter().enumerate().map(place).collect();
        Self { memories, places }
    }
}

/// Memory whose length is known.
pub trait HasLen: sealed::Sealed {
    /// Bytes.
    fn nbytes(&self) -> u64;
}

impl HasLen for Memory {
    fn nbytes(&self) -> u64 {
        self.len()
    }
}

impl HasLen for Target {
    fn nbytes(&self) -> u64 {
        self.len()
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for stagewire_transfer::Memory {}
    impl Sealed for stagewire_transfer::Target {}
}

/// (component, kv, layer of the rank).
pub(super) type Key = (u32, u32, u32);

/// Where each buffer of a rank is.
#[derive(Debug, Clone)]
pub(super) struct Buffers(BTreeMap<Key, (CachePlace, u64)>);

impl Buffers {
    /// Pairs the buffers that a rank has with their places.
    ///
    /// `lens` are the lengths of the memories.
    pub(super) fn new(engine: &Engine, rank: u32, lens: &[u64], places: &[CachePlace]) -> Result<Self, KvError> {
        let buffers = engine.buffers(rank)?;
        if buffers.len() != places.len() {
            return Err(KvError::BufferCount {
                rank,
                found: places.len(),
                expected: buffers.len(),
            });
        }
        for (buffer, place) in buffers.iter().zip(places) {
            check(engine, buffer, place, lens)?;
        }
        overlap(&buffers, places)?;
        let key = |buffer: &RankBuffer| (buffer.component, buffer.kv, buffer.layer);
        let all = buffers.iter().zip(places);
        Ok(Self(
            all.map(|(buffer, place)| (key(buffer), (*place, buffer.page_bytes)))
                .collect(),
        ))
    }

    pub(super) fn get(&self, key: Key) -> Option<CachePlace> {
        self.0.get(&key).map(|(place, _)| *place)
    }

    fn of(&self, component: u32) -> impl Iterator<Item = (CachePlace, u64)> {
        let buffers = self.0.range((component, 0, 0)..(component + 1, 0, 0));
        buffers.map(|(_, &buffer)| buffer)
    }

    /// Whether every buffer of a component has this page.
    pub(super) fn has_page(&self, component: u32, id: u64) -> bool {
        self.of(component)
            .all(|(place, page_bytes)| id < place.nbytes / page_bytes.max(1))
    }

    /// The bytes of these pages of a component, all of which it has: (memory, first byte, bytes).
    pub(super) fn pages(&self, component: u32, ids: &[u64]) -> impl Iterator<Item = (usize, u64, u64)> {
        self.of(component).flat_map(move |(place, page_bytes)| {
            ids.iter()
                .map(move |id| (place.memory, place.offset + id * page_bytes, page_bytes))
        })
    }
}

fn check(engine: &Engine, buffer: &RankBuffer, place: &CachePlace, lens: &[u64]) -> Result<(), KvError> {
    let component = &engine.geometry().components[buffer.component as usize].name;
    let wrong = |problem: String| KvError::Buffer {
        component: component.clone(),
        kv: buffer.kv,
        layer: buffer.layer,
        problem,
    };
    let Some(&len) = lens.get(place.memory) else {
        let count = lens.len();
        return Err(wrong(format!(
            "it is said to be in memory {}, and there are {count}",
            place.memory
        )));
    };
    if place.offset.checked_add(place.nbytes).is_none_or(|end| end > len) {
        let CachePlace { offset, nbytes, .. } = place;
        return Err(wrong(format!(
            "its {nbytes} bytes from {offset} on are not all inside the {len} bytes of its memory"
        )));
    }
    let pages = engine.geometry().num_pages.get(component).copied().unwrap_or(1);
    if buffer
        .page_bytes
        .checked_mul(pages)
        .is_none_or(|wanted| wanted > place.nbytes)
    {
        let (found, page) = (place.nbytes, buffer.page_bytes);
        return Err(wrong(format!(
            "it has {found} bytes, and {pages} pages of {page} bytes need more"
        )));
    }
    Ok(())
}

/// Two buffers that share bytes would be one another's noise.
fn overlap(buffers: &[RankBuffer], places: &[CachePlace]) -> Result<(), KvError> {
    let mut order: Vec<(&CachePlace, &RankBuffer)> = places.iter().zip(buffers).collect();
    order.sort_by_key(|(place, _)| (place.memory, place.offset));
    let shared = order
        .windows(2)
        .find(|two| two[0].0.memory == two[1].0.memory && two[0].0.offset + two[0].0.nbytes > two[1].0.offset);
    match shared {
        Some(two) => Err(KvError::BufferOverlap {
            memory: two[0].0.memory,
            byte: two[1].0.offset,
        }),
        None => Ok(()),
    }
}

/// Taken apart, the lengths first.
pub(super) fn parts<M: HasLen>(cache: CacheMemory<M>) -> (Vec<u64>, Vec<M>, Vec<CachePlace>) {
    let lens = cache.memories.iter().map(HasLen::nbytes).collect();
    (lens, cache.memories, cache.places)
}

#[cfg(test)]
mod tests {
    use stagewire_core::{Classify, DType};
    use stagewire_kv::{Component, Geometry};

    use super::*;

    fn engine() -> Engine {
        let mut geometry = Geometry::new(2, 4, vec![Component::mha("full", 2, 2, [8, 4], DType::U8)]);
        geometry.num_pages.insert("full".to_owned(), 10);
        Engine::new(geometry).expect("sizes")
    }

    fn place(memory: usize, offset: u64, nbytes: u64) -> CachePlace {
        CachePlace { memory, offset, nbytes }
    }

    #[test]
    fn memory_that_does_not_fit_the_engine_is_refused() {
        // K of two layers with 32 bytes a page, V with 16.
        let good = [
            place(0, 0, 320),
            place(0, 320, 320),
            place(1, 0, 160),
            place(1, 160, 160),
        ];
        let buffers = Buffers::new(&engine(), 1, &[640, 320], &good).expect("all fit");
        assert_eq!(buffers.get((0, 1, 1)), Some(good[3]));
        assert_eq!(buffers.get((1, 0, 0)), None);
        let pages: Vec<_> = buffers.pages(0, &[2]).collect();
        assert_eq!(pages, [(0, 64, 32), (0, 384, 32), (1, 32, 16), (1, 192, 16)]);
        assert!(buffers.has_page(0, 9));
        for past in [10, u64::MAX / 32, u64::MAX] {
            assert!(!buffers.has_page(0, past), "{past}");
        }

        let with = |at: usize, changed: CachePlace| {
            let mut places = good;
            places[at] = changed;
            Buffers::new(&engine(), 1, &[640, 320], &places).expect_err("refused")
        };
        let reason = |error: KvError| error.reason();
        assert_eq!(
            reason(with(0, place(0, 0, 319))),
            "kv.buffers",
            "pages that are not there"
        );
        assert_eq!(reason(with(1, place(0, 321, 320))), "kv.buffers", "past its memory");
        assert_eq!(reason(with(1, place(2, 0, 320))), "kv.buffers", "no such memory");
        assert_eq!(
            reason(with(1, place(0, 319, 320))),
            "kv.buffers",
            "shares a byte with K of layer 0"
        );
        let few = Buffers::new(&engine(), 1, &[640, 320], &good[1..]).expect_err("one is missing");
        assert!(few.to_string().contains('3') && few.to_string().contains('4'), "{few}");
    }
}
