use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use stagewire_core::{Incarnation, JobId, Member, PayloadId, StageName, Timestamp, Token};
use stagewire_sched::{
    CacheKey, Discard, DrainScope, Effect, Event, Holder, Input, Limits, Sched, StageKind, Topology, Urgency,
};

use super::agent::{Agent, Link};
use crate::world::{World, name};

/// One thing that happens. Numbers choose among what is there.
#[derive(Debug, Clone, Copy)]
pub(super) enum Op {
    /// A job of some class and shape, with a queue deadline in seconds.
    Submit(u8, Option<u64>),
    Cancel(u8),
    /// Somebody wants a job tried again that may be a dead letter, or does not want it any more.
    Redrive(u8),
    Discard(u8),
    /// A worker process starts and attaches.
    Start(u8, u32),
    /// A message of a worker reaches the scheduler.
    Deliver(u8),
    /// A message of the scheduler reaches a worker.
    Hear(u8),
    /// A worker does something.
    Act(u8, u8),
    /// A message of a worker is sent twice.
    Repeat(u8),
    /// Two messages of a worker overtake each other.
    Swap(u8),
    /// A message that was delivered long ago comes again.
    Stale(u8),
    /// A stream breaks, and the server notices.
    Break(u8),
    /// A worker attaches again, whether or not its stream was lost.
    Reconnect(u8),
    /// A worker dies, and the server notices.
    Die(u8),
    /// A worker dies, and the server sees no more than a stream that says nothing.
    DieUnnoticed(u8),
    /// The server dies and starts again.
    Restart,
    /// Somebody says that a payload is gone.
    LosePayload(u8),
    /// A worker or all of a stage drain, some with a deadline in seconds.
    Drain(u8, Option<u64>),
    /// A worker moves a payload to the store.
    Move(u8, u8),
    Pause(bool),
    /// Milliseconds pass.
    Wait(u64),
}

pub(super) struct Model {
    world: World,
    agents: Vec<Agent>,
    jobs: Vec<JobId>,
    /// What the store holds, and the attempt that wrote it.
    store: BTreeMap<PayloadId, Token>,
    /// Messages that were delivered.
    past: VecDeque<Input>,
    stages: Vec<String>,
}

impl Model {
    pub(super) fn new(topology: Topology, limits: Limits) -> Self {
        Self {
            stages: topology.stages().iter().map(|stage| stage.name.to_string()).collect(),
            world: World::with_limits(topology, limits),
            agents: Vec::new(),
            jobs: Vec::new(),
            store: BTreeMap::new(),
            past: VecDeque::new(),
        }
    }

    pub(super) fn history(&self) -> &[(Timestamp, Event)] {
        &self.world.history
    }

