//! Pulls under way: of the chunk that is asked for, and of those after it while that one is in use.

use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use stagewire_core::{Handle, Timestamp};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::OnChunk;
use super::access::{Access, AccessError};
use super::advance::now;
use crate::link::Heard;

/// How long the pull of several chunks at a time may take by the pace of the one before: what a consumer waits longer for
/// the first of them at most. Below, each pull on its own costs more than it moves.
const AHEAD: Duration = Duration::from_millis(5);

/// Chunks that came in one pull.
#[derive(Debug, Clone, Default)]
pub(super) struct Landed {
    pub(super) chunks: Range<u32>,
    pub(super) begin: Timestamp,
    pub(super) end: Timestamp,
    took: Duration,
}

/// How many chunks are pulled at a time.
#[derive(Debug, Clone)]
pub(super) enum Batch {
    /// As many as are there: nobody looks at one before the last has come.
    All,
    /// As many as the pace of the last pull moves in [`AHEAD`]; at first one.
    Paced(Landed),
}

impl Batch {
    /// Which of the chunks from `next` on, of which those before `readable` are there.
    pub(super) fn cut(&self, handle: &Handle, next: u32, readable: u32) -> Range<u32> {
        let Self::Paced(last) = self else { return next..readable };
        let bytes = |chunks: Range<u32>| chunks.map(|index| handle.manifest.chunk_nbytes(index).0).sum::<u64>();
        let nanos = last.took.as_nanos().max(1);
        let mut room = u128::from(bytes(last.chunks.clone())) * AHEAD.as_nanos() / nanos;
        let mut end = next + 1;
        while end < readable {
            room = room.saturating_sub(u128::from(bytes(end - 1..end)));
            if room < u128::from(bytes(end..end + 1)) {
                break;
            }
            end += 1;
        }
        next..end
    }
}

/// A pull of some chunks. It can be polled by one call after the other, so that a dropped call loses nothing.
pub(super) struct Flight {
    /// Never locked: what is only reached through `&mut` may be shared.
    future: Mutex<BoxFuture<'static, Result<Landed, AccessError>>>,
    /// Of the task that it is, where it goes on without being polled.
    _task: Option<AbortOnDrop>,
}

struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Future for Flight {
    type Output = Result<Landed, AccessError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let future = self.future.get_mut().unwrap_or_else(PoisonError::into_inner);
        future.poll_unpin(context)
    }
}

impl Flight {
    /// Of chunks that are there, for who waits for them.
    pub(super) fn now(pulling: Pulling, chunks: Range<u32>) -> Self {
        Self {
            future: Mutex::new(pulling.pull(chunks).boxed()),
            _task: None,
        }
    }

    /// Of chunks that are there or will be, from `next` on, while nobody waits. It lands with none where none comes any
    /// more; who then asks is told why.
    pub(super) fn ahead(
        runtime: &tokio::runtime::Handle,
        pulling: Pulling,
        next: u32,
        batch: Batch,
        mut heard: watch::Receiver<Heard>,
    ) -> Self {
        let task = runtime.spawn(async move {
            let come = |heard: &Heard| heard.state.readable > next || heard.state.end.is_some();
            let readable = match heard.wait_for(come).await {
                Ok(heard) => heard.state.readable,
                // The connection is over.
                Err(_) => 0,
            };
            if readable <= next {
                return Ok(Landed::default());
            }
            let chunks = batch.cut(&pulling.handle, next, readable);
            pulling.pull(chunks).await
        });
        let abort = AbortOnDrop(task.abort_handle());
        let ended = task.map(|ended| match ended {
            Ok(landed) => landed,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The runtime is shutting down.
            Err(_) => Ok(Landed::default()),
        });
        Self {
            future: Mutex::new(ended.boxed()),
            _task: Some(abort),
        }
    }
}

/// What a pull needs.
pub(super) struct Pulling {
    pub(super) access: Arc<Access>,
    pub(super) handle: Arc<Handle>,
    pub(super) told: Option<OnChunk>,
}

impl Pulling {
    async fn pull(self, chunks: Range<u32>) -> Result<Landed, AccessError> {
        let (begin, started) = (now(), Instant::now());
        self.access.pull(&self.handle, chunks.clone()).await?;
        if let Some(told) = &self.told {
            told.tell(chunks.clone());
        }
        Ok(Landed {
            chunks,
            begin,
            end: now(),
            took: started.elapsed(),
        })
    }
}
