use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use stagewire_core::{Failure, Handover, PayloadId, Token};
use tokio::sync::watch;

use super::super::{TaskError, lock};
use crate::consume::Observer;
use crate::{ConsumeError, Stop};

/// How the server answered to the end of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Accepted,
    Refused(Failure),
    /// There is no server any more.
    Over(Failure),
}

/// What a task and the worker's driver both know of an attempt.
#[derive(Debug)]
pub(crate) struct TaskState {
    pub(super) token: Token,
    pub(super) stop: Stop,
    pub(super) answer: watch::Sender<Option<Answer>>,
    /// Its end was told to the server: completed or failed.
    spoken: AtomicBool,
    pub(super) handovers: Mutex<Vec<Handover>>,
    pub(super) lost: Mutex<Option<PayloadId>>,
}

impl TaskState {
    pub(super) fn new(token: Token) -> Self {
        Self {
            token,
            stop: Stop::new(),
            answer: watch::Sender::new(None),
            spoken: AtomicBool::new(false),
            handovers: Mutex::default(),
            lost: Mutex::default(),
        }
    }

    pub(crate) const fn stop(&self) -> &Stop {
        &self.stop
    }

    pub(crate) fn has_spoken(&self) -> bool {
        self.spoken.load(Ordering::Acquire)
    }

    pub(crate) fn answer(&self, answer: Answer) {
        self.answer.send_replace(Some(answer));
    }

    /// There will be no answer.
    pub(crate) fn end(&self, failure: Failure) {
        self.stop.stop(failure.clone());
        self.answer(Answer::Over(failure));
    }

    /// Takes the right to tell the server how the attempt ended; once.
    pub(super) fn speak(&self) -> Result<(), TaskError> {
        if self.spoken.swap(true, Ordering::AcqRel) {
            return Err(TaskError::Ended { token: self.token });
        }
        Ok(())
    }
}

impl Observer for TaskState {
    fn chunk(&self, handover: &Handover) {
        lock(&self.handovers).push(handover.clone());
    }

    fn error(&self, error: &ConsumeError) {
        if let Some(payload) = error.lost() {
            *lock(&self.lost) = Some(payload);
        }
    }
}