    pub(super) fn step(&mut self, op: Op) {
        let agent = |pick: u8, agents: &[Agent]| (!agents.is_empty()).then(|| usize::from(pick) % agents.len());
        match op {
            Op::Submit(pick, deadline) => {
                let classes = self.world.sched.topology().classes();
                let class = &classes[usize::from(pick) % classes.len()].name;
                let urgency = Urgency {
                    class: Some(class.to_string()),
                    queue_deadline: deadline.map(Duration::from_secs),
                    shape: u64::from(pick / 64),
                    skip: self.skip(pick),
                    cache: self.keys(pick),
                };
                // It may skip all that there is to do.
                self.jobs.extend(self.world.submit_as(urgency));
            }
            Op::Cancel(pick) => _ = self.pick_job(pick).map(|job| self.input(Input::Cancel { job })),
            Op::Redrive(pick) => _ = self.pick_job(pick).map(|job| self.input(Input::Redrive { job })),
            Op::Discard(pick) => {
                let why = if pick % 2 == 0 {
                    Discard::Asked
                } else {
                    Discard::Crowded
                };
                _ = self.pick_job(pick).map(|job| self.input(Input::Discard { job, why }));
            }
            Op::Start(pick, slots) => {
                if self.agents.len() < 12 {
                    let stage = self.stages[usize::from(pick) % self.stages.len()].clone();
                    let incarnation = Incarnation(self.world.id());
                    let mut agent = Agent::new(incarnation, &stage, slots);
                    let spec = self.world.sched.topology().stage(&name(&stage)).expect("it exists");
                    match spec.kind {
                        StageKind::WorkQueue => agent.batches = pick.is_multiple_of(2),
                        StageKind::Admission if pick.is_multiple_of(2) => return self.start_group(&stage, slots),
                        StageKind::Admission => (),
                    }
                    self.agents.push(agent);
                    self.attach(self.agents.len() - 1);
                }
            }
            Op::Wait(millis) => self.world.wait(Duration::from_millis(millis)),
            Op::Restart => self.restart(),
            Op::LosePayload(pick) => {
                let known: Vec<_> = self
                    .agents
                    .iter()
                    .flat_map(|agent| agent.holding.keys())
                    .chain(self.store.keys())
                    .collect();
                if let Some(payload) = known
                    .get(usize::from(pick) % known.len().max(1))
                    .map(|payload| **payload)
                {
                    self.input(Input::PayloadLost { payload });
                }
            }
            Op::Stale(pick) => {
                if let Some(input) = self.past.get(usize::from(pick) % self.past.len().max(1)).cloned() {
                    self.input(input);
                }
            }
            Op::Deliver(pick) => _ = agent(pick, &self.agents).map(|at| self.deliver(at)),
            Op::Hear(pick) => _ = agent(pick, &self.agents).map(|at| self.hear(at)),
            Op::Act(pick, what) => _ = agent(pick, &self.agents).map(|at| self.act(at, what)),
            Op::Repeat(pick) => {
                if let Some(at) = agent(pick, &self.agents)
                    && let Some(last) = self.agents[at].outbox.back().cloned()
                {
                    self.agents[at].outbox.push_back(last);
                }
            }
            Op::Swap(pick) => {
                if let Some(at) = agent(pick, &self.agents)
                    && self.agents[at].outbox.len() > 1
                {
                    self.agents[at].outbox.swap(0, 1);
                }
            }
            Op::Break(pick) => {
                if let Some(at) = agent(pick, &self.agents) {
                    self.agents[at].cut();
                    let worker = self.agents[at].incarnation;
                    self.input(Input::WorkerAway { worker });
                }
            }
            Op::Reconnect(pick) => _ = agent(pick, &self.agents).map(|at| self.attach(at)),
            Op::Die(pick) => {
                if let Some(at) = agent(pick, &self.agents) {
                    let worker = self.agents.remove(at).incarnation;
                    self.input(Input::WorkerLost { worker });
                }
            }
            Op::DieUnnoticed(pick) => _ = agent(pick, &self.agents).map(|at| self.agents.remove(at)),
            Op::Drain(pick, seconds) => {
                let within = seconds.map(Duration::from_secs);
                if let Some(at) = agent(pick, &self.agents) {
                    let agent = &self.agents[at];
                    let scope = if pick >= 192 {
                        DrainScope::Stage(name(&agent.stage))
                    } else {
                        DrainScope::Worker(agent.incarnation)
                    };
                    self.input(Input::Drain { scope, within });
                }
            }
            Op::Move(pick, which) => {
                if let Some(at) = agent(pick, &self.agents) {
                    let moved = self.agents[at].put_away(which);
                    self.store.extend(moved);
                }
            }
            Op::Pause(pause) => self.input(if pause { Input::Pause } else { Input::Resume }),
        }
        self.carry();
    }

    /// As many workers as that, which run every attempt together.
    fn start_group(&mut self, stage: &str, world: u32) {
        // No two groups have the same name.
        let group = name(&format!("g{}", self.world.id().as_u128()));
        for rank in 0..world {
            let mut agent = Agent::new(Incarnation(self.world.id()), stage, 1);
            agent.member = Some(Member {
                group: group.clone(),
                rank,
                world,
            });
            self.agents.push(agent);
            self.attach(self.agents.len() - 1);
        }
        self.carry();
    }

    /// The stages that a job skips: often none.
    fn skip(&self, pick: u8) -> Vec<StageName> {
        let stages = self.world.sched.topology().stages();
        let skips = |stage: usize| pick % 5 == 4 && usize::from(pick / 5) % stages.len() == stage;
        let stages = stages.iter().enumerate().filter(|(stage, _)| skips(*stage));
        stages.map(|(_, spec)| spec.name.clone()).collect()
    }

