//! Copies: short ones at once, long ones in the background, by threads that take one batch of the plan after the other.

mod plain;
mod plan;
mod rows;
mod streaming;

use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::thread;

use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

pub use plan::MAX_ROWS;
pub(crate) use plan::{Piece, Plan, Shape, Written, pieces};
pub(crate) use rows::{Read, copy_rows};
pub(crate) use streaming::end_streaming;

use stagewire_core::Record;

use crate::processor::shared_cache;
use crate::target::Claim;

/// Copies up to this run on the thread that asks. Handing over and back costs 20 to 50 µs, as much as copying a quarter
/// to a half of this.
const INLINE_BYTES: u64 = 1 << 20;

/// Up to so many bytes, the thread that asks takes batches as well, while another wakes up. Half of this takes about as long
/// as a tick of the scheduler, within which others of its runtime can wait.
const JOINED_BYTES: u64 = 8 << 20;

/// The same for copies through the caches, which are twice as fast at least.
const JOINED_CACHED_BYTES: u64 = 16 << 20;

/// As long as they have at most so many rows, which cost time of their own.
const INLINE_ROWS: u64 = 1024;

/// From so many bytes, two threads copy faster around the caches than through them, where the cores have no cache that is
/// known to be near to both. Measured on a Xeon: three times as fast at 64 MiB.
const STREAMED_BYTES: u64 = 4 << 20;

/// How the bytes of a record get to the destination.
pub(crate) trait Mover: Send + Sync + 'static {
    /// Whether it can copy through the caches or around them.
    const CHOOSES: bool;

    /// Copies records to offsets from `dst`, around the caches where it can choose and `streaming` says so.
    ///
    /// # Safety
    /// Each record must lie inside source and destination, and nobody else may touch its destination.
    unsafe fn copy(&self, records: &[Record], dst: NonNull<u8>, streaming: bool) -> Result<(), MoveError>;

    /// Tells, after the last copy, whether all of them read memory that was in place until then.
    fn verify(&self) -> Result<(), MoveError>;
}

/// Why a copy failed.
#[derive(Debug)]
pub(crate) enum MoveError {
    /// The owner of the source is gone.
    Lost,
    /// The source is not readable at this offset.
    Unreadable {
        offset: u64,
    },
    Os(std::io::Error),
}

/// One pull, shared by the threads that work on it.
struct Work<M> {
    plan: Plan,
    /// Whether the copy goes around the caches.
    streaming: bool,
    mover: M,
    dst: Base,
    next: AtomicUsize,
    left: AtomicUsize,
    failed: OnceLock<MoveError>,
    finish: Mutex<Option<Finish>>,
}

/// First byte of the destination.
struct Base(NonNull<u8>);

// SAFETY: the claim in `Finish` keeps the memory and reserves the bytes; each is written by one thread.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

/// What the thread that ends the last batch hands over.
struct Finish {
    claim: Claim,
    done: oneshot::Sender<Result<Claim, MoveError>>,
}

/// Copies records within this process. Nobody needs a fence after it.
///
/// # Safety
/// Each record must lie inside the memory at `src` and that at `dst`, which do not overlap, and nobody else may touch its
/// destination.
pub(crate) unsafe fn copy_records(records: &[Record], src: NonNull<u8>, dst: NonNull<u8>, streaming: bool) {
    let read = |record: &Record| Read {
        at: src.as_ptr().wrapping_add(record.src_offset as usize),
        width: record.width as usize,
        rows: record.rows as usize,
        pitch: record.src_pitch as usize,
    };
    let mut next = records.first().map(read);
    for (index, record) in records.iter().enumerate() {
        let Some(from) = next else { break };
        next = records.get(index + 1).map(read);
        // SAFETY: the caller's promise.
        unsafe {
            let to = dst.add(record.dst_offset as usize).as_ptr();
            copy_rows(from, to, record.dst_pitch as usize, next, streaming);
        }
    }
    if streaming {
        end_streaming();
    }
}

/// Whether a plan is copied sooner on the thread that asks than handed over.
pub(crate) fn is_short(plan: &Plan) -> bool {
    plan.bytes() <= INLINE_BYTES && plan.rows() <= INLINE_ROWS
}

