//! One room: from page tables to records.
//!
//! `request` is what is asked for, `cuts` the pages and the tokens of each that move, `shape` where the bytes of a page
//! are, `stride` the records, `proof` that they are the right ones, `rows` the same as one entry for each run of bytes.

mod cuts;
mod error;
mod proof;
mod request;
mod rows;
mod shape;
mod stride;

use stagewire_core::Record;

use crate::pair::{Paired, Place};
use crate::window::{TokenRange, pages_of};
use crate::{HeadSlice, Pair};
use cuts::{Cut, Pool, Tables};
use shape::Shape;

pub use error::{PlanError, Side};
pub use request::PlanRequest;

/// What one rank sends to another for one room.
#[derive(Debug, Clone)]
pub struct Plan {
    src_rank: u32,
    dst_rank: u32,
    sections: Vec<Section>,
}

/// One component of a plan. Every layer moves by the same records.
#[derive(Debug, Clone)]
pub struct Section {
    index: u32,
    name: String,
    range: TokenRange,
    packing: Packing,
    layers: Vec<(u32, u32)>,
    buffers: Vec<BufferPlan>,
}

#[derive(Debug, Clone)]
struct BufferPlan {
    kv: u32,
    records: Vec<Record>,
}

/// Which side should copy through scratch where a transport moves runs of bytes only. Never both: the narrow side, whose
/// ranks have fewer heads, sends or gets all of them, so its pages are contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Packing {
    /// Both sides have the same heads: runs of pages move as they are.
    None,
    /// The source is wider: gather into scratch there, write straight into the destination's pages.
    Gather,
    /// The destination is wider: write the source's pages into scratch there, scatter.
    Scatter,
    /// Neither side's slice is whole, as where the sizes do not divide each other: row by row.
    Rows,
}

/// One strided record and the buffers that it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedRecord {
    /// Index of the component in the engines' lists.
    pub component: u32,
    /// The source rank's layer, counted in its own.
    pub src_layer: u32,
    /// The destination rank's layer, counted in its own.
    pub dst_layer: u32,
    /// 0 = K, 1 = V; 2 and 3 are their scales, of components that have them.
    pub kv: u32,
    /// Offsets from the start of that layer's buffer on each rank.
    pub record: Record,
}

/// One run of bytes and the buffers that it is for.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// Index of the component in the engines' lists.
    pub component: u32,
    /// The source rank's layer, counted in its own.
    pub src_layer: u32,
    /// The destination rank's layer, counted in its own.
    pub dst_layer: u32,
    /// 0 = K, 1 = V; 2 and 3 are their scales, of components that have them.
    pub kv: u32,
    /// First byte, from the start of the source's buffer.
    pub src_off: u64,
    /// First byte, from the start of the destination's buffer.
    pub dst_off: u64,
    /// How many bytes.
    pub nbytes: u64,
}

impl Plan {
    /// The source's rank without the offset of data-parallel replicas.
    pub fn src_rank(&self) -> u32 {
        self.src_rank
    }

    /// The destination's rank without the offset of data-parallel replicas.
    pub fn dst_rank(&self) -> u32 {
        self.dst_rank
    }

    /// The components that were asked for, in order.
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// The component of this name, where it was asked for.
    pub fn section(&self, component: &str) -> Option<&Section> {
        self.sections.iter().find(|section| section.name == component)
    }

    /// Bytes that move; `u64::MAX` where they are more.
    pub fn nbytes(&self) -> u64 {
        let sections = self.sections.iter().map(Section::nbytes);
        sections.fold(0, u64::saturating_add)
    }

    /// Number of [`Plan::records`].
    pub fn record_count(&self) -> usize {
        self.sections.iter().map(Section::record_count).sum()
    }

    /// Number of [`Plan::descriptors`].
    pub fn descriptor_count(&self) -> usize {
        self.sections.iter().map(Section::descriptor_count).sum()
    }

    /// The plan as strided records, one for each run of pages, by (component, kv, destination layer, destination offset).
    pub fn records(&self) -> Vec<PlannedRecord> {
        let mut all = Vec::with_capacity(self.record_count());
        for (section, buffer) in self.buffers() {
            for &(src_layer, dst_layer) in &section.layers {
                all.extend(buffer.records.iter().map(|&record| PlannedRecord {
                    component: section.index,
                    src_layer,
                    dst_layer,
                    kv: buffer.kv,
                    record,
                }));
            }
        }
        all
    }

    /// The plan as one entry for each run of bytes, in the order of [`Plan::records`]; runs that touch on both sides are one.
    pub fn descriptors(&self) -> Vec<Descriptor> {
        let mut all = Vec::new();
        self.descriptors_into(&mut all);
        all
    }

    /// [`Plan::descriptors`], appended to a vector whose memory can be used again.
    pub fn descriptors_into(&self, all: &mut Vec<Descriptor>) {
        all.reserve(self.descriptor_count());
        for (section, buffer) in self.buffers() {
            let rows = rows::rows(&buffer.records);
            for &(src_layer, dst_layer) in &section.layers {
                all.extend(rows.iter().map(|row| Descriptor {
                    component: section.index,
                    src_layer,
                    dst_layer,
                    kv: buffer.kv,
                    src_off: row.src_off,
                    dst_off: row.dst_off,
                    nbytes: row.nbytes,
                }));
            }
        }
    }

