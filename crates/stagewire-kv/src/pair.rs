use std::collections::{BTreeMap, BTreeSet};

use crate::buffers::Buffers;
use crate::heads::{owned, replicated, slices};
use crate::{Component, Engine, Geometry, HeadSlice, Plan, PlanError, PlanRequest, layers, plan};

/// A prefill engine and a decode engine that can hand over to each other.
#[derive(Debug, Clone)]
pub struct Pair {
    prefill: Engine,
    decode: Engine,
    pub(crate) components: Vec<Paired>,
}

/// One component of a pair.
#[derive(Debug, Clone)]
pub(crate) struct Paired {
    pub(crate) name: String,
    pub(crate) window: Option<u64>,
    /// For each tensor-parallel rank of the destination, the heads that it gets and from whom.
    pub(crate) slices: Vec<Vec<HeadSlice>>,
    /// The layers of each pair of pipeline stages that moves any: (source, destination) in each stage's own list.
    pub(crate) layers: BTreeMap<(u32, u32), Vec<(u32, u32)>>,
    /// Of one layer of one rank, the same on both sides but for the heads.
    pub(crate) buffers: Buffers,
    /// Heads of a rank: (source, destination).
    pub(crate) heads: (u32, u32),
}

/// A rank of an engine as its place in two dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) tp: u32,
    pub(crate) stage: u32,
}

impl Place {
    /// Ranks count tensor-parallel first, then the pipeline stage. Offsets beyond, such as those of data-parallel replicas, do not matter.
    pub(crate) fn of(rank: u32, geometry: &Geometry) -> Self {
        Self {
            tp: rank % geometry.tp_size,
            stage: (rank / geometry.tp_size) % geometry.pp_size,
        }
    }
}

impl Pair {
    /// Of engines that the handshake has found compatible.
    pub(crate) fn new(prefill: Engine, decode: Engine) -> Self {
        let (src, dst) = (prefill.geometry(), decode.geometry());
        let both = src.components.iter().zip(&dst.components);
        let components = both.map(|(from, to)| Paired::new((from, src), (to, dst))).collect();
        Self {
            prefill,
            decode,
            components,
        }
    }

    /// The prefill side.
    pub fn prefill(&self) -> &Engine {
        &self.prefill
    }

    /// The decode side.
    pub fn decode(&self) -> &Engine {
        &self.decode
    }

    /// Every (source rank, destination rank) that moves bytes, in order: one writer for each head of each destination,
    /// no redundant replica.
    pub fn routes(&self) -> Vec<(u32, u32)> {
        let (src, dst) = (self.prefill.geometry(), self.decode.geometry());
        let all = self.components.iter().flat_map(|paired| {
            paired.slices.iter().flatten().flat_map(|slice| {
                let stages = paired.layers.keys();
                stages.map(|stage| {
                    let (from, to) = (stage.0 * src.tp_size, stage.1 * dst.tp_size);
                    (from + slice.src_rank, to + slice.dst_rank)
                })
            })
        });
        let routes: BTreeSet<_> = all.collect();
        routes.into_iter().collect()
    }

    /// The source ranks that `dst_rank` gets bytes from: how many completions it waits for.
    pub fn writers(&self, dst_rank: u32) -> Vec<u32> {
        let (src, here) = (self.prefill.geometry(), Place::of(dst_rank, self.decode.geometry()));
        let all = self.components.iter().flat_map(|paired| {
            paired.slices[here.tp as usize].iter().flat_map(|slice| {
                let stages = paired.layers.keys().filter(|stage| stage.1 == here.stage);
                stages.map(|stage| stage.0 * src.tp_size + slice.src_rank)
            })
        });
        let writers: BTreeSet<_> = all.collect();
        writers.into_iter().collect()
    }

    /// The heads of a component that move between two ranks, in some layer, if any do.
    pub fn slice(&self, component: &str, src_rank: u32, dst_rank: u32) -> Option<HeadSlice> {
        let paired = self.components.iter().find(|paired| paired.name == component)?;
        let from = Place::of(src_rank, self.prefill.geometry());
        let to = Place::of(dst_rank, self.decode.geometry());
        paired.carried(from, to).map(|(slice, _)| slice)
    }

    /// Plans what one rank sends to another for one room.
    ///
    /// # Errors
    /// [`PlanError`] for whatever is wrong with this room; the pair goes on.
    pub fn plan(&self, request: &PlanRequest<'_>) -> Result<Plan, PlanError> {
        plan::make(self, request)
    }
}

impl Paired {
    fn new((from, src): (&Component, &Geometry), (to, dst): (&Component, &Geometry)) -> Self {
        let tp = (src.tp_size, dst.tp_size);
        let slices = (0..tp.1).map(|rank| {
            if from.kind.is_replicated() {
                vec![replicated(from.kv_heads, tp.0, tp.1, rank)]
            } else {
                slices(from.kv_heads, tp.0, tp.1, rank)
            }
        });
        let local = |size| {
            if from.kind.is_replicated() {
                from.kv_heads
            } else {
                owned(from.kv_heads, size, 0).len()
            }
        };
        let pairs = layers::pairs(from, to).expect("the handshake has paired the layers");
        Self {
            name: from.name.clone(),
            window: from.window,
            slices: slices.collect(),
            layers: layers::by_stage(&pairs, (from, src.pp_size), (to, dst.pp_size)),
            buffers: Buffers::of(from, src.page_size, layers::per_stage(from, src.pp_size))
                .expect("a page of all layers was found to fit"),
            heads: (local(tp.0), local(tp.1)),
        }
    }

    /// What moves between two ranks, if anything does: heads, and layers as (source, destination).
    pub(crate) fn carried(&self, from: Place, to: Place) -> Option<(HeadSlice, &[(u32, u32)])> {
        let slices = &self.slices[to.tp as usize];
        let slice = slices.iter().find(|slice| slice.src_rank == from.tp)?;
        let layers = self.layers.get(&(from.stage, to.stage))?;
        Some((*slice, layers))
    }
}
