//! The cluster around the scheduler: what happens when.

mod fetch;
mod lifecycle;
mod output;
mod steps;
mod work;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use stagewire_core::{ByteCount, Epoch, Incarnation, JobId, PayloadId, Timestamp, Token};
use stagewire_sched::{Effect, Input, Limits, NoticeKind, Offer, Sched, Urgency};
use uuid::Uuid;

use crate::experiment::{Experiment, SimError};
use crate::links::{End, Links};
use crate::record::{JobRecord, Run};
use crate::{Agenda, Appointment, Random};

/// A cluster that does not end a job for so long, and for so many times the service time of one, will never.
const PATIENCE: (Duration, u32) = (Duration::from_secs(86_400), 1_000);
/// Nothing is taken for lost by its silence: the simulator tells who dies.
const NEVER: Duration = Duration::from_secs(1000 * 365 * 86_400);
/// Points of time at which levels are written down.
const SAMPLES: u32 = 400;

#[derive(Debug)]
enum Next {
    Arrive,
    Poll,
    /// A worker has heard an offer, and answers.
    Answer(usize, Token),
    /// A worker has heard that it may begin.
    Begin(usize, Token),
    /// The first chunk of an output is there, while the others are made.
    First(usize, Token),
    /// The stage function is done, so far as it depends on time.
    Computed(usize, Token),
    /// All of it is there.
    Finish(usize, Token),
    Flows,
    Attach(usize),
    /// A worker of this place and life dies.
    Die(usize, u64),
    /// The server learns of a death.
    Lost(Incarnation),
    /// A machine will be taken away.
    Warn(usize, u64),
    Take(usize, u64),
    /// An attempt has come to a step boundary.
    Step(usize, Token),
    /// A worker has heard that an attempt should yield.
    Yield(usize, Token),
    /// A worker says that an attempt has stopped.
    Stopped(Incarnation, Token),
    Sample,
}

/// Where a worker runs: one GPU.
#[derive(Debug)]
struct Place {
    stage: usize,
    /// Which group of the stage it belongs to, and which rank of that it is. Rank 0 runs the attempts for all.
    group: u32,
    rank: u32,
    /// Who runs there, if anybody does.
    worker: Option<Incarnation>,
    /// Those that were not granted yet. Attempts of a batch begin together.
    offers: Vec<Offer>,
    /// What it runs: one attempt, or a batch of them.
    tasks: Vec<work::Task>,
    /// Since when it has worked, and how long it has in all.
    busy_since: Option<Timestamp>,
    busy: Duration,
    /// How often somebody began there: what was planned for an earlier one does not concern the next.
    life: u64,
}

/// Where a payload is.
#[derive(Debug, Clone, Copy)]
struct Kept {
    holder: End,
    nbytes: u64,
    /// Its last chunk is there, too.
    whole: bool,
}

pub(crate) struct Cluster<'a> {
    experiment: &'a Experiment,
    sched: Sched,
    now: Timestamp,
    agenda: Agenda<Next>,
    poll: Option<(Timestamp, Appointment)>,
    flows_due: Option<Appointment>,
    places: Vec<Place>,
    by_worker: BTreeMap<Incarnation, usize>,
    payloads: BTreeMap<PayloadId, Kept>,
    links: Links,
    flows: BTreeMap<u64, (usize, Token, fetch::Leg)>,
    /// Those who wait for room in the store.
    puts: VecDeque<(usize, Token)>,
    stored: u64,
    coming: std::vec::IntoIter<crate::arrivals::Coming>,
    next: Option<crate::arrivals::Coming>,
    jobs: BTreeMap<JobId, usize>,
    left: u64,
    /// When a job came or ended last.
    progress: Timestamp,
    service: Random,
    chance: Random,
    ids: u128,
    sample_every: Duration,
    run: Run,
}

