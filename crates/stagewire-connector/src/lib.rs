//! Publish and consume payloads, chunk by chunk; the worker runtime on top.
//!
//! *What it is.* A [`Connector`] publishes bundles of tensors from this process's memory and consumes those of others:
//! whole or chunk by chunk, while later chunks are still computed, mapped or copied into the consumer's own memory.
//! [`StoreService`] makes a process a store that payloads can move to. [`worker`] runs the attempts that an orchestrator
//! hands out.
//!
//! *What it is not.* It moves no bytes itself: `stagewire-transfer` does. It schedules nothing: the orchestrator does.
//!
//! *Guarantees.*
//! - Consumers pull, and see a chunk only when it is complete, in order, whatever order chunks became ready in. The bytes
//!   are exact, or there is an error that names request, stage, chunk and peer.
//! - A producer that fails or dies is an error at its consumers at once; one that is silent, at their deadline.
//! - A payload lives until its [`Owner`] or its [`Lease`](stagewire_core::Lease) ends it. Its memory goes when the last view of it does, wherever that is.
//! - A consumer that dies, or is dropped, leaves no pin; one that is deleted on consume can then be consumed by another
//!   consumer, from chunk 0. Two at once are refused.
//! - Nothing is read without the payload's capability, nor by another user of the host.
//! - A payload that moved to a store is found there by the handle that its producer gave out.
//!
//! *Non-guarantees.* The producer must leave published bytes alone until the payload has ended; nobody checks. What is
//! consumed may be read again after an error, so that a chunk can be seen twice by different consumers.
//!
//! ```
//! use stagewire_connector::{Connector, ConnectorOptions, ConsumeOptions, PublishSpec};
//! use stagewire_core::{Chunking, DType, Entry, EntryValue, Lease, Manifest, PayloadKind, StageName, TensorSpec};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let run_dir = dir.path().join("run");
//! // Two connectors, as two processes would have them.
//! let denoise = Connector::start(ConnectorOptions::new(&run_dir, StageName::new("denoise")?)).await?;
//! let decode = Connector::start(ConnectorOptions::new(&run_dir, StageName::new("decode")?)).await?;
//!
//! let latents = TensorSpec::new(DType::U8, [2, 4])?;
//! let entry = Entry { name: "latents".into(), value: EntryValue::Tensor(latents) };
//! let manifest = Manifest::new(PayloadKind::Latent, vec![entry])?.with_chunking(Chunking::new(1, 2)?)?;
//! let mut memory = denoise.host().arena().allocate(8)?;
//! memory.copy_from_slice(&[0, 1, 2, 3, 4, 5, 6, 7]);
//! let publication = denoise.open(PublishSpec::new("request 1", manifest, Lease::DeleteOnConsume), vec![memory.freeze().into()])?;
//!
//! // The handle travels in a queue; consuming may begin before anything is ready.
//! let mut consumer = decode.consume(publication.handle().clone(), ConsumeOptions::default())?;
//! publication.ready(0)?;
//! let chunk = consumer.next().await?.expect("two chunks");
//! assert_eq!((chunk.index, chunk.tensors[0].to_vec()), (0, vec![0, 1, 4, 5]));
//! publication.ready(1)?;
//! assert_eq!(consumer.next().await?.expect("two chunks").tensors[0].to_vec(), [2, 3, 6, 7]);
//!
//! // The end tells the producer, who may use the memory again.
//! assert!(consumer.next().await?.is_none());
//! publication.released().await;
//! # Ok(())
//! # }
//! ```

mod alive;
mod begun;
mod carriers;
mod complete;
mod connector;
mod consume;
mod digest;
mod error;
pub mod kv;
mod link;
mod live;
mod mode;
mod outbox;
mod owner;
mod pages;
mod publish;
mod put;
mod registered;
mod release;
mod serve;
mod stop;
mod store_file;
mod store_service;
mod wire;
pub mod worker;

pub use carriers::{Carrier, UnknownCarrier};
pub use connector::{Connector, ConnectorOptions, ConnectorStats};
pub use consume::{Chunk, ChunkView, ConsumeError, ConsumeOptions, Consumer, Fetched, OnChunk, Place, ViewMemory};
pub use error::{PublishError, PutError, PutPlace, ReleaseError, StartError};
pub use link::LinkError;
pub use mode::{Mode, ModeCount, ModeError, ModeReason};
pub use owner::Owner;
pub use publish::{Publication, PublishSpec};
pub use registered::Registered;
pub use stop::Stop;
pub use store_service::StoreService;
