use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use stagewire_api::RunDir;

use super::up::seconds;
use crate::args::Global;
use crate::doctor::{self, Setting};
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::Output;
use crate::python::Python;

pub(crate) use crate::doctor::PeerArgs;

const EXAMPLES: &str = "\
Examples:
  stagewire doctor
  stagewire doctor --python ~/envs/wan/bin/python
  stagewire doctor --json | jq -r '.checks[] | select(.state != \"ok\") | .name'";

/// Show what this host can do, and why not
///
/// Looks at shared memory, transports, network, devices, the software of workers and peers, and limits. Needs no server
/// and changes nothing. Every line is what a probe of this machine found: ok, note (it works, with a limit or at a cost),
/// missing, or unknown where that could not be told; with why and what to do where it is not ok. It reports and does
/// not judge: the exit status is 0 whatever it finds.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct DoctorArgs {
    /// The Python that runs the workers [default: the active or the project's virtual environment]
    #[arg(long, value_name = "FILE", env = "STAGEWIRE_PYTHON", hide_env_values = true)]
    python: Option<PathBuf>,

    /// Seconds until a probe that does not answer is given up
    #[arg(long, value_name = "SECONDS", default_value = "20", value_parser = seconds)]
    timeout: Duration,

    /// Print one JSON document to stdout instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) async fn run(args: DoctorArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    // As for a pipeline that lies in the current directory.
    let here = Path::new("stagewire.toml");
    let python = Python::choose(args.python.as_deref(), here);
    let setting = Setting::here(python, peers(here), RunDir::locate(global.run_dir.as_deref()));
    let report = doctor::examine(setting, args.timeout).await;
    if output.json {
        output.document(&report)?;
    } else {
        report.print(output)?;
    }
    Ok(Exit::Done)
}

/// The environment that `make peers` makes: named by `STAGEWIRE_PEERS`, else a `.peers` beside the pipeline or above.
fn peers(pipeline: &Path) -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("STAGEWIRE_PEERS").filter(|named| !named.is_empty()) {
        return Some(named.into());
    }
    let file = std::path::absolute(pipeline).ok()?;
    let candidates = file.ancestors().skip(1).map(|dir| dir.join(".peers"));
    candidates.into_iter().find(|dir| dir.join("bin/python").exists())
}