/// Simulates an experiment as it is laid out.
pub(crate) fn run(experiment: &Experiment) -> Result<Run, SimError> {
    let topology = experiment.topology()?;
    let limits = Limits {
        offer: NEVER,
        grant: NEVER,
        linger: NEVER,
        cancel: NEVER,
        stop: NEVER,
        max_queued: usize::MAX,
        max_queued_bytes: ByteCount(u64::MAX),
        payload_bytes: experiment.byte_credits,
        max_ended: 1_000,
        max_killed_workers: u32::MAX,
        max_expired: u32::MAX,
        max_lost_inputs: u32::MAX,
        ..Limits::default()
    };
    let coming = crate::arrivals::all(experiment);
    let span = coming.last().map_or(Duration::ZERO, |last| last.at);
    let jobs = coming.len() as u64;
    let mut coming = coming.into_iter();
    let mut cluster = Cluster {
        sched: Sched::new(topology, limits),
        now: Timestamp(0),
        agenda: Agenda::default(),
        poll: None,
        flows_due: None,
        places: Vec::new(),
        by_worker: BTreeMap::new(),
        payloads: BTreeMap::new(),
        links: Links::new(experiment.network),
        flows: BTreeMap::new(),
        puts: VecDeque::new(),
        stored: 0,
        next: coming.next(),
        coming,
        jobs: BTreeMap::new(),
        left: jobs,
        progress: Timestamp(0),
        service: Random::branch(experiment.seed, "service"),
        chance: Random::branch(experiment.seed, "chance"),
        ids: 0,
        sample_every: (span / SAMPLES).max(Duration::from_millis(100)),
        run: Run::new(experiment),
        experiment,
    };
    cluster.begin();
    cluster.go_on()?;
    Ok(cluster.end())
}

