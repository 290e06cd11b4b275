//! The consumer's hold on the memory of a payload: pins, mappings, destinations.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, join_all, try_join_all};
use stagewire_core::{Handle, Record, RegionRef};
use stagewire_transfer::{
    ConnectError, ConnectOptions, Mapping, Pinned, Target, TargetError, TransferError, TransferOptions, Transport,
};

use super::view::{ChunkView, ViewMemory};

/// Why the memory could not be reached or read.
#[derive(Debug)]
pub(super) enum AccessError {
    NoTransport(String),
    Connect(ConnectError),
    Transfer(TransferError),
}

impl From<TransferError> for AccessError {
    fn from(error: TransferError) -> Self {
        Self::Transfer(error)
    }
}

impl From<TargetError> for AccessError {
    fn from(error: TargetError) -> Self {
        Self::Transfer(error.into())
    }
}

/// One tensor's memory.
#[derive(Debug, Clone)]
enum Source {
    Empty,
    Mapped(Mapping),
    Pulled(Pulled),
}

/// A tensor that is copied, chunk by chunk, in order.
#[derive(Debug, Clone)]
struct Pulled {
    pin: Arc<dyn Pinned>,
    target: Arc<Target>,
    /// Chunks that are in the target. They are not pulled again where another tensor's part of the chunk failed.
    done: Arc<AtomicU32>,
}

impl Source {
    fn pulled(pin: Arc<dyn Pinned>, target: Arc<Target>) -> Self {
        Self::Pulled(Pulled {
            pin,
            target,
            done: Arc::default(),
        })
    }
}

impl Pulled {
    async fn pull(self, record: Record, index: u32, options: TransferOptions) -> Result<(), AccessError> {
        self.pin.pull(&[record], &self.target, options).await?;
        self.done.store(index + 1, Ordering::Release);
        Ok(())
    }
}

/// Every tensor's memory, held in place.
#[derive(Debug)]
pub(super) struct Access {
    sources: Vec<Source>,
    path: String,
    deadline: Option<Duration>,
}

/// A pull in flight. It can be polled by one call after the other, so that a dropped call loses nothing.
pub(super) struct Pull {
    /// Never locked: what is only reached through `&mut` may be shared.
    future: Mutex<BoxFuture<'static, Result<(), AccessError>>>,
}

impl Future for Pull {
    type Output = Result<(), AccessError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let future = self.future.get_mut().unwrap_or_else(PoisonError::into_inner);
        future.poll_unpin(context)
    }
}

impl Access {
    /// Pins every region of the payload. `destinations` take the bytes of each tensor; without, bytes are mapped
    /// where the transport can and `private` does not forbid it.
    pub(super) async fn open(
        handle: &Handle,
        transports: &[Arc<dyn Transport>],
        destinations: Option<&[Arc<Target>]>,
        private: bool,
        deadline: Option<Duration>,
    ) -> Result<Self, AccessError> {
        let open = handle.regions.iter().enumerate().map(|(index, region)| async move {
            if region.len == 0 {
                return Ok::<_, AccessError>((Source::Empty, None));
            }
            let (pin, transport) = pin(handle, region, transports, deadline).await?;
            let source = if let Some(destinations) = destinations {
                Source::pulled(pin, Arc::clone(&destinations[index]))
            } else if !private && transport.abilities().map {
                Source::Mapped(pin.map().await?)
            } else {
                Source::pulled(pin, Arc::new(Target::allocate(region.len)?))
            };
            Ok((source, Some(transport.name())))
        });
        let (sources, names): (Vec<_>, Vec<_>) = try_join_all(open).await?.into_iter().unzip();
        let names: BTreeSet<_> = names.into_iter().flatten().collect();
        Ok(Self {
            sources,
            path: Vec::from_iter(names).join("+"),
            deadline,
        })
    }

    /// The transports that carry the bytes: `shm`, `cma`, `cma+shm`, `tcp`; empty where there are no bytes.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Copies what of chunk `index` is neither mapped nor copied yet; `None` where there is nothing to copy. It ends when
    /// every copy has, so that a repeated one meets no copy in flight.
    pub(super) fn pull(&self, handle: &Handle, index: u32) -> Option<Pull> {
        let options = TransferOptions {
            deadline: self.deadline,
        };
        let chunking = handle.manifest.chunking();
        let mut pulls = Vec::new();
        for (source, spec) in self.sources.iter().zip(handle.manifest.tensors()) {
            let Source::Pulled(pulled) = source else { continue };
            if pulled.done.load(Ordering::Acquire) > index {
                continue;
            }
            let record = match chunking {
                None => Record::contiguous(0, 0, spec.nbytes().0),
                // The manifest was checked, so that every tensor has this chunk.
                Some(chunking) => chunking.slice(spec, index).ok()?.run.record().merged(),
            };
            pulls.push(pulled.clone().pull(record, index, options.clone()));
        }
        if pulls.is_empty() {
            return None;
        }
        let future = join_all(pulls).map(|ends| ends.into_iter().collect()).boxed();
        Some(Pull {
            future: Mutex::new(future),
        })
    }

