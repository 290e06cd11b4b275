use std::collections::BTreeMap;
use std::ops::Range;

use stagewire_kv::{Component, Engine, Kind};

use super::KvError;
use super::protocol::Announced;

/// Most bytes that go along with the last chunk.
const MAX_AUX: usize = 1 << 20;

/// Most entries of a room's page tables, so that a message has room for all of them.
const MAX_ENTRIES: u64 = 1 << 21;

/// What a sender announces at a time.
///
/// Full layers go chunk by chunk. What has a window, and state that stands for the whole request, goes with the last chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkSpec {
    /// The tokens that are computed. A chunk begins where the one before has ended.
    pub tokens: Range<u64>,
    /// For each component the pages of these tokens: one for each logical page that they touch. With the last chunk also
    /// those of the components with a window: the logical pages of [`Component::pages`].
    pub pages: BTreeMap<String, Vec<i64>>,
    /// No more come; it ends where the sequence does.
    pub last: bool,
    /// What decode gets besides, with the last chunk: the first token, its probabilities. At most 1 MiB.
    pub aux: Option<Vec<u8>>,
}

impl ChunkSpec {
    /// A chunk that is not the last one, without pages.
    pub fn new(tokens: Range<u64>) -> Self {
        Self {
            tokens,
            pages: BTreeMap::new(),
            last: false,
            aux: None,
        }
    }

    /// With the pages of one component.
    #[must_use]
    pub fn pages(mut self, component: &str, pages: impl Into<Vec<i64>>) -> Self {
        self.pages.insert(component.to_owned(), pages.into());
        self
    }

    /// The last chunk.
    #[must_use]
    pub fn last(mut self) -> Self {
        self.last = true;
        self
    }

    /// With what goes along.
    #[must_use]
    pub fn aux(mut self, aux: impl Into<Vec<u8>>) -> Self {
        self.aux = Some(aux.into());
        self
    }
}

/// Whether a component moves once, with the last chunk.
pub(super) fn goes_last(component: &Component) -> bool {
    component.window.is_some() || component.kind == Kind::Mamba
}

/// Entries of a component's page table.
pub(super) fn table_len(component: &Component, engine: &Engine, seq_len: u64) -> u64 {
    component.pages(engine.geometry().page_size, seq_len).end
}

/// Refuses a sequence whose page tables nobody could have.
pub(super) fn check_len(room: u64, engine: &Engine, seq_len: u64) -> Result<(), KvError> {
    let components = engine.geometry().components.iter();
    let entries = components.fold(0_u64, |entries, component| {
        entries.saturating_add(table_len(component, engine, seq_len))
    });
    if entries > MAX_ENTRIES {
        return Err(KvError::Tokens {
            room,
            seq_len,
            entries,
            most: MAX_ENTRIES,
        });
    }
    Ok(())
}

/// The page tables of a room, of which nothing is announced.
pub(super) fn empty_tables(engine: &Engine, seq_len: u64) -> Vec<Vec<i64>> {
    let components = engine.geometry().components.iter();
    let entries = |component: &Component| usize::try_from(table_len(component, engine, seq_len)).unwrap_or(usize::MAX);
    components.map(|component| vec![-1; entries(component)]).collect()
}

/// Whether computed tokens can be in this page.
fn is_page(id: i64, num_pages: u64) -> bool {
    u64::try_from(id).is_ok_and(|id| 0 < id && id < num_pages)
}

/// The logical pages that a component has of a chunk.
pub(super) fn logical(component: &Component, engine: &Engine, seq_len: u64, chunk: &Announced) -> Range<u64> {
    let page = u64::from(engine.geometry().page_size);
    let (lo, hi) = chunk.tokens;
    match goes_last(component) {
        true if chunk.last => component.pages(engine.geometry().page_size, seq_len),
        true => 0..0,
        false if lo == hi => 0..0,
        false => lo / page..hi.div_ceil(page),
    }
}

/// A chunk as the engine's components have it.
pub(super) fn announced(room: u64, engine: &Engine, spec: ChunkSpec) -> Result<Announced, KvError> {
    let components = &engine.geometry().components;
    let mut pages = spec.pages;
    let tables = components
        .iter()
        .map(|component| pages.remove(&component.name).unwrap_or_default());
    let announced = Announced {
        tokens: (spec.tokens.start, spec.tokens.end),
        pages: tables.collect(),
        last: spec.last,
        aux: spec.aux,
    };
    match pages.into_keys().next() {
        None => Ok(announced),
        Some(component) => {
            let known: Vec<&str> = components.iter().map(|component| component.name.as_str()).collect();
            Err(KvError::Component {
                room,
                component,
                known: known.join(", "),
            })
        }
    }
}

