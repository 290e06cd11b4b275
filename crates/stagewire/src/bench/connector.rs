//! What the connector adds to the transports under it, and what its chunks cost.
//!
//! The producer is another process. It publishes memory that it has registered once, again and again, as a stage does with
//! its latents. Each round checks every byte, outside of the times.

mod calls;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use stagewire_connector::{Connector, ConnectorOptions, ConsumeOptions, ViewMemory};
use stagewire_core::{Handle, Record, StageName};
use stagewire_transfer::{ConnectOptions, Pinned, Target, TransferOptions};

use super::Options;
use super::producer::{Memory, Painted, Producer, Shape, now};
use super::report::{self, Goal, Report, Unit};
use super::stats::Pairs;
use crate::exit::Fault;
use crate::output::Output;

/// Rounds before anything counts: connections, mappings and pools are made in them.
const WARM_UP: usize = 3;

const CHUNKS: u32 = 8;

/// Longest time of one operation.
const DEADLINE: Duration = Duration::from_secs(30);

const fn at_most(text: &'static str, most: f64) -> report::Target {
    let goal = Goal::AtMost(most);
    report::Target { text, goal }
}

const HAND_OVER: report::Target = at_most("<= 300 us", 300.0);
const NONE: report::Target = at_most("0", 0.0);
const CALLS: report::Target = at_most("<= 8 per chunk", 8.0);
const OVER_RAW: report::Target = report::Target {
    text: "<= 0.3 ms + 10 %",
    goal: Goal::ExcessMs(0.3),
};
const CHUNKED: report::Target = report::Target {
    text: "<= 1.3",
    goal: Goal::RatioAtMost(1.3),
};
const FIRST: report::Target = report::Target {
    text: "<= whole / 8 + 5 ms",
    goal: Goal::ExcessMs(5.0),
};

struct Bench<'a> {
    options: &'a Options,
    output: &'a Output,
    report: Report,
    connector: Arc<Connector>,
    producer: Producer,
}

pub(super) async fn run(options: &Options, output: &Output) -> Result<Report, Fault> {
    let dir = tempfile::Builder::new().prefix("stagewire-bench-").tempdir()?;
    let role = StageName::new("consumer").expect("it is a name");
    let mut bench = Bench {
        options,
        output,
        report: Report::new("connector"),
        connector: Connector::start(ConnectorOptions::new(dir.path(), role)).await?,
        producer: Producer::spawn(dir.path())?,
    };
    for (memory, copied) in [(Memory::Arena, false), (Memory::Arena, true), (Memory::Borrowed, true)] {
        bench.hand_over(memory, copied).await?;
    }
    for memory in [Memory::Arena, Memory::Borrowed] {
        bench.over_raw(memory).await?;
        bench.chunks(memory).await?;
    }
    bench.counts().await?;
    bench.producer.end().await?;
    bench.connector.close().await;
    Ok(bench.report)
}

/// One payload that was consumed.
struct Consumed {
    first: Duration,
    whole: Duration,
}

