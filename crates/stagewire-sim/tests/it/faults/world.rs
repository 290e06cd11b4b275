//! Everything together, in the order of time.

mod disturb;
mod serve;
mod work;

use std::collections::BTreeMap;
use std::time::Duration;

use stagewire_core::{Incarnation, JobId, PayloadId, StageName, Timestamp, Token};
use stagewire_sched::{CacheKey, Holder, IdempotencyKey, Input, Urgency};
use stagewire_sim::{Agenda, Random};
use uuid::Uuid;

use super::agent::{Agent, Word};
use super::ledger::Ledger;
use super::scenario::{Scenario, TROUBLE};
use serve::Server;

/// Once nothing goes wrong any more, all must have ended within that: several attempts that are found stuck by their
/// no-progress timer, one after the other.
const PATIENCE: Duration = Duration::from_secs(4 * 3_600);

#[derive(Debug, Clone)]
enum Happening {
    /// A message reaches the server.
    Reach(Source, Input),
    /// A message reaches an agent.
    Hear(Incarnation, u64, Word),
    /// The server looks into its inbox, and at what is due.
    Serve,
    /// A server starts.
    Boot,
    /// An attempt goes on.
    Work(Incarnation, Token),
    Renew(Incarnation),
    Connect(Incarnation),
    Spawn(StageName),
    /// Somebody drops a payload, whether or not it is needed: see `Mutant::EagerRelease`.
    Release(PayloadId),
    Submit(usize),
    Cancel(usize),
    Disturb,
    Calm,
}

/// Who says something to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Client(usize),
    Operator,
    Stream(Incarnation, u64),
    /// The operating system, of a stream's end.
    System(Incarnation, u64),
}

/// Where the bytes of a payload are.
#[derive(Debug)]
struct Kept {
    token: Token,
    holder: Holder,
    /// Its producer has written all of it.
    sealed: bool,
}

/// Somebody who wants a job done.
#[derive(Debug)]
struct Client {
    key: Option<String>,
    tries: u32,
    job: Option<JobId>,
}

#[derive(Debug)]
pub(super) struct World {
    scenario: Scenario,
    now: Timestamp,
    agenda: Agenda<Happening>,
    random: Random,
    ids: u128,
    server: Server,
    agents: BTreeMap<Incarnation, Agent>,
    shelf: BTreeMap<PayloadId, Kept>,
    clients: Vec<Client>,
    calm: bool,
    pub(super) ledger: Ledger,
}

impl World {
    pub(super) fn new(scenario: Scenario) -> Self {
        let random = Random::branch(scenario.seed, "world");
        let mut world = Self {
            now: Timestamp(1_000_000_000_000),
            agenda: Agenda::default(),
            random,
            ids: 0,
            server: Server::new(&scenario),
            agents: BTreeMap::new(),
            shelf: BTreeMap::new(),
            clients: Vec::new(),
            calm: false,
            ledger: Ledger::default(),
            scenario,
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        self.after(Duration::ZERO, Happening::Boot);
        for stage in self.stages() {
            for _ in 0..=self.random.below(2) {
                self.within(Duration::from_secs(2), Happening::Spawn(stage.clone()));
            }
        }
        let span = if self.scenario.pause.is_some() {
            TROUBLE / 2
        } else {
            TROUBLE / 20
        };
        for number in 0..self.scenario.jobs {
            let key = self.random.chance(0.7).then(|| format!("key-{number}"));
            let (tries, job) = (0, None);
            self.clients.push(Client { key, tries, job });
            self.within(span, Happening::Submit(self.clients.len() - 1));
        }
        if self.scenario.pause.is_some() {
            self.within(Duration::from_secs(10), Happening::Disturb);
        }
        self.after(TROUBLE, Happening::Calm);
    }

    /// Lets everything happen, and checks that it ends well.
    pub(super) fn run(&mut self) {
        let mut calm_since = None;
        for _ in 0..3_000_000 {
            let (at, happening) = self.agenda.pop().expect("workers renew for ever");
            self.now = at;
            self.ledger.note(at, &happening);
            self.happen(happening);
            if self.calm {
                let since = *calm_since.get_or_insert(self.now);
                if self.is_over() {
                    return self.check_end();
                }
                assert!(self.now.since(since) < PATIENCE, "it does not end: {}", self.left());
            }
        }
        panic!("too much happens: {}", self.left());
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Reach(source, input) => self.reach(source, input),
            Happening::Hear(agent, session, word) => self.hear(agent, session, word),
            Happening::Serve => self.serve(),
            Happening::Boot => self.boot(),
            Happening::Work(agent, token) => self.work(agent, token),
            Happening::Renew(agent) => self.renew(agent),
            Happening::Connect(agent) => self.connect(agent),
            Happening::Spawn(stage) => self.spawn(stage),
            Happening::Release(payload) => self.release(payload),
            Happening::Submit(client) => self.submit(client),
            Happening::Cancel(client) => {
                if let Some(job) = self.clients[client].job {
                    self.post(
                        Duration::ZERO,
                        Happening::Reach(Source::Client(client), Input::Cancel { job }),
                    );
                }
            }
            Happening::Disturb => self.disturb(),
            Happening::Calm => self.calm_down(),
        }
    }

