//! The state of the pipeline in numbers, for metrics and statistics; and whether it is ready.

use std::collections::{BTreeMap, BTreeSet};

use stagewire_core::{Incarnation, Member, StageName, Timestamp};
use stagewire_sched::{
    ByteCredit, CacheTally, Counters, JobState, LinkState, Phase, Sched, Slot, StageKind, StageSpec, Worker,
};

/// One worker.
#[derive(Debug, Clone)]
pub(crate) struct WorkerSnapshot {
    pub(crate) incarnation: Incarnation,
    pub(crate) name: Option<String>,
    pub(crate) attached: bool,
    pub(crate) draining: bool,
    /// When what it runs is taken from it, where it drains within a time.
    pub(crate) drain_by: Option<Timestamp>,
    pub(crate) ready: bool,
    /// Its place in a group. A group has one slot, that of rank 0.
    pub(crate) member: Option<Member>,
    pub(crate) slots: Slots,
    /// Payloads that it holds, and their bytes.
    pub(crate) payloads: u64,
    pub(crate) payload_bytes: u64,
}

impl WorkerSnapshot {
    /// `ready`, `draining` or `away`.
    pub(crate) const fn state(&self) -> &'static str {
        match (self.attached, self.draining) {
            (false, _) => "away",
            (true, true) => "draining",
            (true, false) => "ready",
        }
    }
}

/// Slots by what they are used for. They add up: `free + reserved + running + stopping = advertised`.
#[derive(Debug, Clone, Copy, Default, serde::Serialize)]
pub(crate) struct Slots {
    pub(crate) advertised: u64,
    pub(crate) free: u64,
    pub(crate) reserved: u64,
    pub(crate) running: u64,
    pub(crate) stopping: u64,
}

impl Slots {
    pub(crate) const fn by_use(&self) -> [(&'static str, u64); 4] {
        [
            ("free", self.free),
            ("reserved", self.reserved),
            ("running", self.running),
            ("stopping", self.stopping),
        ]
    }
}

/// One stage.
#[derive(Debug, Clone)]
pub(crate) struct StageSnapshot {
    pub(crate) name: StageName,
    pub(crate) kind: StageKind,
    pub(crate) max_held: u32,
    /// Stages of jobs that have not ended, by phase.
    pub(crate) phases: BTreeMap<&'static str, u64>,
    /// Those that wait for a worker, by class.
    pub(crate) queued: BTreeMap<StageName, u64>,
    /// Since when the one that waits longest waits for a worker.
    pub(crate) oldest: Option<Timestamp>,
    /// Payloads that are held, and their bytes.
    pub(crate) payloads: u64,
    pub(crate) payload_bytes: u64,
    /// Payloads that count for `max_held`: those that are being made, too.
    pub(crate) held: u32,
    pub(crate) workers: Vec<WorkerSnapshot>,
}

impl StageSnapshot {
    /// Whether a worker of the stage can be given work.
    pub(crate) fn is_ready(&self) -> bool {
        self.workers.iter().any(|worker| worker.ready)
    }

