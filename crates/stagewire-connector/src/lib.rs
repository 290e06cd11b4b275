//! Publish and consume payloads, chunk by chunk; the worker runtime on top.

mod connector;
mod consume;
mod error;
mod link;
mod live;
mod pages;
mod publish;
mod put;
mod serve;
mod stop;
mod store_service;
mod wire;
pub mod worker;

pub use connector::{Borrowing, Connector, ConnectorOptions, ConnectorStats};
pub use consume::{Chunk, ChunkView, ConsumeError, ConsumeOptions, Consumer, Fetched, Place, ViewMemory};
pub use error::{PublishError, PutError, StartError};
pub use link::LinkError;
pub use live::Owner;
pub use publish::{Publication, PublishSpec};
pub use stop::Stop;
pub use store_service::StoreService;
