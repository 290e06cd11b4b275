use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{Device, Record};
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};

use super::flight::{Failed, Failure, Keep, Rebuilt};
use super::lane::Lane;
use super::placer::QUARANTINE;
use super::transport::KIND;
use super::{EngineMemory, EngineOperation, EngineSlice};
use crate::batch::{record_reading, records_writing};
use crate::budget::Spent;
use crate::copy::{Piece, Plan, Shape};
use crate::link::Grip;
use crate::pull::{no_map, pull_with};
use crate::push::push_with;
use crate::target::Claim;
use crate::wire::Place;
use crate::{Mapping, Memory, Pinned, Target, TransferError, TransferOptions};

/// An engine cuts large transfers itself, where that is of use.
const SHAPE: Shape = Shape {
    large_from: u64::MAX,
    max_rows: u64::MAX,
};

/// How long a peer has to show that it lives after an engine failed, so that the error says what it is.
const DEATH_AFTER_FAILURE: Duration = Duration::from_millis(500);

/// What stays in place until no slice of a transfer is under way: the memory here, and the pin over there.
pub(super) struct Hold {
    here: Here,
    _grip: Arc<Grip>,
    runtime: Handle,
}

impl Keep for Hold {
    fn quarantine(self) {
        let runtime = self.runtime.clone();
        runtime.spawn(async move {
            sleep(QUARANTINE).await;
            drop(self);
        });
    }
}

enum Here {
    Pull(Claim),
    Push {
        #[expect(dead_code, reason = "held, never looked at")]
        memory: Memory,
        #[expect(dead_code, reason = "held, never looked at")]
        spent: Spent,
    },
}

pub(super) struct EnginePinned {
    grip: Arc<Grip>,
    /// Address of the region in the owner's process, or on its device.
    remote: u64,
    lane: Arc<Lane<Hold>>,
}

impl EnginePinned {
    /// # Errors
    /// [`TransferError::Backend`] where the owner names no address at which the region may lie.
    pub(super) fn new(grip: Arc<Grip>, lane: Arc<Lane<Hold>>) -> Result<Self, TransferError> {
        match address(grip.place(), grip.len()) {
            Some(remote) => Ok(Self { grip, remote, lane }),
            None => Err(backend(
                &grip,
                "pin",
                None,
                format!("it says that the region is at {:?}", grip.place()),
            )),
        }
    }

    /// Moves the pieces, and proves that the pin was held until they had arrived. `record` gives the record of the batch that
    /// a byte of the region belongs to.
    async fn transfer(
        &self,
        operation: EngineOperation,
        slices: Vec<EngineSlice>,
        local: EngineMemory,
        here: Here,
        record: impl FnOnce(u64) -> Option<usize>,
    ) -> Result<Here, TransferError> {
        let hold = Hold {
            here,
            _grip: self.grip.clone(),
            runtime: Handle::current(),
        };
        let bytes = slices.iter().map(|slice| slice.len).sum();
        let moved = self.lane.run(operation, slices, local, hold).await;
        match moved {
            Ok(hold) => {
                self.grip.confirm().await?;
                Ok(hold.here)
            }
            // Where the peer died, the engine may know it first. One that answers lives.
            Err(Failed { failure, begun }) => match timeout(DEATH_AFTER_FAILURE, self.grip.confirm()).await {
                Ok(Err(lost)) => Err(lost),
                _ if !self.grip.link().is_alive() => Err(self.grip.link().peer_lost()),
                _ => {
                    let error = self.failed(failure, record);
                    // What went out before may wait in the peer's sockets.
                    let is_in_doubt = begun && operation == EngineOperation::Write;
                    Err(if is_in_doubt {
                        self.in_doubt(bytes, error.to_string())
                    } else {
                        error
                    })
                }
            },
        }
    }

    fn in_doubt(&self, bytes: u64, how: String) -> TransferError {
        TransferError::InDoubt {
            peer: self.grip.link().peer(),
            pid: self.grip.link().process().pid,
            region: self.grip.region(),
            bytes,
            how,
        }
    }

