//! Workers: they attach, run attempts, hold payloads, and say what they have to say until they are answered.

use std::time::Duration;

use stagewire_core::{ByteCount, ErrorClass, Incarnation, PayloadId, Progress, StageName, Token};
use stagewire_sched::{Effect, Holder, Input, PayloadInfo, ResultInfo, StageKind};

use super::super::agent::{Agent, Link, Task, Word, failure};
use super::{Happening, Kept, Source, World};

impl World {
    pub(super) fn spawn(&mut self, stage: StageName) {
        // At once, or together.
        let queue = self
            .scenario
            .topology
            .stage(&stage)
            .is_some_and(|spec| spec.kind == StageKind::WorkQueue);
        let (slots, max_batch) = [(1, 1), (2, 1), (1, if queue { 3 } else { 1 })][self.random.index(3)];
        let incarnation = Incarnation(self.id());
        self.agents
            .insert(incarnation, Agent::new(incarnation, stage, slots, max_batch));
        self.after(Duration::ZERO, Happening::Connect(incarnation));
        self.within(Duration::from_secs(5), Happening::Renew(incarnation));
    }

    /// A process is gone, and its memory with it; somebody starts another one.
    pub(super) fn bury(&mut self, incarnation: Incarnation) -> Option<Agent> {
        let agent = self.agents.remove(&incarnation)?;
        self.shelf.retain(|_, kept| kept.holder != Holder::Worker(incarnation));
        self.within(Duration::from_secs(10), Happening::Spawn(agent.stage.clone()));
        Some(agent)
    }

    pub(super) fn connect(&mut self, incarnation: Incarnation) {
        let holding = self.holding(incarnation);
        let Some(agent) = self.agents.get_mut(&incarnation) else {
            return;
        };
        let not_before = agent.stopped_until.max(agent.cut_off_until);
        if self.now < not_before {
            self.agenda.put(not_before, Happening::Connect(incarnation));
            return;
        }
        if agent.link != Link::Down {
            return;
        }
        agent.session += 1;
        agent.link = Link::Attaching;
        let source = Source::Stream(incarnation, agent.session);
        let (slow, hello) = (agent.slow, agent.hello(holding));
        self.post_surely(slow, Happening::Reach(source, hello));
    }

    fn holding(&self, incarnation: Incarnation) -> Vec<PayloadId> {
        let holder = Holder::Worker(incarnation);
        let mine = self.shelf.iter().filter(|kept| kept.1.holder == holder);
        mine.map(|kept| *kept.0).collect()
    }

    fn say(&mut self, incarnation: Incarnation, input: Input) {
        let agent = self.agents.get(&incarnation);
        if let Some(agent) = agent.filter(|agent| agent.link != Link::Down) {
            let source = Source::Stream(incarnation, agent.session);
            self.post(agent.slow, Happening::Reach(source, input));
        }
    }

    pub(super) fn renew(&mut self, worker: Incarnation) {
        let Some(agent) = self.agents.get(&worker) else { return };
        let next = self.now + Duration::from_secs(5);
        self.agenda.put(next, Happening::Renew(worker));
        if self.now < agent.stopped_until {
            return;
        }
        let renewals = agent.tasks.iter().map(|(token, task)| Input::Renew {
            worker,
            token: *token,
            sequence: task.sequence,
            progress: Some(progress(task)),
        });
        for renewal in renewals.collect::<Vec<_>>() {
            self.say(worker, renewal);
        }
    }

    pub(super) fn hear(&mut self, incarnation: Incarnation, session: u64, word: Word) {
        let agent = self.agents.get_mut(&incarnation);
        let Some(agent) = agent.filter(|agent| agent.session == session && agent.link != Link::Down) else {
            return;
        };
        if self.now < agent.stopped_until {
            let then = agent.stopped_until;
            self.agenda.put(then, Happening::Hear(incarnation, session, word));
            return;
        }
        match word {
            Word::Closed => {
                agent.cut();
                let pause = self.random.between(Duration::from_millis(500), Duration::from_secs(3));
                self.after(pause, Happening::Connect(incarnation));
            }
            Word::Welcome => {
                agent.link = Link::Up;
                let said = agent.tasks.values().flat_map(|task| task.said.iter().cloned());
                for input in said.collect::<Vec<_>>() {
                    self.say(incarnation, input);
                }
            }
            Word::Effect(effect) => self.hear_effect(incarnation, *effect),
        }
    }

