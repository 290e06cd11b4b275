//! Checkpoints: what an attempt saves for those that come after it, on this worker or another.

use std::sync::Arc;
use std::time::Duration;

use stagewire_api::v1;
use stagewire_core::{Handle, Handover, Progress, Token};
use tokio::sync::{OwnedMutexGuard, watch};

use super::super::{Inner, Output, OutputPlan, TaskError, lock};
use super::{Task, TaskState, describe};
use crate::consume::Observer;
use crate::error::chain;
use crate::release::release;
use crate::{ConsumeError, ConsumeOptions, Consumer, Owner, PublishSpec, Stop};

/// How long the store may wait for room. The attempt goes on without this checkpoint then.
const STORE_WITHIN: Duration = Duration::from_secs(10);

/// The state of a stage function after some steps, as an earlier attempt has left it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// The attempt that made it.
    pub token: Token,
    /// What [`Task::consume_checkpoint`] consumes.
    pub handle: Handle,
    /// How far that attempt had come.
    pub progress: Progress,
}

/// A checkpoint on its way to safety. Dropping it changes nothing.
#[derive(Debug)]
pub struct Saving {
    token: Token,
    outcome: watch::Receiver<Option<Result<(), Arc<TaskError>>>>,
}

impl Saving {
    /// Whether it is saved, or never will be.
    pub fn is_over(&self) -> bool {
        self.outcome.borrow().is_some() || self.outcome.has_changed().is_err()
    }

    /// Waits until the checkpoint is where the next attempt finds it, and the server was told.
    ///
    /// # Errors
    /// [`TaskError::Checkpoint`]; [`TaskError::Cancelled`] and [`TaskError::Ended`] where the attempt was faster.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn saved(&self) -> Result<(), Arc<TaskError>> {
        let mut outcome = self.outcome.clone();
        let over = outcome.wait_for(Option::is_some).await;
        let over = over.ok().and_then(|outcome| outcome.clone());
        over.unwrap_or_else(|| Err(Arc::new(TaskError::Ended { token: self.token })))
    }
}

impl Task {
    /// Whether the stage takes checkpoints of this attempt: in a group, of rank 0 alone.
    pub fn takes_checkpoints(&self) -> bool {
        self.offered.checkpoints
    }

    /// Where to go on; `None` where the stage runs from its beginning.
    pub fn resume(&self) -> Option<&Checkpoint> {
        self.offered.resume.as_ref()
    }

    /// Begins to read the checkpoint to go on from. If its holder is gone, so is the checkpoint: let the attempt fail, and
    /// the next one runs from the beginning, for which nobody is blamed.
    ///
    /// # Errors
    /// [`TaskError::NoCheckpoint`], [`TaskError::Consume`].
    pub fn consume_checkpoint(&self, options: ConsumeOptions) -> Result<Consumer, TaskError> {
        let token = self.state.token;
        let resume = self.resume().ok_or(TaskError::NoCheckpoint { token })?;
        let losses = Arc::new(Losses(Arc::clone(&self.state)));
        self.read(resume.handle.clone(), options, losses)
    }

    /// Tells when and why to end at the next step boundary, by [`Task::yield_with`]: somebody more urgent waits, or this
    /// worker is to leave. Nothing happens to an attempt that goes on. In a group, rank 0 alone is asked.
    pub fn asked_to_yield(&self) -> &Stop {
        &self.state.asked
    }

    /// Saves the state of the stage function for the next attempt: in the store where the server has one, else in this
    /// process until it is released. Of several, the server keeps the one with the most progress. Returns once it is on its
    /// way; it begins when the one before is over.
    ///
    /// # Errors
    /// [`TaskError::NoCheckpoints`], [`TaskError::Checkpoint`], [`TaskError::Cancelled`], [`TaskError::Ended`]. Nothing is
    /// saved, and the attempt goes on unless it was told to stop.
    ///
    /// # Cancel safety
    /// Nothing is saved where the future is dropped.
    pub async fn checkpoint(&self, state: Output, progress: Progress) -> Result<Saving, TaskError> {
        let token = self.state.token;
        let turn = self.turn().await?;
        let kept = self.keep(state)?;
        let (told, outcome) = watch::channel(None);
        let state = Arc::clone(&self.state);
        tokio::spawn(async move {
            let saved = save(kept, &state, progress).await;
            if let Err(error @ TaskError::Checkpoint { .. }) = &saved {
                tracing::warn!(%token, error = chain(error), "the attempt goes on without a checkpoint");
            }
            told.send_replace(Some(saved.map_err(Arc::new)));
            drop(turn);
        });
        Ok(Saving { token, outcome })
    }

