//! Benchmarks that anyone can run: each row stands beside a reference that was measured in the same run.

mod machine;
mod quick;
mod report;
mod stats;

use crate::exit::Fault;

pub(crate) use quick::{producer::ProducerArgs, producer::produce};
pub(crate) use report::Report;

/// What there is to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Name {
    /// What handing a video latent from process to process costs beside a memcpy of the same bytes
    Quick,
}

pub(crate) async fn run(name: Name, pairs: usize) -> Result<Report, Fault> {
    match name {
        Name::Quick => quick::run(pairs).await,
    }
}
