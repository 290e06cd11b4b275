use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{
    ByteCount, Epoch, ErrorClass, Failure, Incarnation, JobId, PayloadId, Progress, StageName, Timestamp, Token,
    TransferMode,
};
use stagewire_sched::{
    Decision, Discard, EdgeSpec, Effect, Event, Flow, Holder, IdempotencyKey, Input, JobNotice, Limits, NoticeKind,
    Offer, PayloadInfo, Phase, Place, Refusal, ResultInfo, Sched, Slot, StageRun, StageSpec, Topology, Urgency,
    WorkerInfo,
};
use uuid::Uuid;

/// A scheduler with its clock, its journal, and everything that it wanted to be done.
pub(crate) struct World {
    pub(crate) sched: Sched,
    pub(crate) now: Timestamp,
    /// Every event, and among them the durable ones.
    pub(crate) history: Vec<(Timestamp, Event)>,
    pub(crate) journal: Vec<(Timestamp, Event)>,
    /// Effects since the last call of [`World::take`].
    pub(crate) effects: Vec<Effect>,
    ids: u128,
    ended: BTreeMap<JobId, NoticeKind>,
    /// What each attempt was offered to read.
    inputs: BTreeMap<Token, Vec<PayloadId>>,
    released: BTreeSet<PayloadId>,
}

pub(crate) fn name(name: &str) -> StageName {
    StageName::new(name).expect("an allowed name")
}

pub(crate) fn whole(from: &str, to: &str) -> EdgeSpec {
    EdgeSpec {
        from: name(from),
        to: name(to),
        flow: Flow::Whole,
        mode: TransferMode::P2p,
    }
}

pub(crate) fn stream(from: &str, to: &str) -> EdgeSpec {
    let flow = Flow::Stream {
        chunks: 3,
        chunk_dim: 2,
    };
    EdgeSpec {
        flow,
        ..whole(from, to)
    }
}

pub(crate) fn stored(edge: EdgeSpec) -> EdgeSpec {
    EdgeSpec {
        mode: TransferMode::Store,
        ..edge
    }
}

pub(crate) fn topology(stages: &[&str], edges: Vec<EdgeSpec>) -> Topology {
    let stages = stages.iter().map(|stage| StageSpec::new(name(stage))).collect();
    Topology::new(stages, edges).expect("an allowed pipeline")
}

/// Encode, denoise, decode, with a stream into the decoder.
pub(crate) fn video() -> Topology {
    let edges = vec![whole("encode", "denoise"), stream("denoise", "decode")];
    topology(&["encode", "denoise", "decode"], edges)
}

pub(crate) fn failure(class: ErrorClass) -> Failure {
    Failure::new(class, "test.failure", "it went wrong")
}

impl World {
    pub(crate) fn new(topology: Topology) -> Self {
        Self::with_limits(topology, Limits::default())
    }

    pub(crate) fn with_limits(topology: Topology, limits: Limits) -> Self {
        let mut world = Self {
            sched: Sched::new(topology, limits),
            now: Timestamp(1_000_000_000),
            history: Vec::new(),
            journal: Vec::new(),
            effects: Vec::new(),
            ids: 0,
            ended: BTreeMap::new(),
            inputs: BTreeMap::new(),
            released: BTreeSet::new(),
        };
        world.does(Input::Restarted {
            epoch: Epoch(1),
            stored: BTreeSet::new(),
        });
        world
    }

    pub(crate) fn id(&mut self) -> Uuid {
        self.ids += 1;
        Uuid::from_u128(self.ids)
    }

    /// Decides and applies, and then all that is due, and checks everything that can be checked.
    pub(crate) fn step(&mut self, input: Input) -> Result<Decision, Refusal> {
        let decision = self.sched.decide(self.now, input)?;
        self.apply(decision.clone());
        self.settle();
        Ok(decision)
    }

    /// Polls until nothing is due.
    pub(crate) fn settle(&mut self) {
        for _ in 0..100_000 {
            let decision = self
                .sched
                .decide(self.now, Input::Poll)
                .expect("a poll is never refused");
            if decision.events.is_empty() {
                assert!(
                    decision.effects.is_empty(),
                    "effects without events would repeat for ever"
                );
                self.check();
                return;
            }
            self.apply(decision);
        }
        panic!("polling never ends: {:?}", self.sched);
    }