    fn submit(&mut self, number: usize) {
        let client = &mut self.clients[number];
        // Without a key nobody dares to ask again.
        if client.job.is_some() || (client.tries > 0 && client.key.is_none()) {
            return;
        }
        client.tries += 1;
        let key = client.key.clone().map(|key| IdempotencyKey { key, hash: 7 });
        let classes = self.scenario.topology.classes();
        let class = classes[self.random.index(classes.len())].name.to_string();
        let late = self.random.chance(0.1);
        let stages = self.scenario.topology.stages();
        let first = stages[0].name.clone();
        let skip = if stages.len() > 1 && self.random.chance(0.1) {
            vec![first]
        } else {
            Vec::new()
        };
        let urgency = Urgency {
            class: Some(class),
            queue_deadline: late.then(|| self.random.between(Duration::from_secs(5), Duration::from_secs(90))),
            shape: self.random.below(2),
            skip,
            cache: self.keys(number),
        };
        let (job, params) = (JobId(self.id()), "{}".into());
        let input = Input::Submit {
            job,
            params,
            key,
            urgency,
        };
        self.post(Duration::ZERO, Happening::Reach(Source::Client(number), input));
        let pause = self.random.between(Duration::from_secs(2), Duration::from_secs(5));
        self.after(pause, Happening::Submit(number));
        if self.scenario.pause.is_some() && self.random.chance(0.15) {
            self.within(TROUBLE / 2, Happening::Cancel(number));
        }
    }

    /// Faults stop: whoever lives is there, has a connection, and does what it should; each stage has one more worker.
    fn calm_down(&mut self) {
        self.calm = true;
        self.server.disk.fail_after(usize::MAX);
        self.server.stalled_until = self.now;
        self.serve_within(Duration::ZERO);
        for stage in self.stages() {
            self.after(Duration::ZERO, Happening::Spawn(stage));
        }
        let agents: Vec<_> = self.agents.keys().copied().collect();
        for incarnation in agents {
            if let Some(agent) = self.agents.get_mut(&incarnation) {
                agent.cut();
                (agent.slow, agent.stopped_until, agent.cut_off_until) = (Duration::ZERO, self.now, self.now);
            }
            self.after(Duration::ZERO, Happening::Connect(incarnation));
        }
    }

    fn is_over(&self) -> bool {
        let jobs = self
            .server
            .sched()
            .is_some_and(|sched| sched.active_jobs() == 0 && sched.live_payloads() == 0);
        jobs && self
            .clients
            .iter()
            .all(|client| client.job.is_some() || client.key.is_none())
            && self.agents.values().all(|agent| agent.tasks.is_empty())
            && self.shelf.len() as u64 == self.kept()
    }

    /// Payloads that are kept for whoever would make the same.
    fn kept(&self) -> u64 {
        self.server.sched().map_or(0, |sched| sched.cache_tally().payloads)
    }

    /// What the first stage of a client's job makes, where others may make the same. Drawn apart, so that a seed means what it
    /// did before there were keys.
    fn keys(&self, client: usize) -> Vec<(StageName, CacheKey)> {
        let mut random = Random::branch(self.scenario.seed, &format!("key {client}"));
        let first = self.scenario.topology.stages()[0].name.clone();
        let keyed = random.chance(0.5).then(|| CacheKey(u128::from(random.below(3))));
        keyed.map(|key| (first, key)).into_iter().collect()
    }

    /// What keeps it from being over, for people.
    fn left(&self) -> String {
        let jobs: Vec<_> = self
            .server
            .sched()
            .into_iter()
            .flat_map(|sched| sched.jobs())
            .filter(|job| job.ended().is_none())
            .collect();
        let agents: Vec<_> = self.agents.values().filter(|agent| !agent.tasks.is_empty()).collect();
        format!(
            "jobs {jobs:#?}\nagents {agents:#?}\nshelf {:#?}\nserver is up: {}",
            self.shelf,
            self.server.sched().is_some()
        )
    }

    /// What has ended stays so when the server starts again.
    fn check_end(&mut self) {
        self.crash(false);
        self.boot();
        let sched = self.server.sched().expect("nothing keeps it from starting");
        assert_eq!(sched.active_jobs(), 0, "what has ended goes on after a restart");
        let tally = &mut self.ledger.tally;
        tally.jobs += sched.jobs().count() as u64;
        tally.succeeded += sched.job_tally()[2];
    }

    fn stages(&self) -> Vec<StageName> {
        self.scenario
            .topology
            .stages()
            .iter()
            .map(|stage| stage.name.clone())
            .collect()
    }

    fn id(&mut self) -> Uuid {
        self.ids += 1;
        Uuid::from_u128(self.ids)
    }

    fn after(&mut self, delay: Duration, happening: Happening) {
        self.agenda.put(self.now + delay, happening);
    }

    fn within(&mut self, longest: Duration, happening: Happening) {
        let delay = self.random.between(Duration::ZERO, longest);
        self.after(delay, happening);
    }

    /// Sends something over the network, which loses it, repeats it, holds it up.
    fn post(&mut self, slow: Duration, happening: Happening) {
        self.ledger.tally.messages += 1;
        if !self.calm && self.random.chance(self.scenario.lost) {
            self.ledger.tally.lost += 1;
            return;
        }
        if !self.calm && self.random.chance(self.scenario.twice) {
            self.ledger.tally.twice += 1;
            self.post_surely(slow, happening.clone());
        }
        self.post_surely(slow, happening);
    }

    /// Sends something that arrives: what a connection's own protocol takes care of.
    fn post_surely(&mut self, slow: Duration, happening: Happening) {
        let (shortest, longest) = self.scenario.latency;
        let mut delay = slow
            + self
                .random
                .between(shortest, if self.calm { 2 * shortest } else { longest });
        if !self.calm && self.random.chance(self.scenario.held_up) {
            delay += self.random.between(Duration::from_millis(50), Duration::from_secs(6));
        }
        self.after(delay, happening);
    }
}
