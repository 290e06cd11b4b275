mod class;
mod error;
mod order;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stagewire_core::{ByteCount, Chunking, StageName, TransferMode};

pub(crate) use class::ClassIndex;
pub use class::ClassSpec;
pub use error::TopologyError;

use crate::Backoff;
use crate::job::StageSet;

/// How a stage takes its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StageKind {
    /// Any worker of the stage takes any item.
    WorkQueue,
    /// A job that has started stays with the worker it started on until that attempt ends.
    Admission,
}

/// One stage of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageSpec {
    /// Its name, unique in the pipeline.
    pub name: StageName,
    /// How it takes its work.
    pub kind: StageKind,
    /// Payloads of this stage that may be held at once, those being made included. At this bound the stage is not
    /// dispatched. Of no effect for a last stage.
    pub max_held: u32,
    /// Most bytes of an output, which is also what the first one of a shape is taken to have: a worker publishes none that is
    /// larger. `None` goes by what the stage has made before, or by a share of
    /// [`Limits::payload_bytes`](crate::Limits::payload_bytes). Of no effect for a last stage.
    pub max_payload: Option<ByteCount>,
    /// A running attempt that reports no progress for so long is lost.
    pub no_progress: Duration,
    /// Failures of this stage, losses not counted, after which the job fails.
    pub max_attempts: u32,
    /// How long to wait between them.
    pub backoff: Backoff,
    /// Whether its attempts may hand over checkpoints at step boundaries, yield there, and go on from one. For a stage of
    /// kind admission.
    pub checkpoint: bool,
}

impl StageSpec {
    /// A work queue with 16 held payloads, 300 s without progress, 1 attempt, [`Backoff::default`], no checkpoints.
    pub fn new(name: StageName) -> Self {
        Self {
            name,
            kind: StageKind::WorkQueue,
            max_held: 16,
            max_payload: None,
            no_progress: Duration::from_secs(300),
            max_attempts: 1,
            backoff: Backoff::default(),
            checkpoint: false,
        }
    }
}

/// When a consumer may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Flow {
    /// Once the producer is done.
    Whole,
    /// Once the producer has published its first chunk.
    Stream {
        /// Number of chunks, at least 1.
        chunks: u32,
        /// Dimension that every tensor is cut along.
        chunk_dim: u32,
    },
}

/// The output of one stage is an input of another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EdgeSpec {
    /// The producer.
    pub from: StageName,
    /// The consumer.
    pub to: StageName,
    /// When the consumer may start.
    pub flow: Flow,
    /// Straight from the producer's memory, or through the store.
    pub mode: TransferMode,
}

/// How a worker hands over the output of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OutputSpec {
    /// False for a last stage: its result goes with the completion.
    pub publish: bool,
    /// Through the store instead of from the worker's memory.
    pub stored: bool,
    /// Number of chunks; 0 is whole.
    pub chunks: u32,
    /// Dimension that the chunks are cut along.
    pub chunk_dim: u32,
    /// Most bytes of all its tensors.
    pub max_nbytes: Option<ByteCount>,
}

/// Position of a stage in [`Topology::stages`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StageIndex(u8);

impl StageIndex {
    pub(crate) fn new(position: usize) -> Self {
        Self(u8::try_from(position).expect("a topology has at most 64 stages"))
    }

    pub(crate) const fn get(self) -> usize {
        self.0 as usize
    }
}