    /// Ends the attempt so that the next one goes on from here: with this state, or where there is none with the last
    /// checkpoint. Returns once the slot is free. The other ranks of its group are told to stop then.
    ///
    /// # Errors
    /// [`TaskError::NoCheckpoints`], [`TaskError::Checkpoint`], [`TaskError::AlreadyOpen`] where others may be reading the
    /// output: the attempt goes on. [`TaskError::Cancelled`], [`TaskError::Ended`].
    ///
    /// # Cancel safety
    /// The attempt goes on where the future is dropped.
    pub async fn yield_with(&self, state: Option<Output>, progress: Progress) -> Result<(), TaskError> {
        let token = self.state.token;
        let _turn = self.turn().await?;
        if lock(&self.output).is_some() {
            return Err(TaskError::AlreadyOpen { token });
        }
        let kept = match state {
            Some(state) => Some(self.state.unless_over(self.keep(state)?.stored()).await?),
            None => None,
        };
        self.state.speak_well(None)?;
        let payload = kept.map(Kept::hand_over);
        self.worker.tell(|session| session.yielded(token, payload, progress));
        // The server counts the slot as free when it hears this, and offers again only after.
        self.worker.free(token);
        Ok(())
    }

    /// Waits until no checkpoint is under way.
    async fn turn(&self) -> Result<OwnedMutexGuard<()>, TaskError> {
        if !self.takes_checkpoints() {
            let (token, stage) = (self.state.token, self.worker.stage.clone());
            return Err(TaskError::NoCheckpoints { token, stage });
        }
        let turn = Arc::clone(&self.state.saving).lock_owned();
        self.state.unless_over(async { Ok(turn.await) }).await
    }

    /// Publishes the state in this process.
    fn keep(&self, state: Output) -> Result<Kept, TaskError> {
        let token = self.state.token;
        let not_saved = |source| TaskError::Checkpoint {
            token,
            source: Box::new(source),
        };
        let whole = OutputPlan {
            publish: true,
            stored: false,
            chunking: None,
            max_nbytes: None,
        };
        let manifest = state.manifest(&whole).map_err(|source| not_saved(source.into()))?;
        let spec = PublishSpec::new(token.job.to_string(), manifest, Owner::Orchestrator);
        let publication = self.worker.connector.publish(spec, state.tensors);
        let publication = publication.map_err(|source| not_saved(source.into()))?;
        Ok(Kept {
            worker: Arc::clone(&self.worker),
            token,
            handle: publication.handle().clone(),
            handed_over: false,
        })
    }
}

/// Brings a checkpoint to where it is safe, and tells the server, unless the attempt ends before.
async fn save(kept: Kept, state: &TaskState, progress: Progress) -> Result<(), TaskError> {
    let kept = state.unless_over(kept.stored()).await?;
    state.while_running(|| {
        let (worker, token) = (Arc::clone(&kept.worker), kept.token);
        let payload = kept.hand_over();
        worker.tell(|session| session.checkpoint(token, payload, progress));
    })
}

/// A checkpoint that the server does not know yet: dropped, it ends.
struct Kept {
    worker: Arc<Inner>,
    token: Token,
    /// Where it is: here or in the store.
    handle: Handle,
    handed_over: bool,
}

impl Kept {
    /// Has the store take it, where the server has one.
    async fn stored(mut self) -> Result<Self, TaskError> {
        let connector = &self.worker.connector;
        let has_store = connector.stores().borrow().is_some();
        if has_store {
            let token = self.token;
            let stored = connector.store(&self.handle, Some(token), STORE_WITHIN).await;
            self.handle = stored.map_err(|source| TaskError::Checkpoint {
                token,
                source: Box::new(source.into()),
            })?;
        }
        Ok(self)
    }

    /// From now on the server releases it.
    fn hand_over(mut self) -> v1::Payload {
        self.handed_over = true;
        describe(&self.handle)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.handed_over {
            return;
        }
        let connector = Arc::clone(&self.worker.connector);
        let (handle, token) = (self.handle.clone(), self.token);
        connector.release(handle.payload);
        let runtime = connector.shared().runtime().clone();
        runtime.spawn(async move {
            if let Err(error) = release(connector.shared(), &handle, Some(token)).await {
                tracing::warn!(%error, "a checkpoint that nobody needs was not released");
            }
        });
    }
}

/// Notes that the checkpoint is lost. It came from no other stage, so that what was read of it is no handover.
struct Losses(Arc<TaskState>);

impl Observer for Losses {
    fn chunk(&self, _: &Handover) {}

    fn error(&self, error: &ConsumeError) {
        self.0.error(error);
    }
}
