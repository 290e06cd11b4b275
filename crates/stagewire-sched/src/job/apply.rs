use std::sync::Arc;

use stagewire_core::{Failure, Incarnation, JobId, PayloadId, Progress, StageName, Timestamp, Token};

use super::{FIRST_ATTEMPT, Job, JobState, Live, Losses, Offering, Output, Phase, Running, StageRun, StageSet};
use crate::topology::{Flow, Link, StageIndex, Topology};
use crate::{AttemptLog, Event, IdempotencyKey, Limits, Loss, OfferEnd, Terms};

impl Job {
    pub(crate) fn new(
        topology: &Topology,
        id: JobId,
        number: u64,
        params: &Arc<str>,
        key: Option<&IdempotencyKey>,
        terms: &Terms,
        at: Timestamp,
    ) -> Self {
        let skipped = StageSet::of(topology, &terms.skip);
        let mut job = Self {
            id,
            number,
            params: Arc::clone(params),
            key: key.cloned(),
            submitted: at,
            entered: at,
            redrives: 0,
            terms: terms.clone(),
            class: topology.class_index(&terms.class),
            skipped,
            state: JobState::Active,
            stages: StageRun::all(topology, skipped, at),
            next_attempt: FIRST_ATTEMPT,
            losses: Losses::default(),
            victims: Vec::new(),
            dead: false,
            attempts: AttemptLog::default(),
        };
        job.requeue(topology, at);
        job
    }

    /// Makes an event of this job true. Returns false, and changes nothing, where it does not fit the state.
    pub(crate) fn apply(&mut self, topology: &Topology, limits: &Limits, at: Timestamp, event: &Event) -> bool {
        let fits = self.change(topology, limits, at, event).is_some();
        if fits && !matches!(event, Event::Renewed { .. }) {
            self.requeue(topology, at);
        }
        fits
    }