    fn buffers(&self) -> impl Iterator<Item = (&Section, &BufferPlan)> {
        self.sections
            .iter()
            .flat_map(|section| section.buffers.iter().map(move |buffer| (section, buffer)))
    }
}

impl Section {
    /// Name of the component.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The tokens that move. Without `exact_window`, whole pages: those from `page_start` up to the one of the last token.
    pub fn token_range(&self) -> TokenRange {
        self.range
    }

    /// Which side packs where a transport moves runs of bytes only.
    pub fn packing(&self) -> Packing {
        self.packing
    }

    /// Bytes that move; `u64::MAX` where they are more.
    pub fn nbytes(&self) -> u64 {
        let records = self.buffers.iter().flat_map(|buffer| &buffer.records);
        let layer = records.map(Record::nbytes).fold(0, u64::saturating_add);
        layer.saturating_mul(self.layers.len() as u64)
    }

    /// Strided records of all layers.
    pub fn record_count(&self) -> usize {
        self.layers.len() * self.buffers.iter().map(|buffer| buffer.records.len()).sum::<usize>()
    }

    /// Runs of bytes of all layers.
    pub fn descriptor_count(&self) -> usize {
        self.layers.len()
            * self
                .buffers
                .iter()
                .map(|buffer| rows::count(&buffer.records))
                .sum::<usize>()
    }
}

impl Packing {
    /// The name in Python and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::Rows => "rows",
        }
    }

    fn of(slice: HeadSlice, (src, dst): (u32, u32)) -> Self {
        match (slice.num_heads == src, slice.num_heads == dst) {
            (true, true) => Self::None,
            (false, true) => Self::Gather,
            (true, false) => Self::Scatter,
            (false, false) => Self::Rows,
        }
    }
}

pub(crate) fn make(pair: &Pair, request: &PlanRequest<'_>) -> Result<Plan, PlanError> {
    let (prefill, decode) = (pair.prefill().geometry(), pair.decode().geometry());
    let (from, to) = (
        Place::of(request.src_rank, prefill),
        Place::of(request.dst_rank, decode),
    );
    let carried = |paired: &Paired| paired.carried(from, to).is_some();
    if !pair.components().iter().any(carried) {
        return Err(PlanError::Route {
            src_rank: request.src_rank,
            dst_rank: request.dst_rank,
            writers: pair.writers(request.dst_rank),
        });
    }
    let known: Vec<&str> = pair.components().iter().map(|paired| paired.name.as_str()).collect();
    request.check(&known)?;
    let mut sections = Vec::new();
    for (index, paired) in (0..).zip(pair.components()) {
        if request.asks_for(&paired.name) {
            sections.push(section(pair, index, paired, request, (from, to))?);
        }
    }
    Ok(Plan {
        src_rank: from.stage * prefill.tp_size + from.tp,
        dst_rank: to.stage * decode.tp_size + to.tp,
        sections,
    })
}

fn section(
    pair: &Pair,
    index: u32,
    paired: &Paired,
    request: &PlanRequest<'_>,
    (from, to): (Place, Place),
) -> Result<Section, PlanError> {
    let geometry = pair.decode().geometry();
    let component = &geometry.components[index as usize];
    let state = component.kind == crate::Kind::Mamba;
    let page = paired.buffers.tokens;
    let (all, range) = request.ranges(paired, geometry, state)?;
    let mut section = Section {
        index,
        name: paired.name.clone(),
        range,
        packing: Packing::None,
        layers: Vec::new(),
        buffers: Vec::new(),
    };
    let Some((slice, layers)) = paired.carried(from, to) else {
        return Ok(section);
    };
    section.packing = Packing::of(slice, paired.heads);
    let whole = !request.exact_window;
    let tables = Tables {
        component: &paired.name,
        src: request.table(&paired.name, Side::Prefill)?,
        dst: request.table(&paired.name, Side::Decode)?,
        pages: if state { 1 } else { pages_of(request.seq_len, geometry) },
        held: request.prefix(&paired.name) / page,
        all,
    };
    let cuts: Vec<Cut> = if state {
        tables.whole(0..u64::from(!range.is_empty()), pair)?
    } else {
        tables.cuts(range, page, whole, pair)?
    };
    if !component.is_sliceable() && cuts.iter().any(|cut| cut.hi - cut.lo != page) {
        return Err(PlanError::Exact {
            component: paired.name.clone(),
            layout: component.layout,
        });
    }
    let pools = [pair.prefill(), pair.decode()].map(|engine| Pool(engine.pool(&paired.name)));
    for buffer in &paired.buffers.list {
        let shape = Shape::new(paired, slice, buffer.head, component.layout);
        shape.check_reach(&paired.name, &cuts)?;
        let records = stride::records(&shape, &cuts);
        proof::prove(&paired.name, &shape, &cuts, &records, pools)?;
        section.buffers.push(BufferPlan { kv: buffer.kv, records });
    }
    section.layers = layers.to_vec();
    Ok(section)
}

impl Paired {
    /// What moves between two ranks, if anything does.
    fn carried(&self, from: Place, to: Place) -> Option<(HeadSlice, &[(u32, u32)])> {
        let slice = self.slices.get(&(from.tp, to.tp))?;
        let layers = self.layers.get(&(from.stage, to.stage))?;
        Some((*slice, layers))
    }
}
