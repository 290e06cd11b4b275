use std::path::PathBuf;

use clap::Args;

use crate::bench::{self, Name, Options};
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::Output;

pub(crate) use crate::bench::ProducerArgs;

const EXAMPLES: &str = "\
Examples:
  stagewire bench quick
  stagewire bench connector
  stagewire bench store
  stagewire bench kv
  stagewire bench sched
  stagewire bench server
  stagewire bench rfc
  stagewire bench transfer --quick
  stagewire bench transfer --only 'shm copy' --json transfer.json";

/// Measure what moving bytes between processes costs on this machine, and how fast the scheduler decides
///
/// Needs no server. The times are medians over pairs that are measured right after each other. A target that is missed
/// is printed as such and is no failure of the command.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct BenchArgs {
    /// The benchmark
    #[arg(value_name = "NAME")]
    name: Name,

    /// Pairs for each row
    #[arg(long, value_name = "N", default_value_t = 31, value_parser = clap::value_parser!(u16).range(21..))]
    pairs: u16,

    /// Fewer cases, in about a minute (`transfer`, `store`, `sched`, `rfc`)
    #[arg(long)]
    quick: bool,

    /// Only rows whose case contains TEXT (not `quick`)
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,

    /// The Python that runs the workers of `rfc` [default: the active or the project's virtual environment]
    #[arg(long, value_name = "FILE", env = "STAGEWIRE_PYTHON", hide_env_values = true)]
    python: Option<PathBuf>,

    /// Write the report as JSON to FILE, or to stdout instead of text
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub(crate) json: Option<Option<PathBuf>>,
}

pub(crate) async fn run(args: BenchArgs, output: &Output) -> Result<Exit, Fault> {
    if args.name == Name::Quick && args.only.is_some() {
        return Err(Fault::usage("--only is not for `stagewire bench quick`"));
    }
    if !matches!(args.name, Name::Transfer | Name::Store | Name::Sched | Name::Rfc) && args.quick {
        return Err(Fault::usage(
            "--quick is for `stagewire bench transfer`, `store`, `sched` and `rfc`",
        ));
    }
    let options = Options {
        pairs: args.pairs.into(),
        quick: args.quick,
        only: args.only,
        python: args.python,
    };
    let report = bench::run(args.name, &options, output).await?;
    if let Some(Some(file)) = &args.json {
        std::fs::write(file, serde_json::to_string_pretty(&report)?)
            .map_err(|error| Fault::failed(format!("cannot write {}: {error}", file.display())))?;
        output.topic("saved", file.display());
    }
    if output.json {
        output.document(&report)?;
    } else {
        report.print(output)?;
    }
    Ok(Exit::Done)
}
