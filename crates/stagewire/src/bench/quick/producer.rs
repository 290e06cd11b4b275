use crate::exit::{Exit, Fault};
use clap::Args;
#[derive(Debug, Args)]
pub(crate) struct ProducerArgs {}
pub(crate) async fn produce(_args: ProducerArgs) -> Result<Exit, Fault> {
    Ok(Exit::Done)
}
