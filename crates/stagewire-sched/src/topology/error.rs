use stagewire_core::{Chunking, Classify, ErrorClass, StageName};

use super::Topology;

/// Why a pipeline is not allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum TopologyError {
    #[error("the pipeline has no stage; it needs at least one")]
    NoStage,
    #[error("the pipeline has {count} stages; at most {} are allowed", Topology::MAX_STAGES)]
    TooManyStages { count: usize },
    #[error("stage {stage} is declared twice; each stage needs its own name")]
    DuplicateStage { stage: StageName },
    #[error("the edge from {from} to {to} is declared twice; remove one")]
    DuplicateEdge { from: StageName, to: StageName },
    #[error("the edge from {from} to {to} names stage {stage}, which does not exist; the stages are {}", list(.known, ", "))]
    UnknownStage {
        from: StageName,
        to: StageName,
        stage: StageName,
        known: Vec<StageName>,
    },
    #[error("the stages wait for each other in a circle: {}; remove one of these edges", list(.stages, " -> "))]
    Cycle { stages: Vec<StageName> },
    #[error("no edge connects {} with {}; a pipeline is one connected graph", list(.apart, ", "), list(.rest, ", "))]
    Disconnected {
        apart: Vec<StageName>,
        rest: Vec<StageName>,
    },
    #[error(
        "stage {stage} hands over p2p on one edge and through the store on another; it publishes once, so choose one"
    )]
    MixedModes { stage: StageName },
    #[error(
        "stage {stage} streams {first} chunks on one edge and {second} on another, or along another dimension; \
         it publishes once, so they must agree"
    )]
    MixedChunks { stage: StageName, first: u32, second: u32 },
    #[error(
        "the edge from {from} to {to} streams {chunks} chunks; it must be 1 to {}",
        Chunking::MAX
    )]
    ChunkCount {
        from: StageName,
        to: StageName,
        chunks: u32,
    },
    #[error("{field} of stage {stage} is 0; the stage could never run")]
    ZeroBound { stage: StageName, field: &'static str },
    #[error(
        "stage {stage} is a work queue with checkpoints; its items are short and run again. Take checkpoints in a stage of \
         kind admission"
    )]
    Checkpoint { stage: StageName },
    #[error("the pipeline has {count} classes; it must be 1 to {}", Topology::MAX_CLASSES)]
    ClassCount { count: usize },
    #[error("class {class} is declared twice; each class needs its own name")]
    DuplicateClass { class: StageName },
    #[error("the weight of class {class} is {weight}; it must be 1 to {}", Topology::MAX_WEIGHT)]
    Weight { class: StageName, weight: u32 },
    #[error("the queue deadline of class {class} is 0; its jobs could never begin")]
    ZeroQueueDeadline { class: StageName },
    #[error("class {class} preempts {preempts}, which is no class; the classes are {}", list(.known, ", "))]
    UnknownPreempted {
        class: StageName,
        preempts: StageName,
        known: Vec<StageName>,
    },
    #[error("the classes preempt each other in a circle: {}; remove one of these", list(.classes, " -> "))]
    PreemptionCycle { classes: Vec<StageName> },
}

impl Classify for TopologyError {
    fn class(&self) -> ErrorClass {
        ErrorClass::Invalid
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Cycle { .. } => "topology.cycle",
            Self::Disconnected { .. } => "topology.disconnected",
            Self::UnknownStage { .. } => "stage.unknown",
            Self::DuplicateStage { .. } | Self::DuplicateEdge { .. } | Self::DuplicateClass { .. } => {
                "topology.duplicate"
            }
            _ => "topology.invalid",
        }
    }
}

fn list(names: &[StageName], separator: &str) -> String {
    names.iter().map(StageName::as_str).collect::<Vec<_>>().join(separator)
}