/// A checked pipeline: a connected graph of stages without cycles, where stages may fan out and join.
///
/// ```
/// use stagewire_core::{StageName, TransferMode};
/// use stagewire_sched::{EdgeSpec, Flow, StageSpec, Topology};
///
/// let name = |name| StageName::new(name).expect("these names are allowed");
/// let stages = ["encode", "denoise", "decode"].map(|stage| StageSpec::new(name(stage)));
/// let edges = [("encode", "denoise"), ("denoise", "decode")].map(|(from, to)| EdgeSpec {
///     from: name(from),
///     to: name(to),
///     flow: Flow::Whole,
///     mode: TransferMode::P2p,
/// });
/// let topology = Topology::new(stages.to_vec(), edges.to_vec())?;
/// assert!(topology.output(&name("encode")).is_some_and(|output| output.publish));
/// assert!(topology.is_last(&name("decode")));
/// # Ok::<(), stagewire_sched::TopologyError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    stages: Vec<StageSpec>,
    edges: Vec<EdgeSpec>,
    index: BTreeMap<StageName, StageIndex>,
    inputs: Vec<Vec<Link>>,
    consumers: Vec<Vec<StageIndex>>,
    upstream_first: Vec<StageIndex>,
    /// All that consume from a stage, or from one of those.
    below: Vec<Vec<StageIndex>>,
    /// Those of kind admission.
    admission: StageSet,
    has_joins: bool,
    /// Those that take checkpoints.
    checkpointing: Vec<StageIndex>,
    classes: Vec<ClassSpec>,
    /// For each class those that it preempts.
    preempted: Vec<Vec<ClassIndex>>,
}

/// One input of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) from: StageIndex,
    pub(crate) flow: Flow,
}

impl Topology {
    /// Highest number of stages of a pipeline.
    pub const MAX_STAGES: usize = 64;

    /// Checks a pipeline. Its classes are [`ClassSpec::defaults`].
    ///
    /// # Errors
    /// [`TopologyError`] for a pipeline without stages, with more than [`Topology::MAX_STAGES`], with a stage or edge
    /// named twice, an edge from or to a stage that is not there, a cycle, or parts without a connection; for
    /// edges of one stage that contradict each other; for bounds of 0; and for a work queue with checkpoints.
    pub fn new(stages: Vec<StageSpec>, edges: Vec<EdgeSpec>) -> Result<Self, TopologyError> {
        let index = order::index(&stages)?;
        let find = |edge: &EdgeSpec, name: &StageName| {
            index.get(name).copied().ok_or_else(|| TopologyError::UnknownStage {
                from: edge.from.clone(),
                to: edge.to.clone(),
                stage: name.clone(),
                known: stages.iter().map(|stage| stage.name.clone()).collect(),
            })
        };
        let mut inputs = vec![Vec::<Link>::new(); stages.len()];
        let mut consumers = vec![Vec::new(); stages.len()];
        for edge in &edges {
            let (from, to) = (find(edge, &edge.from)?, find(edge, &edge.to)?);
            if consumers[from.get()].contains(&to) {
                let (from, to) = (edge.from.clone(), edge.to.clone());
                return Err(TopologyError::DuplicateEdge { from, to });
            }
            if let Flow::Stream { chunks, chunk_dim } = edge.flow
                && Chunking::new(chunk_dim, chunks).is_err()
            {
                let (from, to) = (edge.from.clone(), edge.to.clone());
                return Err(TopologyError::ChunkCount { from, to, chunks });
            }
            inputs[to.get()].push(Link { from, flow: edge.flow });
            consumers[from.get()].push(to);
        }
        let upstream_first = order::upstream_first(&stages, &inputs, &consumers)?;
        order::connected(&stages, &inputs, &consumers)?;
        order::agreeing(&stages, &edges)?;
        let below = order::below(&upstream_first, &consumers);
        let admits = |stage: &StageIndex| stages[stage.get()].kind == StageKind::Admission;
        let admission = (0..stages.len()).map(StageIndex::new).filter(admits);
        let admission = admission.fold(StageSet::default(), StageSet::with);
        let checkpointing = stages.iter().enumerate().filter(|(_, stage)| stage.checkpoint);
        let classes = ClassSpec::defaults();
        Ok(Self {
            admission,
            has_joins: inputs.iter().any(|inputs| inputs.len() > 1),
            checkpointing: checkpointing.map(|(position, _)| StageIndex::new(position)).collect(),
            preempted: class::preempted(&classes),
            stages,
            edges,
            index,
            inputs,
            consumers,
            below,
            upstream_first,
            classes,
        })
    }

    /// The stages, in the order in which they were declared.
    pub fn stages(&self) -> &[StageSpec] {
        &self.stages
    }

    /// The edges, in the order in which they were declared.
    pub fn edges(&self) -> &[EdgeSpec] {
        &self.edges
    }