    /// Views of chunk `index` of every tensor, or of all of it.
    pub(super) fn views(&self, handle: &Handle, index: Option<u32>) -> Vec<ChunkView> {
        let chunking = handle.manifest.chunking().zip(index);
        let views = self
            .sources
            .iter()
            .zip(handle.manifest.tensors())
            .map(|(source, spec)| {
                let slice = chunking.and_then(|(chunking, index)| Some((chunking, chunking.slice(spec, index).ok()?)));
                let memory = match source {
                    Source::Empty => ViewMemory::Empty,
                    Source::Mapped(mapping) => ViewMemory::Mapped(mapping.clone()),
                    Source::Pulled(pulled) => ViewMemory::Target(Arc::clone(&pulled.target)),
                };
                ChunkView::new(spec, slice, memory)
            });
        views.collect()
    }
}

/// The transports that may reach a region, the better one first: the one that it was registered with; then, for those of
/// one host, `tcp`, over which the holder serves any memory of its host itself.
pub(super) fn routes<'a>(
    transports: impl Iterator<Item = &'a Arc<dyn Transport>> + Clone,
    region: &RegionRef,
) -> impl Iterator<Item = &'a Arc<dyn Transport>> {
    let own = region.transport.clone();
    let of_one_host = matches!(own.as_str(), "shm" | "cma");
    let registered = transports.clone().filter(move |transport| transport.name() == own);
    registered.chain(transports.filter(move |transport| of_one_host && transport.name() == "tcp"))
}

/// Pins a region over the first transport by which its holder can be reached.
async fn pin<'a>(
    handle: &Handle,
    region: &RegionRef,
    transports: &'a [Arc<dyn Transport>],
    deadline: Option<Duration>,
) -> Result<(Arc<dyn Pinned>, &'a Arc<dyn Transport>), AccessError> {
    let mut options = ConnectOptions::default();
    if let Some(deadline) = deadline {
        options.deadline = options.deadline.min(deadline);
    }
    let mut out_of_reach = None;
    for transport in routes(transports.iter(), region) {
        match transport.connect(&handle.holder, options.clone()).await {
            Ok(remote) => {
                let pin = remote.pin(region, TransferOptions { deadline }).await?;
                return Ok((pin.into(), transport));
            }
            Err(error) if is_out_of_reach(&error) => {
                // The reason that counts is that of the better transport.
                out_of_reach.get_or_insert(error);
            }
            Err(error) => return Err(AccessError::Connect(error)),
        }
    }
    Err(out_of_reach.map_or_else(
        || AccessError::NoTransport(region.transport.clone()),
        AccessError::Connect,
    ))
}

/// Whether the holder lives for all that is known, but not within reach of this transport.
fn is_out_of_reach(error: &ConnectError) -> bool {
    matches!(
        error,
        ConnectError::NotOffered { .. } | ConnectError::OtherHost { .. } | ConnectError::Forbidden { .. }
    )
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use stagewire_core::{DType, Entry, EntryValue, Manifest, PayloadKind, StageName, TensorSpec};
    use stagewire_transfer::Borrowed;

    use super::*;
    use crate::{Connector, ConnectorOptions, Owner, PublishSpec};

    /// A pin whose first pull fails.
    #[derive(Debug)]
    struct Flaky {
        pin: Arc<dyn Pinned>,
        pulls: AtomicU32,
    }

    #[async_trait]
    impl Pinned for Flaky {
        fn len(&self) -> u64 {
            self.pin.len()
        }

        async fn pull(&self, records: &[Record], dst: &Target, options: TransferOptions) -> Result<(), TransferError> {
            if self.pulls.fetch_add(1, Ordering::Relaxed) == 0 {
                return Err(TransferError::from(TargetError::Busy { start: 0, end: 1 }));
            }
            self.pin.pull(records, dst, options).await
        }

        async fn map(&self) -> Result<Mapping, TransferError> {
            self.pin.map().await
        }
    }

    #[tokio::test]
    async fn a_pull_that_failed_for_one_tensor_can_be_repeated() {
        let dir = tempfile::tempdir().expect("a directory");
        let role = StageName::new("encode").expect("a name");
        let options = ConnectorOptions::new(dir.path().join("run"), role);
        let connector = Connector::start(options).await.expect("a connector");
        let entry = |name: &str| Entry {
            name: name.to_owned(),
            value: EntryValue::Tensor(TensorSpec::new(DType::U8, [4]).expect("small")),
        };
        let manifest = Manifest::new(PayloadKind::Latent, vec![entry("a"), entry("b")]).expect("names differ");
        let memory = [1, 2].map(|byte| Borrowed::from(vec![byte; 4]).into());
        let spec = PublishSpec::new("r".to_owned(), manifest, Owner::Orchestrator);
        let publication = connector.publish(spec, memory.into()).expect("room");

        let transports: Vec<_> = connector.shared().transports().cloned().collect();
        let handle = publication.handle();
        let open = Access::open(handle, &transports, None, true, None).await;
        let mut access = open.expect("it is there");
        let Source::Pulled(flaky) = &mut access.sources[1] else {
            panic!("not private: {access:?}")
        };
        flaky.pin = Arc::new(Flaky {
            pin: Arc::clone(&flaky.pin),
            pulls: AtomicU32::new(0),
        });

        let first = access.pull(handle, 0).expect("something to copy").await;
        first.expect_err("one tensor failed");
        let again = access.pull(handle, 0).expect("something to copy").await;
        again.expect("the other tensor is not pulled twice");
        assert!(access.pull(handle, 0).is_none(), "both are there");
        for (view, byte) in access.views(handle, Some(0)).iter().zip([1, 2]) {
            assert_eq!(view.to_vec(), [byte; 4]);
        }
    }
}
