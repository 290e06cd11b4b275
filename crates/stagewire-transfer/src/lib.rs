//! Moves registered memory between processes.
//!
//! *What it is.* The [`Transport`] trait, and ways to move bytes under it:
//!
//! | transport | reaches | how |
//! | --- | --- | --- |
//! | `shm` ([`Host::shm`]) | this host | payloads lie in the producer's [`Arena`]; consumers map them read-only, or copy them out |
//! | `cma` ([`Host::cma`]) | this host | payloads lie anywhere in the producer's memory; consumers copy them with `process_vm_readv` |
//! | `tcp` ([`Network::tcp`]) | any host | the owner sends and receives the bytes itself, over a few connections |
//! | `mooncake` ([`Mooncake`]) | any host | Mooncake's wire protocol, spoken natively, with peers of ours and of theirs |
//! | `nixl` ([`Nixl`]) | any host, devices | NVIDIA's NIXL, loaded where it is installed |
//! | `mooncake-engine` | any host, devices | a transfer engine that the program brings along, such as the one in Mooncake's wheel |
//!
//! A [`Host`] is what a process needs once: arena, region table, and the Unix socket at which peers of its host pin
//! regions. A [`Network`] is what it needs besides, to be reached from other hosts. [`decorate`] makes any transport slow
//! or faulty, for tests and simulation; `conformance` (feature `conformance`) checks any transport.
//!
//! *What it is not.* It knows no tensors, chunks or jobs, only bytes and strided records. It encrypts nothing.
//!
//! # How a transfer goes
//!
//! The owner registers memory and hands out a [`RegionRef`](stagewire_core::RegionRef): number, generation, and a
//! 128-bit capability. The reader opens a control connection to the owner and pins the region; then the bytes move, and
//! the pin ends. Who answers, which life of it, which generation of the region, with which right: all transports learn it
//! from the control connection, in the same words. They differ in how bytes of a pinned region move.
//!
//! On one host, the control connection is a Unix socket (`SOCK_SEQPACKET`, in a directory of mode 0700, same user only),
//! and the reader copies or maps all on its own: the owner's program is not involved. The bytes of a copy count once the
//! kernel says, after it, that the owner still lives: a pin ends only by the reader's word or together with one of the two
//! processes, so that it was held throughout. The descriptor of an arena segment goes over the socket once; mappings are
//! kept per segment.
//!
//! Between hosts it is a TCP connection, where the reader proves with each connection that it has the deployment's token,
//! if one is set; on other addresses than loopback one must be. Pins end with their connection. Connections that say
//! nothing, or nonsense, are cut off after 5 s, or as soon as too many of them wait, and keep nobody out meanwhile.
//!
//! # Guarantees
//!
//! - A pull gives exact bytes or a typed error, and after an error no byte of its batch counts as written ([`Target`]).
//! - Registered memory goes only when its region is released and every pin has ended: by the reader's word, or by its
//!   death, seen at once through a pidfd, or through the end of its connection. Where the end of a reader of this host
//!   cannot be told, its memory is never reused.
//! - The death of a peer ends all its transfers with an error, at once; that of a whole host after some ten seconds. Its
//!   silence ends, by the deadline, whatever waits for its word; copies out of its pinned memory need none.
//! - What is in flight with one peer is bounded in bytes ([`Host::limit_in_flight`]). More waits, in the order it came,
//!   within its deadline. Only a batch above [`MAX_ROWS`] rows is refused.
//! - What a peer may have open over TCP is bounded ([`NetworkLimits`]), and so are the memory and the time of its pushes
//!   ([`TcpOptions::staging`]); one more is refused to it, and nobody else notices.
//! - A push writes only memory that its owner registered as [`Memory::Writable`], and such memory shares no byte with any
//!   other region.
//! - Over `tcp`, a pull that failed, ran out of time or was dropped writes nothing afterwards, and a push writes all or
//!   nothing: the owner keeps its bytes apart until the last has come and the other side still wants it. Where that side
//!   is not told the end, it says so ([`TransferError::InDoubt`]).
//! - Readers cannot write to a segment, and nobody can shrink it under them: it is sealed.
//! - Futures may be dropped at any time. Copies run on blocking threads, except small ones.
//! - `kill -9` leaves nothing behind but a socket file, which [`sweep`] removes. Segments have no name.
//!
//! # Non-guarantees
//!
//! - A segment holds many payloads, and a reader of one can see the others: processes of one user trust each other.
//!   Capabilities keep mistakes apart, not attackers of the same user.
//! - Who can listen on the network between two hosts sees the bytes, and who can change packets can change them: `tcp`'s
//!   digests find damage, not malice.
//! - The owner's promise not to change announced bytes is not enforced ([`Borrowed::new`], [`ExtentMut::open`]). A reader
//!   that asks for bytes before they are announced to it gets them as they are at that moment ([`Region::open`]).
//! - On one host, bytes are not hashed: they do not pass through anything that could change them.
//! - A fork of a process does not inherit its host.
//!
//! # Example
//!
//! ```
//! use stagewire_core::{ByteCount, Incarnation, Peer, Record};
//! use stagewire_transfer::{
//!     ConnectOptions, Host, HostOptions, RegisterOptions, Target, TransferOptions,
//! };
//! # use uuid::Uuid;
//!
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! # let parent = tempfile::tempdir()?;
//! # let dir = parent.path().join("peers");
//! let host = async |incarnation| {
//!     let arena_limit = ByteCount(64 << 20);
//!     Host::start(HostOptions { dir: dir.clone(), incarnation, arena_limit }).await
//! };
//! // In practice, these two are different processes.
//! let producer = host(Incarnation(Uuid::new_v4())).await?;
//! let consumer = host(Incarnation(Uuid::new_v4())).await?;
//!
//! let mut latent = producer.arena().allocate(1000)?;
//! latent.fill(7);
//! let region = producer.shm().register(latent.freeze().into(), RegisterOptions::default())?;
//!
//! // What the consumer is told, through a queue or a socket of its own.
//! let peer = Peer {
//!     incarnation: producer.incarnation(),
//!     process: producer.process(),
//!     socket: String::new(),
//!     transports: vec![producer.shm().address()],
//! };
//! let reference = region.reference();
//!
//! let remote = consumer.shm().connect(&peer, ConnectOptions::default()).await?;
//! let pinned = remote.pin(&reference, TransferOptions::default()).await?;
//! assert_eq!(pinned.map().await?[999], 7);
//!
//! // 10 rows of 50 bytes, 100 bytes apart, packed.
//! let rows = Record { src_offset: 0, dst_offset: 0, width: 50, rows: 10, src_pitch: 100, dst_pitch: 50 };
//! let target = Target::allocate(500)?;
//! pinned.pull(&[rows], &target, TransferOptions::default()).await?;
//! assert_eq!(target.as_slice()?, [7; 500]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![expect(
    unsafe_code,
    reason = "maps shared memory, copies raw memory and reads other processes"
)]

