use std::collections::{BTreeMap, VecDeque};

use stagewire_core::{ErrorClass, Incarnation, Member, PayloadId, Token};
use stagewire_sched::{Effect, Input, Offer, Place, WorkerInfo};

use crate::world::{completed, failure, payload_info, steps, worker_info};

/// A worker process: what it really does, whatever the scheduler believes.
pub(super) struct Agent {
    pub(super) incarnation: Incarnation,
    pub(super) stage: String,
    pub(super) slots: u32,
    /// Its slots are the places of one batch.
    pub(super) batches: bool,
    pub(super) member: Option<Member>,
    pub(super) link: Link,
    /// From the scheduler, in order.
    pub(super) inbox: VecDeque<Effect>,
    /// To the scheduler, in order.
    pub(super) outbox: VecDeque<Input>,
    offers: BTreeMap<Token, Offer>,
    pub(super) tasks: BTreeMap<Token, Task>,
    /// Payloads whose bytes are here, and the attempt that made them.
    pub(super) holding: BTreeMap<PayloadId, Token>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Link {
    Up,
    Down,
}

/// An attempt as its worker sees it.
pub(super) struct Task {
    offer: Offer,
    published: Option<(PayloadId, bool)>,
    /// Completed, and not answered.
    completed: bool,
    cancelled: bool,
    /// Asked to yield.
    asked: bool,
    /// The newest checkpoint, and how far it had come by then.
    checkpoint: Option<(PayloadId, u64)>,
    /// Yielded, and not answered.
    yielded: bool,
    sequence: u64,
    /// Steps that are done.
    done: u64,
}

impl Agent {
    pub(super) fn new(incarnation: Incarnation, stage: &str, slots: u32) -> Self {
        Self {
            incarnation,
            stage: stage.to_owned(),
            slots,
            batches: false,
            member: None,
            link: Link::Down,
            inbox: VecDeque::new(),
            outbox: VecDeque::new(),
            offers: BTreeMap::new(),
            tasks: BTreeMap::new(),
            holding: BTreeMap::new(),
        }
    }

    pub(super) fn info(&self) -> WorkerInfo {
        let (slots, max_batch) = if self.batches { (1, self.slots) } else { (self.slots, 1) };
        WorkerInfo {
            max_batch,
            member: self.member.clone(),
            place: Place {
                host: Some(self.incarnation.0.as_u64_pair().1 % 3),
                ..Place::default()
            },
            ..worker_info(self.incarnation, &self.stage, slots)
        }
    }

    /// Handles a message of the scheduler.
    pub(super) fn hear(&mut self, effect: Effect) {
        match effect {
            Effect::Offer(offer) => _ = self.offers.insert(offer.token, *offer),
            Effect::Grant { token, .. } => {
                if let Some(offer) = self.offers.remove(&token) {
                    let task = Task {
                        done: offer.checkpoint.as_ref().map_or(0, |kept| kept.progress.done),
                        asked: false,
                        checkpoint: None,
                        yielded: false,
                        offer,
                        published: None,
                        completed: false,
                        cancelled: false,
                        sequence: 0,
                    };
                    self.tasks.insert(token, task);
                }
            }
            Effect::CancelAttempt { token, .. } => {
                self.offers.remove(&token);
                if let Some(task) = self.tasks.get_mut(&token) {
                    task.cancelled = true;
                }
            }
            Effect::Yield { token, .. } => {
                if let Some(task) = self.tasks.get_mut(&token) {
                    task.asked = true;
                }
            }
            Effect::Release { payload, .. } => _ = self.holding.remove(&payload),
            Effect::Accepted { token, .. } => _ = self.tasks.remove(&token),
            Effect::Refused { token, .. } => {
                self.tasks.remove(&token);
                self.holding.retain(|_, owner| *owner != token);
            }
            Effect::Drain { .. } | Effect::Evict { .. } | Effect::Chosen(_) | Effect::Job(_) => (),
        }
    }

