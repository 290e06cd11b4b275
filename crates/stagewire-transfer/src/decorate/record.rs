use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{Classify, ErrorClass, Incarnation, Peer, Record, RegionRef};
use tokio::time::Instant;

use super::{Operation, bytes};
use crate::{
    ConnectError, ConnectOptions, Mapping, Memory, Pinned, Region, RegisterError, RegisterOptions, Remote, Target,
    TransferError, TransferOptions, Transport,
};

/// Entries that are kept; older ones are forgotten.
const KEPT: usize = 1 << 16;

/// One operation that ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What was asked for.
    pub operation: Operation,
    /// Of which transport.
    pub transport: &'static str,
    /// Of which peer; of none, when memory was registered.
    pub peer: Option<Incarnation>,
    /// In which region, where there is one.
    pub region: Option<u64>,
    /// Records of the batch; 0 for what is no pull or push.
    pub records: usize,
    /// Bytes: of the batch, or of the region.
    pub bytes: u64,
    /// When it began, since the recorder was made.
    pub began: Duration,
    /// How long it took.
    pub took: Duration,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It succeeded.
    Done,
    /// It failed.
    Failed {
        /// Class of the error.
        class: ErrorClass,
        /// Reason of the error.
        reason: &'static str,
        /// What it said.
        message: String,
    },
    /// Its future was dropped.
    Dropped,
}

/// A transport that remembers what was asked of it.
///
/// The log has an entry for each operation that ended, in the order in which they ended: the last 65,536.
///
/// ```
/// # use std::sync::Arc;
/// use stagewire_transfer::Transport;
/// use stagewire_transfer::decorate::{Operation, Outcome, Recorder};
///
/// # fn example(transport: Arc<dyn Transport>) {
/// let recorder = Arc::new(Recorder::new(transport));
/// let transport: Arc<dyn Transport> = recorder.clone();
/// // … use the transport, then:
/// # let _ = transport;
/// let failed = recorder.matching(|entry| entry.outcome != Outcome::Done);
/// println!("{failed:?}, {} bytes pulled", recorder.bytes(Operation::Pull));
/// # }
/// ```
#[derive(Debug)]
pub struct Recorder {
    inner: Arc<dyn Transport>,
    log: Arc<Log>,
}

#[derive(Debug)]
struct Log {
    transport: &'static str,
    since: Instant,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    entries: VecDeque<Entry>,
    forgotten: u64,
}

impl Recorder {
    /// Records what is asked of a transport.
    pub fn new(inner: Arc<dyn Transport>) -> Self {
        let log = Arc::new(Log {
            transport: inner.name(),
            since: Instant::now(),
            kept: Mutex::default(),
        });
        Self { inner, log }
    }

    /// All entries, oldest first.
    pub fn entries(&self) -> Vec<Entry> {
        self.matching(|_| true)
    }

    /// The entries for which this holds, oldest first.
    pub fn matching(&self, wanted: impl Fn(&Entry) -> bool) -> Vec<Entry> {
        let kept = self.log.lock();
        kept.entries.iter().filter(|entry| wanted(entry)).cloned().collect()
    }

    /// Operations of this kind that succeeded, among the entries.
    pub fn count(&self, operation: Operation) -> usize {
        self.done(operation).len()
    }

    /// Bytes of the operations of this kind that succeeded, among the entries.
    pub fn bytes(&self, operation: Operation) -> u64 {
        self.done(operation).iter().map(|entry| entry.bytes).sum()
    }

    /// Entries that were forgotten because newer ones came.
    pub fn forgotten(&self) -> u64 {
        self.log.lock().forgotten
    }

    /// Forgets all entries, without counting them as forgotten.
    pub fn clear(&self) {
        *self.log.lock() = Kept::default();
    }

    fn done(&self, operation: Operation) -> Vec<Entry> {
        self.matching(|entry| entry.operation == operation && entry.outcome == Outcome::Done)
    }
}

impl Log {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins an entry, which says that it was dropped until it is told otherwise.
    fn begin(self: &Arc<Self>, operation: Operation, subject: Subject) -> Running {
        let began = Instant::now();
        let Subject {
            peer,
            region,
            records,
            bytes,
        } = subject;
        Running {
            log: self.clone(),
            began,
            entry: Some(Entry {
                operation,
                transport: self.transport,
                peer,
                region,
                records,
                bytes,
                began: began.duration_since(self.since),
                took: Duration::ZERO,
                outcome: Outcome::Dropped,
            }),
        }
    }
}