    fn apply(&mut self, decision: Decision) {
        for event in decision.events {
            if let Event::AttemptStopped { worker, token } = &event {
                let slot = self.sched.worker(*worker).and_then(|known| known.slots().get(token));
                assert!(
                    matches!(slot, Some(Slot::Stopping { .. })),
                    "worker {worker} stops {token}, its slot is {slot:?}"
                );
            }
            self.sched.apply(self.now, &event);
            if let Event::PayloadReleased { payload, .. } | Event::CacheDropped { payload } = &event {
                assert!(self.released.insert(*payload), "payload {payload} was released twice");
            }
            self.history.push((self.now, event.clone()));
            if event.is_durable() {
                self.journal.push((self.now, event));
            }
        }
        for effect in &decision.effects {
            match effect {
                // The other ranks of a group get what rank 0 was granted.
                Effect::Offer(offer) if offer.member.as_ref().is_none_or(|member| member.rank == 0) => {
                    let inputs = offer.inputs.iter().map(|input| input.payload.id).collect();
                    let seen = self.inputs.insert(offer.token, inputs);
                    assert!(seen.is_none(), "token {} was offered twice", offer.token);
                }
                Effect::Job(JobNotice {
                    job,
                    kind: NoticeKind::Redriven,
                    ..
                }) => {
                    let ended = self.ended.remove(job);
                    assert!(
                        matches!(ended, Some(NoticeKind::Failed(_))),
                        "job {job} was redriven after {ended:?}"
                    );
                }
                Effect::Job(JobNotice { job, kind, .. })
                    if matches!(
                        kind,
                        NoticeKind::Succeeded | NoticeKind::Failed(_) | NoticeKind::Cancelled
                    ) =>
                {
                    let other = self.ended.insert(*job, kind.clone());
                    assert_eq!(other, None, "job {job} ended twice, now with {kind:?}");
                }
                _ => (),
            }
        }
        self.effects.extend(decision.effects);
    }

    /// The invariants, with those that need more than the state.
    pub(crate) fn check(&self) {
        if let Err(broken) = self.sched.check() {
            panic!("{broken}");
        }
        if let Some((deadline, what)) = self.sched.poll_timeout() {
            assert!(deadline > self.now, "{what} is overdue");
        }
        for job in self.sched.jobs() {
            let waiting = self.sched.explain(self.now, job.id());
            assert_eq!(
                waiting.is_empty(),
                job.ended().is_some(),
                "job {} cannot say why it waits",
                job.id()
            );
            assert_eq!(
                job.ended().is_some(),
                self.ended.contains_key(&job.id()),
                "nobody heard how job {} ended",
                job.id()
            );
            for run in job.stages() {
                let Some(token) = run.phase().token().filter(|_| run.phase().worker().is_some()) else {
                    continue;
                };
                let inputs = self.inputs.get(&token).into_iter().flatten();
                let lost = inputs.filter(|payload| self.released.contains(payload)).count();
                assert_eq!(lost, 0, "attempt {token} reads what was released");
            }
        }
    }

    pub(crate) fn does(&mut self, input: Input) -> Decision {
        let shown = format!("{input:?}");
        self.step(input)
            .unwrap_or_else(|refusal| panic!("{shown} was refused: {refusal}"))
    }

    pub(crate) fn refused(&mut self, input: Input) -> Refusal {
        let shown = format!("{input:?}");
        match self.step(input) {
            Err(refusal) => refusal,
            Ok(decision) => panic!("{shown} was not refused but gave {decision:?}"),
        }
    }

    /// Effects since the last call.
    pub(crate) fn take(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Lets time pass, from deadline to deadline.
    pub(crate) fn wait(&mut self, duration: Duration) {
        let end = self.now + duration;
        while let Some((deadline, _)) = self.sched.poll_timeout().filter(|(deadline, _)| *deadline <= end) {
            self.now = self.now.max(deadline);
            self.settle();
        }
        self.now = end;
    }

    /// Jumps to the next deadline and says what was due.
    pub(crate) fn jump(&mut self) -> &'static str {
        let (deadline, what) = self.sched.poll_timeout().expect("something is due some time");
        self.now = self.now.max(deadline);
        self.settle();
        what
    }