    fn failed(&self, failure: Failure, record: impl FnOnce(u64) -> Option<usize>) -> TransferError {
        let (peer, segment) = (self.grip.link().peer(), self.lane.segment());
        let backend = |what, record, problem| backend(&self.grip, what, record, problem);
        let of = |slice: &EngineSlice| record(slice.remote - self.remote);
        match failure {
            Failure::Register(error) => backend("register the memory of this side", None, error.to_string()),
            Failure::Submit { slice, error } => backend(
                "begin a transfer",
                of(&slice),
                format!(
                    "{error}, for {} bytes at {:#x} of segment {segment}; look whether that address is reachable from here",
                    slice.len, slice.remote
                ),
            ),
            Failure::Slice { slice, after } => backend(
                "move bytes",
                of(&slice),
                format!(
                    "the engine gave up on {} bytes at {:#x} of segment {segment} after {after:?}; try again",
                    slice.len, slice.remote
                ),
            ),
            Failure::Thread(error) => backend("look after a transfer", None, error.to_string()),
            Failure::Stuck {
                failures,
                within,
                rebuilt,
            } => TransferError::EngineStuck {
                peer,
                segment: segment.to_owned(),
                failures,
                within,
                advice: match rebuilt {
                    Rebuilt::Yes => "another engine was made: try again".to_owned(),
                    Rebuilt::Unknown => "make another engine, and another transport over it".to_owned(),
                    Rebuilt::Failed(error) => format!("another engine could not be made: {error}"),
                },
            },
        }
    }
}

#[async_trait]
impl Pinned for EnginePinned {
    fn len(&self) -> u64 {
        self.grip.len()
    }

    async fn pull(&self, records: &[Record], dst: &Target, options: TransferOptions) -> Result<(), TransferError> {
        let remote = self.remote;
        let local = span(dst.as_ptr().addr().get(), dst.len(), dst.device());
        pull_with(&self.grip, records, dst, &options, SHAPE, |plan, claim| async move {
            let slices = slices(&plan, |piece| (local.address + piece.dst, remote + piece.src));
            let record = |byte| Some(record_reading(records, byte));
            let moved = self.transfer(EngineOperation::Read, slices, local, Here::Pull(claim), record);
            match moved.await? {
                Here::Pull(claim) => Ok(claim),
                Here::Push { .. } => unreachable!("a pull gives its claim back"),
            }
        })
        .await
    }

    async fn push(&self, records: &[Record], src: &Memory, options: TransferOptions) -> Result<(), TransferError> {
        let remote = self.remote;
        let local = span(src.as_ptr().addr().get(), src.len(), src.device());
        let begun = AtomicU64::new(0);
        let pushed = push_with(&self.grip, records, src, &options, SHAPE, |plan, spent| {
            let memory = src.clone();
            begun.store(plan.bytes(), Ordering::Relaxed);
            let slices = slices(&plan, |piece| (local.address + piece.src, remote + piece.dst));
            let record = |byte| records_writing(records, byte).next();
            let moved = self.transfer(
                EngineOperation::Write,
                slices,
                local,
                Here::Push { memory, spent },
                record,
            );
            async { moved.await.map(drop) }
        });
        pushed.await.map_err(|error| {
            let how = match &error {
                TransferError::Deadline { after, .. } => format!("the engine did not finish within {after:?}"),
                // What a dead process had as memory is gone with it.
                TransferError::PeerLost { .. } if !self.grip.link().is_dead() => error.to_string(),
                _ => return error,
            };
            let bytes = begun.load(Ordering::Relaxed);
            if bytes == 0 {
                return error;
            }
            self.in_doubt(bytes, how)
        })
    }

    async fn map(&self) -> Result<Mapping, TransferError> {
        Err(no_map(KIND.name()))
    }
}

/// Where the region is: its last byte has an address, too.
fn address(place: Place, len: u64) -> Option<u64> {
    match place {
        Place::Address(address) => address.checked_add(len).map(|_| address),
        _ => None,
    }
}

fn backend(grip: &Grip, what: &'static str, record: Option<usize>, problem: String) -> TransferError {
    TransferError::Backend {
        transport: KIND.name(),
        peer: grip.link().peer(),
        region: grip.region(),
        what,
        record,
        problem,
    }
}

fn span(address: usize, len: u64, device: Device) -> EngineMemory {
    EngineMemory {
        address: address as u64,
        len,
        device,
    }
}

/// The plan's pieces between addresses, which `addresses` gives: here, and over there.
fn slices(plan: &Plan, addresses: impl Fn(&Piece) -> (u64, u64)) -> Vec<EngineSlice> {
    let slice = |piece: Piece| {
        let (local, remote) = addresses(&piece);
        EngineSlice {
            local,
            remote,
            len: piece.len,
        }
    };
    plan.pieces().into_iter().map(slice).collect()
}

impl fmt::Debug for EnginePinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EnginePinned")
            .field("grip", &self.grip)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_address_that_has_room_for_the_region_counts() {
        assert_eq!(address(Place::Address(4096), 4096), Some(4096));
        assert_eq!(address(Place::Address(u64::MAX - 4095), 4096), None);
        assert_eq!(address(Place::Served, 4096), None);
    }
}
