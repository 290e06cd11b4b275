use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{Peer, Record, RegionRef};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::far::{Far, whole_deadline};
use super::{Operation, bytes};
use crate::{
    ConnectError, ConnectOptions, Mapping, Memory, Pinned, Region, RegisterError, RegisterOptions, Remote, Target,
    TransferError, TransferOptions, Transport,
};

/// Timers wake this much late, so a transfer that is asked for this soon after another counts as asked for at its end: else
/// every one of a row would find the line slower than it is.
const LATE: Duration = Duration::from_millis(2);

/// How slow a [`Throttle`] is. The default holds nothing back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ThrottleOptions {
    /// Bytes per second of all pulls and pushes together; `None` is without bound.
    pub bytes_per_second: Option<NonZeroU64>,
    /// Time before each operation, for all operations at the same time.
    pub latency: Duration,
}

/// A transport over a line of bounded bandwidth and with a latency.
///
/// An operation waits first and then runs on the transport below, so that no byte shows before its time. Transfers
/// occupy the line one after the other, in the order in which they were asked for; one that is dropped or late frees it
/// at once. Mapping moves no bytes and costs only the latency. Records that are malformed or leave their memory are
/// refused without a wait; what the transport below refuses for other reasons costs the wait.
#[derive(Debug)]
pub struct Throttle {
    inner: Arc<dyn Transport>,
    line: Arc<Line>,
}

#[derive(Debug)]
struct Line {
    options: ThrottleOptions,
    /// When the line was done with what it carried last. Tokio's mutex is fair: first come, first served.
    done: tokio::sync::Mutex<Option<Instant>>,
}

impl Line {
    /// Waits for as long as so many bytes take.
    async fn carry(&self, bytes: u64) {
        let latency = self.options.latency;
        if !latency.is_zero() {
            sleep(latency).await;
        }
        if let Some(rate) = self.options.bytes_per_second
            && bytes > 0
        {
            let mut done = self.done.lock().await;
            let now = Instant::now();
            let begin = done.filter(|done| now.duration_since(*done) <= LATE).unwrap_or(now);
            let takes = duration(bytes, rate);
            match begin.checked_add(takes) {
                Some(end) => {
                    sleep_until(end).await;
                    *done = Some(end);
                }
                None => sleep(takes).await,
            }
        }
    }
}

/// How long so many bytes take: seconds and nanoseconds, rounded up, or as long as a duration can be.
fn duration(bytes: u64, rate: NonZeroU64) -> Duration {
    let nanoseconds = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(rate.get()));
    u64::try_from(nanoseconds).map_or(Duration::MAX, Duration::from_nanos)
}

impl Throttle {
    /// Slows a transport down.
    pub fn new(inner: Arc<dyn Transport>, options: ThrottleOptions) -> Self {
        let done = tokio::sync::Mutex::default();
        let line = Arc::new(Line { options, done });
        Self { inner, line }
    }
}

#[async_trait]
impl Transport for Throttle {
    as_below!();

    fn register(&self, memory: Memory, options: RegisterOptions) -> Result<Region, RegisterError> {
        self.inner.register(memory, options)
    }

    async fn connect(&self, peer: &Peer, options: ConnectOptions) -> Result<Arc<dyn Remote>, ConnectError> {
        let after = options.deadline;
        let connected = timeout(after, async {
            self.line.carry(0).await;
            self.inner.connect(peer, options).await
        });
        let late = ConnectError::Deadline {
            peer: peer.incarnation,
            after,
        };
        let remote = connected.await.unwrap_or(Err(late))?;
        Ok(Arc::new(ThrottledRemote {
            far: Far::new(remote, peer),
            line: self.line.clone(),
        }))
    }
}

#[derive(Debug)]
struct ThrottledRemote {
    far: Far,
    line: Arc<Line>,
}

#[async_trait]
impl Remote for ThrottledRemote {
    async fn pin(&self, region: &RegionRef, options: TransferOptions) -> Result<Box<dyn Pinned>, TransferError> {
        let pause = self.line.carry(0);
        let left = self.far.wait(Operation::Pin, region.region, &options, pause).await?;
        let pinned = self.far.remote().pin(region, left).await;
        Ok(Box::new(ThrottledPinned {
            inner: pinned.map_err(whole_deadline(&options))?,
            region: region.region,
            far: self.far.clone(),
            line: self.line.clone(),
        }))
    }

    fn is_alive(&self) -> bool {
        self.far.remote().is_alive()
    }

    async fn closed(&self) -> String {
        self.far.remote().closed().await
    }
}

#[derive(Debug)]
struct ThrottledPinned {
    inner: Box<dyn Pinned>,
    region: u64,
    far: Far,
    line: Arc<Line>,
}

impl ThrottledPinned {
    /// Waits for as long as the records take; not at all where they will be refused.
    async fn carry(
        &self,
        operation: Operation,
        records: &[Record],
        (src_len, dst_len): (u64, u64),
        options: &TransferOptions,
    ) -> Result<TransferOptions, TransferError> {
        let refused = records.iter().any(|record| record.check(src_len, dst_len).is_err());
        if refused {
            return Ok(options.clone());
        }
        let pause = self.line.carry(bytes(records));
        self.far.wait(operation, self.region, options, pause).await
    }
}

#[async_trait]
impl Pinned for ThrottledPinned {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    async fn pull(&self, records: &[Record], dst: &Target, options: TransferOptions) -> Result<(), TransferError> {
        let lens = (self.len(), dst.len());
        let left = self.carry(Operation::Pull, records, lens, &options).await?;
        let pulled = self.inner.pull(records, dst, left).await;
        pulled.map_err(whole_deadline(&options))
    }

    async fn push(&self, records: &[Record], src: &Memory, options: TransferOptions) -> Result<(), TransferError> {
        let lens = (src.len(), self.len());
        let left = self.carry(Operation::Push, records, lens, &options).await?;
        let pushed = self.inner.push(records, src, left).await;
        pushed.map_err(whole_deadline(&options))
    }

    async fn map(&self) -> Result<Mapping, TransferError> {
        let unbounded = TransferOptions { deadline: None };
        let pause = self.line.carry(0);
        self.far.wait(Operation::Map, self.region, &unbounded, pause).await?;
        self.inner.map().await
    }
}