/// What an operation is about.
#[derive(Debug, Clone, Copy, Default)]
struct Subject {
    peer: Option<Incarnation>,
    region: Option<u64>,
    records: usize,
    bytes: u64,
}

/// An operation that has not ended.
struct Running {
    log: Arc<Log>,
    began: Instant,
    entry: Option<Entry>,
}

impl Running {
    fn end<T, E: Classify>(mut self, result: &Result<T, E>) {
        if let Some(entry) = &mut self.entry {
            entry.outcome = match result {
                Ok(_) => Outcome::Done,
                Err(error) => Outcome::Failed {
                    class: error.class(),
                    reason: error.reason(),
                    message: error.to_string(),
                },
            };
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(mut entry) = self.entry.take() else {
            return;
        };
        entry.took = self.began.elapsed();
        let mut kept = self.log.lock();
        if kept.entries.len() == KEPT {
            kept.entries.pop_front();
            kept.forgotten += 1;
        }
        kept.entries.push_back(entry);
    }
}

#[async_trait]
impl Transport for Recorder {
    as_below!();

    fn register(&self, memory: Memory, options: RegisterOptions) -> Result<Region, RegisterError> {
        let bytes = memory.len();
        let mut running = self.log.begin(
            Operation::Register,
            Subject {
                bytes,
                ..Subject::default()
            },
        );
        let registered = self.inner.register(memory, options);
        if let (Ok(region), Some(entry)) = (&registered, &mut running.entry) {
            entry.region = Some(region.reference().region);
        }
        running.end(&registered);
        registered
    }

    async fn connect(&self, peer: &Peer, options: ConnectOptions) -> Result<Arc<dyn Remote>, ConnectError> {
        let incarnation = peer.incarnation;
        let subject = Subject {
            peer: Some(incarnation),
            ..Subject::default()
        };
        let running = self.log.begin(Operation::Connect, subject);
        let connected = self.inner.connect(peer, options).await;
        running.end(&connected);
        Ok(Arc::new(RecordedRemote {
            inner: connected?,
            peer: incarnation,
            log: self.log.clone(),
        }))
    }
}

#[derive(Debug)]
struct RecordedRemote {
    inner: Arc<dyn Remote>,
    peer: Incarnation,
    log: Arc<Log>,
}

#[async_trait]
impl Remote for RecordedRemote {
    async fn pin(&self, region: &RegionRef, options: TransferOptions) -> Result<Box<dyn Pinned>, TransferError> {
        let subject = Subject {
            peer: Some(self.peer),
            region: Some(region.region),
            records: 0,
            bytes: region.len,
        };
        let running = self.log.begin(Operation::Pin, subject);
        let pinned = self.inner.pin(region, options).await;
        running.end(&pinned);
        Ok(Box::new(RecordedPinned {
            inner: pinned?,
            subject,
            log: self.log.clone(),
        }))
    }

    fn is_alive(&self) -> bool {
        self.inner.is_alive()
    }

    async fn closed(&self) -> String {
        self.inner.closed().await
    }
}

#[derive(Debug)]
struct RecordedPinned {
    inner: Box<dyn Pinned>,
    subject: Subject,
    log: Arc<Log>,
}

impl RecordedPinned {
    fn batch(&self, records: &[Record]) -> Subject {
        Subject {
            records: records.len(),
            bytes: bytes(records),
            ..self.subject
        }
    }
}

#[async_trait]
impl Pinned for RecordedPinned {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    async fn pull(&self, records: &[Record], dst: &Target, options: TransferOptions) -> Result<(), TransferError> {
        let running = self.log.begin(Operation::Pull, self.batch(records));
        let pulled = self.inner.pull(records, dst, options).await;
        running.end(&pulled);
        pulled
    }

    async fn push(&self, records: &[Record], src: &Memory, options: TransferOptions) -> Result<(), TransferError> {
        let running = self.log.begin(Operation::Push, self.batch(records));
        let pushed = self.inner.push(records, src, options).await;
        running.end(&pushed);
        pushed
    }

    async fn map(&self) -> Result<Mapping, TransferError> {
        let running = self.log.begin(Operation::Map, self.subject);
        let mapped = self.inner.map().await;
        running.end(&mapped);
        mapped
    }
}
