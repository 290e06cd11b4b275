//! The registered memory of one payload.

mod staged;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use stagewire_core::{ByteCount, Device, Manifest, RegionRef};
use stagewire_transfer::{Arena, Memory, Region, RegisterOptions, Transport, empty_region};

use crate::PublishError;
use crate::live::Keep;
use staged::Staged;

/// What others can read of this process's memory, and how.
#[derive(Debug)]
pub(crate) struct Offer<'a> {
    pub(crate) arena: &'a Arena,
    /// Whether memory outside the arena may be copied into it.
    pub(crate) stage: bool,
    pub(crate) shm: &'a dyn Transport,
    /// For memory outside the arena; `None` where it is copied into the arena instead.
    pub(crate) cma: Option<&'a dyn Transport>,
    /// For memory outside the arena for which neither cma nor the arena has a place.
    pub(crate) tcp: Option<&'a dyn Transport>,
    /// Counts bytes that were copied into the arena.
    pub(crate) copied: &'a Arc<AtomicU64>,
}

/// Registered memory of one payload, and what is to be copied there before a chunk is shown.
pub(crate) struct Pages {
    /// One per tensor that has bytes.
    regions: Vec<Region>,
    staged: Vec<Staged>,
    copied: Arc<AtomicU64>,
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
        let mut pages = Self {
            regions: Vec::with_capacity(expected),
            staged: Vec::new(),
            copied: Arc::clone(offer.copied),
        };
        let mut references = Vec::with_capacity(expected);
        for (index, (spec, memory)) in manifest.tensors().zip(tensors).enumerate() {
            if memory.is_empty() {
                references.push(empty_region(offer.shm.name()));
                continue;
            }
            let (transport, memory) = match (memory, offer.cma) {
                (Memory::Arena(extent), _) => (offer.shm, Memory::Arena(extent)),
                (Memory::Borrowed(borrowed), Some(cma)) => (cma, Memory::Borrowed(borrowed)),
                // Where there is no cma, shm says why it does not take it.
                (Memory::Writable(_), _) => {
                    let request = request.to_owned();
                    return Err(PublishError::Writable { request, index });
                }
                // Which no arena takes: the transport says what can.
                (Memory::Borrowed(borrowed), None) if borrowed.device() != Device::Cpu => {
                    (offer.shm, Memory::Borrowed(borrowed))
                }
                (Memory::Borrowed(borrowed), None) => {
                    let stage = || Staged::new(offer.arena, borrowed.clone(), spec, manifest.chunking());
                    match (offer.stage.then(stage), offer.tcp) {
                        (Some(Ok(staged)), _) => {
                            let memory = Memory::Arena(staged.extent());
                            pages.staged.push(staged);
                            (offer.shm, memory)
                        }
                        (_, Some(tcp)) => (tcp, Memory::Borrowed(borrowed)),
                        // Which says why it does not take it.
                        (None, None) => (offer.shm, Memory::Borrowed(borrowed)),
                        (Some(Err(source)), None) => {
                            return Err(PublishError::Arena {
                                request: request.to_owned(),
                                index,
                                nbytes: spec.nbytes(),
                                source,
                            });
                        }
                    }
                }
            };
            let options = RegisterOptions { device: spec.device() };
            let region = transport.register(memory, options);
            let region = region.map_err(|source| PublishError::Register {
                request: request.to_owned(),
                index,
                source,
            })?;
            // Until every chunk is complete, the producer writes those that are not.
            region.open();
            references.push(region.reference().clone());
            pages.regions.push(region);
        }
        Ok((pages, references))
    }
}