    pub(crate) fn attach(&mut self, stage: &str, slots: u32) -> Incarnation {
        let incarnation = Incarnation(self.id());
        self.attach_as(incarnation, stage, slots, vec![], vec![]);
        incarnation
    }

    pub(crate) fn attach_as(
        &mut self,
        incarnation: Incarnation,
        stage: &str,
        slots: u32,
        running: Vec<Token>,
        holding: Vec<PayloadId>,
    ) {
        let worker = worker_info(incarnation, stage, slots);
        self.does(Input::WorkerAttached {
            worker,
            running,
            holding,
        });
    }

    pub(crate) fn submit(&mut self) -> JobId {
        let job = JobId(self.id());
        let decision = self.does(submission(job, "{}".into()));
        assert_eq!(decision.job, Some(job));
        job
    }

    pub(crate) fn submit_as(&mut self, urgency: Urgency) -> Result<JobId, Refusal> {
        let job = JobId(self.id());
        let (params, key) = ("{}".into(), None);
        self.step(Input::Submit {
            job,
            params,
            key,
            urgency,
        })?;
        Ok(job)
    }

    /// Submits a job of this class, and of a shape.
    pub(crate) fn submit_to(&mut self, class: &str, shape: u64) -> JobId {
        let urgency = Urgency {
            class: Some(class.to_owned()),
            shape,
            ..Urgency::default()
        };
        self.submit_as(urgency).expect("the class exists")
    }

    pub(crate) fn submit_with_key(&mut self, key: &str, hash: u64) -> Result<JobId, Refusal> {
        let job = JobId(self.id());
        let key = Some(IdempotencyKey {
            key: key.to_owned(),
            hash,
        });
        let params = "{}".into();
        let urgency = Urgency::default();
        let decision = self.step(Input::Submit {
            job,
            params,
            key,
            urgency,
        })?;
        Ok(decision.job.expect("a submission names its job"))
    }

    /// The last offer to the worker that still stands.
    pub(crate) fn offer(&self, worker: Incarnation) -> Option<&Offer> {
        self.effects.iter().rev().find_map(|effect| match effect {
            Effect::Offer(offer) if offer.worker == worker && self.stands(offer.token) => Some(&**offer),
            _ => None,
        })
    }

    fn stands(&self, token: Token) -> bool {
        let runs = self.sched.job(token.job).into_iter().flat_map(|job| job.stages());
        let mut offers = runs.filter(|run| matches!(run.phase(), Phase::Offered(_)));
        offers.any(|run| run.phase().token() == Some(token))
    }

    /// Accepts the worker's offer.
    pub(crate) fn accept(&mut self, worker: Incarnation) -> Token {
        let token = self.offer(worker).expect("the worker has an offer").token;
        self.does(Input::Accept { worker, token });
        assert!(self.effects.contains(&Effect::Grant { worker, token }), "no grant");
        token
    }

    pub(crate) fn publish(&mut self, worker: Incarnation, token: Token) -> PayloadId {
        self.publish_in(worker, token, false)
    }

    pub(crate) fn publish_in(&mut self, worker: Incarnation, token: Token, stored: bool) -> PayloadId {
        let id = PayloadId(self.id());
        let payload = payload_info(id, stored);
        self.does(Input::Published { worker, token, payload });
        id
    }

    pub(crate) fn complete(&mut self, worker: Incarnation, token: Token) {
        self.does(completed(worker, token));
    }

    /// Accepts, publishes where there is a consumer, completes.
    pub(crate) fn run(&mut self, worker: Incarnation) -> Token {
        let publish = self.offer(worker).expect("the worker has an offer").output;
        let token = self.accept(worker);
        if publish.publish {
            self.publish_in(worker, token, publish.stored);
        }
        self.complete(worker, token);
        token
    }

    pub(crate) fn fail(&mut self, worker: Incarnation, token: Token, class: ErrorClass) {
        self.does(Input::Failed {
            worker,
            token,
            failure: failure(class),
            lost: None,
        });
    }