    /// What the stages of a job make: often what some others do.
    fn keys(&self, pick: u8) -> Vec<(StageName, CacheKey)> {
        let stages = self.world.sched.topology().stages().iter().zip(0..);
        let keyed = stages.filter(|(_, stage)| u32::from(pick / 2) % 3 != *stage % 3);
        let key = |stage: u32| CacheKey(u128::from(u32::from(pick % 2) + 2 * stage));
        keyed.map(|(spec, stage)| (spec.name.clone(), key(stage))).collect()
    }

    fn pick_job(&self, pick: u8) -> Option<JobId> {
        self.jobs.get(usize::from(pick) % self.jobs.len().max(1)).copied()
    }

    /// An input that may well be refused.
    fn input(&mut self, input: Input) {
        if !matches!(
            input,
            Input::WorkerAttached { .. } | Input::WorkerLost { .. } | Input::WorkerAway { .. }
        ) {
            self.past.push_back(input.clone());
            self.past.truncate(64);
        }
        let (sender, absent) = (sender(&input), self.absent(&input));
        if self.world.step(input).is_err()
            && let Some((worker, token)) = sender
        {
            // As the server does.
            let failure = crate::world::failure(stagewire_core::ErrorClass::Fenced);
            self.world.effects.push(Effect::Refused { worker, token, failure });
        }
        if let Some(payload) = absent {
            // As the server does, too.
            _ = self.world.step(Input::PayloadLost { payload });
        }
        self.carry();
    }

    /// The payload that a worker says is in the store, which was lost with the server before.
    fn absent(&self, input: &Input) -> Option<PayloadId> {
        let (Input::Published { payload, .. }
        | Input::Checkpointed { payload, .. }
        | Input::Yielded {
            payload: Some(payload), ..
        }) = input
        else {
            return None;
        };
        (payload.stored && !self.store.contains_key(&payload.id)).then_some(payload.id)
    }

    /// Puts effects into the inboxes of those whose stream is up. The store hears at once, and keeps nothing that nobody
    /// will ask for.
    fn carry(&mut self) {
        for effect in self.world.take() {
            match &effect {
                Effect::Release {
                    holder: Holder::Store,
                    payload,
                } => _ = self.store.remove(payload),
                Effect::Evict { worker, .. } => self.agents.retain(|agent| agent.incarnation != *worker),
                _ => {
                    let addressee = addressee(&effect);
                    let agent = self
                        .agents
                        .iter_mut()
                        .find(|agent| Some(agent.incarnation) == addressee);
                    if let Some(agent) = agent.filter(|agent| agent.link == Link::Up) {
                        agent.inbox.push_back(effect);
                    }
                }
            }
        }
        let sched = &self.world.sched;
        self.store
            .retain(|payload, token| sched.needs_payload(*payload) || sched.is_running(*token));
    }

    fn deliver(&mut self, at: usize) {
        if self.agents[at].link == Link::Up
            && let Some(input) = self.agents[at].outbox.pop_front()
        {
            self.input(input);
        }
    }

    fn hear(&mut self, at: usize) {
        if let Some(effect) = self.agents[at].inbox.pop_front() {
            self.agents[at].hear(effect);
        }
    }

    fn act(&mut self, at: usize, what: u8) {
        let world = &mut self.world;
        let stored = self.agents[at].act(what, || PayloadId(world.id()));
        self.store.extend(stored);
    }

    fn attach(&mut self, at: usize) {
        let agent = &mut self.agents[at];
        agent.cut();
        agent.link = Link::Up;
        let input = Input::WorkerAttached {
            worker: agent.info(),
            running: agent.tasks.keys().copied().collect(),
            holding: agent.holding.keys().copied().collect(),
        };
        agent.say_again();
        self.world.does(input);
        self.carry();
    }

    fn restart(&mut self) {
        for agent in &mut self.agents {
            agent.cut();
        }
        self.store.clear();
        self.past.clear();
        self.world.restart();
        self.carry();
    }

