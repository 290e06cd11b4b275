//! That a finished plan moves each needed byte once, from the right place, and nothing else.
//!
//! What is needed is derived anew, from what was asked for and from what each engine says of itself: pages and tokens
//! (`need`), heads, layers, buffers and places (`held`). Of what the planner made, the plan alone is read, and the choice
//! among the replicas of a head, which is free as long as every head of the destination has one writer that holds it.

mod bytes;
mod held;
#[cfg(test)]
mod mutants;
mod need;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use stagewire_core::Record;

use super::{PlanError, PlanRequest, Section};
use crate::{HeadSlice, Layout, Pair};
use held::Held;
use need::Page;

/// Proves one component of a plan; `writers` are all who write to the destination.
pub(super) fn prove(
    pair: &Pair,
    request: &PlanRequest<'_>,
    section: &Section,
    writers: &[HeadSlice],
) -> Result<(), PlanError> {
    let proven = check(pair, request, section, writers);
    proven.map_err(|problem| PlanError::Unproven {
        component: section.name.clone(),
        problem,
    })
}

fn check(pair: &Pair, request: &PlanRequest<'_>, section: &Section, writers: &[HeadSlice]) -> Result<(), String> {
    let (prefill, decode) = (pair.prefill().geometry(), pair.decode().geometry());
    let src = Held::of(prefill, section.index, request.src_rank);
    let dst = Held::of(decode, section.index, request.dst_rank);
    let mut heads = 0..0;
    let mut next = dst.heads.start;
    for slice in writers {
        let writer = Held::of(prefill, section.index, slice.src_rank);
        let first = |held: &Held<'_>, start: u32| held.heads.start + u64::from(start);
        let moved = next..next + u64::from(slice.num_heads);
        if first(&writer, slice.src_head_start) != moved.start
            || first(&dst, slice.dst_head_start) != moved.start
            || moved.end > writer.heads.end
        {
            return Err(format!("heads {moved:?} are not what {slice:?} says"));
        }
        if slice.src_rank == request.src_rank % prefill.tp_size {
            if !heads.is_empty() {
                return Err(format!("prefill rank {} writes twice", slice.src_rank));
            }
            heads = moved.clone();
        }
        next = moved.end;
    }
    if next != dst.heads.end {
        return Err(format!("heads {:?} are needed, but written up to {next}", dst.heads));
    }
    let layers = if heads.is_empty() {
        Vec::new()
    } else {
        layers(&src, &dst)?
    };
    if section.layers != layers {
        return Err(format!("layers {:?} move where {layers:?} are needed", section.layers));
    }
    let buffers: Vec<u32> = src.buffers().filter(|_| !layers.is_empty()).collect();
    if !section
        .buffers
        .iter()
        .map(|buffer| buffer.kv)
        .eq(buffers.iter().copied())
    {
        return Err(format!("it does not move the buffers {buffers:?}"));
    }
    if buffers.is_empty() {
        return Ok(());
    }
    let pages = need::pages(request, &dst)?;
    let move_ = Move { src, dst, heads };
    let mut proven: Option<(u64, &Arc<[Record]>)> = None;
    for buffer in &section.buffers {
        let bytes = move_.head_bytes(buffer.kv)?;
        if proven.is_none_or(|(of, records)| of != bytes || !Arc::ptr_eq(records, &buffer.records)) {
            move_.check(bytes, &pages, &buffer.records)?;
        }
        proven = Some((bytes, &buffer.records));
    }
    Ok(())
}

/// The layers that both ranks have, in the destination's order.
fn layers(src: &Held<'_>, dst: &Held<'_>) -> Result<Vec<(u32, u32)>, String> {
    let places: BTreeMap<u32, u32> = src.layer_ids().zip(0..).collect();
    let pairs = dst.layer_ids().zip(0..);
    let pairs: Vec<_> = pairs
        .filter_map(|(id, layer)| Some((*places.get(&id)?, layer)))
        .collect();
    if dst.component.layout != Layout::PageMajor || pairs.is_empty() {
        return Ok(pairs);
    }
    // One buffer has them all.
    if src.layer_ids().eq(dst.layer_ids()) {
        Ok(vec![(0, 0)])
    } else {
        Err("pages hold other layers".to_owned())
    }
}

/// Heads that move from one rank to another.
struct Move<'a> {
    src: Held<'a>,
    dst: Held<'a>,
    heads: Range<u64>,
}

impl Move<'_> {
    fn head_bytes(&self, kv: u32) -> Result<u64, String> {
        let (src, dst) = (self.src.head_bytes(kv), self.dst.head_bytes(kv));
        if src == dst {
            Ok(src)
        } else {
            Err(format!("a head has {src} bytes at prefill and {dst} at decode"))
        }
    }

    fn check(&self, bytes: u64, pages: &[Page], records: &[Record]) -> Result<(), String> {
        // As far as the pool goes, or else as far as there are offsets.
        let end = |held: &Held<'_>, furthest: Option<u64>| {
            let (page_bytes, furthest) = (held.page_bytes(bytes), furthest.unwrap_or(0));
            match furthest.checked_add(1).and_then(|pages| pages.checked_mul(page_bytes)) {
                Some(_) => Ok(held.pages.map_or(u64::MAX, |pages| pages.saturating_mul(page_bytes))),
                None => Err(format!("page {furthest} has no offset")),
            }
        };
        let src_end = end(&self.src, pages.iter().map(|page| page.src).max())?;
        let dst_end = end(&self.dst, pages.iter().map(|page| page.dst).max())?;
        for record in records {
            record.check(src_end, dst_end).map_err(|error| error.to_string())?;
        }
        let whole = |page: &Page| page.tokens == (0..self.src.tokens);
        let as_they_are = self.heads == self.src.heads && self.heads == self.dst.heads && pages.iter().all(whole);
        if !self.src.component.is_sliceable() && !as_they_are {
            return Err("it cuts pages that cannot be cut".to_owned());
        }
        bytes::compare(
            records.iter().copied(),
            pages.iter().map(|page| self.block(bytes, page)),
        )
    }

    /// What is needed of one page.
    fn block(&self, bytes: u64, page: &Page) -> Record {
        let (tokens, heads) = (page.tokens.end - page.tokens.start, self.heads.end - self.heads.start);
        let (width, rows, next) = match self.dst.component.layout {
            Layout::Hnd => (tokens * bytes, heads, (0, 1)),
            _ => (heads * bytes, tokens, (1, 0)),
        };
        let at = |held: &Held<'_>, page: u64, token: u64, head: u64| held.offset(page, token, head, bytes);
        // From one row to the next is as far in every page; in the last there can be, the one after the last row has no offset.
        let pitch = |held: &Held<'_>| at(held, 0, next.0, held.heads.start + next.1) - at(held, 0, 0, held.heads.start);
        let record = Record {
            src_offset: at(&self.src, page.src, page.tokens.start, self.heads.start),
            dst_offset: at(&self.dst, page.dst, page.tokens.start, self.heads.start),
            width,
            rows,
            src_pitch: pitch(&self.src),
            dst_pitch: pitch(&self.dst),
        };
        record.merged()
    }
}
