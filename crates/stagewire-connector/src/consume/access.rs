//! The consumer's hold on the memory of a payload: pins, mappings, destinations.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use stagewire_core::{Chunking, Handle, Peer, Record, RegionRef, Run, TensorSpec};
use stagewire_transfer::{
    ConnectError, ConnectOptions, Mapping, Pinned, Target, TargetError, TransferError, TransferOptions, Transport,
};

use super::view::{ChunkView, ViewMemory};
use crate::Carrier;

/// Why the memory could not be reached or read.
#[derive(Debug)]
pub(crate) enum AccessError {
    NoTransport(String),
    Connect(ConnectError),
    Transfer(TransferError),
}

impl AccessError {
    /// Whether the holder answers, but has no such region, or not any more.
    pub(super) const fn is_of_an_old_place(&self) -> bool {
        matches!(
            self,
            Self::Transfer(
                TransferError::Released { .. } | TransferError::UnknownRegion { .. } | TransferError::Generation { .. }
            )
        )
    }
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

/// Where the bytes of one tensor are copied to, and how far they are. It outlives the pins, so that what was copied need
/// not be copied again from another place.
#[derive(Debug, Clone, Default)]
pub(super) struct Room {
    /// Private memory is taken as it is needed.
    target: OnceLock<Arc<Target>>,
    done: Arc<Done>,
}

/// Which chunks of a tensor are in its target.
#[derive(Debug, Default)]
struct Done(Mutex<BTreeSet<u32>>);

impl Done {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those of `chunks` that are not, in stretches.
    fn missing(&self, chunks: Range<u32>) -> Vec<Range<u32>> {
        let done = self.lock();
        let mut missing: Vec<Range<u32>> = Vec::new();
        for index in chunks.filter(|index| !done.contains(index)) {
            match missing.last_mut() {
                Some(last) if last.end == index => last.end += 1,
                _ => missing.push(index..index + 1),
            }
        }
        missing
    }
}

impl Room {
    /// Memory of the caller.
    pub(super) fn of(target: Arc<Target>) -> Self {
        Self {
            target: target.into(),
            done: Arc::default(),
        }
    }

    /// Returns once nothing is copied into it.
    pub(super) async fn idle(&self) {
        if let Some(target) = self.target.get() {
            target.idle().await;
        }
    }

    fn target(&self, len: u64) -> Result<Arc<Target>, TargetError> {
        if let Some(target) = self.target.get() {
            return Ok(Arc::clone(target));
        }
        let target = Arc::new(Target::allocate(len)?);
        Ok(Arc::clone(self.target.get_or_init(|| target)))
    }
}

/// One tensor's memory.
#[derive(Debug, Clone)]
enum Source {
    Empty,
    Mapped(Mapping),
    Pulled(Pulled),
    /// All of it came with the holder's answer.
    Sent(Arc<Target>),
}

/// A tensor that is copied, chunk by chunk.
#[derive(Debug, Clone)]
struct Pulled {
    pin: Arc<dyn Pinned>,
    target: Arc<Target>,
    done: Arc<Done>,
}

impl Pulled {
    async fn pull(
        &self,
        records: Vec<Record>,
        chunks: Range<u32>,
        deadline: Option<Duration>,
    ) -> Result<(), AccessError> {
        self.pin
            .pull(&records, &self.target, TransferOptions { deadline })
            .await?;
        self.done.lock().extend(chunks);
        Ok(())
    }
}

/// Several chunks of a tensor, which touch each other in every row: one row for all of them.
fn record(spec: &TensorSpec, chunking: Option<Chunking>, chunks: Range<u32>) -> Option<Record> {
    if chunks.is_empty() {
        return None;
    }
    let Some(chunking) = chunking else {
        return Some(Record::contiguous(0, 0, spec.nbytes().0));
    };
    // The manifest was checked, so that every tensor has these chunks.
    let first = chunking.slice(spec, chunks.start).ok()?.run;
    let last = chunking.slice(spec, chunks.end - 1).ok()?.run;
    let run = Run {
        width: last.offset + last.width - first.offset,
        ..first
    };
    Some(run.record().merged())
}

/// The path of what was sent along with an answer.
const SENT: &str = "socket";

/// How a consumer wants the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// The holder's memory, where it can be mapped.
    Mapped,
    /// Copied into the rooms.
    Copied,
}

/// Every tensor's memory, held in place.
#[derive(Debug)]
pub(super) struct Access {
    sources: Vec<Source>,
    regions: Vec<RegionRef>,
    path: String,
    copied: bool,
    deadline: Option<Duration>,
}

impl Access {
    /// Pins every region of the payload. With `rooms`, one for each tensor, bytes are copied into them.
    pub(super) async fn open(
        holder: &Peer,
        regions: &[RegionRef],
        transports: &[Arc<dyn Transport>],
        rooms: &[Room],
        way: Way,
        deadline: Option<Duration>,
    ) -> Result<Self, AccessError> {
        let open = regions.iter().zip(rooms).map(|(region, room)| async move {
            if region.len == 0 {
                return Ok::<_, AccessError>((Source::Empty, None));
            }
            let (pin, transport) = pin(holder, region, transports, deadline).await?;
            let source = if way == Way::Mapped && transport.abilities().map {
                Source::Mapped(pin.map().await?)
            } else {
                Source::Pulled(Pulled {
                    pin,
                    target: room.target(region.len)?,
                    done: Arc::clone(&room.done),
                })
            };
            Ok((source, Some(transport.name())))
        });
        let (sources, names): (Vec<_>, Vec<_>) = try_join_all(open).await?.into_iter().unzip();
        let names: BTreeSet<_> = names.into_iter().flatten().collect();
        Ok(Self {
            copied: sources.iter().any(|source| matches!(source, Source::Pulled(_))),
            sources,
            regions: regions.to_vec(),
            path: Vec::from_iter(names).join("+"),
            deadline,
        })
    }

