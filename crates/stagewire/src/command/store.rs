use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use serde_json::json;
use stagewire_connector::{Connector, ConnectorOptions, StoreService};
use stagewire_core::{ByteCount, Classify, StageName};
use stagewire_server::RunDir;
use stagewire_store::{DurableOptions, HostStore, Recovery, SpillOptions, StoreOptions, TokenGate};

use super::keeper;
use crate::args::Global;
use crate::command::serve::ended_by;
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::Output;
use crate::signals::Signals;

const EXAMPLES: &str = "\
Examples:
  stagewire store --capacity 8GiB
  stagewire store --capacity 8GiB --spill /var/tmp/stagewire --spill-quota 100GiB
  stagewire store --capacity 8GiB --run-dir /run/stagewire --data-dir /var/lib/stagewire/store";

/// Keep payloads for the processes of this host, where no server does
///
/// Connectors of the run directory find it by themselves: what they publish with `transfer_mode=\"store\"` is kept here
/// until it is consumed, released or its time is over, whatever becomes of its producer. A store that is killed loses
/// nothing that it had taken: start it again within ten minutes. SIGTERM and Ctrl-C end it, and everything in it.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct StoreArgs {
    /// Most bytes of payloads, such as 8GiB
    #[arg(long, value_name = "BYTES")]
    capacity: ByteCount,

    /// Move payloads that nobody reads to files here when memory is short
    #[arg(long, value_name = "DIR", requires = "spill_quota")]
    spill: Option<PathBuf>,

    /// Most bytes of such files, such as 100GiB
    #[arg(long, value_name = "BYTES", requires = "spill")]
    spill_quota: Option<ByteCount>,

    /// Keep here what the next store needs after a kill; for one store alone
    ///
    /// Default: `index` in the directory of --spill, so that the files are found again after a reboot; without --spill
    /// `store` in the run directory.
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// Print one line of JSON to stdout when it serves
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) async fn run(args: StoreArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let mut signals = Signals::listen()?;
    let run_dir = RunDir::locate(global.run_dir.as_deref());
    let role = StageName::new("store").expect("the name is allowed");
    let mut connector = ConnectorOptions::new(run_dir.path(), role);
    connector.arena_limit = HostStore::arena_limit(args.capacity);
    let connector = Connector::start(connector).await.map_err(fault)?;
    let mut options = StoreOptions::new(args.capacity, Arc::new(TokenGate::open()));
    options.durable = Some(DurableOptions {
        dir: args.data_dir.clone().unwrap_or_else(|| match &args.spill {
            Some(spill) => spill.join("index"),
            None => run_dir.path().join("store"),
        }),
        keeper: keeper::command(),
    });
    options.spill = args
        .spill
        .clone()
        .zip(args.spill_quota)
        .map(|(dir, quota)| SpillOptions { dir, quota });
    let opened = StoreService::open(&connector, options).await;
    let (service, recovery) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            connector.close().await;
            return Err(fault(error));
        }
    };
    announce(&args, &run_dir, &recovery, output)?;
    let wish = signals.next().await;
    output.topic("store", "stops");
    connector.close().await;
    service.store().close().await.map_err(fault)?;
    Ok(ended_by(wish))
}

fn announce(args: &StoreArgs, run_dir: &RunDir, recovery: &Recovery, output: &Output) -> Result<(), Fault> {
    let (place, survivors) = (run_dir.path(), recovery.survivors.len());
    output.topic(
        "store",
        format_args!("{} for run directory {}", args.capacity, place.display()),
    );
    if survivors > 0 {
        let nbytes = recovery.adopted.nbytes + recovery.moved.nbytes;
        output.topic(
            "store",
            format_args!(
                "has the {survivors} payloads ({nbytes}) of the store before, after {:.1?}",
                recovery.took
            ),
        );
    }
    if recovery.lost.objects > 0 {
        output.warn(format_args!(
            "{} payloads ({}) of the store before are gone: the keeper of their memory had ended, too",
            recovery.lost.objects, recovery.lost.nbytes
        ));
    }
    if !output.json {
        return Ok(());
    }
    output.data(json!({
        "run_dir": place,
        "pid": std::process::id(),
        "capacity": args.capacity.0,
        "payloads": survivors,
        "files": recovery.files.objects,
        "lost": recovery.lost.objects,
        "seconds": recovery.took.as_secs_f64(),
    }))
}

fn fault<E: Classify + std::error::Error + Send + Sync + 'static>(error: E) -> Fault {
    Fault {
        exit: Exit::of(error.class()),
        error: error.into(),
    }
}
