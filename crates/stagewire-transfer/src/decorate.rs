//! Decorators over any transport, for tests and simulation: [`Throttle`] makes it slow, [`Fault`] makes it fail, and
//! [`Recorder`] remembers what was asked of it.
//!
//! They stack, and a transport under any of them still keeps the rules of this crate: what was not pulled as the caller
//! sees it does not show in the [`Target`](crate::Target), deadlines hold, and the loss of a peer ends a wait at once.
//! None has a clock but tokio's, or any randomness, so that with tokio's paused clock a run can be repeated.
//!
//! ```
//! use std::num::NonZeroU64;
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use stagewire_core::Record;
//! use stagewire_transfer::decorate::{Fault, FaultPlan, Mishap, Operation, Recorder, Throttle, ThrottleOptions};
//! use stagewire_transfer::{Borrowed, ConnectOptions, Target, TransferOptions, Transport};
//! # use stagewire_core::{ByteCount, Incarnation, Peer};
//! # use stagewire_transfer::{Host, HostOptions, RegisterOptions};
//! # use uuid::Uuid;
//!
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! # let parent = tempfile::tempdir()?;
//! # let dir = parent.path().join("peers");
//! # let host = async |incarnation| {
//! #     let arena_limit = ByteCount(64 << 20);
//! #     Host::start(HostOptions { dir: dir.clone(), incarnation, arena_limit }).await
//! # };
//! # let producer = host(Incarnation(Uuid::new_v4())).await?;
//! # let consumer = host(Incarnation(Uuid::new_v4())).await?;
//! # let peer = Peer {
//! #     incarnation: producer.incarnation(),
//! #     process: producer.process(),
//! #     socket: String::new(),
//! #     transports: vec![producer.shm().address()],
//! # };
//! # let mut latent = producer.arena().allocate(1000)?;
//! # latent.fill(7);
//! # let region = producer.shm().register(latent.freeze().into(), RegisterOptions::default())?;
//! // 1 MB/s, 1 ms for each operation, and the second pull of all arrives with a bit changed.
//! let slow = ThrottleOptions {
//!     bytes_per_second: NonZeroU64::new(1_000_000),
//!     latency: Duration::from_millis(1),
//! };
//! let throttled = Arc::new(Throttle::new(consumer.shm(), slow));
//! let plan = FaultPlan::new().at(Operation::Pull, 2, Mishap::Corrupt { byte: 999 });
//! let recorder = Arc::new(Recorder::new(Arc::new(Fault::new(throttled, plan))));
//! let transport: Arc<dyn Transport> = recorder.clone();
//!
//! let remote = transport.connect(&peer, ConnectOptions::default()).await?;
//! let pinned = remote.pin(&region.reference(), TransferOptions::default()).await?;
//! let mut target = Target::allocate(1000)?;
//! for expected in [7, 6] {
//!     target.reset()?;
//!     pinned.pull(&[Record::contiguous(0, 0, 1000)], &target, TransferOptions::default()).await?;
//!     assert_eq!(target.as_slice()?[999], expected);
//! }
//! assert_eq!(recorder.bytes(Operation::Pull), 2000);
//! assert!(recorder.entries().iter().all(|entry| entry.took >= Duration::from_millis(1)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

/// What a decorator leaves to the transport below: all that moves nothing.
macro_rules! as_below {
    () => {
        fn name(&self) -> &'static str {
            self.inner.name()
        }

        fn abilities(&self) -> crate::Abilities {
            self.inner.abilities()
        }

        fn address(&self) -> stagewire_core::TransportAddress {
            self.inner.address()
        }

        fn stats(&self) -> crate::TransferStats {
            self.inner.stats()
        }
    };
}

mod far;
mod fault;
#[cfg(test)]
mod loopback;
mod record;
#[cfg(test)]
mod tests;
mod throttle;

use std::fmt;

use stagewire_core::Record;

pub use fault::{Fault, FaultPlan, Mishap};
pub use record::{Entry, Outcome, Recorder};
pub use throttle::{Throttle, ThrottleOptions};

/// What is asked of a transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operation {
    /// [`Transport::register`](crate::Transport::register).
    Register,
    /// [`Transport::connect`](crate::Transport::connect).
    Connect,
    /// [`Remote::pin`](crate::Remote::pin).
    Pin,
    /// [`Pinned::pull`](crate::Pinned::pull).
    Pull,
    /// [`Pinned::push`](crate::Pinned::push).
    Push,
    /// [`Pinned::map`](crate::Pinned::map).
    Map,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Register => "register",
            Self::Connect => "connect",
            Self::Pin => "pin",
            Self::Pull => "pull",
            Self::Push => "push",
            Self::Map => "map",
        })
    }
}

/// Bytes of a batch, also of one that is refused for overflowing.
fn bytes(records: &[Record]) -> u64 {
    records.iter().map(Record::nbytes).fold(0, u64::saturating_add)
}
