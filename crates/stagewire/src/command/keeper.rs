use stagewire_core::Classify;
use stagewire_store::{KeeperCommand, KeeperOptions, run_keeper};

use crate::exit::{Exit, Fault};

/// Becomes the keeper of a store's memory. No runtime, no threads.
pub(crate) fn run() -> Result<Exit, Fault> {
    let options = KeeperOptions::from_env()
        .ok_or_else(|| Fault::usage("a store starts its keeper by itself; there is nothing to start by hand"))?;
    run_keeper(&options).map_err(|error| Fault {
        exit: Exit::of(error.class()),
        error: error.into(),
    })?;
    Ok(Exit::Done)
}

/// How a store of this process starts its keeper: the very file that runs, also where another one has its name by now.
pub(crate) fn command() -> KeeperCommand {
    KeeperCommand::new("/proc/self/exe", ["keeper"])
}
