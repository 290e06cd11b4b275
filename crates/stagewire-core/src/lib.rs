//! The words of Stagewire, and nothing else.
//!
//! *What it is.* Ids and units, tensor and payload schema (the [`Manifest`]), chunk plans and the strided
//! [`Record`]s they turn into, the life of a payload, handles, error classes. Every other crate speaks these.
//!
//! *What it is not.* No I/O, no clock, no randomness, no runtime: time and random numbers come in as arguments
//! and `clippy.toml` forbids the rest. Nothing here moves a byte.
//!
//! *Guarantees.* Everything that crosses a process boundary is versioned and rejects what it does not know;
//! size arithmetic is checked; [`Capability`] never shows in `Debug`.
//!
//! ```
//! use stagewire_core::{Chunking, DType, TensorSpec};
//!
//! // A Wan latent [B, C, T, H, W], cut along T into 8 chunks: 21 frames are 3 3 3 3 3 2 2 2.
//! let latent = TensorSpec::new(DType::BF16, [1, 16, 21, 60, 104])?;
//! let chunking = Chunking::new(2, 8)?;
//! let first = chunking.slice(&latent, 0)?;
//! assert_eq!((first.start, first.len), (0, 3));
//! // A chunk is B × C strided runs of 3 × H × W elements.
//! assert_eq!((first.run.rows, first.run.width), (16, 3 * 60 * 104 * 2));
//! # Ok::<(), stagewire_core::SchemaError>(())
//! ```

mod capability;
mod chunk;
mod dtype;
mod error;
mod handle;
mod id;
mod lease;
mod manifest;
mod member;
mod payload;
mod record;
mod tensor;
mod timeline;
mod units;

pub use capability::Capability;
pub use chunk::{ChunkSlice, Chunking, Run};
pub use dtype::{DType, Device};
pub use error::{Classify, ErrorClass, Failure};
pub use handle::{Handle, HandleError, Peer, ProcessRef, RegionRef, TransferMode, TransportAddress};
pub use id::{Attempt, Epoch, Incarnation, JobId, NameError, PayloadId, StageName, Token};
pub use lease::{Lease, LeaseError};
pub use manifest::{Entry, EntryValue, MAX_METADATA, Manifest, PayloadKind};
pub use member::Member;
pub use payload::{PayloadLife, PayloadPhase};
pub use record::{Record, RecordError};
pub use tensor::{SchemaError, TensorSpec};
pub use timeline::{Handover, Progress};
pub use units::{ByteCount, ParseByteCountError, Timestamp};
