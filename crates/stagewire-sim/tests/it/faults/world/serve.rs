//! The server: the real driver's core and the real journal, on a disk that fails.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use stagewire_core::{Classify, Incarnation, PayloadId, Timestamp};
use stagewire_sched::{Effect, Holder, Input, Limits, Phase, Refusal, Sched, Topology};
use stagewire_server::rehearsal::{Disk, Rehearsal, Step};
use stagewire_sim::Appointment;

use super::super::agent::Word;
use super::super::scenario::{Mutant, Scenario};
use super::work::completed;
use super::{Happening, Source, World};

#[derive(Debug)]
pub(super) struct Server {
    pub(super) disk: Disk,
    /// Whether a journal was opened on the disk.
    is_made: bool,
    running: Option<Rehearsal>,
    inbox: Vec<(Source, Input)>,
    /// The stream of each worker that is attached.
    sessions: BTreeMap<Incarnation, u64>,
    /// Does nothing until then: its machine stands still.
    pub(super) stalled_until: Timestamp,
    next: Option<(Timestamp, Appointment)>,
    /// What its clock said when it started, and when that was.
    started: (Timestamp, Timestamp),
    limits: Limits,
    topology: Topology,
}

impl Server {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let disk = Disk::holding(Vec::new(), usize::MAX);
        if let Some(operations) = scenario.first_crash {
            disk.fail_after(operations);
        }
        if scenario.mutant == Some(Mutant::EarlyAck) {
            disk.lie();
        }
        let mut limits = scenario.limits;
        let mut topology = scenario.topology.clone();
        if scenario.mutant == Some(Mutant::NoLoss) {
            let never = Duration::from_secs(100 * 365 * 86_400);
            (limits.grant, limits.linger) = (never, never);
            let mut stages = topology.stages().to_vec();
            for stage in &mut stages {
                stage.no_progress = never;
            }
            topology = Topology::new(stages, topology.edges().to_vec()).expect("as before");
        }
        Self {
            disk,
            is_made: false,
            running: None,
            inbox: Vec::new(),
            sessions: BTreeMap::new(),
            stalled_until: Timestamp(0),
            next: None,
            started: (Timestamp(0), Timestamp(0)),
            limits,
            topology,
        }
    }

    /// What it believes, while it is up.
    pub(super) fn sched(&self) -> Option<&Sched> {
        self.running.as_ref().map(Rehearsal::sched)
    }

    fn clock(&self, now: Timestamp) -> Timestamp {
        self.started.0 + now.since(self.started.1)
    }

    /// When the next thing is due, by everybody's clock.
    fn due(&self) -> Option<Timestamp> {
        let (deadline, _) = self.sched()?.poll_timeout()?;
        Some(self.started.1 + deadline.since(self.started.0))
    }

    /// Whether a message comes on a stream that counts.
    fn admits(&self, source: Source, input: &Input) -> bool {
        match source {
            Source::Client(_) | Source::Operator => true,
            Source::Stream(worker, session) if matches!(input, Input::WorkerAttached { .. }) => {
                self.sessions.get(&worker).is_none_or(|known| *known < session)
            }
            Source::Stream(worker, session) | Source::System(worker, session) => {
                self.sessions.get(&worker) == Some(&session)
            }
        }
    }
}

impl World {
    pub(super) fn reach(&mut self, source: Source, input: Input) {
        if self.server.running.is_none() {
            if let (Source::Stream(worker, session), Input::WorkerAttached { .. }) = (source, &input) {
                self.post_surely(Duration::ZERO, Happening::Hear(worker, session, Word::Closed));
            }
            return;
        }
        self.server.inbox.push((source, input));
        self.serve_within(Duration::from_millis(5));
    }

    /// The server works at the latest after that; what comes until then shares a sync.
    pub(super) fn serve_within(&mut self, longest: Duration) {
        let at = self.now + self.random.between(Duration::ZERO, longest);
        self.serve_at(at);
    }

    fn serve_at(&mut self, at: Timestamp) {
        if let Some((then, appointment)) = self.server.next {
            if then <= at {
                return;
            }
            self.agenda.cancel(appointment);
        }
        self.server.next = Some((at, self.agenda.put(at, Happening::Serve)));
    }

