//! Handing over KV caches from prefill to decode: rooms, over any transport.
//!
//! *What it is.* A [`Sender`] is one rank of a prefill engine whose cache others may read, a [`Receiver`] one rank of a
//! decode engine that reads it. Each request is a *room*, a number that both sides know. The sender opens it with
//! [`Sender::room`] and announces chunk by chunk which pages hold which tokens; the receiver opens it with
//! [`Receiver::room`] and pulls what it needs of each chunk from every sender that has any of it, straight into its own
//! pages. `stagewire-kv` says who has what; both engines may have different tensor-parallel sizes.
//!
//! *What it is not.* It allocates no pages, evicts none, and brings no rooms together: who decodes what prefill computes is
//! the caller's to decide, and so is how [`SenderHandle`]s get to decode.
//!
//! # Guarantees
//!
//! - A room of the receiver succeeds only when every chunk of every component has come from every sender that it needs,
//!   and each of them has confirmed, after the last byte, that its pages were kept until then. A copy of pages that were
//!   used again is never taken for good.
//! - Failed is final. A reason that one side gives reaches the others.
//! - Pages of a sender's room are its readers' until [`SenderRoom::released`]: each has everything, has let go, has died,
//!   or was cut off. Pages of a receiver's room are written by nobody after [`ReceiverRoom::released`]; until then they are
//!   refused to other rooms.
//! - A number may be used again at once, in a later life ([`RoomId`]): who still asks for the old room is told
//!   `kv.superseded`, who asks for the new one too early waits.
//! - A rank of prefill that no rank of decode needs is told so when decode opens the room, and succeeds at once.
//! - What the two sides say to each other may be lost, doubled or come late: a receiver asks for the state of a room,
//!   again and again, from what it has heard on, and everything that it says can be said twice.
//! - A peer that dies fails its rooms within a second, one that is silent after [`Heartbeat::limit`]. Nothing waits longer
//!   than the deadline of its room.
//! - An engine that does not fit is refused at its greeting, with the handshake's reason, and nobody else notices.
//!
//! # Non-guarantees
//!
//! - That pages hold what they are said to hold. They must not be written from [`SenderRoom::send`] until the room is released.
//! - That a number can be used again in the same life, unless all sides have succeeded: questions about the old room may
//!   still be on their way, and can end the new one.
//! - A receiver that gives up before the sender has opened its room is not remembered there: that room waits for another
//!   receiver until its deadline.
//!
//! # Which side packs
//!
//! Decode pulls, over every transport: a copy that comes too late harms nobody, whereas a write would. `shm`, `cma` and
//! `tcp` execute strided records as they are. Over Mooncake and NIXL, rows go through scratch, in the arena of the side whose pages
//! are strided; where there is no room in it, row by row.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use stagewire_connector::kv::{CacheMemory, ChunkSpec, Receiver, ReceiverOptions, RoomSpec, Sender, SenderOptions};
//! use stagewire_connector::{Connector, ConnectorOptions};
//! use stagewire_core::{DType, StageName};
//! use stagewire_kv::{Component, Engine, Geometry};
//! use stagewire_transfer::{Borrowed, Memory, Target};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let run_dir = dir.path().join("run");
//! // Two connectors, as two processes would have them.
//! let prefill = Connector::start(ConnectorOptions::new(&run_dir, StageName::new("prefill")?)).await?;
//! let decode = Connector::start(ConnectorOptions::new(&run_dir, StageName::new("decode")?)).await?;
//!
//! // One layer of two heads, pages of 4 tokens; two ranks of prefill, one of decode.
//! let full = Component::mha("full", 1, 2, [8, 8], DType::U8);
//! let engine = |tp| Engine::new(Geometry::new(tp, 4, vec![full.clone()]));
//! let mut handles = Vec::new();
//! let mut rooms = Vec::new();
//! for rank in 0..2 {
//!     // K and V, ten pages each, of one head.
//!     let memory = [1, 2].map(|kv| Memory::from(Borrowed::from(vec![10 * rank as u8 + kv; 10 * 4 * 8])));
//!     let cache = CacheMemory::one_each(memory);
//!     let sender = Sender::new(&prefill, engine(2)?, rank, cache, SenderOptions::default())?;
//!     let room = sender.room(7, 6, Duration::from_secs(10))?;
//!     room.send(ChunkSpec::new(0..6).pages("full", [3, 5]).last())?;
//!     handles.push(sender.handle());
//!     rooms.push((sender, room));
//! }
//! // In practice, decode allocates with `Target::new` over its own tensors, and reads them itself.
//! let cache = CacheMemory::one_each([Target::allocate(10 * 4 * 16)?, Target::allocate(10 * 4 * 16)?]);
//! let receiver = Receiver::new(&decode, engine(1)?, 0, cache, ReceiverOptions::default())?;
//! let room = receiver.room(RoomSpec::new(7, handles, 6).pages("full", [1, 2]))?;
//! // Two pages of four tokens, each with two heads of 8 bytes, K and V.
//! assert_eq!(room.finished().await?.nbytes, 8 * 2 * 8 * 2);
//! for (_, room) in &rooms {
//!     room.released().await;
//! }
//! # Ok(())
//! # }
//! ```

mod cache;
mod chunk;
mod desk;
mod error;
mod failure;
mod heartbeat;
mod id;
mod incoming;
mod outgoing;
mod protocol;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;

pub use cache::{CacheMemory, CachePlace};
pub use chunk::ChunkSpec;
pub use error::KvError;
pub use heartbeat::Heartbeat;
pub use id::RoomId;
pub use protocol::SenderHandle;
pub use receiver::{Received, Receiver, ReceiverOptions, ReceiverRoom, RoomSpec};
pub use sender::{Sender, SenderOptions, SenderRoom};

pub(crate) use desk::{Desk, Visit};

use stagewire_core::Failure;

/// How far a room is. It never goes back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// The sides have not all met yet.
    Bootstrapping,
    /// They have met, and nothing is announced.
    Waiting,
    /// Chunks are announced.
    Transferring,
    /// The other side has everything, or everything is here.
    Success,
    /// It ended, for this reason. Final.
    Failed(Failure),
}

impl Phase {
    /// Whether nothing comes after it.
    pub const fn is_terminal(&self) -> bool {
        matches!(self, Self::Success | Self::Failed(_))
    }
}