    fn hear_effect(&mut self, incarnation: Incarnation, effect: Effect) {
        let Some(agent) = self.agents.get_mut(&incarnation) else {
            return;
        };
        match effect {
            Effect::Offer(offer) => {
                if let Some(answer) = agent.consider(*offer) {
                    self.say(incarnation, answer);
                }
            }
            Effect::Grant { token, .. } => {
                if agent.begin(token) {
                    self.within(Duration::from_millis(100), Happening::Work(incarnation, token));
                }
            }
            Effect::CancelAttempt { token, .. } => {
                agent.offers.remove(&token);
                match agent.tasks.get_mut(&token) {
                    Some(task) if !task.over => {
                        task.cancelled = true;
                        self.within(Duration::from_secs(3), Happening::Work(incarnation, token));
                    }
                    _ => self.stop(incarnation, token),
                }
            }
            Effect::Yield { token, .. } => {
                if let Some(task) = agent.tasks.get_mut(&token) {
                    task.asked = true;
                }
            }
            Effect::Release { payload, .. } => {
                let kept = self.shelf.get(&payload);
                if kept.is_some_and(|kept| kept.holder == Holder::Worker(incarnation)) {
                    self.release(payload);
                }
            }
            Effect::Accepted { token, .. } => _ = agent.tasks.remove(&token),
            Effect::Refused { token, .. } => {
                agent.offers.remove(&token);
                if agent.tasks.remove(&token).is_some() {
                    self.scrap(incarnation, token);
                }
            }
            Effect::Drain { .. } | Effect::Evict { .. } | Effect::Chosen(_) | Effect::Job(_) => {}
        }
    }

    /// The attempt stops, leaves nothing, and says so.
    fn stop(&mut self, worker: Incarnation, token: Token) {
        let agent = self.agents.get_mut(&worker);
        if agent.is_some_and(|agent| agent.tasks.remove(&token).is_some()) {
            self.scrap(worker, token);
        }
        self.say(worker, Input::Stopped { worker, token });
    }

    /// What an attempt has published is of no use.
    fn scrap(&mut self, worker: Incarnation, token: Token) {
        self.shelf
            .retain(|_, kept| kept.token != token || kept.holder != Holder::Worker(worker));
    }

    /// The attempt does its next step.
    pub(super) fn work(&mut self, incarnation: Incarnation, token: Token) {
        let Some(agent) = self.agents.get_mut(&incarnation) else {
            return;
        };
        let (stopped_until, deaf) = (agent.stopped_until, agent.deaf);
        let Some(task) = agent.tasks.get_mut(&token) else {
            return;
        };
        if self.now < stopped_until {
            self.agenda.put(stopped_until, Happening::Work(incarnation, token));
            return;
        }
        if task.cancelled && !deaf && !task.stuck {
            return self.stop(incarnation, token);
        }
        if task.over || task.stuck {
            return;
        }
        let kept = task.offer.checkpoint.as_ref().filter(|_| task.step == task.begun);
        let kept = kept.map(|kept| kept.payload.id);
        let mut inputs = task.offer.inputs.iter().map(|input| input.payload.id).chain(kept);
        if let Some(lost) = inputs.clone().find(|payload| !self.shelf.contains_key(payload)) {
            self.ledger.tally.inputs_lost += 1;
            return self.fail(incarnation, token, ErrorClass::Unavailable, Some(lost));
        }
        let unsealed = inputs.any(|payload| !self.shelf[&payload].sealed);
        let between = task.offer.checkpoints && task.step > 0 && task.step < task.publishes_in();
        let asked = task.asked;
        if between && asked && self.random.chance(0.8) {
            return self.yield_up(incarnation, token);
        }
        if between && self.random.chance(0.3) {
            self.checkpoint(incarnation, token);
        }
        let agent = self.agents.get_mut(&incarnation);
        let Some(task) = agent.and_then(|agent| agent.tasks.get_mut(&token)) else {
            return;
        };
        if task.step == task.last() && unsealed {
            return self.after(Duration::from_millis(700), Happening::Work(incarnation, token));
        }
        if !self.calm && self.scenario.pause.is_some() {
            match self.random.below(400) {
                0..8 => return self.fail(incarnation, token, ErrorClass::Internal, None),
                8 => return self.fail(incarnation, token, ErrorClass::Invalid, None),
                9 => return self.fail(incarnation, token, ErrorClass::Cancelled, None),
                10..13 => return task.stuck = true,
                _ => {}
            }
        }
        task.step += 1;
        task.sequence += 1;
        let (step, last, publishes_in, output) = (task.step, task.last(), task.publishes_in(), task.offer.output);
        if step == publishes_in && output.publish && !self.publish(incarnation, token, output.stored) {
            return;
        }
        if step > last {
            return self.complete(incarnation, token);
        }
        let pause = self.random.between(Duration::from_millis(20), Duration::from_secs(4));
        self.after(pause, Happening::Work(incarnation, token));
    }

