//! The registered memory of one payload.

mod digested;
mod staged;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::FutureExt;
use futures::future::{BoxFuture, join_all};
use stagewire_core::{ByteCount, Chunking, Manifest, RegionRef, TensorSpec};
use stagewire_transfer::{Arena, ArenaError, Memory, Region, RegisterOptions, Transport, empty_region};

use crate::PublishError;
use crate::carriers::Carriers;
use crate::live::Keep;
use crate::registered::Registry;
use digested::Digested;
use staged::Staged;

/// What others can read of this process's memory, and how.
#[derive(Debug)]
pub(crate) struct Offer<'a> {
    pub(crate) arena: &'a Arena,
    pub(crate) carriers: &'a Carriers,
    pub(crate) registered: &'a Registry,
    /// Counts bytes that were copied into the arena.
    pub(crate) copied: &'a Arc<AtomicU64>,
}

/// Registered memory of one payload, and what is to be copied there before a chunk is shown.
pub(crate) struct Pages {
    /// One per tensor that has bytes.
    regions: Vec<Region>,
    staged: Vec<Staged>,
    copied: Arc<AtomicU64>,
    /// Of every tensor, where the producer's bytes are to be compared with what consumers read.
    digested: Option<Digested>,
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages")
            .field("regions", &self.regions.len())
            .field("staged", &self.staged.len())
            .finish_non_exhaustive()
    }
}

impl Keep for Pages {
    fn complete(&self, index: u32) {
        let bytes: u64 = self.staged.iter().map(|staged| staged.copy(index)).sum();
        self.copied.fetch_add(bytes, Ordering::Relaxed);
    }

    fn digest(&self, index: u32) -> Option<u64> {
        self.digested.as_ref().map(|digested| digested.of(index))
    }

    fn bytes(&self) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        let readable = self.regions.iter().all(|region| region.append_to(&mut bytes));
        readable.then_some(bytes)
    }

    fn close(&self) {
        self.regions.iter().for_each(Region::release);
    }

    fn unread(&self) -> BoxFuture<'static, ()> {
        let idle: Vec<_> = self.regions.iter().map(Region::once_idle).collect();
        join_all(idle).map(drop).boxed()
    }

    fn sealed(&self) {
        self.regions.iter().for_each(Region::seal);
    }
}

impl Pages {
    /// Registers the memory of every tensor. Returns one reference per tensor, in the order of the manifest.
    pub(crate) fn register(
        offer: &Offer<'_>,
        request: &str,
        manifest: &Manifest,
        digests: bool,
        tensors: Vec<Memory>,
    ) -> Result<(Self, Vec<RegionRef>), PublishError> {
        let expected = manifest.tensors().count();
        if tensors.len() != expected {
            return Err(PublishError::TensorCount {
                request: request.to_owned(),
                expected,
                found: tensors.len(),
            });
        }
        for (index, (spec, memory)) in manifest.tensors().zip(&tensors).enumerate() {
            let (expected, found) = (spec.nbytes(), ByteCount(memory.len()));
            if found != expected {
                return Err(PublishError::TensorSize {
                    request: request.to_owned(),
                    index,
                    found,
                    expected,
                });
            }
        }
        let digested = digests.then(|| Digested::new(manifest, &tensors));
        let mut pages = Self {
            digested,
            regions: Vec::with_capacity(expected),
            staged: Vec::new(),
            copied: Arc::clone(offer.copied),
        };
        let mut references = Vec::with_capacity(expected);
        for (index, (spec, memory)) in manifest.tensors().zip(tensors).enumerate() {
            if memory.is_empty() {
                references.push(empty_region(offer.carriers.first().name()));
                continue;
            }
            if let Some(region) = offer.registered.grant(&memory) {
                pages.add(region, &mut references);
                continue;
            }
            if let Memory::Writable(_) = memory {
                let request = request.to_owned();
                return Err(PublishError::Writable { request, index });
            }
            let place = place(offer, memory, spec, manifest.chunking());
            let (transport, memory, staged) = place.map_err(|source| PublishError::Arena {
                request: request.to_owned(),
                index,
                nbytes: spec.nbytes(),
                source,
            })?;
            pages.staged.extend(staged);
            let options = RegisterOptions { device: spec.device() };
            let region = transport.register(memory, options);
            let region = region.map_err(|source| PublishError::Register {
                request: request.to_owned(),
                index,
                source,
            })?;
            pages.add(region, &mut references);
        }
        Ok((pages, references))
    }

    fn add(&mut self, region: Region, references: &mut Vec<RegionRef>) {
        // Until every chunk is complete, the producer writes those that are not.
        region.open();
        references.push(region.reference());
        self.regions.push(region);
    }
}

/// By which transport memory is offered, as it is or as the copy that it becomes.
fn place<'a>(
    offer: &Offer<'a>,
    memory: Memory,
    spec: &TensorSpec,
    chunking: Option<Chunking>,
) -> Result<(&'a dyn Transport, Memory, Option<Staged>), ArenaError> {
    let carriers = offer.carriers;
    if let Some(transport) = carriers.preferred(&memory) {
        return Ok((transport, memory, None));
    }
    let mut full = None;
    if let (Some(shm), Memory::Borrowed(borrowed)) = (carriers.copies(&memory), &memory) {
        match Staged::new(offer.arena, borrowed.clone(), spec, chunking) {
            Ok(staged) => return Ok((shm, Memory::Arena(staged.extent()), Some(staged))),
            Err(error) => full = Some(error),
        }
    }
    match (carriers.any(&memory), full) {
        (Some(transport), _) => Ok((transport, memory, None)),
        (None, Some(full)) => Err(full),
        // Which says why it does not take it.
        (None, None) => Ok((carriers.first(), memory, None)),
    }
}