    /// The stage of this name.
    pub fn stage(&self, name: &StageName) -> Option<&StageSpec> {
        self.find(name).map(|stage| self.spec(stage))
    }

    /// Whether nobody consumes the output of this stage: it ends with a result. False for an unknown stage.
    pub fn is_last(&self, name: &StageName) -> bool {
        self.find(name).is_some_and(|stage| self.consumers(stage).is_empty())
    }

    /// How a worker of this stage hands over its output; `None` for an unknown stage.
    pub fn output(&self, name: &StageName) -> Option<OutputSpec> {
        let stage = self.find(name)?;
        let edges = || self.edges.iter().filter(|edge| edge.from == *name);
        let (chunks, chunk_dim) = edges()
            .find_map(|edge| match edge.flow {
                Flow::Stream { chunks, chunk_dim } => Some((chunks, chunk_dim)),
                Flow::Whole => None,
            })
            .unwrap_or_default();
        Some(OutputSpec {
            publish: edges().next().is_some(),
            stored: edges().any(|edge| edge.mode == TransferMode::Store),
            chunks,
            chunk_dim,
            max_nbytes: self.spec(stage).max_payload,
        })
    }

    pub(crate) fn find(&self, name: &StageName) -> Option<StageIndex> {
        self.index.get(name).copied()
    }

    pub(crate) fn spec(&self, stage: StageIndex) -> &StageSpec {
        &self.stages[stage.get()]
    }

    pub(crate) fn name(&self, stage: StageIndex) -> &StageName {
        &self.stages[stage.get()].name
    }

    pub(crate) fn indices(&self) -> impl DoubleEndedIterator<Item = StageIndex> + use<> {
        (0..self.stages.len()).map(StageIndex::new)
    }

    pub(crate) fn inputs(&self, stage: StageIndex) -> &[Link] {
        &self.inputs[stage.get()]
    }

    pub(crate) fn consumers(&self, stage: StageIndex) -> &[StageIndex] {
        &self.consumers[stage.get()]
    }

    /// Whether a consumer of this stage may begin before the stage is done.
    pub(crate) fn streams(&self, stage: StageIndex) -> bool {
        let streams = |link: &Link| link.from == stage && matches!(link.flow, Flow::Stream { .. });
        let mut consumers = self.consumers(stage).iter();
        consumers.any(|consumer| self.inputs(*consumer).iter().any(streams))
    }

    /// Names of all stages.
    pub(crate) fn names(&self) -> Vec<StageName> {
        self.stages.iter().map(|stage| stage.name.clone()).collect()
    }

    /// Every stage after all the stages that it consumes from.
    pub(crate) fn upstream_first(&self) -> &[StageIndex] {
        &self.upstream_first
    }

    /// All stages that consume from this one, or from one of those.
    pub(crate) fn below(&self, stage: StageIndex) -> &[StageIndex] {
        &self.below[stage.get()]
    }

    /// What an output of this stage and one of each stage further down have together, where the stages say so.
    pub fn max_payloads(&self, name: &StageName) -> ByteCount {
        let own = self.find(name).into_iter();
        let all = own.flat_map(|stage| std::iter::once(stage).chain(self.below(stage).iter().copied()));
        let publish = all.filter(|stage| !self.consumers(*stage).is_empty());
        ByteCount(publish.fold(0, |sum, stage| {
            sum.saturating_add(self.spec(stage).max_payload.map_or(0, |most| most.0))
        }))
    }

    /// The stages of kind admission.
    pub(crate) const fn admission(&self) -> StageSet {
        self.admission
    }

    /// The stages that take checkpoints.
    pub(crate) fn checkpointing(&self) -> &[StageIndex] {
        &self.checkpointing
    }

    /// The classes whose attempts this class may have yield.
    pub(crate) fn preempted(&self, class: ClassIndex) -> &[ClassIndex] {
        &self.preempted[class.get()]
    }

    /// Whether some stage has more than one input.
    pub(crate) const fn has_joins(&self) -> bool {
        self.has_joins
    }
}

#[cfg(test)]
mod tests;
