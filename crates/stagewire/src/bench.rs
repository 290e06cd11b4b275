//! Benchmarks that anyone can run: each row stands beside a reference that was measured in the same run.

mod connector;
mod contest;
mod kv;
mod machine;
mod manifests;
mod memory;
mod paint;
mod peers;
mod producer;
mod quick;
mod report;
mod rfc;
mod sched;
mod server;
mod stats;
mod store;
mod transfer;

use std::path::PathBuf;

use clap::Args;

use crate::exit::{Exit, Fault};
use crate::output::Output;

pub(crate) use report::Report;

/// What there is to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Name {
    /// What handing a video latent from process to process costs beside a memcpy of the same bytes
    Quick,
    /// What the connector adds to the transports under it, and what chunks cost
    Connector,
    /// KV caches between unequal tensor-parallel sizes: planning, and slices over each transport beside whole copies
    Kv,
    /// The host store beside Mooncake Store from its wheel: puts, gets, small objects
    Store,
    /// The scheduler's core: events per second with 4,096 workers, from 1,000 to 1,000,000 jobs that wait
    Sched,
    /// A server with 1,000 workers: jobs per second, dispatch latency, idle CPU
    Server,
    /// What the RFC asks: stages apart against all on each worker, overlap of transfer and decoding, decoders that denoisers share
    Rfc,
    /// Each transport beside memcpy, TCP and a bare copy of the same kind, 4 KiB to 1 GiB
    Transfer,
}

/// How it is measured.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// Pairs for each row.
    pub(crate) pairs: usize,
    /// A part of the rows, in a minute.
    pub(crate) quick: bool,
    /// Only rows whose name contains this.
    pub(crate) only: Option<String>,
    /// For workers, where one is named.
    pub(crate) python: Option<PathBuf>,
}

pub(crate) async fn run(name: Name, options: &Options, output: &Output) -> Result<Report, Fault> {
    match name {
        Name::Quick => quick::run(options.pairs).await,
        Name::Connector => connector::run(options, output).await,
        Name::Kv => kv::run(options).await,
        Name::Store => store::run(options, output).await,
        Name::Sched => sched::run(options).await,
        Name::Server => server::run(options, output).await,
        Name::Rfc => rfc::run(options, output).await,
        Name::Transfer => transfer::run(options, output).await,
    }
}

#[derive(Debug, Args)]
pub(crate) struct ProducerArgs {
    /// Directory where the processes find each other.
    #[arg(long)]
    dir: PathBuf,

    /// The benchmark that it is part of.
    #[arg(long)]
    bench: Name,
}

/// The other process of a benchmark: does what each line of stdin orders, until stdin ends.
pub(crate) async fn produce(args: ProducerArgs) -> Result<Exit, Fault> {
    match args.bench {
        Name::Quick | Name::Connector | Name::Store | Name::Rfc => producer::serve(args.dir).await,
        Name::Transfer => transfer::owner::serve(args.dir).await,
        Name::Kv => kv::serve(args.dir).await,
        Name::Sched => Err(Fault::usage("`stagewire bench sched` has one process")),
        Name::Server => Err(Fault::usage("`stagewire bench server` starts its server itself")),
    }
}