mod arena;
mod batch;
mod budget;
mod buffer;
mod cma;
#[cfg(feature = "conformance")]
pub mod conformance;
mod copy;
pub mod decorate;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod host;
mod link;
mod mapping;
mod memory;
mod mooncake;
mod network;
mod nixl;
#[cfg(feature = "probe")]
pub mod probe;
mod process;
mod processor;
mod pull;
mod push;
mod readiness;
mod region;
mod shm;
mod sync;
mod table;
mod target;
mod tcp;
mod transport;
pub mod unix;
mod wire;

pub use arena::{
    AdoptedSegment, Arena, ArenaStats, Extent, ExtentMut, ExtentWriter, Inherited, Lent, Location, SegmentName,
};
pub use copy::MAX_ROWS;
pub use error::{
    AdoptError, ArenaError, CmaUnavailable, ConnectError, NixlUnavailable, RegisterError, RegisterProblem, StartError,
    TargetError, TransferError,
};
pub use host::{Host, HostOptions, HostStats, SocketFile, listen_unix, sweep};
pub use mapping::Mapping;

pub use memory::{Borrowed, Memory, Writable, digest};
pub use mooncake::{
    Engine, EngineBatch, EngineError, EngineMemory, EngineOperation, EngineOptions, EngineSlice, EngineStatus,
    EngineTransport, Exposed, Mooncake, MooncakeError, MooncakeOptions, Notification, Rebuild, Segment, SegmentBuffer,
};
pub use network::{Network, NetworkLimits, NetworkOptions, Secret};
pub use nixl::{Nixl, NixlLibrary, NixlOptions, NixlVersion};
pub use process::{ProcessWatch, close_on_exec, this_process};
pub use region::Region;
pub use table::Reader;
pub use target::{Filling, Target};
pub use tcp::TcpOptions;
pub use transport::{
    Abilities, ConnectOptions, Pinned, RegisterOptions, Remote, TransferOptions, TransferStats, Transport, empty_region,
};
