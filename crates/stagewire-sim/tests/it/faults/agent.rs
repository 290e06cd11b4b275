//! A worker process: what it really does, whatever the scheduler believes.

use std::collections::BTreeMap;
use std::time::Duration;

use stagewire_core::{ErrorClass, Failure, Incarnation, PayloadId, StageName, Timestamp, Token};
use stagewire_sched::{Effect, Input, Offer, WorkerInfo};

/// What an agent hears on its stream.
#[derive(Debug, Clone)]
pub(super) enum Word {
    Effect(Box<Effect>),
    /// It is attached.
    Welcome,
    /// The stream is broken, or never came up.
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Link {
    Down,
    /// It has said hello and was not answered.
    Attaching,
    Up,
}

#[derive(Debug)]
pub(super) struct Agent {
    pub(super) incarnation: Incarnation,
    pub(super) stage: StageName,
    pub(super) slots: u32,
    /// Attempts that it runs together.
    pub(super) max_batch: u32,
    pub(super) link: Link,
    /// Number of its stream; what comes on an earlier one counts for nothing.
    pub(super) session: u64,
    /// Added to each message, one way: a slow link.
    pub(super) slow: Duration,
    /// Does nothing and hears nothing until then: a process that was stopped.
    pub(super) stopped_until: Timestamp,
    /// Has no connection until then.
    pub(super) cut_off_until: Timestamp,
    /// Never stops what it is told to stop.
    pub(super) deaf: bool,
    pub(super) offers: BTreeMap<Token, Offer>,
    pub(super) tasks: BTreeMap<Token, Task>,
}

/// An attempt as its worker sees it.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) offer: Offer,
    pub(super) step: u32,
    /// The step that it goes on from.
    pub(super) begun: u32,
    pub(super) sequence: u64,
    pub(super) published: Option<PayloadId>,
    /// Said of the attempt and not answered: repeated after a reconnect.
    pub(super) said: Vec<Input>,
    /// The stage function has returned.
    pub(super) over: bool,
    pub(super) cancelled: bool,
    /// Asked to yield.
    pub(super) asked: bool,
    /// Makes no progress any more.
    pub(super) stuck: bool,
}

impl Task {
    /// Its last step. Stages with checkpoints have more of them, as they publish only then.
    pub(super) const fn last(&self) -> u32 {
        if self.offer.checkpoints { 8 } else { 3 }
    }

    /// The step in which it publishes, if it does.
    pub(super) const fn publishes_in(&self) -> u32 {
        if self.offer.checkpoints { self.last() } else { 1 }
    }
}

impl Agent {
    pub(super) fn new(incarnation: Incarnation, stage: StageName, slots: u32, max_batch: u32) -> Self {
        Self {
            incarnation,
            stage,
            slots,
            max_batch,
            link: Link::Down,
            session: 0,
            slow: Duration::ZERO,
            stopped_until: Timestamp(0),
            cut_off_until: Timestamp(0),
            deaf: false,
            offers: BTreeMap::new(),
            tasks: BTreeMap::new(),
        }
    }

    /// How it presents itself.
    pub(super) fn hello(&self, holding: Vec<PayloadId>) -> Input {
        Input::WorkerAttached {
            worker: WorkerInfo {
                incarnation: self.incarnation,
                stage: self.stage.clone(),
                slots: self.slots,
                max_batch: self.max_batch,
                name: format!("{}-worker", self.stage),
                member: None,
                place: stagewire_sched::Place::default(),
            },
            running: self.tasks.keys().copied().collect(),
            holding,
        }
    }

    /// Answers an offer.
    pub(super) fn consider(&mut self, offer: Offer) -> Option<Input> {
        let (worker, token) = (self.incarnation, offer.token);
        if self.tasks.contains_key(&token) {
            return None;
        }
        if self.tasks.len() + self.offers.len() >= (self.slots * self.max_batch) as usize
            && !self.offers.contains_key(&token)
        {
            let failure = failure(ErrorClass::Exhausted, "its slots are in use");
            return Some(Input::Decline { worker, token, failure });
        }
        self.offers.insert(token, offer);
        Some(Input::Accept { worker, token })
    }

    /// Begins the attempt that was granted. False where it does not know the offer, or has begun already.
    pub(super) fn begin(&mut self, token: Token) -> bool {
        let Some(offer) = self.offers.remove(&token) else {
            return false;
        };
        let begun = offer.checkpoint.as_ref().map_or(0, |kept| kept.progress.done);
        let step = u32::try_from(begun).expect("a few steps");
        let task = Task {
            offer,
            step,
            begun: step,
            asked: false,
            sequence: 0,
            published: None,
            said: Vec::new(),
            over: false,
            cancelled: false,
            stuck: false,
        };
        self.tasks.insert(token, task);
        true
    }

    /// The stream is gone, and the offers with it.
    pub(super) fn cut(&mut self) {
        self.link = Link::Down;
        self.offers.clear();
    }
}

pub(super) fn failure(class: ErrorClass, message: &str) -> Failure {
    Failure::new(class, "test.failure", message)
}
