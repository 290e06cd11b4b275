mod checkpoint;
mod state;

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stagewire_api::v1;
use stagewire_core::{Classify, ErrorClass, Failure, Handle, JobId, Member, Progress, StageName, Token};

pub use checkpoint::{Checkpoint, Saving};
pub(crate) use state::{Answer, Sent, TaskState};

use super::leave::Made;
use super::{Cancelled, Inner, Offered, Output, OutputPlan, TaskError, lock};
use crate::consume::Observer;
use crate::{ConsumeOptions, Consumer, Owner, Publication, PublishSpec, PutError, Stop};

/// How long the store may wait for room before an attempt fails for lack of it.
const STORE_WITHIN: Duration = Duration::from_secs(30);
/// Pause before a store that could not be reached is asked again.
const STORE_PAUSE: Duration = Duration::from_millis(500);

/// One input of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskInput {
    /// Stage that produced it.
    pub stage: StageName,
    /// What to consume.
    pub handle: Handle,
}

/// A parameter of the job that is an input: a file on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputFile {
    /// Name of the parameter.
    pub param: String,
    /// The file, not to be written to; `None` where the job gives none.
    pub path: Option<PathBuf>,
}

/// A granted attempt.
///
/// It ends with [`Task::complete`], [`Task::finish`], [`Task::yield_with`] or [`Task::fail`]. Dropping it before fails it, or, where it was
/// told to stop, says that it has stopped.
pub struct Task {
    worker: Arc<Inner>,
    state: Arc<TaskState>,
    offered: Offered,
    output: Mutex<Option<Opened>>,
}

/// The output of an attempt.
#[derive(Debug)]
struct Opened {
    publication: Publication,
    /// The server knows of it.
    announced: bool,
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task")
            .field("token", &self.state.token)
            .field("stage", &self.worker.stage)
            .finish_non_exhaustive()
    }
}

impl Task {
    pub(super) fn new(worker: Arc<Inner>, token: Token, offered: Offered) -> Self {
        Self {
            worker,
            state: Arc::new(TaskState::new(token)),
            offered,
            output: Mutex::default(),
        }
    }

    pub(super) const fn state(&self) -> &Arc<TaskState> {
        &self.state
    }

    /// The attempt.
    pub fn token(&self) -> Token {
        self.state.token
    }

    /// The job.
    pub fn job(&self) -> JobId {
        self.state.token.job
    }

    /// The stage.
    pub fn stage(&self) -> &StageName {
        &self.worker.stage
    }

    /// Parameters of the job: a JSON object.
    pub fn params(&self) -> &str {
        &self.offered.params
    }

    /// The parameters that are inputs of the job; in [`Task::params`] they are names.
    pub fn files(&self) -> &[InputFile] {
        &self.offered.files
    }

    /// What the stage reads.
    pub fn inputs(&self) -> &[TaskInput] {
        &self.offered.inputs
    }

    /// The place of this worker in the group that runs the attempt, where it is in one.
    pub fn member(&self) -> Option<&Member> {
        self.offered.member.as_ref()
    }

    /// How the output is handed over.
    pub fn plan(&self) -> OutputPlan {
        self.offered.output
    }

    /// Tells when and why to stop. [`Task::consume`] heeds it by itself.
    pub fn stop(&self) -> &Stop {
        &self.state.stop
    }

    /// Begins to read the input from `stage`, or the only one where none is named. Each call reads from chunk 0.
    ///
    /// # Errors
    /// [`TaskError::NoInput`], [`TaskError::WhichInput`], [`TaskError::Consume`].
    pub fn consume(&self, stage: Option<&StageName>, options: ConsumeOptions) -> Result<Consumer, TaskError> {
        let token = self.state.token;
        let inputs = || {
            let names: Vec<_> = self.offered.inputs.iter().map(|input| input.stage.as_str()).collect();
            if names.is_empty() {
                "none".to_owned()
            } else {
                names.join(", ")
            }
        };
        let input = match stage {
            Some(stage) => {
                let input = self.offered.inputs.iter().find(|input| input.stage == *stage);
                input.ok_or_else(|| TaskError::NoInput {
                    token,
                    stage: stage.clone(),
                    inputs: inputs(),
                })?
            }
            None => match self.offered.inputs.as_slice() {
                [only] => only,
                _ => {
                    return Err(TaskError::WhichInput {
                        token,
                        inputs: inputs(),
                    });
                }
            },
        };
        self.read(input.handle.clone(), options, Arc::clone(&self.state))
    }

