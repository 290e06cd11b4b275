//! Random geometries and rooms, from a seed.

use stagewire_core::DType;
use stagewire_kv::{Component, Engine, Geometry, Kind, Layout, Pair, PlanRequest, handshake};

/// A small generator of numbers; proptest chooses the seed.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// splitmix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[usize::try_from(self.below(list.len() as u64)).unwrap()]
    }

    fn shuffled(&mut self, mut list: Vec<i64>) -> Vec<i64> {
        for place in (1..list.len()).rev() {
            list.swap(place, usize::try_from(self.below(place as u64 + 1)).unwrap());
        }
        list
    }
}

/// One room between two engines, each of whose components has a table and a prefix.
#[derive(Debug, Clone)]
pub(crate) struct World {
    pub(crate) prefill: Geometry,
    pub(crate) decode: Geometry,
    pub(crate) seq_len: u64,
    pub(crate) exact: bool,
    /// Boundaries of prefill chunks; two for the whole sequence.
    pub(crate) chunks: Vec<u64>,
    pub(crate) rooms: Vec<Room>,
}

/// The part of one component.
#[derive(Debug, Clone)]
pub(crate) struct Room {
    pub(crate) prefix: u64,
    pub(crate) src: Vec<i64>,
    pub(crate) dst: Vec<i64>,
}

fn splits(heads: u32, tp: u32) -> bool {
    heads.is_multiple_of(tp) || tp.is_multiple_of(heads)
}

impl World {
    pub(crate) fn roll(seed: u64) -> Self {
        let dice = &mut Dice::new(seed);
        let heads = dice.pick(&[1, 2, 2, 3, 4, 4, 6, 8, 8, 12]);
        let sizes: Vec<u32> = (1..=8).filter(|&tp| splits(heads, tp)).collect();
        let (src_tp, dst_tp) = (dice.pick(&sizes), dice.pick(&sizes));
        let page = dice.pick(&[1, 2, 3, 4, 4, 5, 8, 16, 64]);
        let most = if page > 8 { 2 * page } else { 6 * page };
        let seq_len = dice.below(u64::from(most)) + u64::from(!dice.one_in(20));
        let mut full = component(dice, "full", heads);
        if dice.one_in(10) {
            full.kind = Kind::Mla;
            full.v_dim = 0;
        }
        let window_heads: Vec<u32> = [1, 2, 3, 4, 6, 8, 12]
            .into_iter()
            .filter(|&h| splits(h, src_tp) && splits(h, dst_tp))
            .collect();
        let window_heads = dice.pick(&window_heads);
        let mut swa = component(dice, "swa", window_heads);
        swa.window = Some(dice.below(u64::from(most) + 4));
        let stages = if dice.one_in(8) { 2 } else { 1 };
        if stages > 1 && src_tp != dst_tp {
            swa.window = None;
        }
        for component in [&mut full, &mut swa] {
            component.layers *= stages;
        }
        let mut prefill = Geometry::new(src_tp, page, vec![full, swa]);
        prefill.pp_size = stages;
        let mut decode = Geometry {
            tp_size: dst_tp,
            pp_size: dice.pick(&[1, stages]),
            ..prefill.clone()
        };
        if dice.one_in(3) {
            for (from, to) in prefill.components.iter_mut().zip(&mut decode.components) {
                let ids: Vec<u32> = (0..from.layers).map(|layer| layer * 7 + 3).collect();
                from.layer_ids = Some(ids.clone());
                to.layer_ids = Some(ids.into_iter().rev().collect());
            }
        }
        let pages = seq_len.div_ceil(page.into());
        let kept = dice.below(seq_len / u64::from(page) + 1) * u64::from(page);
        let kept = if dice.one_in(2) { 0 } else { kept };
        let mut rooms = Vec::new();
        for name in ["full", "swa"] {
            let pools = [pages + 1 + dice.below(4), pages + 1 + dice.below(4)];
            prefill.num_pages.insert(name.to_owned(), pools[0]);
            decode.num_pages.insert(name.to_owned(), pools[1]);
            // Decode may have kept the prefix of the full layers and evicted that of the window.
            let prefix = if name == "swa" && dice.one_in(2) { 0 } else { kept };
            let window = prefill
                .components
                .iter()
                .find(|c| c.name == name)
                .and_then(|c| c.window);
            let [src, dst] = pools.map(|pool| table(dice, pages, pool));
            rooms.push(Room { prefix, src, dst }.evicted(dice, window, seq_len, page.into()));
        }
        let mut chunks = vec![0, seq_len];
        if dice.one_in(3) {
            chunks.extend((0..2).map(|_| dice.below(seq_len + 1)));
            chunks.sort_unstable();
        }
        Self {
            prefill,
            decode,
            seq_len,
            exact: dice.one_in(2),
            chunks,
            rooms,
        }
    }

    pub(crate) fn pair(&self) -> Pair {
        let engine = |geometry: &Geometry| Engine::new(geometry.clone()).unwrap();
        handshake(&engine(&self.prefill), &engine(&self.decode)).unwrap()
    }

    /// One request for each chunk.
    pub(crate) fn requests(&self, route: (u32, u32)) -> Vec<PlanRequest<'_>> {
        let request = |tokens| {
            let mut request = PlanRequest::new(route.0, route.1, self.seq_len);
            for (component, room) in self.prefill.components.iter().zip(&self.rooms) {
                request = request.pages(&component.name, &room.src, &room.dst);
                request.prefix.insert(&component.name, room.prefix);
            }
            request.tokens = tokens;
            request.exact_window = self.exact;
            request
        };
        if self.chunks.len() == 2 {
            return vec![request(None)];
        }
        self.chunks
            .windows(2)
            .map(|two| request(Some((two[0], two[1]))))
            .collect()
    }
}

impl Room {
    /// Without the pages that nobody needs, now and then.
    fn evicted(mut self, dice: &mut Dice, window: Option<u64>, seq_len: u64, page: u64) -> Self {
        let first = window.map_or(0, |window| seq_len.saturating_sub(window)) / page;
        for logical in 0..usize::try_from(first).unwrap().min(self.src.len()) {
            if dice.one_in(2) {
                (self.src[logical], self.dst[logical]) = (-1, -1);
            }
        }
        self
    }
}

fn component(dice: &mut Dice, name: &str, heads: u32) -> Component {
    let layers = u32::try_from(dice.below(2)).unwrap() + 1;
    let dims = [dice.pick(&[1, 2, 3]), dice.pick(&[1, 2, 3])];
    let dtype = dice.pick(&[DType::U8, DType::F8E4M3, DType::BF16]);
    Component {
        layout: dice.pick(&[Layout::Nhd, Layout::Nhd, Layout::Hnd]),
        ..Component::mha(name, layers, heads, dims, dtype)
    }
}

/// Different pages from 1, in a run, reversed or in any order.
fn table(dice: &mut Dice, pages: u64, pool: u64) -> Vec<i64> {
    let ids: Vec<i64> = (1..i64::try_from(pool).unwrap()).collect();
    let mut ids = match dice.below(3) {
        0 => ids,
        1 => ids.into_iter().rev().collect(),
        _ => dice.shuffled(ids),
    };
    ids.truncate(usize::try_from(pages).unwrap());
    ids
}
