use std::time::Duration;

use stagewire_core::{Classify, ErrorClass};
use stagewire_sched::TopologyError;

/// Why an experiment cannot be simulated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum SimError {
    #[error("the experiment cannot be read: {0}")]
    Syntax(String),
    #[error("{key} is {value}; it must be {must}")]
    Value { key: String, value: String, must: String },
    #[error("the experiment names the file {file}, which cannot be read: {error}")]
    File { file: String, error: String },
    #[error("the pipeline is not possible: {0}")]
    Pipeline(#[from] TopologyError),
    #[error(
        "no job has ended for {waited:?}, and {left} are left: is the store too small for what its stages hold at once, or are \
         all workers of a stage gone?"
    )]
    Stuck { waited: Duration, left: u64 },
}

impl Classify for SimError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Syntax(_) | Self::Value { .. } | Self::Pipeline(_) => ErrorClass::Invalid,
            Self::File { .. } => ErrorClass::NotFound,
            Self::Stuck { .. } => ErrorClass::Exhausted,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Syntax(_) | Self::Value { .. } | Self::File { .. } => "sim.experiment",
            Self::Pipeline(error) => error.reason(),
            Self::Stuck { .. } => "sim.stuck",
        }
    }
}