impl Cluster<'_> {
    fn begin(&mut self) {
        let (epoch, stored) = (Epoch(1), Default::default());
        self.tell(Input::Restarted { epoch, stored });
        for (stage, spec) in self.experiment.stages.iter().enumerate() {
            let ranks = (0..spec.workers).flat_map(|group| (0..spec.world).map(move |rank| (group, rank)));
            for (group, rank) in ranks {
                self.places.push(Place {
                    stage,
                    group,
                    rank,
                    worker: None,
                    offers: Vec::new(),
                    tasks: Vec::new(),
                    busy_since: None,
                    busy: Duration::ZERO,
                    life: 0,
                });
                self.attach(self.places.len() - 1);
            }
        }
        if let Some(first) = &self.next {
            self.agenda.put(Timestamp(0) + first.at, Next::Arrive);
        }
        self.agenda.put(Timestamp(0), Next::Sample);
    }

    fn go_on(&mut self) -> Result<(), SimError> {
        let work: Duration = self.experiment.stages.iter().map(|stage| stage.time).sum();
        let patience = PATIENCE.0 + work * PATIENCE.1;
        while self.left > 0 {
            let Some((at, next)) = self.agenda.pop() else { break };
            self.now = at;
            let (waited, left) = (at.since(self.progress), self.left);
            if waited > patience {
                return Err(SimError::Stuck { waited, left });
            }
            match next {
                Next::Arrive => self.arrive(),
                Next::Poll => {
                    self.poll = None;
                    self.settle();
                }
                Next::Answer(place, token) => self.answer(place, token),
                Next::Begin(place, token) => self.begin_attempt(place, token),
                Next::First(place, token) => self.first_made(place, token),
                Next::Computed(place, token) => self.computed(place, token),
                Next::Step(place, token) => self.step(place, token),
                Next::Yield(place, token) => self.ask(place, token),
                Next::Finish(place, token) => self.finish(place, token),
                Next::Flows => self.flows_done(),
                Next::Attach(place) => self.attach(place),
                Next::Die(place, life) => self.die(place, life),
                Next::Lost(worker) => self.tell(Input::WorkerLost { worker }),
                Next::Warn(place, life) => self.warn(place, life),
                Next::Take(place, life) => self.take(place, life),
                Next::Stopped(worker, token) => self.tell(Input::Stopped { worker, token }),
                Next::Sample => self.sample(),
            }
            self.plan_flows();
        }
        Ok(())
    }

    fn end(mut self) -> Run {
        for place in &mut self.places {
            if let Some(since) = place.busy_since.take() {
                place.busy += self.now.since(since);
            }
            self.run.busy[place.stage] += place.busy;
        }
        self.run.span = self.now.since(Timestamp(0));
        self.run.moved = self.links.moved;
        self.run
    }

    fn id(&mut self) -> Uuid {
        self.ids += 1;
        Uuid::from_u128(self.ids)
    }

    fn arrive(&mut self) {
        let Some(coming) = self.next.take() else { return };
        self.progress = self.now;
        self.next = self.coming.next();
        if let Some(next) = &self.next {
            self.agenda.put(Timestamp(0) + next.at, Next::Arrive);
        }
        let class = &self.experiment.classes[coming.class];
        let job = JobId(self.id());
        self.jobs.insert(job, self.run.jobs.len());
        self.run.jobs.push(JobRecord::new(coming.class, coming.scale, self.now));
        let urgency = Urgency {
            class: Some(class.spec.name.to_string()),
            // Jobs that take as long are alike: half a percent apart at most.
            shape: (coming.scale.ln() * 200.0).round() as i64 as u64,
            ..Urgency::default()
        };
        let (params, key) = ("{}".into(), None);
        self.tell(Input::Submit {
            job,
            params,
            key,
            urgency,
        });
    }

    /// Something happens, and what follows from it follows. What comes too late is refused and of no effect, as in a real
    /// cluster.
    fn tell(&mut self, input: Input) {
        if let Ok(decision) = self.sched.decide(self.now, input) {
            self.make_true(decision);
        }
        self.settle();
    }

    fn settle(&mut self) {
        loop {
            let decision = self.sched.decide(self.now, Input::Poll).unwrap_or_default();
            if decision.events.is_empty() && decision.effects.is_empty() {
                break;
            }
            self.make_true(decision);
        }
        let due = self.sched.poll_timeout().map(|due| due.0);
        if let (Some(due), known) = (due, self.poll)
            && known.is_none_or(|known| due < known.0)
        {
            if let Some((_, appointment)) = known {
                self.agenda.cancel(appointment);
            }
            self.poll = Some((due, self.agenda.put(due, Next::Poll)));
        }
    }

    fn make_true(&mut self, decision: stagewire_sched::Decision) {
        for event in &decision.events {
            self.sched.apply(self.now, event);
            self.run.note(self.now, event);
        }
        for effect in decision.effects {
            self.let_out(effect);
        }
    }

    fn let_out(&mut self, effect: Effect) {
        let heard = self.now + self.experiment.network.latency;
        match effect {
            Effect::Offer(offer) => {
                // Ranks above 0 do as rank 0 does.
                let leads = offer.member.as_ref().is_none_or(|member| member.rank == 0);
                if let Some(place) = self.by_worker.get(&offer.worker).copied().filter(|_| leads) {
                    let token = offer.token;
                    self.places[place].offers.push(*offer);
                    // There and back.
                    self.agenda
                        .put(heard + self.experiment.network.latency, Next::Answer(place, token));
                }
            }
            Effect::Grant { worker, token } => {
                if let Some(place) = self.by_worker.get(&worker).copied() {
                    self.agenda.put(heard, Next::Begin(place, token));
                }
            }
            Effect::CancelAttempt { worker, token, .. } | Effect::Refused { worker, token, .. } => {
                self.stop(worker, token);
            }
            Effect::Release { payload, .. } => self.drop_payload(payload),
            Effect::Job(notice) => {
                let Some(record) = self.jobs.get(&notice.job).map(|job| &mut self.run.jobs[*job]) else {
                    return;
                };
                match notice.kind {
                    NoticeKind::Succeeded => record.succeeded = true,
                    NoticeKind::Failed(_) | NoticeKind::Cancelled => {}
                    _ => return,
                }
                record.ended = Some(self.now);
                self.jobs.remove(&notice.job);
                self.left -= 1;
                self.progress = self.now;
            }
            Effect::Yield { worker, token, .. } => {
                if let Some(place) = self.by_worker.get(&worker).copied() {
                    self.agenda.put(heard, Next::Yield(place, token));
                }
            }
            Effect::Accepted { .. } | Effect::Drain { .. } | Effect::Evict { .. } | Effect::Chosen(_) => {}
        }
    }

    fn sample(&mut self) {
        let queued = self
            .experiment
            .stages
            .iter()
            .map(|stage| self.sched.queued(&stage.spec.name));
        let queued = queued.collect();
        self.run.sample(self.now, queued);
        self.agenda.put(self.now + self.sample_every, Next::Sample);
    }
}
