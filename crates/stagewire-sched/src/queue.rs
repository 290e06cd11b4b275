use std::collections::BTreeSet;
use std::time::Duration;

use stagewire_core::{Incarnation, JobId, Timestamp};

use crate::job::Job;
use crate::near::Near;
use crate::ranked::Ranked;
use crate::tally::Pool;
use crate::topology::{ClassIndex, StageIndex, StageKind, Topology};
use crate::{Place, StageTally};

/// A job without deadline stands among those that have one as if it had this long.
const PATIENCE: Duration = Duration::from_secs(3_600);

/// Place of a job among those of its class in the queue of a stage: those that have begun first, which go on while the
/// pipeline is paused; then those that have been tried before, then those that are due first, then the older first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// The job has not begun.
    pub(crate) new: bool,
    fresh: bool,
    pub(crate) due: Timestamp,
    number: u64,
    pub(crate) job: JobId,
    /// What its time depends on.
    pub(crate) shape: u64,
}

impl Rank {
    /// The same, of a stage that has run before or not, of a job that has begun or not.
    pub(crate) const fn tried(self, again: bool, begun: bool) -> Self {
        Self {
            new: !begun,
            fresh: !again,
            ..self
        }
    }

    pub(crate) fn new(again: bool, job: &Job, begun: bool) -> Self {
        Self {
            new: !begun,
            fresh: !again,
            due: job.due().unwrap_or(job.entered + PATIENCE),
            number: job.number,
            job: job.id,
            shape: job.terms.shape,
        }
    }
}

/// What waits for a stage, who could do it, and how many of its payloads are held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Queue {
    /// Jobs that only lack a worker, or a credit, by class.
    ready: Vec<Ranked<Rank>>,
    /// Workers that take offers and have a free slot, by the number of slots they use: the least busy first.
    pub(crate) free: BTreeSet<(u32, Incarnation)>,
    /// The same by place, at a work queue with inputs: there it counts.
    pub(crate) near: Option<Near>,
    /// Jobs whose payload of this stage is held or being made.
    pub(crate) held: u32,
    /// Since when each that waits does.
    pub(crate) since: Ranked<(Timestamp, u64)>,
    /// All numbers but the oldest, which is the first of `since`.
    pub(crate) tally: StageTally,
    pub(crate) pool: Pool,
    /// Workers with a free slot that get no offers for now, and until when.
    pub(crate) paused: BTreeSet<(Timestamp, Incarnation)>,
    /// Attempts that may be preempted, by class and since when they run.
    pub(crate) yieldable: BTreeSet<(ClassIndex, Timestamp, JobId)>,
    /// How many were asked to yield for the sake of each class.
    pub(crate) yielding: Vec<u32>,
}

impl Queue {
    pub(crate) fn new(topology: &Topology, stage: StageIndex) -> Self {
        let reads = topology.spec(stage).kind == StageKind::WorkQueue && !topology.inputs(stage).is_empty();
        Self {
            ready: vec![Ranked::default(); topology.classes().len()],
            free: BTreeSet::new(),
            near: reads.then(Near::default),
            held: 0,
            since: Ranked::default(),
            tally: StageTally::default(),
            pool: Pool::default(),
            paused: BTreeSet::new(),
            yieldable: BTreeSet::new(),
            yielding: vec![0; topology.classes().len()],
        }
    }

    pub(crate) fn insert(&mut self, class: ClassIndex, rank: Rank) {
        self.ready[class.get()].insert(rank);
    }

    pub(crate) fn remove(&mut self, class: ClassIndex, rank: &Rank) {
        self.ready[class.get()].remove(rank);
    }

    /// The worker has a free slot.
    pub(crate) fn set_free(&mut self, place: Place, used: u32, worker: Incarnation) {
        self.free.insert((used, worker));
        if let Some(near) = &mut self.near {
            near.insert(place, used, worker);
        }
    }

    /// The worker has none any more.
    pub(crate) fn clear_free(&mut self, place: Place, used: u32, worker: Incarnation) {
        self.free.remove(&(used, worker));
        if let Some(near) = &mut self.near {
            near.remove(place, used, worker);
        }
    }

    /// The job that comes first in a class.
    pub(crate) fn first(&self, class: ClassIndex) -> Option<&Rank> {
        self.ready[class.get()].first()
    }

    /// The jobs of a class, in order.
    pub(crate) fn of(&self, class: ClassIndex) -> impl Iterator<Item = &Rank> {
        self.ready[class.get()].iter()
    }

    /// Number of jobs of the class that come before this rank.
    pub(crate) fn ahead(&self, class: ClassIndex, rank: &Rank) -> usize {
        self.ready[class.get()].below(rank)
    }

    /// Number of jobs that wait.
    pub(crate) fn len(&self) -> usize {
        self.ready.iter().map(Ranked::len).sum()
    }

    /// Number of jobs of a class that wait.
    pub(crate) fn len_of(&self, class: ClassIndex) -> usize {
        self.ready[class.get()].len()
    }
}