impl Bench<'_> {
    fn wants(&self, case: &str) -> bool {
        self.options
            .only
            .as_ref()
            .is_none_or(|only| case.contains(only.as_str()))
    }

    fn rounds(&self) -> usize {
        WARM_UP + self.options.pairs
    }

    /// From `publish` to the last byte that may be read, in another process, beside a memcpy of the same bytes.
    async fn hand_over(&mut self, memory: Memory, copied: bool) -> anyhow::Result<()> {
        let how = if copied { "copied" } else { "mapped" };
        let name = format!("hand-over of 14.3 MB, {} {how}", memory.transport());
        if !self.wants(&name) {
            return Ok(());
        }
        self.output.say(&name);
        let held = self.producer.hold(memory, Shape::Latent).await?;
        let own = held.bytes();
        let mut copy = vec![0; own.len()];
        let mut pairs = Pairs::default();
        for round in 0..self.rounds() {
            let begin = Instant::now();
            std::hint::black_box(&mut copy).copy_from_slice(std::hint::black_box(own));
            let reference = begin.elapsed();
            let (begin, handle) = self.producer.publish(1).await?;
            let (end, _) = self.consume(handle, copied, &held).await?;
            if round >= WARM_UP {
                pairs.push(end.saturating_sub(begin), reference);
            }
        }
        let target = (!copied).then_some(HAND_OVER);
        self.add(name, "handover", Unit::Microseconds, "memcpy", target, &pairs);
        Ok(())
    }

    /// Consumes as a task of a server does, on a worker of the runtime. Returns when the last byte could be read.
    async fn consume(&self, handle: Handle, copied: bool, held: &Painted) -> anyhow::Result<(Duration, Consumed)> {
        let mut options = ConsumeOptions::within(DEADLINE);
        if copied {
            options.destinations = Some(vec![Arc::new(Target::allocate(held.nbytes())?)]);
        }
        let count = handle.manifest.chunks();
        let connector = Arc::clone(&self.connector);
        let consumed = tokio::spawn(async move {
            let begin = Instant::now();
            let mut consumer = connector.consume(handle, options)?;
            let mut chunks = Vec::new();
            let mut first = Duration::ZERO;
            while chunks.len() < count as usize {
                chunks.push(consumer.next().await?.context("a chunk is missing")?);
                if chunks.len() == 1 {
                    first = begin.elapsed();
                }
            }
            let (whole, end) = (begin.elapsed(), now());
            consumer.ack().await?;
            anyhow::Ok((end, Consumed { first, whole }, chunks))
        });
        let (end, consumed, chunks) = consumed.await??;
        for chunk in &chunks {
            held.check(&chunk.tensors[0])?;
            let mapped = matches!(chunk.tensors[0].memory(), ViewMemory::Mapped(_));
            ensure!(mapped != copied, "it came in another way");
        }
        Ok((end, consumed))
    }

    /// 16 MiB through the connector, its request to the producer included, beside a pull of the pinned region.
    async fn over_raw(&mut self, memory: Memory) -> anyhow::Result<()> {
        let name = format!("16 MiB copied, {}", memory.transport());
        if !self.wants(&name) {
            return Ok(());
        }
        self.output.say(&name);
        let held = self.producer.hold(memory, Shape::Flat { nbytes: 16 << 20 }).await?;
        let mut pairs = Pairs::default();
        for round in 0..self.rounds() {
            let (_, handle) = self.producer.publish(1).await?;
            let reference = self.raw(&handle, memory).await?;
            let (_, consumed) = self.consume(handle, true, &held).await?;
            if round >= WARM_UP {
                // The tenth that the connector may take more is in the reference.
                pairs.push(consumed.whole, reference.mul_f64(1.1));
            }
        }
        let reference = "1.1 x raw pull";
        self.add(name, "handover", Unit::Milliseconds, reference, Some(OVER_RAW), &pairs);
        Ok(())
    }

    async fn raw(&self, handle: &Handle, memory: Memory) -> anyhow::Result<Duration> {
        let host = self.connector.host();
        let transport = match memory {
            Memory::Arena => host.shm(),
            Memory::Borrowed => host.cma()?,
        };
        let remote = transport.connect(&handle.holder, ConnectOptions::default()).await?;
        let pinned: Arc<dyn Pinned> = remote.pin(&handle.regions[0], TransferOptions::default()).await?.into();
        let target = Target::allocate(pinned.len())?;
        let pull = tokio::spawn(async move {
            let records = [Record::contiguous(0, 0, pinned.len())];
            let begin = Instant::now();
            pinned.pull(&records, &target, TransferOptions::default()).await?;
            anyhow::Ok(begin.elapsed())
        });
        pull.await?
    }

    /// Strided chunks beside the whole tensor.
    async fn chunks(&mut self, memory: Memory) -> anyhow::Result<()> {
        let name = format!("14.3 MB copied, {}", memory.transport());
        let (all, first) = (format!("{name}, {CHUNKS} chunks"), format!("{name}, first of {CHUNKS}"));
        if !self.wants(&all) && !self.wants(&first) {
            return Ok(());
        }
        self.output.say(&all);
        let held = self.producer.hold(memory, Shape::Latent).await?;
        let (mut alls, mut firsts) = (Pairs::default(), Pairs::default());
        for round in 0..self.rounds() {
            // In turns, so that neither always has the same one before it.
            let mut times = [None, None];
            for step in 0..2 {
                let index = (round + step) % 2;
                let (_, handle) = self.producer.publish([1, CHUNKS][index]).await?;
                times[index] = Some(self.consume(handle, true, &held).await?.1);
            }
            let [Some(whole), Some(cut)] = times else {
                unreachable!("both were measured")
            };
            if round >= WARM_UP {
                alls.push(cut.whole, whole.whole);
                firsts.push(cut.first, whole.whole / CHUNKS);
            }
        }
        self.add(all, "handover", Unit::Milliseconds, "whole", Some(CHUNKED), &alls);
        self.add(
            first,
            "first chunk",
            Unit::Milliseconds,
            "whole / 8",
            Some(FIRST),
            &firsts,
        );
        Ok(())
    }

    /// What the steady path of registered memory does besides moving the bytes.
    async fn counts(&mut self) -> anyhow::Result<()> {
        let name = "registered, mapped, 8 chunks";
        if !self.wants(name) {
            return Ok(());
        }
        let held = self.producer.hold(Memory::Arena, Shape::Latent).await?;
        for _ in 0..WARM_UP {
            let (_, handle) = self.producer.publish(CHUNKS).await?;
            self.consume(handle, false, &held).await?;
        }
        let copied = self.connector.stats().host.copied_bytes;
        let before = self.producer.stats().await?;
        let (count, calls) = (self.options.pairs, calls::Count::begin());
        let calls = calls.await;
        for _ in 0..count {
            let (_, handle) = self.producer.publish(CHUNKS).await?;
            self.consume(handle, false, &held).await?;
        }
        let calls = match calls {
            Ok(calls) => calls.end().await,
            Err(why) => Err(why),
        };
        let after = self.producer.stats().await?;
        let copied = self.connector.stats().host.copied_bytes - copied;
        #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
        let as_float = |count: u64| count as f64;
        for (what, value, unit) in [
            ("bytes copied", copied + after.staged - before.staged, "B"),
            ("registrations", after.registrations - before.registrations, ""),
        ] {
            self.report
                .count(format!("{name}, {what}"), "count", as_float(value), unit, NONE);
        }
        let name = format!("{name}, system calls of the consumer");
        match calls {
            Ok(calls) => {
                let per_chunk = as_float(calls) / as_float(count as u64 * u64::from(CHUNKS));
                self.report.count(name, "count", per_chunk, "per chunk", CALLS);
            }
            Err(why) => self.report.skip(name, "count", why),
        }
        Ok(())
    }

    fn add(
        &mut self,
        name: String,
        metric: &'static str,
        unit: Unit,
        reference: &str,
        target: Option<report::Target>,
        pairs: &Pairs,
    ) {
        let reference = reference.to_owned();
        let case = report::Case {
            name,
            metric,
            unit,
            reference,
            target,
        };
        self.report.add(case, pairs);
    }
}
