//! The wire between the orchestrator and its workers.
//!
//! *What it is.* The protobuf messages ([`v1`], generated and committed), their conversion to and from the words of
//! `stagewire-core`, how a client finds the server of its run directory ([`RunDir`]), and the worker's side of the
//! stream ([`WorkerSession`]): attach, renew, reconnect.
//!
//! *What it is not.* It does not run stages or move payloads: `stagewire-connector` does, on top of the session.
//!
//! *Guarantees.* What a worker says of an attempt is repeated after a reconnect until the server has answered it.
//! Renewal runs on the session's own task and needs nobody's cooperation. A worker without a server ends after the
//! linger time, never hangs.
//!
//! *Non-guarantees.* Progress reports are merged: the server may see only the newest.
//!
//! ```
//! use stagewire_api::v1;
//! use stagewire_core::Token;
//!
//! let token = Token { epoch: stagewire_core::Epoch(3), job: uuid::Uuid::nil().to_string().parse()?, attempt: stagewire_core::Attempt(1) };
//! assert_eq!(Token::try_from(v1::Token::from(token)).ok(), Some(token));
//! # Ok::<(), uuid::Error>(())
//! ```

mod convert;
mod outbox;
mod run_dir;
mod session;
#[expect(
    missing_docs,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    clippy::large_enum_variant,
    reason = "generated from the protobuf file, whose comments document it"
)]
pub mod v1;

pub use convert::WireError;
pub use run_dir::{RunDir, RunDirError, SERVER_FILE_SCHEMA, ServerFile, host_id};
pub use session::{AttachError, SessionEvent, SessionOptions, WorkerSession};

/// Version of the worker protocol; both sides refuse another one and name both.
pub const PROTOCOL: u32 = 1;