    fn change(&mut self, topology: &Topology, limits: &Limits, at: Timestamp, event: &Event) -> Option<()> {
        match event {
            Event::Offered { .. } => self.offer(topology, limits, at, event),
            Event::OfferEnded { token, end } => {
                self.end_offer(*token)?;
                let unaccepted = u32::from(*end != OfferEnd::Withdrawn);
                self.losses.unaccepted = self.losses.unaccepted.saturating_add(unaccepted);
                Some(())
            }
            Event::AttemptGranted { .. } => self.grant(topology, limits, at, event),
            Event::Renewed {
                token,
                sequence,
                progress,
            } => self.renew(topology, limits, at, *token, *sequence, progress.as_ref()),
            Event::OutputShared { token } => self.share(*token),
            Event::StageCached {
                stage, payload, token, ..
            } => self.take_shared(at, topology.find(stage)?, payload, *token),
            Event::SharedLeft { stage, payload, .. } => self.leave_shared(topology.find(stage)?, *payload),
            Event::Awaits { stage, by, .. } => self.await_other(topology.find(stage)?, *by),
            Event::AwaitEnded { stage, .. } => {
                let run = self.stages.get_mut(topology.find(stage)?.get())?;
                run.awaits.take().map(drop)
            }
            Event::Published { token, payload } => {
                let stage = self.running(*token)?;
                let run = &mut self.stages[stage.get()];
                if run.output.live().is_some() || topology.consumers(stage).is_empty() {
                    return None;
                }
                run.output = Output::Live(Arc::new(Live {
                    payload: payload.clone(),
                    token: *token,
                    worker: run.phase.worker()?,
                }));
                Some(())
            }
            Event::AttemptCompleted { token, result, .. } => {
                let stage = self.running(*token)?;
                let last = topology.consumers(stage).is_empty();
                if !last && self.run(stage).output.live().is_none() {
                    return None;
                }
                let run = &mut self.stages[stage.get()];
                run.phase = Phase::Done {
                    since: at,
                    token: Some(*token),
                };
                run.result = result.clone().filter(|_| last).map(Box::new);
                run.last_failure = None;
                Some(())
            }
            Event::AttemptFailed { token, failure, retry } => {
                let run = self.end_attempt(at, *token, failure)?;
                run.failures = run.failures.saturating_add(1);
                run.retry = *retry;
                Some(())
            }
            Event::AttemptLost {
                token,
                worker,
                loss,
                failure,
            } => {
                self.end_attempt(at, *token, failure)?;
                self.count_loss(*loss, *worker);
                Some(())
            }
            Event::AttemptFenced { token, failure } => self.end_attempt(at, *token, failure).map(drop),
            Event::Checkpointed {
                token,
                payload,
                progress,
            } => self.keep_checkpoint(*token, payload, progress),
            Event::Yielding { token, by, failure } => self.ask(*token, by.as_ref(), failure),
            Event::AttemptYielded { token, by, failure } => {
                let run = self.end_attempt(at, *token, failure)?;
                run.preemptions = run.preemptions.saturating_add(u32::from(by.is_some()));
                Some(())
            }
            Event::PayloadLost { stage, payload, .. } | Event::PayloadReleased { stage, payload, .. } => {
                self.end_payload(topology, stage, *payload)
            }
            Event::PayloadMoved { token, payload: moved } => {
                let stage = self.find(*token)?;
                match &mut self.stages[stage.get()].output {
                    Output::Live(live)
                        if live.token == *token
                            && live.payload.id == moved.id
                            && !live.payload.stored
                            && moved.stored =>
                    {
                        Arc::make_mut(live).payload = moved.clone();
                        Some(())
                    }
                    _ => None,
                }
            }
            Event::StageReopened { stage, .. } => {
                let stage = topology.find(stage)?;
                let run = self.stages.get_mut(stage.get())?;
                let again = run.phase.is_done() && run.output.live().is_none() && !topology.consumers(stage).is_empty();
                let again = again && !self.skipped.has(stage);
                again.then(|| run.phase = Phase::Blocked { since: at, again })
            }
            Event::StageSkipped { stage, .. } => {
                let run = self.stages.get_mut(topology.find(stage)?.get())?;
                run.phase.is_idle().then(|| {
                    run.phase = Phase::Done { since: at, token: None };
                    run.retry = None;
                })
            }
            Event::RetryDue { stage, .. } => {
                let run = self.stages.get_mut(topology.find(stage)?.get())?;
                run.retry.take().map(drop)
            }
            Event::JobCancelling { .. } => {
                let active = self.state == JobState::Active;
                active.then(|| self.state = JobState::Cancelling { since: at })
            }
            Event::JobEnded { outcome, .. } => {
                let at_rest = |run: &StageRun| run.phase.worker().is_none() && run.payloads().next().is_none();
                let ends = self.ended().is_none() && self.stages.iter().all(at_rest);
                ends.then(|| {
                    self.dead = outcome.is_death();
                    self.state = JobState::Ended {
                        outcome: outcome.clone(),
                        at,
                    };
                })
            }
            Event::JobRedriven { .. } => self.begin_again(topology, at),
            Event::DeadLetterDiscarded { .. } => std::mem::take(&mut self.dead).then_some(()),
            _ => None,
        }
    }

    fn offer(&mut self, topology: &Topology, limits: &Limits, at: Timestamp, event: &Event) -> Option<()> {
        let Event::Offered {
            token,
            stage,
            worker,
            price,
            nbytes,
            batch,
            steps: _,
        } = event
        else {
            return None;
        };
        let (token, worker, price, nbytes, batch) = (*token, *worker, *price, *nbytes, *batch);
        let stage = topology.find(stage)?;
        let run = self.run(stage);
        let Phase::Queued { since, again } = run.phase else {
            return None;
        };
        if run.awaits.is_some() {
            return None;
        }
        let inputs = self
            .input_payloads(topology, stage)
            .filter(|_| self.find(token).is_none())?;
        let resumed = self.run(stage).resumable();
        self.stages[stage.get()].phase = Phase::Offered(Arc::new(Offering {
            token,
            worker,
            since: at,
            deadline: at + limits.offer,
            queued: since,
            again,
            price,
            batch,
            nbytes,
            inputs,
            resumed,
        }));
        self.count_attempt(token);
        Some(())
    }

    /// The stage waits again, as if it had not been offered.
    fn end_offer(&mut self, token: Token) -> Option<()> {
        let stage = self.find(token)?;
        let phase = &mut self.stages[stage.get()].phase;
        let Phase::Offered(offer) = phase else { return None };
        let (since, again) = (offer.queued, offer.again);
        *phase = Phase::Queued { since, again };
        Some(())
    }