    pub(super) fn serve(&mut self) {
        self.server.next = None;
        if self.now < self.server.stalled_until {
            return self.serve_at(self.server.stalled_until);
        }
        let inbox = std::mem::take(&mut self.server.inbox);
        if self.server.running.is_none() {
            return;
        }
        let mut batch = Vec::new();
        for (source, input) in inbox {
            if self.server.admits(source, &input) {
                if let Source::System(worker, _) = source {
                    self.server.sessions.remove(&worker);
                }
                batch.push((source, self.mutate(input)));
            }
        }
        let now = self.server.clock(self.now);
        let running = self.server.running.as_mut().expect("it is up");
        let result = running.step(now, batch.iter().map(|(_, input)| input.clone()));
        self.ledger.write(running.sched().snapshot());
        match result {
            Ok(step) => {
                self.ledger.wrote();
                self.answer(batch, step);
                self.stand(now);
            }
            Err(error) => {
                assert_eq!(error.reason(), "journal.write", "{error}");
                self.ledger.tally.crashes_writing += 1;
                let power = self.random.chance(0.5);
                self.crash(power);
            }
        }
    }

    /// What one step let out goes its ways.
    fn answer(&mut self, asked: Vec<(Source, Input)>, step: Step) {
        for ((source, input), answer) in asked.into_iter().zip(step.answers) {
            match (source, answer) {
                (Source::Client(client), Ok(job)) => {
                    if let (Input::Submit { .. }, Some(job)) = (input, job) {
                        self.ledger.acknowledge(self.clients[client].key.as_deref(), job);
                        self.clients[client].job = Some(job);
                    }
                }
                (Source::Client(_), Err(refusal)) => {
                    let usual = matches!(refusal, Refusal::DuplicateJob { .. } | Refusal::JobEnded { .. });
                    assert!(usual, "a client was refused: {refusal}");
                }
                (Source::Stream(worker, session), answer) if matches!(input, Input::WorkerAttached { .. }) => {
                    answer.unwrap_or_else(|refusal| panic!("worker {worker} was not let in: {refusal}"));
                    self.server.sessions.insert(worker, session);
                    self.post_surely(Duration::ZERO, Happening::Hear(worker, session, Word::Welcome));
                }
                (Source::Stream(..), Err(_)) => self.ledger.tally.zombies += 1,
                (Source::Stream(..) | Source::System(..) | Source::Operator, _) => {}
            }
        }
        for effect in step.effects {
            self.let_out(effect);
        }
    }

    fn let_out(&mut self, effect: Effect) {
        let worker = match &effect {
            Effect::Offer(offer) => {
                self.ledger.tally.resumed += u64::from(offer.checkpoint.is_some());
                if let (Some(Mutant::EagerRelease), Some(input)) = (self.scenario.mutant, offer.inputs.first()) {
                    let payload = input.payload.id;
                    self.after(Duration::from_secs(1), Happening::Release(payload));
                }
                offer.worker
            }
            Effect::Grant { worker, token } => {
                self.ledger.grant(*token, *worker);
                *worker
            }
            Effect::CancelAttempt { worker, .. }
            | Effect::Yield { worker, .. }
            | Effect::Accepted { worker, .. }
            | Effect::Refused { worker, .. }
            | Effect::Drain { worker, .. }
            | Effect::Release {
                holder: Holder::Worker(worker),
                ..
            } => *worker,
            Effect::Release {
                holder: Holder::Store,
                payload,
            } => return self.release(*payload),
            Effect::Evict { worker, .. } => return self.evict(*worker),
            Effect::Job(_) | Effect::Chosen(_) => return,
        };
        if let Some(session) = self.server.sessions.get(&worker).copied() {
            let slow = self.agents.get(&worker).map_or(Duration::ZERO, |agent| agent.slow);
            self.post(slow, Happening::Hear(worker, session, Word::Effect(Box::new(effect))));
        }
    }

    /// The server ends the worker's process, where that is in its power, or else its stream.
    fn evict(&mut self, worker: Incarnation) {
        self.ledger.tally.evictions += 1;
        let session = self.server.sessions.remove(&worker);
        if self.calm || self.random.chance(0.7) {
            self.bury(worker);
        } else if let Some(session) = session {
            self.post_surely(Duration::ZERO, Happening::Hear(worker, session, Word::Closed));
        }
    }

    /// After each step: the invariants hold, the store keeps what may be needed, and the next step is planned.
    fn stand(&mut self, now: Timestamp) {
        let sched = self.server.running.as_ref().expect("it is up").sched();
        self.ledger.check(now, sched);
        self.shelf.retain(|payload, kept| {
            kept.holder != Holder::Store || sched.needs_payload(*payload) || sched.is_running(kept.token)
        });
        if let Some(due) = self.server.due() {
            self.serve_at(due.max(self.now + Duration::from_millis(1)));
        }
    }

