//! Bytes in flight between two processes: bounded, and fair to who waits.

use std::sync::Arc;

use stagewire_core::ByteCount;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::host::Counters;
use crate::wire::Kind;

/// What a host allows until it is told otherwise.
pub(crate) const DEFAULT_LIMIT: ByteCount = ByteCount(256 << 20);

/// Bytes of one permit; every transfer takes at least one.
const UNIT: u64 = 4096;

/// The bytes that transfers with one peer may have in flight. Who comes first gets first; a transfer above the whole
/// budget waits until it is alone.
pub(crate) struct Budget {
    permits: Arc<Semaphore>,
    all: u32,
    counters: Arc<Counters>,
}

/// Bytes that count as in flight until this is dropped, which must not be before nothing touches the memory any more.
pub(crate) struct Spent {
    _permits: OwnedSemaphorePermit,
    counters: Arc<Counters>,
    kind: Kind,
    bytes: u64,
}

impl Budget {
    pub(crate) fn new(limit: ByteCount, counters: Arc<Counters>) -> Self {
        let units = usize::try_from(limit.0.div_ceil(UNIT)).unwrap_or(usize::MAX);
        let units = units.clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        Self {
            permits: Arc::new(Semaphore::new(units)),
            all: units as u32,
            counters,
        }
    }

    /// Waits until so many bytes may be in flight, too.
    ///
    /// # Cancel safety
    /// A dropped future has taken nothing and lost its place.
    pub(crate) async fn spend(&self, kind: Kind, bytes: u64) -> Spent {
        let units = bytes.div_ceil(UNIT).clamp(1, u64::from(self.all)) as u32;
        let permits = match self.permits.clone().try_acquire_many_owned(units) {
            Ok(permits) => permits,
            Err(_) => {
                let _waiting = self.counters.meter(kind).wait();
                let permits = self.permits.clone().acquire_many_owned(units).await;
                permits.expect("the semaphore is never closed")
            }
        };
        self.counters.meter(kind).departed(bytes);
        Spent {
            _permits: permits,
            counters: self.counters.clone(),
            kind,
            bytes,
        }
    }
}

impl Drop for Spent {
    fn drop(&mut self) {
        self.counters.meter(self.kind).landed(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn who_comes_first_gets_first_and_a_giant_goes_alone() {
        let counters = Arc::new(Counters::default());
        let budget = Budget::new(ByteCount(10 * UNIT), counters.clone());
        let stats = || counters.meter(Kind::Tcp).stats();
        let mut first = pin!(budget.spend(Kind::Tcp, 6 * UNIT));
        let Poll::Ready(first) = poll(first.as_mut()) else {
            panic!("there is room");
        };
        let mut giant = pin!(budget.spend(Kind::Tcp, 1000 * UNIT));
        assert!(poll(giant.as_mut()).is_pending());
        // It would fit, but the giant came before it.
        let mut small = Box::pin(budget.spend(Kind::Tcp, 1));
        assert!(poll(small.as_mut()).is_pending());
        assert_eq!((stats().waiting, stats().in_flight_bytes), (2, 6 * UNIT));
        drop(first);
        let Poll::Ready(giant) = poll(giant.as_mut()) else {
            panic!("it is alone");
        };
        assert!(poll(small.as_mut()).is_pending());
        assert_eq!((stats().waiting, stats().in_flight_bytes), (1, 1000 * UNIT));
        drop(small);
        drop(giant);
        assert_eq!((stats().waiting, stats().in_flight_bytes), (0, 0));
    }
}