    fn grant(&mut self, topology: &Topology, limits: &Limits, at: Timestamp, event: &Event) -> Option<()> {
        let Event::AttemptGranted {
            token,
            stage,
            worker,
            batch,
            ranks,
            nbytes,
            name,
            saved: _,
        } = event
        else {
            return None;
        };
        let (token, worker, batch, nbytes) = (*token, *worker, *batch, *nbytes);
        let stage = topology.find(stage)?;
        let (inputs, price) = match &self.stages[stage.get()].phase {
            Phase::Offered(offer) if offer.token == token && offer.worker == worker => {
                (offer.inputs.clone(), Some(offer.price))
            }
            // In a replay there was no offer.
            Phase::Queued { .. } if self.find(token).is_none() => (self.input_payloads(topology, stage)?, None),
            _ => return None,
        };
        let run = &mut self.stages[stage.get()];
        let resumed = run.resumable();
        run.output = Output::None;
        run.phase = Phase::Running(Arc::new(Running {
            token,
            worker,
            name: Arc::clone(name),
            since: at,
            deadline: at + limits.grant.min(topology.spec(stage).no_progress),
            progress: None,
            sequence: 0,
            progressed: at,
            price,
            batch,
            ranks: ranks.clone(),
            nbytes,
            inputs,
            resumed,
            asked: None,
        }));
        self.count_attempt(token);
        Some(())
    }

    fn renew(
        &mut self,
        topology: &Topology,
        limits: &Limits,
        at: Timestamp,
        token: Token,
        sequence: u64,
        progress: Option<&Progress>,
    ) -> Option<()> {
        let stage = self.running(token)?;
        let attempt = self.attempt_mut(stage)?;
        if sequence > attempt.sequence {
            attempt.sequence = sequence;
            attempt.progressed = at;
            attempt.progress = progress.cloned().or(attempt.progress.take());
        }
        attempt.deadline = (at + limits.grant).min(attempt.progressed + topology.spec(stage).no_progress);
        Some(())
    }

    /// Keeps a running attempt until then, whether or not it is renewed: its worker cannot be reached. Of a group it is
    /// rank 0 that renews, so that the others do not matter here.
    pub(crate) fn hold(&mut self, worker: Incarnation, token: Token, until: Timestamp) {
        let attempt = self.running(token).and_then(|stage| self.attempt_mut(stage));
        if let Some(attempt) = attempt.filter(|attempt| attempt.worker == worker) {
            attempt.deadline = until;
            attempt.asked = None;
        }
    }

    /// Starts the deadlines of a running attempt anew: its worker, or rank 0 of its group, can be reached again.
    pub(crate) fn resume(
        &mut self,
        topology: &Topology,
        limits: &Limits,
        worker: Incarnation,
        token: Token,
        at: Timestamp,
    ) {
        if let Some(stage) = self.running(token)
            && let Some(attempt) = self.attempt_mut(stage).filter(|attempt| attempt.worker == worker)
        {
            attempt.progressed = at;
            attempt.deadline = at + limits.grant.min(topology.spec(stage).no_progress);
            attempt.asked = None;
        }
    }

    /// Ends a running attempt without an output: what it published is void.
    fn end_attempt(&mut self, at: Timestamp, token: Token, failure: &Failure) -> Option<&mut StageRun> {
        let stage = self.running(token)?;
        let run = &mut self.stages[stage.get()];
        run.last_failure = Some(Box::new(failure.clone()));
        run.phase = Phase::Blocked { since: at, again: true };
        if let Some(payload) = run.output.live().map(|payload| payload.id) {
            run.output = Output::Gone { payload, sealed: false };
        }
        Some(run)
    }

    fn count_loss(&mut self, loss: Loss, worker: Incarnation) {
        let count = match loss {
            Loss::WorkerLost if self.victims.contains(&worker) => return,
            Loss::WorkerLost => {
                self.victims.push(worker);
                &mut self.losses.killed_workers
            }
            Loss::GrantExpired | Loss::NoProgress | Loss::Stopped => &mut self.losses.expired,
            Loss::InputLost => &mut self.losses.lost_inputs,
            Loss::Unclaimed | Loss::NotRunning => return,
        };
        *count = count.saturating_add(1);
    }

