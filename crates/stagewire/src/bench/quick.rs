//! Hands one video latent after another from a producing process to this one, each beside a memcpy of the same bytes.
//!
//! A hand-over begins when the producer, whose tensor is finished, calls `publish`, and ends when the consumer may read
//! the last byte. In between the handle goes through a pipe, as it would through a queue.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use stagewire_connector::{Connector, ConnectorOptions, ConsumeOptions};
use stagewire_core::StageName;
use stagewire_transfer::Target;

use crate::bench::producer::{Memory, Painted, Producer, Shape, now};
use crate::bench::report::{self, Goal, Report, Unit};
use crate::bench::stats::Pairs;
use crate::exit::Fault;

/// Rounds before anything counts: connections, mappings and pools are made in them.
const WARM_UP: u64 = 3;

const TARGET: report::Target = report::Target {
    text: "<= 1 ms + one memcpy",
    goal: Goal::ExcessMs(1.0),
};

/// One way to hand over.
struct Case {
    memory: Memory,
    chunks: u32,
    /// Into memory of the consumer, instead of showing it the producer's.
    copied: bool,
    pairs: Pairs,
    skipped: Option<String>,
}

impl Case {
    fn name(&self) -> String {
        let chunks = match self.chunks {
            1 => "whole".to_owned(),
            count => format!("{count} chunks"),
        };
        let how = if self.copied { "copied" } else { "mapped" };
        format!("{} {how}, {chunks}", self.memory.transport())
    }
}

pub(super) async fn run(pairs: usize) -> Result<Report, Fault> {
    let mut report = Report::new("quick");
    let dir = tempfile::Builder::new().prefix("stagewire-bench-").tempdir()?;
    let role = StageName::new("consumer").expect("it is a name");
    let connector = Connector::start(ConnectorOptions::new(dir.path(), role)).await?;
    let mut producer = Producer::spawn(dir.path())?;
    let mut cases = cases();
    let mut latent = Shape::Latent.painted()?;
    let mut copy = vec![0; latent.bytes().len()];
    for round in 0..WARM_UP + pairs as u64 {
        latent.paint(round);
        for case in cases.iter_mut().filter(|case| case.skipped.is_none()) {
            let reference = memcpy(latent.bytes(), &mut copy);
            let value = hand_over(&connector, &mut producer, case, &latent, round)
                .await
                .with_context(|| format!("{}, round {round}", case.name()))?;
            match value {
                Ok(value) if round >= WARM_UP => case.pairs.push(value, reference),
                Ok(_) => {}
                Err(why) => case.skipped = Some(why),
            }
        }
    }
    producer.end().await?;
    connector.close().await;
    for case in cases {
        let name = case.name();
        match case.skipped {
            Some(why) => report.skip(name, "handover", why),
            None => {
                let row = report::Case {
                    name,
                    metric: "handover",
                    unit: Unit::Milliseconds,
                    reference: "memcpy".to_owned(),
                    target: Some(TARGET),
                };
                report.add(row, &case.pairs);
            }
        }
    }
    Ok(report)
}

fn cases() -> Vec<Case> {
    let ways = [(Memory::Arena, false), (Memory::Arena, true), (Memory::Borrowed, true)];
    let cases = ways.into_iter().flat_map(|(memory, copied)| {
        [1, 8].map(|chunks| Case {
            memory,
            chunks,
            copied,
            pairs: Pairs::default(),
            skipped: None,
        })
    });
    cases.collect()
}

fn memcpy(from: &[u8], to: &mut [u8]) -> Duration {
    let begin = Instant::now();
    black_box(&mut *to).copy_from_slice(black_box(from));
    begin.elapsed()
}

/// How long one hand-over takes, or why it cannot be done here. Checks every byte, outside of the time.
async fn hand_over(
    connector: &Connector,
    producer: &mut Producer,
    case: &Case,
    latent: &Painted,
    round: u64,
) -> anyhow::Result<Result<Duration, String>> {
    let mut options = ConsumeOptions::within(Duration::from_secs(30));
    if case.copied {
        options.destinations = Some(vec![Arc::new(Target::allocate(latent.nbytes())?)]);
    }
    let (begin, handle) = producer.publish_fresh(case.memory, case.chunks, round).await?;
    let transport = handle.regions[0].transport.clone();
    let mut consumer = connector.consume(handle, options)?;
    let mut chunks = Vec::new();
    let mut end = begin;
    while let Some(chunk) = consumer.next().await? {
        chunks.push(chunk);
        if chunks.len() == case.chunks as usize {
            end = now();
        }
    }
    for chunk in &chunks {
        latent.check(&chunk.tensors[0])?;
    }
    if transport != case.memory.transport() {
        let why = connector
            .host()
            .cma()
            .err()
            .map_or_else(|| "not available".to_owned(), |error| error.to_string());
        return Ok(Err(why));
    }
    Ok(Ok(end.saturating_sub(begin)))
}
