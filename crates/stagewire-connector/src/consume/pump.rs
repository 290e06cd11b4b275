//! What goes on while nobody asks: chunks are copied, and who wants to be told of each is told.

use std::sync::Arc;

use stagewire_core::Handle;
use tokio::runtime::Handle as Runtime;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::access::Access;
use super::progress::{Batch, Progress, Told};
use crate::link::Heard;
use crate::wire::End;

/// A task for one consumer, which ends with it.
#[derive(Debug)]
pub(super) struct Pump(AbortOnDropHandle<()>);

impl Pump {
    /// Copies chunks as they become complete, in whatever order.
    pub(super) fn copying(
        runtime: &Runtime,
        access: Arc<Access>,
        progress: Arc<Progress>,
        heard: watch::Receiver<Heard>,
        batch: Batch,
    ) -> Self {
        Self(AbortOnDropHandle::new(
            runtime.spawn(copy(access, progress, heard, batch)),
        ))
    }

    /// Tells of chunks as they become complete, where they are read where they are.
    pub(super) fn telling(
        runtime: &Runtime,
        access: Arc<Access>,
        handle: Arc<Handle>,
        told: Arc<Told>,
        heard: watch::Receiver<Heard>,
    ) -> Self {
        Self(AbortOnDropHandle::new(runtime.spawn(tell(access, handle, told, heard))))
    }

    pub(super) fn is_over(&self) -> bool {
        self.0.is_finished()
    }

    /// Ends it. When this returns, it touches nothing any more, but for copies that still end.
    pub(super) async fn end(mut self) {
        self.0.abort();
        // Whether it had ended by itself does not matter.
        let _ = (&mut self.0).await;
    }
}

async fn copy(access: Arc<Access>, progress: Arc<Progress>, mut heard: watch::Receiver<Heard>, batch: Batch) {
    loop {
        let (flying, over) = {
            let heard = heard.borrow_and_update();
            (progress.take(0, &heard.shown, batch), is_over(&heard))
        };
        if let Some(flying) = flying {
            if let Err(error) = flying.pull(Arc::clone(&access)).await {
                // Who asks for the chunk meets the same, and is told.
                tracing::debug!(?error, "chunks could not be copied ahead");
                return;
            }
        } else if over || !progress.lacks_any() || heard.changed().await.is_err() {
            return;
        }
    }
}

async fn tell(access: Arc<Access>, handle: Arc<Handle>, told: Arc<Told>, mut heard: watch::Receiver<Heard>) {
    let mut known = 0;
    loop {
        let (complete, over) = {
            let heard = heard.borrow_and_update();
            (heard.shown.complete.since(&mut known), is_over(&heard))
        };
        for index in complete {
            told.tell(index, &access, &handle);
        }
        if over || told.all() || heard.changed().await.is_err() {
            return;
        }
    }
}

/// Whether no more chunks become complete.
fn is_over(heard: &Heard) -> bool {
    heard.refused.is_some() || matches!(heard.shown.end, Some(End::Failed(_) | End::Released))
}