    /// The holder of a payload has heard that nobody needs it.
    pub(super) fn release(&mut self, payload: PayloadId) {
        if self.shelf.remove(&payload).is_none() {
            return;
        }
        let Some(sched) = self.server.sched() else { return };
        for agent in self.agents.values() {
            for (token, task) in &agent.tasks {
                let reads = !task.over && task.offer.inputs.iter().any(|input| input.payload.id == payload);
                assert!(
                    !reads || !sched.is_running(*token),
                    "payload {payload} was released while attempt {token} reads it"
                );
            }
        }
    }

    pub(super) fn crash(&mut self, power: bool) {
        // What the process does while it is taken down reaches no disk.
        self.server.disk.fail_after(0);
        self.server.running = None;
        let bytes = if power {
            self.ledger.tally.power_failures += 1;
            self.server.disk.after_power_failure(self.random.next())
        } else {
            self.server.disk.after_kill()
        };
        // A journal has no name before it is one: what a crash leaves of it until then is not looked at.
        let bytes = if self.server.is_made { bytes } else { Vec::new() };
        self.server.disk = Disk::holding(bytes, usize::MAX);
        if self.scenario.mutant == Some(Mutant::EarlyAck) {
            self.server.disk.lie();
        }
        // Each seed has one crash at a write, and some have more.
        let tally = &self.ledger.tally;
        let none = self.scenario.pause.is_some() && tally.crashes_writing + tally.crashes_starting == 0;
        if (none || self.scenario.more_crashes) && !self.calm {
            self.server.disk.fail_after(self.random.index(200));
        }
        self.server.inbox.clear();
        for (worker, session) in std::mem::take(&mut self.server.sessions) {
            self.post_surely(Duration::ZERO, Happening::Hear(worker, session, Word::Closed));
        }
        let pause = self.random.between(Duration::from_millis(300), Duration::from_secs(20));
        self.after(pause, Happening::Boot);
    }

    pub(super) fn boot(&mut self) {
        if self.server.running.is_some() {
            return;
        }
        let (disk, topology) = (self.server.disk.clone(), &self.server.topology);
        let mut rehearsal = match Rehearsal::open(disk, topology, self.server.limits, self.scenario.long) {
            Ok(rehearsal) => rehearsal,
            Err(error) => return self.cannot_start(&error),
        };
        self.server.is_made = true;
        self.ledger.check_replay(&rehearsal.sched().snapshot());
        // A server's own clock does not go back.
        let now = self.wall_clock().max(rehearsal.last());
        self.server.started = (now, self.now);
        // A keeper has kept the store, or it was in the memory of the server.
        if self.random.chance(0.5) {
            self.shelf.retain(|_, kept| kept.holder != Holder::Store);
        }
        let stored = self.shelf.iter().filter(|kept| kept.1.holder == Holder::Store);
        let stored: BTreeSet<_> = stored.map(|kept| *kept.0).collect();
        let begun = rehearsal.begin(now, stored);
        self.ledger.write(rehearsal.sched().snapshot());
        match begun {
            Ok(step) => {
                self.ledger.wrote();
                self.server.running = Some(rehearsal);
                self.answer(Vec::new(), step);
                self.stand(now);
            }
            Err(error) => self.cannot_start(&error),
        }
    }

    /// It may have jumped while the server was down.
    fn wall_clock(&mut self) -> Timestamp {
        if self.calm || !self.random.chance(0.3) {
            return self.now;
        }
        self.ledger.tally.clock_jumps += 1;
        let jump = self.random.between(Duration::ZERO, Duration::from_secs(600));
        if self.random.chance(0.5) {
            self.now + jump
        } else {
            Timestamp(1) + self.now.since(Timestamp(1) + jump)
        }
    }

    fn cannot_start(&mut self, error: &stagewire_server::JournalError) {
        let disk = ["journal.write", "journal.unreadable"].contains(&error.reason());
        assert!(disk && !self.calm, "the server does not start: {error}: {error:?}");
        self.ledger.tally.crashes_starting += 1;
        let power = self.random.chance(0.5);
        self.crash(power);
    }

    fn mutate(&self, input: Input) -> Input {
        if let (Some(Mutant::StaleToken), Input::Completed { token, .. }, Some(sched)) =
            (self.scenario.mutant, &input, self.server.sched())
            && !sched.is_running(*token)
            && let Some(job) = sched.job(token.job)
            && let Some(successor) = job.stages().iter().find_map(|run| match run.phase() {
                Phase::Running(attempt) => Some(attempt),
                _ => None,
            })
        {
            return completed(successor.worker, successor.token);
        }
        input
    }
}
