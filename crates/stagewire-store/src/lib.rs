//! Keeps payloads apart from the processes that made them.
//!
//! *What it is.* The [`Store`] trait (create, write in place, seal, get, fetch, delete), the [`TokenGate`] that keeps
//! superseded attempts out, and [`HostStore`], which keeps objects in the shared memory of its process, where other
//! processes of the host read them without a copy, and in files when that memory is short.
//!
//! *What it is not.* It does not talk to other processes: `stagewire-connector` pulls payloads in and hands them out.
//!
//! *Guarantees.* An object is readable only when it is complete, and never changes after. Put-if-absent is truthful:
//! of several writers of one key exactly one gets it, and the others are told. The bytes of all objects stay under the
//! bound, in whole pages for each part, those included that are gone but still read; an error about space says what
//! holds it. A store that was opened as a durable one survives the end of its process, however that comes:
//! what was sealed and not deleted is there again, byte for byte, for the next process; see [`HostStore::open`] and
//! [`HostStore::leave`]. Only [`HostStore::close`] ends it with everything in it.
//!
//! *Who goes when room is needed.* First [`Retention::Cached`] objects, by GreedyDual-Size-Frequency: cheap, large and
//! seldom read ones first. Then [`Retention::Held`] ones move to files, if the store has a place for them
//! ([`SpillOptions`]), those whose last use is longest ago first; the others stay until they are deleted. Then
//! [`Retention::SoftPinned`] ones, by their last use. What somebody reads stays where it is. Nothing is evicted that would
//! not make enough room for somebody who waits. An object with a deadline is gone when it has come, read or not.
//!
//! *Files.* An object can be read throughout: from memory until all of it is on the disk, with direct I/O where the file
//! system can do that, and then from the file, straight into where the reader wants it. A file whose bytes do not have the
//! digest of those that were written is an error, never other bytes. When a write fails the object stays in memory, and
//! whoever waits for room is told why there is none.
//!
//! *Non-guarantees.* A copy into an aborted draft may run on for a moment; its pages are free only then, although the
//! store's books already show them as free. The arena's own bound holds all the same. Objects in memory do not survive
//! the machine, nor the end of store and keeper at the same time.
//!
//! ```
//! use std::sync::Arc;
//! use stagewire_core::{ByteCount, PayloadId};
//! use stagewire_store::{HostStore, NewObject, Store, TokenGate};
//! # use stagewire_transfer::{Host, HostOptions};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let incarnation = "00000000-0000-4000-8000-000000000001".parse()?;
//! # let host = Host::start(HostOptions { dir: dir.path().join("peers"), incarnation, arena_limit: ByteCount(1 << 20) }).await?;
//! let store = HostStore::new(&host, ByteCount(1 << 20), Arc::new(TokenGate::open()));
//! let payload: PayloadId = "00000000-0000-4000-8000-000000000002".parse()?;
//!
//! let mut draft = store.create(NewObject::new(payload, [ByteCount(5)])).await?;
//! draft.bytes_mut(0)?.copy_from_slice(b"bytes");
//! assert!(store.get(payload).await.is_err(), "not readable before it is sealed");
//! draft.seal().await?;
//!
//! assert_eq!(store.get(payload).await?.part(0), Some(b"bytes".as_slice()));
//! store.delete(payload, None).await?;
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod gate;
mod host;
mod journal;
mod keeper;
mod lock;
mod recover;
mod reservation;
mod spill;
mod stats;
mod store;
mod usage;

pub use error::StoreError;
pub use gate::{Fenced, TokenGate};
pub use host::{Departure, Departures, HostStore};
pub use journal::JournalError;
pub use keeper::{KeeperCommand, KeeperError, KeeperOptions, LINGER, run as run_keeper};
pub use lock::StoreLock;
pub use recover::{DurableOptions, LeaveError, OpenError, Recovery, StoreOptions, Survivor};
pub use reservation::Reservation;
pub use spill::{Digest, SpillFault, SpillOptions};
pub use stats::StoreStats;
pub use store::{Draft, NewObject, Object, Retention, Store, StoreAbilities};
pub use usage::{Holding, ObjectState, Reading, Share, SpillUsage, Usage};
