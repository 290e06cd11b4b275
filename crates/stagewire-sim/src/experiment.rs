//! What is simulated: the cluster, the jobs, and what goes wrong.

mod error;
mod file;
mod trace;

use std::time::Duration;

use stagewire_core::{ByteCount, StageName, TransferMode};
use stagewire_sched::{ClassSpec, EdgeSpec, Flow, StageKind, StageSpec, Topology, TopologyError};

pub use error::SimError;

/// An attempt is never taken for stuck: deaths are told as such.
const NEVER: Duration = Duration::from_secs(1000 * 365 * 86_400);

/// One simulation, checked. [`Experiment::parse`] reads it from TOML.
#[derive(Debug, Clone, PartialEq)]
pub struct Experiment {
    /// Decides every random number.
    pub seed: u64,
    /// Who comes when.
    pub arrivals: Arrivals,
    /// Classes of jobs.
    pub classes: Vec<Class>,
    /// Stages, every one after those that it reads from.
    pub stages: Vec<Stage>,
    /// Coefficient of variation of service times; they are log-normal.
    pub spread: f64,
    /// What carries the bytes.
    pub network: Network,
    /// Most bytes in the store; who wants to put more waits.
    pub store_capacity: Option<ByteCount>,
    /// Most bytes of outputs that are made or held, wherever they are: at this bound the scheduler dispatches no more.
    pub byte_credits: Option<ByteCount>,
    /// Workers that die.
    pub deaths: Option<Deaths>,
    /// Workers whose machine is taken away.
    pub spot: Option<Spot>,
    /// How much longer each stage takes where all stages share one GPU: what it costs that the weights of one have to make
    /// room for those of another. `None` where colocated serving is not compared.
    pub colocated: Option<Vec<f64>>,
}

/// Who comes when.
#[derive(Debug, Clone, PartialEq)]
pub enum Arrivals {
    /// So many jobs, in bursts that come independently of each other.
    Model {
        /// Jobs in all.
        jobs: u64,
        /// Jobs per second, on average.
        rate: f64,
        /// Jobs that come together, on average; 1 is a Poisson process.
        burst: f64,
    },
    /// As recorded.
    Trace(Vec<Arrival>),
}

/// One recorded submission.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arrival {
    /// When, from the start.
    pub at: Duration,
    /// Position of its class.
    pub class: usize,
    /// How its service times compare with those of the stages.
    pub scale: f64,
}

/// A class of jobs.
#[derive(Debug, Clone, PartialEq)]
pub struct Class {
    /// How it is served.
    pub spec: ClassSpec,
    /// Its part of the jobs, in proportion to those of the other classes.
    pub share: f64,
    /// How long its jobs take, in proportion to the times of the stages.
    pub scale: f64,
    /// A job should take no longer, from submission to result.
    pub slo: Option<Duration>,
}

/// A stage and its workers.
#[derive(Debug, Clone, PartialEq)]
pub struct Stage {
    /// How the scheduler sees it.
    pub spec: StageSpec,
    /// Positions of the stages that it reads from.
    pub after: Vec<usize>,
    /// Workers, or groups of them.
    pub workers: u32,
    /// Ranks of each, one GPU each, that run an attempt together.
    pub world: u32,
    /// Attempts that a worker runs together.
    pub max_batch: u32,
    /// What each further attempt of a batch adds to its time, as a part of the time of the longest one.
    pub batch_cost: f64,
    /// Outputs that may be held at once. Where it says nothing, two for each attempt that workers can make or read at once:
    /// an output is held until whoever reads it is done.
    pub max_held: Option<u32>,
    /// Of one job, on average; with ranks, where all of them work at it.
    pub time: Duration,
    /// What it hands on.
    pub output: ByteCount,
    /// Pieces in which its output is handed on; a consumer begins with the first one.
    pub chunks: u32,
    /// They are made one after the other, as by a model that denoises causally, instead of all at the end.
    pub streams: bool,
    /// Part of its time after which the first piece of a result is there, where it is a last stage.
    pub first: f64,
    /// How it is handed on.
    pub mode: TransferMode,
    /// Where its attempts can stop, and go on elsewhere.
    pub checkpoints: Option<Checkpoints>,
}

/// Step boundaries at which an attempt that is asked to yields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checkpoints {
    /// Steps of an attempt that begins at the beginning, all of the same time.
    pub steps: u32,
    /// What goes on from one attempt to the next, through the store.
    pub nbytes: ByteCount,
}

