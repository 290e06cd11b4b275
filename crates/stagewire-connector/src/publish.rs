pub(crate) mod settle;

use std::sync::Arc;
use std::time::Duration;

use settle::{Outcome, Settling};
use stagewire_core::{ErrorClass, Failure, Handle, Manifest, PayloadPhase, Peer, TransferMode};

use crate::connector::Shared;
use crate::live::Live;
use crate::wire::End;
use crate::{Mode, ModeReason, Owner, PublishError, PutError};

/// What is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishSpec {
    /// The request that the payload belongs to; shown in errors, need not be unique.
    pub request: String,
    /// Names, shapes, metadata, cut.
    pub manifest: Manifest,
    /// Who ends the payload's life.
    pub owner: Owner,
    /// Longest life without having been consumed or released; then the payload expires and is counted. A time to live
    /// is not extended by it.
    pub deadline: Option<Duration>,
    /// How it is to get to its consumer.
    pub mode: Mode,
    /// Who is to consume it, where that is known: then [`Mode::Auto`] can leave it in this process's memory.
    pub consumer: Option<Peer>,
    /// Whether consumers compare each chunk with a digest that is taken as it is shown. It finds a producer that writes
    /// to memory it has published, at the cost of reading everything twice. For debugging.
    pub digests: bool,
    /// How long the store may take to make room and to pull.
    pub store_within: Duration,
}

impl PublishSpec {
    /// How long a payload waits for its consumer where that one is to delete it: 10 minutes.
    pub const UNCONSUMED: Duration = Duration::from_secs(600);

    /// How long a store may take where the producer says nothing else: 30 s.
    pub const STORE_WITHIN: Duration = Duration::from_secs(30);

    /// A payload that stays in this process's memory, with the usual deadline: [`Self::UNCONSUMED`] where its consumer is to delete it, its time to live, else
    /// none.
    pub fn new(request: impl Into<String>, manifest: Manifest, owner: impl Into<Owner>) -> Self {
        let owner = owner.into();
        Self {
            request: request.into(),
            manifest,
            owner,
            deadline: owner.usual_deadline(),
            mode: Mode::P2p,
            consumer: None,
            digests: false,
            store_within: Self::STORE_WITHIN,
        }
    }
}

/// A published payload, as its producer sees it.
///
/// Dropping it does not release the payload: its owner or its lease does. Dropping it while chunks are missing fails the payload,
/// because nobody is left who could show them.
#[derive(Debug)]
#[must_use = "a payload whose publication is dropped before every chunk is shown fails"]
pub struct Publication {
    shared: Arc<Shared>,
    live: Arc<Live>,
    settling: Arc<Settling>,
}

impl Publication {
    pub(crate) fn new(shared: Arc<Shared>, live: Arc<Live>, settling: Arc<Settling>) -> Self {
        Self { shared, live, settling }
    }

    /// What the consumer needs; it may be handed over at once, before any chunk is ready. It stays good wherever the
    /// payload goes. Once the payload is in the store, this is the handle that leads straight there.
    pub fn handle(&self) -> &Handle {
        self.settling.stored().unwrap_or_else(|| self.live.handle())
    }

    /// Shows chunk `index` to consumers, which see chunks in order whatever order they are shown in. Showing a chunk
    /// twice changes nothing.
    ///
    /// # Errors
    /// [`PublishError::NoSuchChunk`]; [`PublishError::Ended`] where the payload failed or was released meanwhile.
    pub fn ready(&self, index: u32) -> Result<(), PublishError> {
        let handle = self.live.handle();
        let (request, chunks) = (handle.request.clone(), handle.manifest.chunks());
        if index >= chunks {
            return Err(PublishError::NoSuchChunk {
                request,
                chunk: index,
                chunks,
            });
        }
        let end = match self.live.phase() {
            PayloadPhase::Open => {
                self.live.ready(index);
                return Ok(());
            }
            PayloadPhase::Sealed => return Ok(()),
            PayloadPhase::Failed(_) => "it failed",
            PayloadPhase::Released => "it was released",
        };
        Err(PublishError::Ended {
            request,
            chunk: index,
            end,
        })
    }

    /// Which way the payload goes: that of now, for it may have fallen back to the store.
    pub fn mode(&self) -> TransferMode {
        self.settling.way().0
    }

    /// Why it goes that way.
    pub fn mode_reason(&self) -> ModeReason {
        self.settling.way().1
    }

    /// Waits until the payload is where it is to be, and returns the handle that leads straight there: in the store, which
    /// has every byte and needs the producer no more; or in this process, with room reserved in the store where there may
    /// be need for it and the store has any. What cannot be reserved is counted, see [`ConnectorStats::unreserved`](crate::ConnectorStats::unreserved).
    ///
    /// # Errors
    /// [`PutError`]: the store has no room in time, is gone, or the publication was cancelled. The payload has ended then,
    /// and its consumers are told this reason. One that stays in this process fails by being cancelled only.
    ///
    /// # Cancel safety
    /// Safe; [`Publication::cancel`] is what gives up.
    pub async fn settled(&self) -> Result<Handle, Arc<PutError>> {
        self.settling.settled().await.map(|handle| Handle::clone(&handle))
    }

    /// What [`Publication::settled`] would return at once; `None` while it would wait.
    pub fn outcome(&self) -> Option<Result<Handle, Arc<PutError>>> {
        let outcome: Outcome = self.settling.outcome()?;
        Some(outcome.map(|handle| Handle::clone(&handle)))
    }

    /// Gives up a publication that is not settled: the payload ends, and so does its way into the store. Returns whether
    /// that was possible: a store that was first keeps it.
    pub fn cancel(&self) -> bool {
        self.settling.cancel(&self.shared, &self.live)
    }

    /// Waits until the payload has ended and nobody reads its memory any more, which may be written again then.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn unread(&self) {
        self.released().await;
        self.live.unread().await;
    }

    pub(crate) const fn live(&self) -> &Arc<Live> {
        &self.live
    }

    pub(crate) fn seal(&self) {
        self.live.seal();
    }

    /// Gives up: consumers get this reason instead of more chunks, at once. Nothing happens to a payload that is
    /// complete or has ended.
    pub fn fail(&self, failure: Failure) {
        self.shared.table().fail(&self.live, failure);
    }

    /// Whether every chunk is shown.
    pub fn is_sealed(&self) -> bool {
        self.live.phase() == PayloadPhase::Sealed
    }

    /// Waits until the payload has ended: released, consumed under a lease that ends so, expired, or failed. Its memory goes when
    /// the last pin ends.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn released(&self) {
        let mut states = self.live.subscribe();
        let owner = self.live.owner();
        let ended = states.wait_for(|state| match state.end {
            Some(End::Released) => true,
            // Only an orchestrator releases by name what has failed.
            Some(End::Failed(_)) => !owner.releases_failed(),
            _ => false,
        });
        // The sender is in `live`, which this publication holds.
        let _ = ended.await;
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        self.fail(Failure::new(
            ErrorClass::Internal,
            "payload.abandoned",
            "the producer dropped the publication before every chunk was ready",
        ));
    }
}