    pub(crate) fn fail_for_lost(&mut self, worker: Incarnation, token: Token, payload: PayloadId) {
        self.does(Input::Failed {
            worker,
            token,
            failure: failure(ErrorClass::Unavailable),
            lost: Some(payload),
        });
    }

    pub(crate) fn renew(&mut self, worker: Incarnation, token: Token, sequence: u64) {
        let progress = Some(steps(sequence));
        self.does(Input::Renew {
            worker,
            token,
            sequence,
            progress,
        });
    }

    /// Hands over a checkpoint, which a store holds or the worker.
    pub(crate) fn checkpoint(&mut self, worker: Incarnation, token: Token, done: u64, stored: bool) -> PayloadId {
        let id = PayloadId(self.id());
        self.does(Input::Checkpointed {
            worker,
            token,
            payload: payload_info(id, stored),
            progress: steps(done),
        });
        id
    }

    /// Yields, with a checkpoint in the store.
    pub(crate) fn yield_at(&mut self, worker: Incarnation, token: Token, done: u64) -> PayloadId {
        let id = PayloadId(self.id());
        self.does(Input::Yielded {
            worker,
            token,
            payload: Some(payload_info(id, true)),
            progress: steps(done),
        });
        id
    }

    /// Attempts that were asked to yield since the last call of [`World::take`].
    pub(crate) fn asked(&self) -> Vec<Token> {
        let asked = self.effects.iter().filter_map(|effect| match effect {
            Effect::Yield { token, .. } => Some(*token),
            _ => None,
        });
        asked.collect()
    }

    pub(crate) fn stop(&mut self, worker: Incarnation, token: Token) {
        self.does(Input::Stopped { worker, token });
    }

    pub(crate) fn cancel(&mut self, job: JobId) {
        self.does(Input::Cancel { job });
    }

    pub(crate) fn redrive(&mut self, job: JobId) {
        self.does(Input::Redrive { job });
    }

    pub(crate) fn discard(&mut self, job: JobId) {
        let why = Discard::Asked;
        self.does(Input::Discard { job, why });
    }

    /// Dead letters, the first to die first.
    pub(crate) fn dead(&self) -> Vec<JobId> {
        self.sched.dead_letters().map(|letter| letter.job.id()).collect()
    }

    pub(crate) fn lose(&mut self, worker: Incarnation) {
        self.does(Input::WorkerLost { worker });
    }

    pub(crate) fn away(&mut self, worker: Incarnation) {
        self.does(Input::WorkerAway { worker });
    }

    pub(crate) fn stage(&self, job: JobId, stage: &str) -> &StageRun {
        let job = self.sched.job(job).expect("the job is remembered");
        job.stage(&name(stage)).expect("the stage exists")
    }