    fn read(
        &self,
        handle: Handle,
        mut options: ConsumeOptions,
        observer: Arc<impl Observer + 'static>,
    ) -> Result<Consumer, TaskError> {
        let token = self.state.token;
        options.stop.get_or_insert_with(|| self.state.stop.clone());
        let consumer = self.worker.connector.consume(handle, options);
        let mut consumer = consumer.map_err(|source| TaskError::Consume {
            token,
            source: Box::new(source),
        })?;
        consumer.observe(observer);
        Ok(consumer)
    }

    /// Reports how far the attempt has come; renews its grant.
    ///
    /// # Errors
    /// [`Cancelled`] where the attempt must stop.
    pub fn progress(&self, progress: Progress) -> Result<(), Cancelled> {
        self.check()?;
        self.worker.tell(|session| session.progress(self.state.token, progress));
        Ok(())
    }

    /// Whether the attempt may go on.
    ///
    /// # Errors
    /// [`Cancelled`] where it must stop.
    pub fn check(&self) -> Result<(), Cancelled> {
        match self.state.stop.reason() {
            Some(reason) => Err(Cancelled {
                token: self.state.token,
                reason,
            }),
            None => Ok(()),
        }
    }

    /// Publishes an output whose chunks are still being computed. The offer's plan says how it is cut.
    ///
    /// # Errors
    /// [`TaskError::Output`] where the tensors cannot be cut as planned, [`TaskError::TooLarge`], [`TaskError::Publish`],
    /// [`TaskError::AlreadyOpen`], [`TaskError::Cancelled`], [`TaskError::Ended`].
    pub fn open(&self, output: Output) -> Result<(), TaskError> {
        self.state.while_running(|| ())?;
        let token = self.state.token;
        let manifest = output
            .manifest(&self.offered.output)
            .map_err(|source| TaskError::Output {
                token,
                stage: self.worker.stage.clone(),
                source,
            })?;
        let nbytes = manifest.nbytes();
        if let Some(limit) = self.offered.output.max_nbytes.filter(|limit| nbytes > *limit) {
            return Err(TaskError::TooLarge {
                token,
                stage: self.worker.stage.clone(),
                nbytes,
                limit,
            });
        }
        let mut place = lock(&self.output);
        if place.is_some() {
            return Err(TaskError::AlreadyOpen { token });
        }
        let spec = PublishSpec::new(token.job.to_string(), manifest, Owner::Orchestrator);
        let publication = self.worker.connector.open(spec, output.tensors);
        let publication = publication.map_err(|source| TaskError::Publish {
            token,
            source: Box::new(source),
        })?;
        *place = Some(Opened {
            publication,
            announced: false,
        });
        Ok(())
    }

    /// Shows chunk `index` of the opened output. The consumer is called in once chunk 0 is there.
    ///
    /// # Errors
    /// [`TaskError::NotOpen`], [`TaskError::Publish`], [`TaskError::Cancelled`].
    pub fn ready(&self, index: u32) -> Result<(), TaskError> {
        self.check()?;
        let token = self.state.token;
        let mut place = lock(&self.output);
        let Opened { publication, announced } = place.as_mut().ok_or(TaskError::NotOpen { token })?;
        publication.ready(index).map_err(|source| TaskError::Publish {
            token,
            source: Box::new(source),
        })?;
        let plan = self.offered.output;
        if index == 0 && plan.publish && !plan.stored && !*announced {
            let payload = describe(publication.handle());
            self.worker.tell(|session| session.published(token, payload));
            *announced = true;
        }
        Ok(())
    }

    /// Ends the attempt well: every chunk of the opened output is ready. Returns once the server has accepted it.
    ///
    /// # Errors
    /// [`TaskError::Refused`] where the server takes no completion of this attempt; else [`TaskError`], and the attempt
    /// goes on.
    ///
    /// # Cancel safety
    /// Once the completion was sent, the server decides though the future was dropped, and the worker lets go of the
    /// output as it says.
    pub async fn finish(&self) -> Result<(), TaskError> {
        self.check()?;
        let token = self.state.token;
        let handle = {
            let mut place = lock(&self.output);
            let opened = place.as_mut().ok_or(TaskError::NotOpen { token })?;
            opened.publication.seal();
            opened.publication.handle().clone()
        };
        let plan = self.offered.output;
        let payload = if plan.publish && plan.stored {
            let stored = tokio::select! {
                stored = self.put(&handle) => stored,
                reason = self.state.stop.stopped() => return Err(Cancelled { token, reason }.into()),
            };
            describe(&stored.map_err(|source| TaskError::Put {
                token,
                source: Box::new(source),
            })?)
        } else {
            describe(&handle)
        };
        let sent = Sent {
            payload: handle.payload,
            result: !plan.publish,
        };
        self.state.speak_well(Some(sent))?;
        if plan.publish && !plan.stored {
            let told = None;
            lock(&self.worker.made).insert(handle.payload, Made { token, handle, told });
        }
        let result = if plan.publish {
            let announced = lock(&self.output)
                .as_mut()
                .is_some_and(|opened| std::mem::replace(&mut opened.announced, true));
            if !announced {
                self.worker.tell(|session| session.published(token, payload));
            }
            None
        } else {
            Some(payload)
        };
        self.completed(result).await
    }

