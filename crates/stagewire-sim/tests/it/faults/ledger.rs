//! What was promised and what was really done, kept outside of the server: the promises are judged by that.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use stagewire_core::{Incarnation, JobId, Timestamp, Token};
use stagewire_sched::{Job, Output, Phase, Sched, Snapshot};

#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// Jobs whose submission was acknowledged, and the keys that were.
    acknowledged: BTreeSet<JobId>,
    keys: BTreeMap<String, JobId>,
    /// How jobs ended, and by which attempts, as anybody could see it.
    ended: BTreeMap<JobId, (&'static str, Vec<Option<Token>>)>,
    granted: BTreeMap<Token, Incarnation>,
    /// Attempts whose worker has said that they are complete.
    completed: BTreeSet<Token>,
    /// The durable state as of the last write, and the one that was being written when the server died.
    written: Option<Snapshot>,
    writing: Option<Snapshot>,
    /// Everything that happened, in one number.
    trace: u64,
    pub(super) tally: Tally,
}

/// What happened how often: a harness in which nothing happens proves nothing.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Tally {
    pub(super) jobs: u64,
    pub(super) succeeded: u64,
    pub(super) crashes_writing: u64,
    pub(super) crashes_otherwise: u64,
    pub(super) crashes_starting: u64,
    pub(super) power_failures: u64,
    pub(super) messages: u64,
    pub(super) lost: u64,
    pub(super) twice: u64,
    pub(super) deaths: u64,
    pub(super) evictions: u64,
    pub(super) zombies: u64,
    pub(super) inputs_lost: u64,
    pub(super) clock_jumps: u64,
    pub(super) yields: u64,
    /// Offers to go on from a checkpoint.
    pub(super) resumed: u64,
}

impl Tally {
    pub(super) fn add(&mut self, other: Self) {
        self.jobs += other.jobs;
        self.succeeded += other.succeeded;
        self.crashes_writing += other.crashes_writing;
        self.crashes_otherwise += other.crashes_otherwise;
        self.crashes_starting += other.crashes_starting;
        self.power_failures += other.power_failures;
        self.messages += other.messages;
        self.lost += other.lost;
        self.twice += other.twice;
        self.deaths += other.deaths;
        self.evictions += other.evictions;
        self.zombies += other.zombies;
        self.inputs_lost += other.inputs_lost;
        self.clock_jumps += other.clock_jumps;
        self.yields += other.yields;
        self.resumed += other.resumed;
    }
}

impl Ledger {
    pub(super) const fn trace(&self) -> u64 {
        self.trace
    }

    pub(super) fn note(&mut self, at: Timestamp, what: &impl std::fmt::Debug) {
        let mut hasher = DefaultHasher::new();
        (self.trace, at, format!("{what:?}")).hash(&mut hasher);
        self.trace = hasher.finish();
    }

    /// A submission was answered.
    pub(super) fn acknowledge(&mut self, key: Option<&str>, job: JobId) {
        self.acknowledged.insert(job);
        if let Some(key) = key {
            let first = *self.keys.entry(key.to_owned()).or_insert(job);
            assert_eq!(first, job, "key {key} led to two jobs");
        }
    }

    pub(super) fn grant(&mut self, token: Token, worker: Incarnation) {
        let first = *self.granted.entry(token).or_insert(worker);
        assert_eq!(first, worker, "token {token} was granted to two workers");
    }

    /// The worker of an attempt says that it is complete.
    pub(super) fn complete(&mut self, token: Token) {
        self.completed.insert(token);
    }

    /// The server is about to have written this.
    pub(super) fn write(&mut self, snapshot: Snapshot) {
        self.writing = Some(snapshot);
    }

    /// It has.
    pub(super) fn wrote(&mut self) {
        self.written = self.writing.take();
    }

    /// What a server finds when it starts is what the one before had written, with or without its last batch.
    pub(super) fn check_replay(&mut self, found: &Snapshot) {
        let writing = Some(found) == self.writing.as_ref();
        assert!(
            writing || self.written.as_ref().is_none_or(|written| written == found),
            "a restart replays to another state:\nfound   {found:?}\nwritten {:?}\nwriting {:?}",
            self.written,
            self.writing
        );
        self.writing = None;
        self.written = Some(found.clone());
    }

    /// The invariants, by what is known outside and by the state itself.
    pub(super) fn check(&mut self, now: Timestamp, sched: &Sched) {
        // A debug build has checked it in the step.
        if !cfg!(debug_assertions) {
            assert_eq!(sched.check(), Ok(()));
        }
        if let Some((deadline, what)) = sched.poll_timeout() {
            assert!(deadline > now, "{what} is overdue");
        }
        for job in &self.acknowledged {
            assert!(sched.job(*job).is_some(), "job {job} was acknowledged and is not there");
        }
        for (job, ended) in &self.ended {
            let found = sched.job(*job).map(|job| (job.state().name(), done_by(job)));
            assert_eq!(found.as_ref(), Some(ended), "job {job} had ended otherwise");
        }
        for job in sched.jobs() {
            let waits = !sched.explain(now, job.id()).is_empty();
            assert_eq!(waits, job.ended().is_none(), "job {} cannot say why it waits", job.id());
            for run in job.stages() {
                self.check_stage(run);
            }
            if job.ended().is_some() && !self.ended.contains_key(&job.id()) {
                self.ended.insert(job.id(), (job.state().name(), done_by(job)));
            }
        }
    }

    fn check_stage(&self, run: &stagewire_sched::StageRun) {
        let name = run.name();
        if let Phase::Done { token: Some(token), .. } = run.phase() {
            let said = self.completed.contains(token);
            assert!(
                said,
                "attempt {token} of {name} counts, and its worker never completed it"
            );
        }
        if let (Phase::Running(attempt), Output::Live(live)) = (run.phase(), run.output()) {
            assert_eq!(attempt.token, live.token, "attempts mix at stage {name}");
        }
    }
}

/// The attempts that did the stages of a job.
fn done_by(job: &Job) -> Vec<Option<Token>> {
    let done = job.stages().iter().map(|run| match run.phase() {
        Phase::Done { token, .. } => *token,
        _ => None,
    });
    done.collect()
}