    /// Does one thing that a worker may do. Returns a payload that it put into the store, with its token.
    pub(super) fn act(&mut self, what: u8, new_id: impl FnOnce() -> PayloadId) -> Option<(PayloadId, Token)> {
        let worker = self.incarnation;
        let choice = usize::from(what / 16);
        if what.is_multiple_of(3)
            && let Some(token) = self.offers.keys().nth(choice % self.offers.len().max(1)).copied()
        {
            let failure = failure(ErrorClass::Exhausted);
            let busy = self.tasks.len() >= self.slots as usize || what % 16 == 15;
            self.outbox.push_back(if busy {
                self.offers.remove(&token);
                Input::Decline { worker, token, failure }
            } else {
                Input::Accept { worker, token }
            });
            return None;
        }
        let token = *self.tasks.keys().nth(choice % self.tasks.len().max(1))?;
        let task = self.tasks.get_mut(&token)?;
        if task.cancelled {
            self.tasks.remove(&token);
            self.holding.retain(|_, owner| *owner != token);
            self.outbox.push_back(Input::Stopped { worker, token });
            return None;
        }
        if task.completed || task.yielded {
            return None;
        }
        match what % 16 {
            0 | 1 => {
                task.sequence += 1;
                task.done += 1;
                let (sequence, progress) = (task.sequence, Some(steps(task.done)));
                self.outbox.push_back(Input::Renew {
                    worker,
                    token,
                    sequence,
                    progress,
                });
            }
            // Most that are asked do, some that are not do as well, and some give no checkpoint with it.
            6..=8 if task.offer.checkpoints && task.published.is_none() => {
                let yields = (task.asked && what % 16 != 6) || what == 8 * 16 + 7;
                let (progress, stored) = (steps(task.done), task.offer.output.stored);
                let kept = (!yields || choice % 4 != 0).then(new_id);
                if let Some(id) = kept {
                    task.checkpoint = Some((id, task.done));
                    if !stored {
                        self.holding.insert(id, token);
                    }
                }
                let payload = kept.map(|id| payload_info(id, stored));
                task.yielded = yields;
                self.outbox.push_back(match payload {
                    Some(payload) if !yields => Input::Checkpointed {
                        worker,
                        token,
                        payload,
                        progress,
                    },
                    payload => Input::Yielded {
                        worker,
                        token,
                        payload,
                        progress,
                    },
                });
                return kept.filter(|_| stored).map(|id| (id, token));
            }
            2 => {
                let class = [ErrorClass::Internal, ErrorClass::Invalid, ErrorClass::Cancelled][choice % 3];
                let failure = failure(class);
                self.end(token);
                self.outbox.push_back(Input::Failed {
                    worker,
                    token,
                    failure,
                    lost: None,
                });
            }
            4 => {
                let inputs = &task.offer.inputs;
                let lost = inputs.get(choice % inputs.len().max(1)).map(|input| input.payload.id);
                let failure = failure(ErrorClass::Unavailable);
                if lost.is_some() {
                    self.end(token);
                    self.outbox.push_back(Input::Failed {
                        worker,
                        token,
                        failure,
                        lost,
                    });
                }
            }
            _ if task.offer.output.publish && task.published.is_none() => {
                let (id, stored) = (new_id(), task.offer.output.stored);
                task.published = Some((id, stored));
                if !stored {
                    self.holding.insert(id, token);
                }
                let payload = payload_info(id, stored);
                self.outbox.push_back(Input::Published { worker, token, payload });
                return stored.then_some((id, token));
            }
            _ => {
                task.completed = true;
                self.outbox.push_back(completed(worker, token));
            }
        }
        None
    }

    /// Puts a payload of an attempt that is done into the store, and says so; it stays here until the scheduler has heard.
    pub(super) fn put_away(&mut self, which: u8) -> Option<(PayloadId, Token)> {
        let done = self.holding.iter().filter(|(_, token)| !self.tasks.contains_key(token));
        let done: Vec<_> = done.map(|(id, token)| (*id, *token)).collect();
        let (id, token) = *done.get(usize::from(which) % done.len().max(1))?;
        let (worker, payload) = (self.incarnation, payload_info(id, true));
        self.outbox.push_back(Input::Published { worker, token, payload });
        Some((id, token))
    }

    fn end(&mut self, token: Token) {
        self.tasks.remove(&token);
        self.holding.retain(|_, owner| *owner != token);
    }

    /// The stream broke: what was on its way is lost, and so are the offers.
    pub(super) fn cut(&mut self) {
        self.link = Link::Down;
        self.inbox.clear();
        self.outbox.clear();
        self.offers.clear();
    }

    /// What is said again once the stream is up: publications and completions that were not answered.
    pub(super) fn say_again(&mut self) {
        let worker = self.incarnation;
        for (token, task) in &self.tasks {
            let token = *token;
            if let Some((id, stored)) = task.published {
                let payload = payload_info(id, stored);
                self.outbox.push_back(Input::Published { worker, token, payload });
            }
            if let Some((id, done)) = task.checkpoint {
                self.outbox.push_back(Input::Checkpointed {
                    worker,
                    token,
                    payload: payload_info(id, task.offer.output.stored),
                    progress: steps(done),
                });
            }
            if task.yielded {
                self.outbox.push_back(Input::Yielded {
                    worker,
                    token,
                    payload: None,
                    progress: steps(task.done),
                });
            }
            if task.completed {
                self.outbox.push_back(completed(worker, token));
            }
        }
    }
}