/// What carries the bytes, in bytes per second. A flow gets a fair part of whatever it shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    /// Of each worker, each way.
    pub nic: u64,
    /// Of the store, each way.
    pub store: u64,
    /// Of everything together.
    pub shared: u64,
    /// One way, of a message between server and worker.
    pub latency: Duration,
}

/// Workers die one by one and are started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deaths {
    /// Life of a worker, on average.
    pub mean: Duration,
    /// Until the server knows.
    pub noticed: Duration,
    /// Until another one attaches in its place.
    pub restart: Duration,
}

/// Machines that are taken away with a warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spot {
    /// Position of the stage whose workers run on such machines.
    pub stage: usize,
    /// Until a machine is taken away, on average.
    pub mean: Duration,
    /// Between the warning and the end: the worker is drained.
    pub notice: Duration,
    /// Until there is another one.
    pub away: Duration,
}

/// How the GPUs are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Each stage has workers of its own.
    Disaggregated,
    /// Each GPU runs all stages of a job, one after the other.
    Colocated,
}

impl Experiment {
    /// Reads an experiment. `read` gives the text of a file that it names: of arrivals or of service times.
    ///
    /// # Errors
    /// [`SimError`].
    pub fn parse(text: &str, read: impl FnMut(&str) -> Result<String, String>) -> Result<Self, SimError> {
        file::parse(text, read)
    }

    /// GPUs in all.
    pub fn gpus(&self) -> u32 {
        self.stages.iter().map(|stage| stage.workers * stage.world).sum()
    }

    /// Position of the stage of this name.
    pub fn stage(&self, name: &str) -> Option<usize> {
        self.stages.iter().position(|stage| stage.spec.name.as_str() == name)
    }

    /// The same jobs on the same number of GPUs, used in this way. `None` for [`Layout::Colocated`] where the experiment
    /// does not say what that costs.
    pub fn laid_out(&self, layout: Layout) -> Option<Self> {
        if layout == Layout::Disaggregated {
            return Some(self.clone());
        }
        let slowdown = self.colocated.as_ref()?;
        let times = self.stages.iter().zip(slowdown);
        let times: Vec<Duration> = times.map(|(stage, slowdown)| stage.time.mul_f64(*slowdown)).collect();
        let (time, last): (Duration, _) = (times.iter().sum(), self.stages.last()?);
        // All but the other pieces of what the last stage makes.
        let rest = times.last()?.mul_f64(1.0 - last.first);
        let fused = Stage {
            spec: StageSpec {
                kind: StageKind::Admission,
                no_progress: NEVER,
                ..StageSpec::new(StageName::new("all").ok()?)
            },
            after: Vec::new(),
            workers: self.gpus(),
            world: 1,
            max_batch: 1,
            batch_cost: 1.0,
            max_held: None,
            time,
            output: ByteCount(0),
            chunks: 1,
            streams: false,
            first: 1.0 - rest.as_secs_f64() / time.as_secs_f64(),
            mode: TransferMode::P2p,
            checkpoints: None,
        };
        Some(Self {
            stages: vec![fused],
            spot: None,
            ..self.clone()
        })
    }

    pub(crate) fn topology(&self) -> Result<Topology, TopologyError> {
        let spec = |(position, stage): (usize, &Stage)| {
            let readers = self.stages.iter().filter(|reader| reader.after.contains(&position));
            let attempts = readers.chain([stage]).map(|stage| stage.workers * stage.max_batch);
            StageSpec {
                max_held: stage.max_held.unwrap_or(2 * attempts.sum::<u32>()),
                ..stage.spec.clone()
            }
        };
        let stages = self.stages.iter().enumerate().map(spec).collect();
        let mut edges = Vec::new();
        for stage in &self.stages {
            for from in &stage.after {
                let producer = &self.stages[*from];
                edges.push(EdgeSpec {
                    from: producer.spec.name.clone(),
                    to: stage.spec.name.clone(),
                    flow: if producer.chunks > 1 {
                        Flow::Stream {
                            chunks: producer.chunks,
                            chunk_dim: 2,
                        }
                    } else {
                        Flow::Whole
                    },
                    mode: producer.mode,
                });
            }
        }
        let classes = self.classes.iter().map(|class| class.spec.clone()).collect();
        Topology::new(stages, edges)?.with_classes(classes)
    }
}
