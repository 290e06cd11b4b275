//! Overlap of transfer and decoding over a slow line: a latent in 8 chunks beside the same latent whole.
//!
//! The producer is another process. The consumer's connector reads over throttled TCP: of shared memory it would expect the
//! pace of memory, and pull ahead in one go. Decoding is a wait of known length, as on a GPU that leaves the CPU alone. The
//! ideal has every chunk at the very time at which the line can have brought it, and the decoder never idle while a chunk
//! is there.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use stagewire_connector::{Carrier, Connector, ConnectorOptions, ConsumeOptions};
use stagewire_core::{Handle, Manifest, StageName};
use stagewire_transfer::Target;
use stagewire_transfer::decorate::ThrottleOptions;

use super::Bench;
use crate::bench::manifests::latent;
use crate::bench::producer::{Memory, Painted, Producer, Shape, now};
use crate::bench::report::{self, Goal, Unit};
use crate::bench::stats::Pairs;

const CHUNKS: u32 = 8;
/// What one of as many equal parts takes to decode.
const DECODE: Duration = Duration::from_millis(8);
/// Bytes per second: moving takes a quarter of the time of decoding, about as long, and four times as long.
const LINES: [u64; 3] = [1_000_000_000, 250_000_000, 60_000_000];
const WARM_UP: usize = 2;
const DEADLINE: Duration = Duration::from_secs(30);

const EFFICIENT: report::Target = report::Target {
    text: ">= 0.9",
    goal: Goal::RatioAtLeast(0.9),
};

/// One latent, from `publish` on.
#[derive(Debug, Clone, Copy)]
struct Decoded {
    first: Duration,
    all: Duration,
}

pub(super) async fn run(bench: &mut Bench<'_>) -> anyhow::Result<()> {
    let lines = if bench.options.quick { &LINES[1..2] } else { &LINES };
    for rate in lines {
        line(bench, *rate).await?;
    }
    Ok(())
}

async fn line(bench: &mut Bench<'_>, rate: u64) -> anyhow::Result<()> {
    let case = format!("14.3 MB over {} MB/s", rate / 1_000_000);
    let names = [
        format!("{case}, {CHUNKS} chunks, decoded"),
        format!("{case}, {CHUNKS} chunks, first decoded"),
        format!("{case}, {CHUNKS} chunks, efficiency: ideal"),
    ];
    if !bench.wants(&names) {
        return Ok(());
    }
    bench.output.say(&case);
    let dir = tempfile::Builder::new().prefix("stagewire-bench-").tempdir()?;
    let role = StageName::new("consumer").expect("it is a name");
    let connector = Connector::start(ConnectorOptions {
        transports: vec![Carrier::Tcp],
        throttle: ThrottleOptions {
            bytes_per_second: NonZeroU64::new(rate),
            ..ThrottleOptions::default()
        },
        ..ConnectorOptions::new(dir.path(), role)
    })
    .await?;
    let mut producer = Producer::spawn(dir.path())?;
    let held = producer.hold(Memory::Arena, Shape::Latent).await?;
    let ideal = ideal(&latent(CHUNKS)?, rate);
    let [mut decoded, mut first, mut efficiency] = std::array::from_fn(|_| Pairs::default());
    for round in 0..WARM_UP + bench.options.pairs {
        // In turns, so that neither always has the same one before it.
        let mut took = [None, None];
        for step in 0..2 {
            let index = (round + step) % 2;
            let (begin, handle) = producer.publish([1, CHUNKS][index]).await?;
            took[index] = Some(decode(&connector, handle, begin, &held).await?);
        }
        let [Some(whole), Some(cut)] = took else {
            unreachable!("both were measured")
        };
        if round >= WARM_UP {
            decoded.push(cut.all, whole.all);
            first.push(cut.first, whole.first);
            efficiency.push(ideal, cut.all);
        }
    }
    producer.end().await?;
    connector.close().await;
    let unit = Unit::Milliseconds;
    bench.add(&names[0], "decoded", unit, "whole", None, &decoded);
    bench.add(&names[1], "first chunk", unit, "whole", None, &first);
    bench.add(&names[2], "efficiency", unit, "measured", Some(EFFICIENT), &efficiency);
    Ok(())
}

/// Consumes and decodes; checks every byte, outside of the times.
async fn decode(
    connector: &Arc<Connector>,
    handle: Handle,
    begin: Duration,
    held: &Painted,
) -> anyhow::Result<Decoded> {
    let count = handle.manifest.chunks();
    let each = DECODE * CHUNKS / count;
    let options = ConsumeOptions {
        destinations: Some(vec![Arc::new(Target::allocate(held.nbytes())?)]),
        ..ConsumeOptions::within(DEADLINE)
    };
    let connector = Arc::clone(connector);
    let (decoded, chunks) = tokio::spawn(async move {
        let mut consumer = connector.consume(handle, options)?;
        let (mut chunks, mut first) = (Vec::new(), None);
        while chunks.len() < count as usize {
            chunks.push(consumer.next().await?.context("a chunk is missing")?);
            // The waits of tokio are of whole milliseconds.
            tokio::task::spawn_blocking(move || std::thread::sleep(each)).await?;
            first.get_or_insert_with(|| now().saturating_sub(begin));
        }
        let all = now().saturating_sub(begin);
        consumer.ack().await?;
        let first = first.unwrap_or(all);
        anyhow::Ok((Decoded { first, all }, chunks))
    })
    .await??;
    for chunk in &chunks {
        held.check(&chunk.tensors[0])?;
    }
    Ok(decoded)
}

/// From the first byte on the line to the end of the last chunk's work.
fn ideal(manifest: &Manifest, rate: u64) -> Duration {
    let mut here = Duration::ZERO;
    let mut done = Duration::ZERO;
    for index in 0..manifest.chunks() {
        here += Duration::from_nanos(manifest.chunk_nbytes(index).0 * 1_000_000_000 / rate);
        done = here.max(done) + DECODE * CHUNKS / manifest.chunks();
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ideal_is_bound_by_the_line_or_by_the_decoder() {
        let (whole, cut) = (latent(1).expect("a manifest"), latent(CHUNKS).expect("a manifest"));
        let all = DECODE * CHUNKS;
        let line = Duration::from_nanos(whole.nbytes().0);
        assert_eq!(ideal(&whole, 1_000_000_000), line + all);
        // Chunks of 4 of the 31 latent frames come first.
        let first = line * 4 / 31;
        let near = |found: Duration, expected: Duration| found.abs_diff(expected) < Duration::from_micros(1);
        assert!(near(ideal(&cut, 1_000_000_000), first + all));
        assert!(near(ideal(&cut, 60_000_000), line.mul_f64(1e3 / 60.0) + DECODE));
    }
}