    /// Makes the payload of an attempt visible. False where that has to wait, or is not allowed any more.
    fn publish(&mut self, worker: Incarnation, token: Token, stored: bool) -> bool {
        if stored {
            match self.server.sched().map(|sched| sched.is_running(token)) {
                Some(true) => {}
                Some(false) => {
                    self.ledger.tally.zombies += 1;
                    self.fail(worker, token, ErrorClass::Fenced, None);
                    return false;
                }
                // The store is not there: again.
                None => {
                    if let Some(task) = self.task(worker, token) {
                        task.step = task.publishes_in() - 1;
                    }
                    self.after(Duration::from_secs(1), Happening::Work(worker, token));
                    return false;
                }
            }
        }
        let id = PayloadId(self.id());
        let holder = if stored { Holder::Store } else { Holder::Worker(worker) };
        let sealed = false;
        self.shelf.insert(id, Kept { token, holder, sealed });
        let payload = PayloadInfo {
            id,
            nbytes: ByteCount(1 << 20),
            chunks: 3,
            stored,
            handle: vec![7; 16].into(),
        };
        if let Some(task) = self.task(worker, token) {
            task.published = Some(id);
        }
        self.say_of(worker, token, Input::Published { worker, token, payload });
        true
    }

    /// Puts what the attempt has made so far into the store. Without a store it goes on without.
    fn keep(&mut self, token: Token) -> Option<PayloadInfo> {
        if !self.server.sched()?.is_running(token) {
            return None;
        }
        let id = PayloadId(self.id());
        let (holder, sealed) = (Holder::Store, true);
        self.shelf.insert(id, Kept { token, holder, sealed });
        Some(PayloadInfo {
            id,
            nbytes: ByteCount(1 << 18),
            chunks: 1,
            stored: true,
            handle: vec![7; 16].into(),
        })
    }

    fn checkpoint(&mut self, worker: Incarnation, token: Token) {
        let Some(progress) = self.task(worker, token).map(|task| progress(task)) else {
            return;
        };
        if let Some(payload) = self.keep(token) {
            let input = Input::Checkpointed {
                worker,
                token,
                payload,
                progress,
            };
            if let Some(task) = self.task(worker, token) {
                task.said.retain(|said| !matches!(said, Input::Checkpointed { .. }));
            }
            self.say_of(worker, token, input);
        }
    }

    fn yield_up(&mut self, worker: Incarnation, token: Token) {
        let payload = self.keep(token);
        let Some(task) = self.task(worker, token) else { return };
        task.over = true;
        let progress = progress(task);
        self.ledger.tally.yields += 1;
        let input = Input::Yielded {
            worker,
            token,
            payload,
            progress,
        };
        self.say_of(worker, token, input);
    }

    fn complete(&mut self, worker: Incarnation, token: Token) {
        let Some(task) = self.task(worker, token) else { return };
        task.over = true;
        let published = task.published;
        if let Some(kept) = published.and_then(|payload| self.shelf.get_mut(&payload)) {
            kept.sealed = true;
        }
        self.ledger.complete(token);
        self.say_of(worker, token, completed(worker, token));
    }

    fn fail(&mut self, worker: Incarnation, token: Token, class: ErrorClass, lost: Option<PayloadId>) {
        let Some(task) = self.task(worker, token) else { return };
        task.over = true;
        self.scrap(worker, token);
        let failure = failure(class, "it went wrong");
        let input = Input::Failed {
            worker,
            token,
            failure,
            lost,
        };
        self.say_of(worker, token, input);
    }

    /// Says something of an attempt, now and after each reconnect until it is answered.
    fn say_of(&mut self, worker: Incarnation, token: Token, input: Input) {
        if let Some(task) = self.task(worker, token) {
            task.said.push(input.clone());
        }
        self.say(worker, input);
    }

    fn task(&mut self, worker: Incarnation, token: Token) -> Option<&mut Task> {
        self.agents.get_mut(&worker)?.tasks.get_mut(&token)
    }
}

fn progress(task: &Task) -> Progress {
    Progress {
        done: task.step.into(),
        total: task.last().into(),
        unit: "step".to_owned(),
    }
}

pub(super) fn completed(worker: Incarnation, token: Token) -> Input {
    Input::Completed {
        worker,
        token,
        result: Some(ResultInfo::default()),
        handovers: Vec::new(),
    }
}