    pub(crate) fn slots(&self) -> Slots {
        let follows = |worker: &&WorkerSnapshot| worker.member.as_ref().is_some_and(|member| member.rank > 0);
        let units = self.workers.iter().filter(|worker| !follows(worker));
        units.fold(Slots::default(), |sum, worker| Slots {
            advertised: sum.advertised + worker.slots.advertised,
            free: sum.free + worker.slots.free,
            reserved: sum.reserved + worker.slots.reserved,
            running: sum.running + worker.slots.running,
            stopping: sum.stopping + worker.slots.stopping,
        })
    }
}

/// The whole pipeline at one time.
#[derive(Debug, Clone)]
pub(crate) struct Snapshot {
    pub(crate) at: Timestamp,
    pub(crate) paused: bool,
    pub(crate) bytes: Option<ByteCredit>,
    pub(crate) jobs: BTreeMap<&'static str, u64>,
    pub(crate) stages: Vec<StageSnapshot>,
    pub(crate) dead_letters: u64,
    pub(crate) counters: Counters,
    pub(crate) cache: CacheTally,
}

impl Snapshot {
    /// Counts. Takes time in proportion to the workers and to the payloads that they hold, not to the jobs.
    pub(crate) fn take(sched: &Sched, now: Timestamp) -> Self {
        let jobs = JobState::NAMES.into_iter().zip(sched.job_tally()).collect();
        let stage = |spec: &StageSpec| {
            let tally = sched.tally(&spec.name).unwrap_or_default();
            let classes = sched.topology().classes().iter();
            StageSnapshot {
                name: spec.name.clone(),
                kind: spec.kind,
                max_held: spec.max_held,
                phases: Phase::NAMES.into_iter().zip(tally.phases).collect(),
                queued: classes
                    .map(|class| (class.name.clone(), sched.queued_of(&spec.name, &class.name) as u64))
                    .collect(),
                oldest: tally.oldest,
                payloads: tally.payloads,
                payload_bytes: tally.payload_bytes,
                held: sched.held(&spec.name),
                workers: Vec::new(),
            }
        };
        let mut stages: Vec<StageSnapshot> = sched.topology().stages().iter().map(stage).collect();
        for worker in sched.workers() {
            let Some(stage) = stages.iter_mut().find(|stage| stage.name == *worker.stage()) else {
                continue;
            };
            let mut slots = Slots {
                advertised: worker.advertised().into(),
                free: worker.free().into(),
                ..Slots::default()
            };
            for slot in worker.slots().values() {
                match slot {
                    Slot::Reserved => slots.reserved += 1,
                    Slot::Running => slots.running += 1,
                    Slot::Stopping { .. } => slots.stopping += 1,
                }
            }
            let held = sched.held_by(worker.incarnation());
            let (payloads, payload_bytes) = held.fold((0, 0), |(count, nbytes), (_, payload)| {
                (count + 1, nbytes + payload.nbytes.0)
            });
            stage.workers.push(WorkerSnapshot {
                incarnation: worker.incarnation(),
                name: worker.info().map(|info| info.name.clone()),
                attached: worker.link() == LinkState::Attached,
                draining: worker.is_draining(),
                drain_by: worker.drain_by(),
                ready: worker.is_ready(),
                member: worker.member().cloned(),
                slots,
                payloads,
                payload_bytes,
            });
        }
        Self {
            at: now,
            paused: sched.is_paused(),
            bytes: sched.byte_credit(),
            jobs,
            stages,
            dead_letters: sched.dead_letters().len() as u64,
            counters: sched.counters(),
            cache: sched.cache_tally(),
        }
    }
}

/// Stages without a worker that can be given work. Takes time in proportion to the workers, and looks at no job.
pub(crate) fn unready(sched: &Sched) -> Vec<StageName> {
    let ready: BTreeSet<&StageName> = sched
        .workers()
        .filter(|worker| worker.is_ready())
        .map(Worker::stage)
        .collect();
    let stages = sched.topology().stages().iter().map(|spec| &spec.name);
    stages.filter(|stage| !ready.contains(stage)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use stagewire_sched::{DrainScope, Input, Limits, StageSpec, Topology, WorkerInfo};

    use super::*;

    #[test]
    fn a_stage_is_ready_while_a_worker_of_it_can_be_given_work() {
        let stage = StageName::new("encode").unwrap();
        let specs = vec![StageSpec::new(stage.clone())];
        let mut sched = Sched::new(Topology::new(specs, vec![]).unwrap(), Limits::default());
        let worker = WorkerInfo {
            incarnation: Incarnation(uuid::Uuid::from_u128(1)),
            stage,
            slots: 1,
            max_batch: 1,
            name: "encode-0".to_owned(),
            member: None,
            place: stagewire_sched::Place::default(),
        };
        let incarnation = worker.incarnation;
        let attached = Input::WorkerAttached {
            worker,
            running: vec![],
            holding: vec![],
        };
        let drain = Input::Drain {
            scope: DrainScope::Worker(incarnation),
            within: None,
        };
        let away = Input::WorkerAway { worker: incarnation };
        let mut after = |input: Input| {
            let now = Timestamp(1);
            for event in sched.decide(now, input).unwrap().events {
                sched.apply(now, &event);
            }
            let ready = Snapshot::take(&sched, now).stages[0].is_ready();
            assert_eq!(ready, unready(&sched).is_empty(), "both ways of asking agree");
            ready
        };
        assert!(!after(Input::Poll));
        assert!(after(attached.clone()));
        assert!(!after(away));
        assert!(after(attached));
        assert!(!after(drain));
    }
}