    /// Fills the rooms with what the holder has sent along, tensor after tensor: there is nothing to pin.
    pub(super) fn sent(
        handle: &Handle,
        regions: &[RegionRef],
        rooms: &[Room],
        mut bytes: &[u8],
    ) -> Result<Self, AccessError> {
        let mut sources = Vec::with_capacity(rooms.len());
        for (spec, room) in handle.manifest.tensors().zip(rooms) {
            let len = spec.nbytes().0;
            if len == 0 {
                sources.push(Source::Empty);
                continue;
            }
            let target = room.target(len)?;
            let mut filling = target.begin()?;
            let room = filling.bytes_mut();
            let too_short = TargetError::OutOfBounds {
                start: 0,
                end: bytes.len() as u64,
                len,
            };
            let (here, rest) = bytes.split_at_checked(room.len()).ok_or(too_short)?;
            room.copy_from_slice(here);
            filling.commit();
            bytes = rest;
            sources.push(Source::Sent(target));
        }
        Ok(Self {
            copied: false,
            sources,
            regions: regions.to_vec(),
            path: SENT.to_owned(),
            deadline: None,
        })
    }

    /// Whether these are the regions that are held.
    pub(super) fn is_of(&self, regions: &[RegionRef]) -> bool {
        self.regions == regions
    }

    /// Whether there is anything to pull; else every chunk is here as soon as it is readable.
    pub(super) const fn is_copied(&self) -> bool {
        self.copied
    }

    /// The transports that carry the bytes, or [`SENT`]: `shm`, `cma`, `cma+shm`, `tcp`; empty where there are no bytes.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Whether the bytes come from memory of this host, and over no wire.
    pub(super) fn is_local(&self) -> bool {
        let local = [Carrier::Shm.name(), Carrier::Cma.name()];
        self.path.split('+').all(|name| local.contains(&name))
    }

    /// Copies what of these chunks is neither mapped nor copied yet. It ends when every copy has, so that a repeated one
    /// meets no copy in flight.
    pub(super) async fn pull(&self, handle: &Handle, chunks: Range<u32>) -> Result<(), AccessError> {
        let chunking = handle.manifest.chunking();
        let mut pulls = Vec::new();
        for (source, spec) in self.sources.iter().zip(handle.manifest.tensors()) {
            let Source::Pulled(pulled) = source else { continue };
            let missing = pulled.done.missing(chunks.clone()).into_iter();
            let records: Vec<_> = missing.filter_map(|chunks| record(spec, chunking, chunks)).collect();
            if !records.is_empty() {
                pulls.push(pulled.pull(records, chunks.clone(), self.deadline));
            }
        }
        join_all(pulls).await.into_iter().collect()
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
                    Source::Pulled(Pulled { target, .. }) | Source::Sent(target) => {
                        ViewMemory::Target(Arc::clone(target))
                    }
                };
                ChunkView::new(spec, slice, memory)
            });
        views.collect()
    }
}

/// The transports that may reach a region, the better one first: the one that it was registered with; then `tcp`, over
/// which the holder serves any memory of its host itself.
pub(super) fn routes<'a>(
    transports: impl Iterator<Item = &'a Arc<dyn Transport>> + Clone,
    region: &RegionRef,
) -> impl Iterator<Item = &'a Arc<dyn Transport>> {
    let own = region.transport.clone();
    let served = own.parse().is_ok_and(|registered: Carrier| registered != Carrier::Tcp);
    let registered = transports.clone().filter(move |transport| transport.name() == own);
    registered.chain(transports.filter(move |transport| served && transport.name() == "tcp"))
}

/// Pins a region over the first transport by which its holder can be reached.
pub(crate) async fn pin<'a>(
    holder: &Peer,
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
        match transport.connect(holder, options.clone()).await {
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
    use std::sync::atomic::{AtomicU32, Ordering};

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

    #[test]
    fn chunks_that_are_pulled_together_are_one_row_where_they_touch() {
        let spec = TensorSpec::new(DType::U8, [2, 5, 3]).expect("small");
        let cut = |dim, count, chunks| record(&spec, Some(Chunking::new(dim, count).expect("some")), chunks);
        let strided = Record {
            src_offset: 3,
            dst_offset: 3,
            width: 6,
            rows: 2,
            src_pitch: 15,
            dst_pitch: 15,
        };
        assert_eq!(cut(1, 5, 1..3), Some(strided));
        assert_eq!(cut(1, 5, 0..5), Some(Record::contiguous(0, 0, 30)));
        assert_eq!(cut(1, 5, 3..3), None);
        assert_eq!(record(&spec, None, 0..1), Some(Record::contiguous(0, 0, 30)));
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
        let rooms = [Room::default(), Room::default()];
        let open = Access::open(&handle.holder, &handle.regions, &transports, &rooms, Way::Copied, None);
        let mut access = open.await.expect("it is there");
        let Source::Pulled(flaky) = &mut access.sources[1] else {
            panic!("not private: {access:?}")
        };
        flaky.pin = Arc::new(Flaky {
            pin: Arc::clone(&flaky.pin),
            pulls: AtomicU32::new(0),
        });

        access.pull(handle, 0..1).await.expect_err("one tensor failed");
        let again = access.pull(handle, 0..1).await;
        again.expect("the other tensor is not pulled twice");
        access.pull(handle, 0..1).await.expect("both are there");
        for (view, byte) in access.views(handle, Some(0)).iter().zip([1, 2]) {
            assert_eq!(view.to_vec(), [byte; 4]);
        }
    }
}