/// Says what is wrong with a chunk that comes after another.
pub(super) fn check(
    room: u64,
    engine: &Engine,
    seq_len: u64,
    before: Option<&Announced>,
    chunk: &Announced,
) -> Result<(), KvError> {
    let (lo, hi) = chunk.tokens;
    let wrong = |problem: String| KvError::Chunk { room, lo, hi, problem };
    let page = u64::from(engine.geometry().page_size);
    match before {
        _ if lo > hi || hi > seq_len => return Err(wrong(format!("it is no part of {seq_len} tokens"))),
        Some(before) if before.tokens.1 != lo => {
            return Err(wrong(format!("the chunk before ends at {}", before.tokens.1)));
        }
        None if !lo.is_multiple_of(page) => {
            return Err(wrong(format!(
                "the first chunk must begin at a page, and pages have {page} tokens"
            )));
        }
        _ if lo == hi && !chunk.last => return Err(wrong("it has no tokens, and is not the last one".to_owned())),
        _ if chunk.last && hi != seq_len => return Err(wrong(format!("it is the last one of {seq_len} tokens"))),
        _ => {}
    }
    if let Some(aux) = &chunk.aux {
        if aux.len() > MAX_AUX {
            let (nbytes, most) = (aux.len(), MAX_AUX);
            return Err(KvError::Aux { room, nbytes, most });
        }
        if !chunk.last {
            return Err(wrong("bytes go along with the last chunk only".to_owned()));
        }
    }
    let components = &engine.geometry().components;
    if chunk.pages.len() != components.len() {
        let (given, wanted) = (chunk.pages.len(), components.len());
        return Err(wrong(format!(
            "it has pages of {given} components, and there are {wanted}"
        )));
    }
    for (at, (component, given)) in components.iter().zip(&chunk.pages).enumerate() {
        let logical = logical(component, engine, seq_len, chunk);
        let (wanted, name) = (logical.end - logical.start, &component.name);
        if given.len() as u64 != wanted {
            return Err(wrong(format!(
                "component {name:?} has {wanted} pages of it, and {} were given",
                given.len()
            )));
        }
        let num_pages = engine.geometry().num_pages.get(name).copied().unwrap_or(u64::MAX);
        if let Some(page) = given.iter().find(|&&page| !is_page(page, num_pages)) {
            return Err(wrong(format!(
                "component {name:?} has page {page} of it, which is none: page 0 is for padding, and ids go up to num_pages"
            )));
        }
        // A page that the chunk before has begun is its last one, too.
        let begun = before.filter(|_| !goes_last(component) && !lo.is_multiple_of(page));
        if let (Some(before), Some(first)) = (begun.and_then(|before| before.pages[at].last()), given.first())
            && before != first
        {
            return Err(wrong(format!(
                "component {name:?} has page {first} where the chunk before said {before}"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use stagewire_core::DType;
    use stagewire_kv::Geometry;

    use super::*;

    fn engine() -> Engine {
        let full = Component::mha("full", 1, 2, [8, 8], DType::U8);
        let swa = Component {
            window: Some(3),
            ..Component::mha("swa", 1, 2, [8, 8], DType::U8)
        };
        let mut geometry = Geometry::new(1, 4, vec![full, swa]);
        geometry.num_pages.insert("full".to_owned(), 10);
        Engine::new(geometry).expect("sizes")
    }

    #[test]
    fn a_chunk_comes_after_the_one_before_with_the_pages_that_it_needs() {
        let engine = engine();
        let send = |before: Option<&Announced>, spec: &ChunkSpec| {
            let chunk = announced(7, &engine, spec.clone())?;
            check(7, &engine, 10, before, &chunk).map(|()| chunk)
        };
        let first = ChunkSpec::new(0..6).pages("full", [5, 6]);
        let first = send(None, &first).expect("right");
        assert_eq!(first.pages, [vec![5, 6], vec![]]);
        let last = ChunkSpec::new(6..10).pages("full", [6, 9]).pages("swa", [2, 3]).last();
        let wrong = [
            (true, ChunkSpec::new(5..10)),
            (true, ChunkSpec::new(6..11)),
            (
                true,
                ChunkSpec {
                    last: false,
                    ..last.clone()
                },
            ),
            (true, last.clone().pages("full", [6])),
            (true, last.clone().pages("full", [7, 9])),
            (true, last.clone().pages("swa", [3])),
            (true, last.clone().pages("swa", [-1, 3])),
            (true, last.clone().pages("full", [6, 0])),
            (true, last.clone().pages("full", [6, -1])),
            (true, last.clone().pages("full", [6, 10])),
            (true, last.clone().pages("full", [6, i64::MAX])),
            (true, ChunkSpec::new(6..6)),
            (true, last.clone().pages("other", [3])),
            (true, last.clone().aux(vec![0; MAX_AUX + 1])),
            (true, ChunkSpec::new(6..8).pages("full", [6]).last()),
            (true, ChunkSpec::new(6..8).pages("full", [6]).aux([1])),
            (false, ChunkSpec::new(2..8).pages("full", [5, 6])),
        ];
        for (goes_on, spec) in wrong {
            send(Some(&first).filter(|_| goes_on), &spec).expect_err(&format!("{spec:?}"));
        }
        let last = send(Some(&first), &last).expect("right");
        assert_eq!(last.pages, [vec![6, 9], vec![2, 3]]);
        let swa = &engine.geometry().components[1];
        assert_eq!(logical(swa, &engine, 10, &last), 1..3);
        assert_eq!(logical(swa, &engine, 10, &first), 0..0);
        let short = Announced {
            pages: vec![vec![6, 9]],
            ..last
        };
        check(7, &engine, 10, Some(&first), &short).expect_err("a component is missing");
    }
}
