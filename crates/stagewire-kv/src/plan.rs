//! One room: from page tables to records.
//!
//! `request` is what is asked for, `cuts` the pages and the tokens of each that move, `shape` where the bytes of a page
//! are, `stride` the records, `rows` the same as one entry for each run of bytes. `proof` shares none of it.

mod cuts;
mod error;
mod proof;
mod request;
mod rows;
mod shape;
mod stride;

use std::sync::Arc;

use stagewire_core::Record;

use crate::pair::{Paired, Place};
use crate::window::TokenRange;
use crate::{HeadSlice, Kind, Layout, Pair};
use cuts::{Cut, Tables};
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
    /// Shared with the buffer before where both are alike.
    records: Arc<[Record]>,
}

/// Which side should copy through scratch where a transport moves runs of bytes only. Never both: the narrow side, whose
/// ranks have fewer heads, sends or gets all of them, so its pages are contiguous. Head after head, whole pages are
/// contiguous on both sides, however few of the heads move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Packing {
    /// On both sides a page is one run of bytes: runs of pages move as they are.
    None,
    /// The source is wider: gather into scratch there, write straight into the destination's pages.
    Gather,
    /// The destination is wider: write the source's pages into scratch there, scatter.
    Scatter,
    /// On neither side, as where the sizes do not divide each other: row by row.
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

    /// Number of [`Plan::records`]; `usize::MAX` where they are more.
    pub fn record_count(&self) -> usize {
        let sections = self.sections.iter().map(Section::record_count);
        sections.fold(0, usize::saturating_add)
    }

    /// Number of [`Plan::descriptors`]; `usize::MAX` where they are more.
    pub fn descriptor_count(&self) -> usize {
        let sections = self.sections.iter().map(Section::descriptor_count);
        sections.fold(0, usize::saturating_add)
    }

    /// The plan as strided records, one for each run of pages, by (component, kv, destination layer, destination offset).
    ///
    /// # Errors
    /// [`PlanError::Memory`] where there is not enough for so many.
    pub fn records(&self) -> Result<Vec<PlannedRecord>, PlanError> {
        let mut all = Vec::new();
        reserve(&mut all, self.record_count())?;
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
        Ok(all)
    }

    /// The plan as one entry for each run of bytes, in the order of [`Plan::records`]; runs that touch on both sides are one.
    ///
    /// # Errors
    /// [`PlanError::Memory`] where there is not enough for so many.
    pub fn descriptors(&self) -> Result<Vec<Descriptor>, PlanError> {
        let mut all = Vec::new();
        self.descriptors_into(&mut all)?;
        Ok(all)
    }

    /// [`Plan::descriptors`], appended to a vector whose memory can be used again.
    ///
    /// # Errors
    /// [`PlanError::Memory`] where there is not enough for so many.
    pub fn descriptors_into(&self, all: &mut Vec<Descriptor>) -> Result<(), PlanError> {
        reserve(all, self.descriptor_count())?;
        for (section, buffer) in self.buffers() {
            let rows = rows::rows(&buffer.records)?;
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
        Ok(())
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
        let records = self.buffers.iter().flat_map(|buffer| buffer.records.iter());
        let layer = records.map(Record::nbytes).fold(0, u64::saturating_add);
        layer.saturating_mul(self.layers.len() as u64)
    }

    /// Strided records of all layers.
    pub fn record_count(&self) -> usize {
        let layer: usize = self.buffers.iter().map(|buffer| buffer.records.len()).sum();
        self.layers.len().saturating_mul(layer)
    }

    /// Runs of bytes of all layers.
    pub fn descriptor_count(&self) -> usize {
        let layer: usize = self.buffers.iter().map(|buffer| rows::count(&buffer.records)).sum();
        self.layers.len().saturating_mul(layer)
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

    fn of(slice: HeadSlice, (src, dst): (u32, u32), layout: Layout, whole_pages: bool) -> Self {
        let is_run = |heads: u32| match layout {
            Layout::Hnd => whole_pages || slice.num_heads == 1,
            _ => slice.num_heads == heads,
        };
        match (is_run(src), is_run(dst)) {
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
    if !pair.components.iter().any(carried) {
        return Err(PlanError::Route {
            src_rank: request.src_rank,
            dst_rank: request.dst_rank,
            writers: pair.writers(request.dst_rank),
        });
    }
    let known: Vec<&str> = pair.components.iter().map(|paired| paired.name.as_str()).collect();
    request.check(&known)?;
    let mut sections = Vec::new();
    for (index, paired) in (0..).zip(&pair.components) {
        if request.asks_for(&paired.name) {
            let section = section(pair, index, paired, request, (from, to))?;
            proof::prove(pair, request, &section, &paired.slices[to.tp as usize])?;
            sections.push(section);
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
    let state = component.kind == Kind::Mamba;
    let page = paired.buffers.tokens;
    let range = request.range(paired, geometry, state)?;
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
    let tables = Tables {
        component: &paired.name,
        src: request.table(&paired.name, Side::Prefill)?,
        dst: request.table(&paired.name, Side::Decode)?,
        needed: component.pages(geometry.page_size, request.seq_len),
        pools: [pair.prefill(), pair.decode()].map(|engine| engine.pool(&paired.name)),
    };
    let cuts: Vec<Cut> = tables.cuts(if state { range.as_state() } else { range }, page, request.exact_window)?;
    let whole_pages = cuts.iter().all(|cut| cut.hi - cut.lo == page);
    if !component.is_sliceable() && !whole_pages {
        return Err(PlanError::Exact {
            component: paired.name.clone(),
            layout: component.layout,
        });
    }
    section.packing = Packing::of(slice, paired.heads, component.layout, whole_pages);
    let mut last: Option<(u64, Arc<[Record]>)> = None;
    for buffer in &paired.buffers.list {
        let records = match last {
            Some((head, records)) if head == buffer.head => records,
            _ => {
                let shape = Shape::new(paired, slice, buffer.head, component.layout);
                shape.check_reach(&paired.name, &cuts)?;
                stride::records(&shape, &cuts).into()
            }
        };
        last = Some((buffer.head, Arc::clone(&records)));
        section.buffers.push(BufferPlan { kv: buffer.kv, records });
    }
    section.layers = layers.to_vec();
    Ok(section)
}

/// Room for so many more entries.
fn reserve<T>(list: &mut Vec<T>, more: usize) -> Result<(), PlanError> {
    list.try_reserve(more).map_err(|_| PlanError::Memory {
        entries: more as u64,
        nbytes: (more as u64).saturating_mul(size_of::<T>() as u64),
    })
}
