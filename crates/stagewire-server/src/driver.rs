//! Owns the scheduler: takes what happens, decides, journals, and only then lets anything out.
//!
//! One task. It drains its inbox, decides every input, applies what was decided, polls until nothing is due, writes one
//! batch and syncs it, and then sends replies and effects. Applying before the sync is safe because nothing leaves
//! before it, and a failed sync stops the server. While the disk works, the inbox fills: that is the group commit.

mod batch;
mod core;
mod record;

use std::sync::Arc;
use std::time::{Duration, Instant};

use stagewire_core::{Classify, ErrorClass, JobId, PayloadId, Timestamp};
use stagewire_sched::{Input, Refusal, Sched};
use stagewire_store::Survivor;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::journal::{Journal, JournalError};
use crate::outlet::Outlet;

pub(crate) use self::batch::Out;
pub(crate) use self::core::Core;
pub(crate) use self::record::{LONG, Replayed, replay};

/// Inputs that wait for the driver; more make their senders wait.
const INBOX: usize = 4096;
/// Inputs that share one sync.
const BATCH: usize = 512;
/// The driver never polls more often, whatever the scheduler says.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// Answer to an input: the job that a submission made or found.
type Reply = oneshot::Sender<Result<Option<JobId>, Refusal>>;
/// A look at the scheduler.
type Look = Box<dyn FnOnce(&Sched, Timestamp) + Send>;

enum Command {
    Decide(Input, Option<Reply>),
    Look(Look),
}

/// Why the driver gives no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DriveError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the server is stopping; ask again once it runs")]
    Stopped,
}

impl Classify for DriveError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Refused(refusal) => refusal.class(),
            Self::Stopped => ErrorClass::Unavailable,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Refused(refusal) => refusal.reason(),
            Self::Stopped => "server.stopping",
        }
    }

    fn details(&self) -> std::collections::BTreeMap<String, String> {
        match self {
            Self::Refused(refusal) => refusal.details(),
            Self::Stopped => Default::default(),
        }
    }
}

/// Talks to the driver.
#[derive(Debug, Clone)]
pub(crate) struct Driver {
    inbox: mpsc::Sender<Command>,
}

impl Driver {
    /// Hands in what happened and waits until what follows is safe on disk.
    ///
    /// # Errors
    /// [`DriveError`].
    ///
    /// # Cancel safety
    /// Once the input is in the inbox it is decided, whether or not somebody waits for the answer.
    pub(crate) async fn decide(&self, input: Input) -> Result<Option<JobId>, DriveError> {
        let (reply, answer) = oneshot::channel();
        let sent = self.inbox.send(Command::Decide(input, Some(reply))).await;
        sent.map_err(|_| DriveError::Stopped)?;
        Ok(answer.await.map_err(|_| DriveError::Stopped)??)
    }

    /// Hands in what happened; nobody waits for the answer.
    pub(crate) async fn tell(&self, input: Input) {
        // A driver that is gone needs no input: the server is stopping.
        let _ = self.inbox.send(Command::Decide(input, None)).await;
    }

    /// Looks at the scheduler. What it sees is safe on disk.
    ///
    /// # Errors
    /// [`DriveError::Stopped`].
    pub(crate) async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Sched, Timestamp) -> T + Send + 'static,
    ) -> Result<T, DriveError> {
        let (reply, answer) = oneshot::channel();
        let look: Look = Box::new(move |sched, now| drop(reply.send(look(sched, now))));
        let sent = self.inbox.send(Command::Look(look)).await;
        sent.map_err(|_| DriveError::Stopped)?;
        answer.await.map_err(|_| DriveError::Stopped)
    }
}

#[cfg(test)]
impl Driver {
    /// One in whose scheduler nothing happens but what it is told; `first` runs before each look at it.
    pub(crate) fn still(mut sched: Sched, mut first: impl FnMut() + Send + 'static) -> Self {
        let (inbox, mut commands) = mpsc::channel(1);
        tokio::spawn(async move {
            while let Some(command) = commands.recv().await {
                let now = Timestamp::default();
                match command {
                    Command::Look(look) => {
                        first();
                        look(&sched, now);
                    }
                    Command::Decide(input, reply) => {
                        let decided = sched.decide(now, input).map(|decision| {
                            decision.events.iter().for_each(|event| sched.apply(now, event));
                            None
                        });
                        _ = reply.map(|reply| reply.send(decided));
                    }
                }
            }
        });
        Self { inbox }
    }
}

/// The driver itself.
pub(crate) struct Drive {
    core: Core,
    clock: Clock,
    outlet: Arc<Outlet>,
    inbox: mpsc::Receiver<Command>,
    /// Taken while it writes.
    journal: Option<Journal>,
}