    /// Phase of a stage in one word.
    pub(crate) fn phase(&self, job: JobId, stage: &str) -> &'static str {
        self.stage(job, stage).phase().name()
    }

    /// Phases of all stages.
    pub(crate) fn phases(&self, job: JobId) -> Vec<&'static str> {
        let job = self.sched.job(job).expect("the job is remembered");
        job.stages().iter().map(|run| run.phase().name()).collect()
    }

    /// The payloads of a job that somebody holds.
    pub(crate) fn live(&self, job: JobId) -> BTreeSet<PayloadId> {
        let stages = self.sched.job(job).expect("the job is remembered").stages();
        let live = stages.iter().filter_map(|run| run.output().live());
        live.map(|payload| payload.id).collect()
    }

    /// State of a job in one word.
    pub(crate) fn state(&self, job: JobId) -> &'static str {
        self.sched.job(job).expect("the job is remembered").state().name()
    }

    /// The server dies and replays its journal: effects on their way are lost, and so is everything volatile.
    pub(crate) fn restart(&mut self) {
        self.restart_with(BTreeSet::new());
    }

    /// The same, but the store still has these payloads.
    pub(crate) fn restart_with(&mut self, stored: BTreeSet<PayloadId>) {
        let replayed = self.replayed();
        assert_eq!(
            replayed.snapshot(),
            self.sched.snapshot(),
            "a replay gives the same durable state"
        );
        let snapshot = self.sched.snapshot();
        let (topology, limits) = (self.sched.topology().clone(), *self.sched.limits());
        let restored = Sched::restore(topology, limits, snapshot).expect("the same pipeline");
        let epoch = Epoch(self.sched.epoch().0 + 1);
        let input = || Input::Restarted {
            epoch,
            stored: stored.clone(),
        };
        assert_eq!(
            restored.decide(self.now, input()),
            replayed.decide(self.now, input()),
            "a snapshot is as good as a replay"
        );
        self.effects.clear();
        self.sched = replayed;
        self.does(input());
    }

    /// A scheduler that knows what the journal says.
    pub(crate) fn replayed(&self) -> Sched {
        self.replayed_with(self.sched.topology().clone())
    }

    /// The same, with a pipeline that was configured otherwise since.
    pub(crate) fn replayed_with(&self, topology: Topology) -> Sched {
        let mut sched = Sched::new(topology, *self.sched.limits());
        for (at, event) in &self.journal {
            let bytes = postcard::to_stdvec(event).expect("events encode");
            let event: Event = postcard::from_bytes(&bytes).expect("events decode");
            sched.apply(*at, &event);
        }
        sched
    }

    pub(crate) fn releases(&self) -> Vec<(Holder, PayloadId)> {
        let releases = self.effects.iter().filter_map(|effect| match effect {
            Effect::Release { holder, payload } => Some((*holder, *payload)),
            _ => None,
        });
        releases.collect()
    }

    pub(crate) fn was_cancelled(&self, token: Token) -> bool {
        let is_it = |effect: &Effect| matches!(effect, Effect::CancelAttempt { token: other, .. } if *other == token);
        self.effects.iter().any(is_it)
    }

    /// What those who watch the job heard, in one word each, with the stage.
    pub(crate) fn heard(&self, job: JobId) -> Vec<String> {
        let notices = self.effects.iter().filter_map(|effect| match effect {
            Effect::Job(notice) if notice.job == job => Some(notice),
            _ => None,
        });
        let word = |notice: &JobNotice| {
            let kind = match &notice.kind {
                NoticeKind::Submitted => "submitted",
                NoticeKind::Redriven => "redriven",
                NoticeKind::Queued => "queued",
                NoticeKind::Offered => "offered",
                NoticeKind::Running => "running",
                NoticeKind::Progress(_) => "progress",
                NoticeKind::Published { .. } => "published",
                NoticeKind::Checkpointed { .. } => "checkpointed",
                NoticeKind::Yielding(_) => "yielding",
                NoticeKind::Yielded(_) => "yielded",
                NoticeKind::Cached { .. } => "cached",
                NoticeKind::StageDone { .. } => "done",
                NoticeKind::Requeued { .. } => "requeued",
                NoticeKind::Cancelling => "cancelling",
                NoticeKind::Succeeded => "succeeded",
                NoticeKind::Failed(_) => "failed",
                NoticeKind::Cancelled => "cancelled",
                NoticeKind::Forgotten => "forgotten",
            };
            match &notice.stage {
                Some(stage) => format!("{stage} {kind}"),
                None => kind.to_owned(),
            }
        };
        notices.map(word).collect()
    }
}

/// So many of 100 steps.
pub(crate) fn steps(done: u64) -> Progress {
    Progress {
        done,
        total: 100,
        unit: "step".to_owned(),
    }
}

pub(crate) fn submission(job: JobId, params: Arc<str>) -> Input {
    Input::Submit {
        job,
        params,
        key: None,
        urgency: Urgency::default(),
    }
}

pub(crate) fn worker_info(incarnation: Incarnation, stage: &str, slots: u32) -> WorkerInfo {
    WorkerInfo {
        incarnation,
        stage: name(stage),
        slots,
        max_batch: 1,
        name: format!("{stage}-1"),
        member: None,
        place: Place::default(),
    }
}

pub(crate) fn payload_info(id: PayloadId, stored: bool) -> PayloadInfo {
    PayloadInfo {
        id,
        nbytes: ByteCount(1 << 20),
        chunks: 3,
        stored,
        handle: vec![1, 2, 3].into(),
    }
}

pub(crate) fn completed(worker: Incarnation, token: Token) -> Input {
    Input::Completed {
        worker,
        token,
        result: Some(ResultInfo::default()),
        handovers: vec![],
    }
}