    /// The faults stop: workers that live attach and do their work, each stage has one, and time passes.
    pub(super) fn finish(&mut self) {
        self.input(Input::Resume);
        for at in 0..self.agents.len() {
            self.attach(at);
        }
        for stage in self.stages.clone() {
            let incarnation = Incarnation(self.world.id());
            self.agents.push(Agent::new(incarnation, &stage, 1));
            self.attach(self.agents.len() - 1);
        }
        let start = self.world.now;
        while !self.is_over() {
            self.work();
            assert!(
                self.world.now.since(start) < Duration::from_secs(3_600),
                "it does not end: {:#?}",
                self.world
                    .sched
                    .jobs()
                    .filter(|job| job.ended().is_none())
                    .collect::<Vec<_>>()
            );
        }
        self.work();
        assert_eq!(self.world.sched.live_payloads(), 0);
        // Of a worker that died unnoticed, what was lost with its grant is given back once it must have stopped.
        let stopped = self.world.now + 2 * Limits::default().stop;
        let owed = |sched: &Sched| {
            sched
                .byte_credit()
                .is_some_and(|credit| credit.free != credit.advertised)
        };
        while owed(&self.world.sched) && self.world.now < stopped {
            self.work();
        }
        if let Some(credit) = self.world.sched.byte_credit() {
            assert_eq!(
                credit.free, credit.advertised,
                "bytes that nobody gives back: {credit:?}"
            );
        }
        let kept = self.world.sched.cache_tally().payloads;
        assert_eq!(self.store.len() as u64, kept, "left in the store: {:?}", self.store);
        for agent in &self.agents {
            let left: Vec<_> = agent.holding.keys().collect();
            assert!(
                left.is_empty(),
                "worker {} of {} still holds {left:?}",
                agent.incarnation,
                agent.stage
            );
            assert!(
                agent.tasks.is_empty(),
                "worker {} still runs something",
                agent.incarnation
            );
        }
        self.restart();
        assert!(self.is_over(), "what has ended stays so");
    }

    fn is_over(&self) -> bool {
        self.world.sched.jobs().all(|job| job.ended().is_some())
    }

    /// All messages arrive, everybody does what there is to do, half a second passes.
    fn work(&mut self) {
        for _ in 0..8 {
            for at in 0..self.agents.len() {
                // Accept, publish, complete; never fail.
                for what in [3, 19, 5] {
                    self.act(at, what);
                    self.act(at, what + 16);
                }
            }
            let mut at = 0;
            while at < self.agents.len() {
                let incarnation = self.agents[at].incarnation;
                while self
                    .agents
                    .get(at)
                    .is_some_and(|agent| agent.incarnation == incarnation && !agent.outbox.is_empty())
                {
                    self.deliver(at);
                }
                while self.agents.get(at).is_some_and(|agent| !agent.inbox.is_empty()) {
                    self.hear(at);
                }
                at += 1;
            }
        }
        self.world.wait(Duration::from_millis(500));
        self.carry();
    }
}

fn sender(input: &Input) -> Option<(Incarnation, Token)> {
    match input {
        Input::Accept { worker, token }
        | Input::Renew { worker, token, .. }
        | Input::Published { worker, token, .. }
        | Input::Checkpointed { worker, token, .. }
        | Input::Yielded { worker, token, .. }
        | Input::Completed { worker, token, .. } => Some((*worker, *token)),
        _ => None,
    }
}

fn addressee(effect: &Effect) -> Option<Incarnation> {
    match effect {
        Effect::Offer(offer) => Some(offer.worker),
        Effect::Grant { worker, .. }
        | Effect::CancelAttempt { worker, .. }
        | Effect::Yield { worker, .. }
        | Effect::Accepted { worker, .. }
        | Effect::Refused { worker, .. }
        | Effect::Drain { worker, .. }
        | Effect::Evict { worker, .. } => Some(*worker),
        Effect::Release {
            holder: Holder::Worker(worker),
            ..
        } => Some(*worker),
        Effect::Release { .. } | Effect::Chosen(_) | Effect::Job(_) => None,
    }
}