/// Whether so many bytes are copied sooner around the caches than through them: where source and destination do not fit
/// into the cache that both threads share. On an EPYC with 32 MiB, two threads copy 4 MiB at 124 GB/s through it, 16 MiB
/// at 91 and 24 MiB at 49; around it, at 42 to 44.
fn is_streaming(bytes: u64) -> bool {
    static LEAST: LazyLock<u64> = LazyLock::new(|| streamed_from(shared_cache()));
    bytes >= *LEAST
}

fn streamed_from(shared_cache: Option<u64>) -> u64 {
    shared_cache.map_or(STREAMED_BYTES, |bytes| STREAMED_BYTES.max(bytes / 2 + 1))
}

/// Runs a short plan on this thread.
pub(crate) fn at_once(plan: &Plan, mover: &impl Mover, claim: &Claim) -> Result<(), MoveError> {
    for batch in plan.batches() {
        // SAFETY: the plan was made for these lengths, and the claim reserves the destination.
        unsafe { mover.copy(plan.records(batch), claim.base(), false)? };
    }
    mover.verify()
}

/// Runs a plan and gives the claim back, to be committed.
///
/// # Cancel safety
/// When the future is dropped, the batches under way end, no other begins, and then the claim is given up.
pub(crate) async fn run<M: Mover>(plan: Plan, mover: M, claim: Claim) -> Result<Claim, MoveError> {
    if is_short(&plan) {
        return at_once(&plan, &mover, &claim).map(|()| claim);
    }
    let batches = plan.batches().len();
    let (done, finished) = oneshot::channel();
    let work = Arc::new(Work {
        dst: Base(claim.base()),
        next: AtomicUsize::new(0),
        left: AtomicUsize::new(batches),
        failed: OnceLock::new(),
        finish: Mutex::new(Some(Finish { claim, done })),
        streaming: is_streaming(plan.bytes()),
        plan,
        mover,
    });
    let joined = match work.streaming {
        false if M::CHOOSES => JOINED_CACHED_BYTES,
        _ => JOINED_BYTES,
    };
    let joins = work.plan.bytes() <= joined;
    for _ in usize::from(joins)..batches.min(threads()) {
        let work = work.clone();
        spawn_blocking(move || work.take_batches());
    }
    if joins {
        work.take_batches();
    }
    drop(work);
    finished
        .await
        .unwrap_or_else(|_| Err(MoveError::Os(std::io::Error::other("the runtime is shutting down"))))
}

/// More threads than two gain little on one memory bus.
pub(crate) fn threads() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| thread::available_parallelism().map_or(1, |cores| cores.get().min(2)))
}

impl<M: Mover> Work<M> {
    fn take_batches(&self) {
        while let Some(batch) = self.plan.batches().get(self.next.fetch_add(1, Ordering::Relaxed)) {
            if self.failed.get().is_none() && !self.is_abandoned() {
                // SAFETY: as in `run`; batches are disjoint, and each is taken once.
                let copied = unsafe { self.mover.copy(self.plan.records(batch), self.dst.0, self.streaming) };
                if let Err(error) = copied {
                    // The first error stands.
                    let _ = self.failed.set(error);
                }
            }
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                if self.failed.get().is_none()
                    && let Err(error) = self.mover.verify()
                {
                    let _ = self.failed.set(error);
                }
                self.finish();
            }
        }
    }

    fn is_abandoned(&self) -> bool {
        let finish = self.finish.lock().unwrap_or_else(PoisonError::into_inner);
        finish.as_ref().is_none_or(|finish| finish.done.is_closed())
    }

    /// Called once, when no thread touches the destination any more.
    fn finish(&self) {
        let finish = self.finish.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Finish { claim, done }) = finish {
            let outcome = match self.failed.get() {
                None => Ok(claim),
                Some(MoveError::Lost) => Err(MoveError::Lost),
                Some(&MoveError::Unreadable { offset }) => Err(MoveError::Unreadable { offset }),
                Some(MoveError::Os(error)) => Err(MoveError::Os(std::io::Error::new(error.kind(), error.to_string()))),
            };
            // Nobody waits any more: the claim comes back and is given up.
            drop(done.send(outcome));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_into_a_shared_cache_twice_is_copied_through_it() {
        assert_eq!(streamed_from(None), 4 << 20, "a Xeon");
        assert_eq!(streamed_from(Some(32 << 20)), (16 << 20) + 1, "an EPYC");
        assert_eq!(
            streamed_from(Some(4 << 20)),
            4 << 20,
            "never below what was measured without one"
        );
    }
}
