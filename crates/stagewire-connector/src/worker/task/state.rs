mod handovers;

use std::sync::{Arc, Mutex};

use stagewire_core::{Failure, Handover, PayloadId, Token};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::super::{Cancelled, TaskError, lock};
use crate::consume::Observer;
use crate::{ConsumeError, Stop};
use handovers::Handovers;

/// How the server answered to the end of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Accepted,
    Refused(Failure),
    /// There is no server any more.
    Over(Failure),
}

/// The output of an attempt that was told to have ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sent {
    pub(crate) payload: PayloadId,
    /// It is the result of the job, which the server keeps a copy of once it has accepted it.
    pub(crate) result: bool,
}

/// What the server was told of an attempt's end.
#[derive(Debug, Default)]
struct Spoken {
    ended: bool,
    /// Until the server has answered.
    output: Option<Sent>,
}

/// What a task and the worker's driver both know of an attempt.
#[derive(Debug)]
pub(crate) struct TaskState {
    pub(super) token: Token,
    pub(super) stop: Stop,
    pub(super) answer: watch::Sender<Option<Answer>>,
    /// Its end was told to the server: completed or failed. Locked while that is decided, so that an attempt either ends
    /// or is told to stop.
    spoken: Mutex<Spoken>,
    pub(super) handovers: Mutex<Handovers>,
    pub(super) lost: Mutex<Option<PayloadId>>,
    /// When and why to yield.
    pub(super) asked: Stop,
    /// Held while a checkpoint is on its way.
    pub(super) saving: Arc<tokio::sync::Mutex<()>>,
    /// Cancelled once its end was told.
    over: CancellationToken,
}

impl TaskState {
    pub(super) fn new(token: Token) -> Self {
        Self {
            token,
            stop: Stop::new(),
            answer: watch::Sender::new(None),
            spoken: Mutex::default(),
            handovers: Mutex::default(),
            lost: Mutex::default(),
            asked: Stop::new(),
            saving: Arc::default(),
            over: CancellationToken::new(),
        }
    }

    pub(crate) const fn stop(&self) -> &Stop {
        &self.stop
    }

    pub(crate) const fn asked(&self) -> &Stop {
        &self.asked
    }

    /// Does something that only a running attempt does; gives up when it ends or is told to stop.
    pub(super) async fn unless_over<T>(
        &self,
        work: impl Future<Output = Result<T, TaskError>>,
    ) -> Result<T, TaskError> {
        let token = self.token;
        tokio::select! {
            biased;
            () = self.over.cancelled() => Err(TaskError::Ended { token }),
            reason = self.stop.stopped() => Err(Cancelled { token, reason }.into()),
            done = work => done,
        }
    }

    /// Says something that only a running attempt says.
    pub(super) fn while_running(&self, say: impl FnOnce()) -> Result<(), TaskError> {
        let spoken = lock(&self.spoken);
        self.may_speak(&spoken, Some(&self.stop))?;
        say();
        Ok(())
    }

    /// Tells it to stop, unless its end was told already. Returns whether it was.
    pub(crate) fn stop_unless_ended(&self, failure: &Failure) -> bool {
        let spoken = lock(&self.spoken);
        if !spoken.ended {
            self.stop.stop(failure.clone());
        }
        spoken.ended
    }

    /// What there is to let go of now that the server has answered, or will not; once.
    pub(crate) fn take_output(&self) -> Option<Sent> {
        lock(&self.spoken).output.take()
    }

    pub(crate) fn answer(&self, answer: Answer) {
        self.answer.send_replace(Some(answer));
    }

    /// Takes the right to tell the server how the attempt ended; once.
    pub(super) fn speak(&self) -> Result<(), TaskError> {
        self.speak_unless(None, None)
    }

    /// Takes the right to tell the server that the attempt ended well, with this output if it has one; not once it was
    /// told to stop.
    pub(super) fn speak_well(&self, output: Option<Sent>) -> Result<(), TaskError> {
        self.speak_unless(Some(&self.stop), output)
    }

    fn speak_unless(&self, stop: Option<&Stop>, output: Option<Sent>) -> Result<(), TaskError> {
        let mut spoken = lock(&self.spoken);
        self.may_speak(&spoken, stop)?;
        *spoken = Spoken { ended: true, output };
        self.over.cancel();
        Ok(())
    }

    fn may_speak(&self, spoken: &Spoken, stop: Option<&Stop>) -> Result<(), TaskError> {
        let token = self.token;
        if spoken.ended {
            return Err(TaskError::Ended { token });
        }
        match stop.and_then(Stop::reason) {
            Some(reason) => Err(Cancelled { token, reason }.into()),
            None => Ok(()),
        }
    }
}

impl Observer for TaskState {
    fn chunk(&self, handover: &Handover) {
        lock(&self.handovers).note(handover);
    }

    fn error(&self, error: &ConsumeError) {
        if let Some(payload) = error.lost() {
            *lock(&self.lost) = Some(payload);
        }
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::{Attempt, Epoch, ErrorClass, JobId};
    use uuid::Uuid;

    use super::*;

    const OUTPUT: Sent = Sent {
        payload: PayloadId(Uuid::from_u128(2)),
        result: true,
    };

    fn state() -> TaskState {
        TaskState::new(Token {
            epoch: Epoch(1),
            job: JobId(Uuid::from_u128(1)),
            attempt: Attempt(1),
        })
    }

    #[test]
    fn an_attempt_ends_or_is_told_to_stop_but_not_both() {
        let stale = Failure::new(ErrorClass::Fenced, "token.stale", "superseded");
        let late = state();
        assert!(!late.stop_unless_ended(&stale));
        assert!(matches!(late.speak_well(Some(OUTPUT)), Err(TaskError::Cancelled(_))));
        late.speak().expect("it says that it has stopped");

        let early = state();
        early.speak_well(Some(OUTPUT)).expect("nobody told it to stop");
        assert!(early.stop_unless_ended(&stale) && !early.stop.is_stopped());
        assert!(matches!(early.speak(), Err(TaskError::Ended { .. })));
    }
}
