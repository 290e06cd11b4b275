use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use stagewire_connector::{Connector, ConnectorOptions, PublishSpec, Registered};
use stagewire_core::{Lease, StageName};
use stagewire_transfer as transfer;

use super::{Memory, Order, Shape, Stats, now};
use crate::bench::paint::paint;
use crate::exit::{Exit, Fault};

/// The producing process itself: does what each line of stdin orders, until stdin ends.
pub(in crate::bench) async fn serve(dir: PathBuf) -> Result<Exit, Fault> {
    let role = StageName::new("producer").expect("it is a name");
    let connector = Connector::start(ConnectorOptions::new(dir, role)).await?;
    let mut held: Option<(Shape, Registered)> = None;
    // Blocks this thread alone: the connector runs on the others.
    let mut stdout = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?)? {
            Order::Hold { memory, shape } => {
                // What was held goes first, to make room.
                drop(held.take());
                let memory = painted(&connector, memory, shape, 0)?;
                held = Some((shape, connector.register(memory)?));
                Vec::new()
            }
            Order::Publish { chunks } => {
                let (shape, registered) = held.as_ref().context("nothing is held")?;
                publish(&connector, *shape, chunks, || registered.memory())?
            }
            Order::Fresh { memory, chunks, round } => {
                let memory = painted(&connector, memory, Shape::Latent, round)?;
                publish(&connector, Shape::Latent, chunks, || memory)?
            }
            Order::Stats => {
                let stats = connector.stats();
                serde_json::to_vec(&Stats {
                    registrations: stats.host.registrations,
                    staged: stats.staged_bytes,
                })?
            }
        };
        let mut frame = u32::try_from(answer.len())?.to_be_bytes().to_vec();
        frame.extend(answer);
        stdout.write_all(&frame)?;
        stdout.flush()?;
    }
    connector.close().await;
    Ok(Exit::Done)
}

/// When it was published, then the handle.
fn publish(
    connector: &Arc<Connector>,
    shape: Shape,
    chunks: u32,
    memory: impl FnOnce() -> transfer::Memory,
) -> anyhow::Result<Vec<u8>> {
    let spec = PublishSpec::new("bench", shape.manifest(chunks)?, Lease::DeleteOnConsume);
    let begin = now();
    let publication = connector.publish(spec, vec![memory()])?;
    let mut answer = u64::try_from(begin.as_nanos())?.to_be_bytes().to_vec();
    answer.extend(publication.handle().to_bytes());
    Ok(answer)
}

fn painted(connector: &Arc<Connector>, memory: Memory, shape: Shape, round: u64) -> anyhow::Result<transfer::Memory> {
    let nbytes = shape.manifest(1)?.nbytes().0;
    match memory {
        Memory::Arena => {
            let mut extent = connector.host().arena().allocate(nbytes)?;
            paint(&mut extent, round);
            Ok(extent.freeze().into())
        }
        Memory::Borrowed => {
            let mut bytes = vec![0; usize::try_from(nbytes)?];
            paint(&mut bytes, round);
            Ok(transfer::Borrowed::from(bytes).into())
        }
    }
}
