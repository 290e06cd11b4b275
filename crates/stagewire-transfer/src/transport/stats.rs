use std::sync::atomic::{AtomicU64, Ordering};

/// What one transport of a process did as the side that asks, and does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TransferStats {
    /// Pulls that succeeded.
    pub pulls: u64,
    /// Pushes that succeeded.
    pub pushes: u64,
    /// Bytes of these pulls.
    pub pulled_bytes: u64,
    /// Bytes of these pushes.
    pub pushed_bytes: u64,
    /// Pulls and pushes that ended without success, those included that were refused or whose future was dropped.
    pub failed: u64,
    /// Pulls and pushes that wait because too many bytes are in flight.
    pub waiting: u64,
    /// Bytes of pulls and pushes in flight.
    pub in_flight_bytes: u64,
}

/// Counts for [`TransferStats`].
#[derive(Debug, Default)]
pub(crate) struct Meter {
    pulls: AtomicU64,
    pushes: AtomicU64,
    pulled_bytes: AtomicU64,
    pushed_bytes: AtomicU64,
    failed: AtomicU64,
    waiting: AtomicU64,
    in_flight_bytes: AtomicU64,
}

/// Which way bytes go, as the side that asks sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Pull,
    Push,
}

impl Meter {
    pub(crate) fn stats(&self) -> TransferStats {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        TransferStats {
            pulls: read(&self.pulls),
            pushes: read(&self.pushes),
            pulled_bytes: read(&self.pulled_bytes),
            pushed_bytes: read(&self.pushed_bytes),
            failed: read(&self.failed),
            waiting: read(&self.waiting),
            in_flight_bytes: read(&self.in_flight_bytes),
        }
    }

    /// Counts a transfer as failed, unless it says that it succeeded.
    pub(crate) fn begin(&self, direction: Direction) -> Attempt<'_> {
        Attempt {
            meter: self,
            direction,
            succeeded: false,
        }
    }

    /// Counts one that waits, until this is dropped.
    pub(crate) fn wait(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting { meter: self }
    }

    /// So many bytes more are in flight.
    pub(crate) fn departed(&self, bytes: u64) {
        self.in_flight_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many bytes less are in flight.
    pub(crate) fn landed(&self, bytes: u64) {
        self.in_flight_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// One transfer.
pub(crate) struct Attempt<'a> {
    meter: &'a Meter,
    direction: Direction,
    succeeded: bool,
}

impl Attempt<'_> {
    pub(crate) fn succeeded(mut self, bytes: u64) {
        self.succeeded = true;
        let (count, sum) = match self.direction {
            Direction::Pull => (&self.meter.pulls, &self.meter.pulled_bytes),
            Direction::Push => (&self.meter.pushes, &self.meter.pushed_bytes),
        };
        count.fetch_add(1, Ordering::Relaxed);
        sum.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.succeeded {
            self.meter.failed.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// One transfer that waits.
pub(crate) struct Waiting<'a> {
    meter: &'a Meter,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.meter.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}
