use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use futures::FutureExt;
use futures::future::BoxFuture;
use stagewire_core::{Failure, Handle, RegionRef};
use stagewire_store::Object;

/// Whatever must live as long as the payload can be read: regions, staging memory, an object of a store.
#[async_trait]
pub(crate) trait Keep: fmt::Debug + Send + Sync {
    /// Chunk `index` is complete: the last chance to move its bytes to where consumers read them.
    fn complete(&self, _index: u32) {}

    /// Digest of chunk `index` as the producer has it, where consumers are to compare it with what they read.
    fn digest(&self, _index: u32) -> Option<u64> {
        None
    }

    /// Whether a store has it, and not the memory of its producer.
    fn is_stored(&self) -> bool {
        false
    }

    /// All bytes, tensor after tensor, where this process can read them. They do not change any more.
    fn bytes(&self) -> Option<Vec<u8>> {
        None
    }

    /// Lets nobody read it who does not yet.
    fn close(&self) {}

    /// The process ends, and not the payload: whoever can leaves it to the next one.
    fn leave(&self) {}

    /// Resolves when nobody reads any of it.
    fn unread(&self) -> BoxFuture<'static, ()> {
        std::future::ready(()).boxed()
    }

    /// Every chunk is complete: no byte changes any more.
    fn sealed(&self) {}

    /// The payload has ended. When this returns, nobody finds it any more, the next process included, though who reads it
    /// may go on.
    fn end(&self) {}

    /// Brings the bytes to where consumers read them, if they are somewhere else.
    async fn bring(&self) -> Result<Option<Brought>, Failure> {
        Ok(None)
    }
}

/// Bytes that stay where they are as long as this lives.
#[derive(Debug)]
pub(crate) struct Brought {
    /// Where that is, one region for each tensor.
    pub(crate) regions: Vec<RegionRef>,
    /// What keeps them there.
    pub(crate) object: Arc<dyn Object>,
}

impl Brought {
    /// All bytes, tensor after tensor. An object is complete.
    pub(crate) fn bytes(&self, handle: &Handle) -> Vec<u8> {
        let parts = (0..handle.manifest.tensors().count()).filter_map(|part| self.object.part(part));
        let mut bytes = Vec::with_capacity(handle.manifest.nbytes().0 as usize);
        parts.for_each(|part| bytes.extend_from_slice(part));
        bytes
    }
}