    fn end_payload(&mut self, topology: &Topology, stage: &StageName, payload: PayloadId) -> Option<()> {
        let run = self.stages.get_mut(topology.find(stage)?.get())?;
        if run.checkpoint().is_some_and(|kept| kept.payload.id == payload) {
            run.checkpoint = None;
            return Some(());
        }
        let fits = run.output.live().is_some_and(|live| live.id == payload);
        fits.then(|| {
            let sealed = run.phase.is_done();
            run.output = Output::Gone { payload, sealed };
        })
    }

    /// Sorts the stages that neither run nor are done into those that wait for inputs and those that wait for a worker.
    fn requeue(&mut self, topology: &Topology, at: Timestamp) {
        for stage in topology.indices() {
            let active = self.state == JobState::Active && self.run(stage).retry.is_none();
            let ready = active && self.is_ready(topology, stage);
            let run = &mut self.stages[stage.get()];
            match run.phase {
                Phase::Blocked { again, .. } if ready => run.phase = Phase::Queued { since: at, again },
                Phase::Queued { again, .. } if !ready => run.phase = Phase::Blocked { since: at, again },
                _ => (),
            }
            if !matches!(run.phase, Phase::Queued { .. }) {
                run.awaits = None;
            }
        }
    }

    fn is_ready(&self, topology: &Topology, stage: StageIndex) -> bool {
        self.links(topology, stage).all(|link| self.has_input(link))
    }

    /// Whether a consumer may start to read this input.
    pub(crate) fn has_input(&self, link: &Link) -> bool {
        let producer = self.run(link.from);
        producer.output.live().is_some() && (producer.phase.is_done() || matches!(link.flow, Flow::Stream { .. }))
    }

    /// The payloads that an attempt of this stage would read, once all are there.
    fn input_payloads(&self, topology: &Topology, stage: StageIndex) -> Option<Vec<PayloadId>> {
        self.links(topology, stage)
            .map(|link| self.run(link.from).output.live().map(|payload| payload.id))
            .collect()
    }

    fn count_attempt(&mut self, token: Token) {
        self.next_attempt = self.next_attempt.max(token.attempt.0.saturating_add(1));
    }

    pub(crate) fn run(&self, stage: StageIndex) -> &StageRun {
        &self.stages[stage.get()]
    }

    /// When the stage is tried again, if it waits for that.
    pub(crate) fn retry_at(&self, stage: StageIndex) -> Option<Timestamp> {
        self.run(stage).retry.filter(|_| self.state == JobState::Active)
    }

    /// When the attempt that runs is lost, unless it is renewed.
    pub(crate) fn deadline(&self, stage: StageIndex) -> Option<Timestamp> {
        match &self.run(stage).phase {
            Phase::Running(attempt) => Some(attempt.deadline),
            Phase::Blocked { .. }
            | Phase::Queued { .. }
            | Phase::Offered(_)
            | Phase::Done { .. }
            | Phase::Cached { .. } => None,
        }
    }

    pub(super) fn attempt_mut(&mut self, stage: StageIndex) -> Option<&mut Running> {
        match &mut self.stages[stage.get()].phase {
            Phase::Running(attempt) => Some(Arc::make_mut(attempt)),
            _ => None,
        }
    }

    /// The stage that was offered, runs or was done with this token.
    pub(crate) fn find(&self, token: Token) -> Option<StageIndex> {
        let position = self.stages.iter().position(|run| run.phase.token() == Some(token))?;
        Some(StageIndex::new(position))
    }

    /// Who was offered, or runs, the attempt: every rank of a group.
    pub(crate) fn workers_of(&self, token: Token) -> Vec<Incarnation> {
        let phase = self.find(token).map(|stage| &self.run(stage).phase);
        match phase {
            Some(Phase::Running(attempt)) => attempt.workers().collect(),
            other => other.and_then(Phase::worker).into_iter().collect(),
        }
    }

    /// Whether several ranks run the attempt.
    pub(crate) fn is_of_group(&self, token: Token) -> bool {
        self.workers_of(token).len() > 1
    }

    /// The stage that runs with this token.
    pub(crate) fn running(&self, token: Token) -> Option<StageIndex> {
        let stage = self.find(token)?;
        matches!(self.run(stage).phase, Phase::Running(_)).then_some(stage)
    }
}