impl Drive {
    /// A driver of a scheduler that has replayed `journal`, and the handle to it.
    pub(crate) fn new(sched: Sched, journal: Journal, clock: Clock, outlet: Arc<Outlet>) -> (Driver, Self) {
        let (sender, inbox) = mpsc::channel(INBOX);
        let core = Core::new(sched, journal.epoch(), Arc::clone(&outlet.histories));
        let drive = Self {
            core,
            clock,
            outlet,
            inbox,
            journal: Some(journal),
        };
        (Driver { inbox: sender }, drive)
    }

    /// Begins the epoch: what the server before left is judged, and the outlet learns which attempts still run.
    ///
    /// # Errors
    /// [`JournalError`].
    pub(crate) async fn begin(&mut self) -> Result<(), JournalError> {
        for token in self.core.running() {
            self.outlet.store.grant(token);
        }
        let survivors = self.outlet.store.survivors();
        let stored = survivors.iter().map(|survivor| survivor.payload).collect();
        self.process(vec![Command::Decide(self.core.restarted(stored), None)])
            .await?;
        for Survivor { payload, token, .. } in survivors {
            // What a running attempt has put may not be published yet.
            let sched = self.core.sched();
            let wanted = token.is_some_and(|token| sched.is_running(token));
            if !wanted && !sched.needs_payload(payload) {
                self.outlet.store.release(payload);
            }
        }
        Ok(())
    }

    /// Works until it is told to stop. Gives the journal back, with everything in it.
    ///
    /// # Errors
    /// [`JournalError`] where the journal cannot be written. Nothing that the server could not make safe has left it.
    pub(crate) async fn run(mut self, stop: CancellationToken) -> Result<Journal, JournalError> {
        let mut commands = Vec::with_capacity(BATCH);
        loop {
            let due = self
                .core
                .sched()
                .poll_timeout()
                .map(|(then, _)| self.clock.until(then).max(SHORTEST_WAIT));
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                received = self.inbox.recv_many(&mut commands, BATCH) => if received == 0 { break },
                () = tokio::time::sleep(due.unwrap_or(Duration::MAX)), if due.is_some() => {}
            }
            self.process(std::mem::take(&mut commands)).await?;
        }
        self.write().await?;
        // What no job needs is not worth a process that keeps it.
        for payload in self.core.sched().idle_cached() {
            self.outlet.store.release(payload);
        }
        Ok(self.journal.take().expect("taken only while it writes"))
    }

    async fn process(&mut self, commands: Vec<Command>) -> Result<(), JournalError> {
        let now = self.clock.now();
        let mut inputs = Vec::with_capacity(commands.len());
        for command in commands {
            match command {
                // Everything that was decided is written at this point, so that a look sees nothing that a crash
                // could take back.
                Command::Look(look) => look(self.core.sched(), now),
                Command::Decide(input, reply) => inputs.push((input, reply)),
            }
        }
        let mut replies = Vec::with_capacity(inputs.len());
        for (input, reply) in inputs {
            let absent = self.absent(&input);
            let answer = self.core.decide(now, input);
            if let Some(payload) = absent {
                // Where nobody knows it, nothing follows.
                let _ = self.core.decide(now, Input::PayloadLost { payload });
            }
            replies.extend(reply.map(|reply| (reply, answer)));
        }
        self.core.settle(now);
        if self.core.must_write() {
            self.write().await?;
        }
        for out in self.core.release() {
            self.outlet.let_out(out);
        }
        for (reply, answer) in replies {
            // Whoever asked may have gone.
            let _ = reply.send(answer);
        }
        Ok(())
    }

    /// The payload that a worker says is in the store, where it is not: what the store of the server before has lost with its
    /// memory, workers say again to the next one.
    fn absent(&self, input: &Input) -> Option<PayloadId> {
        let (Input::Published { payload, .. }
        | Input::Checkpointed { payload, .. }
        | Input::Yielded {
            payload: Some(payload), ..
        }) = input
        else {
            return None;
        };
        (payload.stored && !self.outlet.store.has(payload.id)).then_some(payload.id)
    }

    /// Writes and syncs what the journal has not yet.
    async fn write(&mut self) -> Result<(), JournalError> {
        let Some(bytes) = self.core.encode() else {
            return Ok(());
        };
        let mut journal = self
            .journal
            .take()
            .expect("put back below; a failed write ends the driver");
        let begin = Instant::now();
        let written = tokio::task::spawn_blocking(move || {
            let result = journal.append(&bytes);
            (journal, result)
        });
        let (journal, result) = written.await.map_err(|error| JournalError::task(&error))?;
        result?;
        self.outlet.metrics.commit(begin.elapsed());
        self.journal = Some(journal);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