    /// Ends the attempt well on a rank above 0 of its group, which hands nothing over. Returns once rank 0 has completed for
    /// all.
    ///
    /// # Errors
    /// [`TaskError::Cancelled`] or [`TaskError::Refused`] where the attempt has ended otherwise; [`TaskError::Ended`].
    ///
    /// # Cancel safety
    /// As [`Task::finish`].
    pub async fn follow(&self) -> Result<(), TaskError> {
        self.check()?;
        let token = self.state.token;
        self.state.speak_well(None)?;
        tokio::select! {
            biased;
            ended = self.completed(None) => ended,
            // It has ended on another rank, so nobody will answer.
            reason = self.state.stop.stopped() => {
                self.worker.tell(|session| session.stopped(token));
                self.worker.free(token);
                Err(Cancelled { token, reason }.into())
            }
        }
    }

    /// Says that the attempt has ended well, and waits for the answer.
    async fn completed(&self, result: Option<v1::Payload>) -> Result<(), TaskError> {
        let token = self.state.token;
        let handovers = std::mem::take(&mut *lock(&self.state.handovers));
        let handovers = handovers.into_iter().map(v1::Handover::from).collect();
        self.worker.tell(|session| session.completed(token, result, handovers));
        let mut answers = self.state.answer.subscribe();
        let answer = answers
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|answer| answer.clone());
        match answer {
            Some(Answer::Accepted) => Ok(()),
            Some(Answer::Refused(failure) | Answer::Over(failure)) => Err(TaskError::Refused { token, failure }),
            // The sender is in `state`.
            None => Err(TaskError::Ended { token }),
        }
    }

    /// Has the store take the output. A store that is gone comes back with the next server, and is asked there again; one
    /// that only lost the connection is asked again soon. It ends with the attempt.
    async fn put(&self, handle: &Handle) -> Result<Handle, PutError> {
        let connector = &self.worker.connector;
        let mut stores = connector.stores();
        loop {
            stores.mark_unchanged();
            match connector.store(handle, Some(self.state.token), STORE_WITHIN).await {
                Err(error) if error.class() == ErrorClass::Unavailable => {
                    tracing::info!(token = %self.state.token, %error, "the store is asked again");
                    // Whether another one is named or not: the sender is in the connector.
                    let _ = tokio::time::timeout(STORE_PAUSE, stores.changed()).await;
                }
                done => return done,
            }
        }
    }

    /// Publishes a complete output and ends the attempt well: [`Task::open`] and [`Task::finish`] in one.
    ///
    /// # Errors
    /// As those. The attempt goes on, and can be ended by [`Task::fail`], unless it was [`TaskError::Refused`].
    ///
    /// # Cancel safety
    /// As [`Task::finish`].
    pub async fn complete(&self, output: Output) -> Result<(), TaskError> {
        self.open(output)?;
        self.finish().await
    }

    /// Ends the attempt with a failure, which consumers of its output see at once. An attempt that was told to stop
    /// has stopped by this, whatever the failure says. Nothing happens to one that has ended.
    pub fn fail(&self, failure: Failure) {
        let token = self.state.token;
        if self.state.speak().is_err() {
            return;
        }
        if let Some(Opened { publication, announced }) = lock(&self.output).take() {
            publication.fail(failure.clone());
            if !announced {
                self.worker.connector.release(publication.handle().payload);
            }
        }
        if self.state.stop.is_stopped() {
            self.worker.tell(|session| session.stopped(token));
        } else {
            let lost = *lock(&self.state.lost);
            self.worker.tell(|session| session.failed(token, failure, lost));
        }
        // The server counts the slot as free when it hears this, and offers again only after.
        self.worker.free(token);
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        let message = "the stage function ended without an output";
        self.fail(Failure::new(ErrorClass::Internal, "stage.no_output", message));
    }
}

pub(super) fn describe(handle: &Handle) -> v1::Payload {
    v1::Payload {
        id: handle.payload.0.as_bytes().to_vec(),
        handle: handle.to_bytes(),
        nbytes: handle.manifest.nbytes().0,
        chunks: handle.manifest.chunks(),
        stored: handle.mode == stagewire_core::TransferMode::Store,
    }
}
