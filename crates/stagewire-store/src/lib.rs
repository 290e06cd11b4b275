//! Keeps payloads apart from the processes that made them.
//!
//! *What it is.* The [`Store`] trait (create, write in place, seal, get, delete), the [`TokenGate`] that keeps
//! superseded attempts out, and [`HostStore`], which keeps objects in the shared memory of its process, where other
//! processes of the host read them without a copy.
//!
//! *What it is not.* It does not talk to other processes: `stagewire-connector` pulls payloads in and hands them out.
//!
//! *Guarantees.* An object is readable only when it is complete, and never changes after. Put-if-absent is truthful:
//! of several writers of one key exactly one gets it, and the others are told. The bytes of all objects stay under the
//! bound, in whole pages for each part, those included that are deleted but still read; an error about space says what
//! holds it. A store that was opened as a durable one survives the end of its process, however that comes:
//! what was sealed and not deleted is there again, byte for byte, for the next process; see [`HostStore::open`].
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
mod recover;
mod reservation;
mod stats;
mod store;
mod usage;

pub use error::StoreError;
pub use gate::{Fenced, TokenGate};
pub use host::HostStore;
pub use journal::JournalError;
pub use keeper::{KeeperCommand, KeeperError, KeeperOptions, LINGER, run as run_keeper};
pub use recover::{DurableOptions, OpenError, Recovery, StoreOptions, Survivor};
pub use reservation::Reservation;
pub use stats::StoreStats;
pub use store::{Draft, NewObject, Object, Retention, Store};
pub use usage::{Holding, ObjectState, Share, Usage};
