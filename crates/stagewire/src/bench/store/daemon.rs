use std::hint::black_box;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, kill_process};
use stagewire_connector::{
    Connector, ConnectorOptions, ConsumeOptions, Consumer, Mode, Publication, PublishSpec, Registered,
};
use stagewire_core::{Handle, Lease, Manifest, StageName};
use stagewire_transfer::Target;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::embedded::Objects;
use super::{Act, CAPACITY, DEADLINE};
use crate::bench::manifests::flat;

/// `stagewire store`, and a connector of this process that uses it.
pub(super) struct Daemon {
    child: Child,
    connector: Arc<Connector>,
    objects: Objects,
    registered: Vec<Registered>,
    manifest: Option<Manifest>,
    /// Payloads that are there to be read.
    kept: Vec<Handle>,
}

impl Daemon {
    pub(super) async fn start(run_dir: &Path) -> anyhow::Result<Self> {
        let mut child = Command::new("/proc/self/exe")
            .args([
                "store",
                "--json",
                "--quiet",
                "--capacity",
                &CAPACITY.to_string(),
                "--run-dir",
            ])
            .arg(run_dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start the store")?;
        let mut lines = BufReader::new(child.stdout.take().context("no pipe")?).lines();
        lines.next_line().await?.context("the store does not start")?;
        let role = StageName::new("user").expect("it is a name");
        Ok(Self {
            child,
            connector: Connector::start(ConnectorOptions::new(run_dir, role)).await?,
            objects: Objects::default(),
            registered: Vec::new(),
            manifest: None,
            kept: Vec::new(),
        })
    }

    /// Writes payloads to be read, and proves that they come back.
    pub(super) async fn hold(&mut self, size: u64, count: usize) -> anyhow::Result<()> {
        let kept = std::mem::take(&mut self.kept);
        self.release(kept).await?;
        self.registered.clear();
        self.objects = Objects::default();
        self.objects = Objects::new(size, count)?;
        let memory = self.objects.memory().into_iter();
        let registered = memory.map(|memory| self.connector.register(memory));
        self.registered = registered.collect::<Result<_, _>>()?;
        self.manifest = Some(flat(size, 1)?);
        self.kept = self.put(false).await?.0;
        self.get(true, true).await?;
        self.objects.check()
    }

    pub(super) async fn once(&mut self, act: Act, at_once: bool) -> anyhow::Result<Duration> {
        match act {
            Act::Put => {
                let (written, took) = self.put(at_once).await?;
                self.release(written).await?;
                Ok(took)
            }
            Act::Get => self.get(true, at_once).await,
            Act::Map => self.get(false, at_once).await,
        }
    }

    /// Memory that the connector knows, as Mooncake's client knows what it writes.
    async fn put(&self, at_once: bool) -> anyhow::Result<(Vec<Handle>, Duration)> {
        let manifest = self.manifest.as_ref().context("nothing is held")?;
        let specs = self.registered.iter().map(|registered| {
            let mut spec = PublishSpec::new("bench", manifest.clone(), Lease::Pinned);
            spec.mode = Mode::Store;
            (spec, registered.memory())
        });
        let specs: Vec<_> = specs.collect();
        let mut written = Vec::with_capacity(specs.len());
        let begin = Instant::now();
        let publications = specs
            .into_iter()
            .map(|(spec, memory)| self.connector.publish(spec, vec![memory]));
        if at_once {
            for publication in publications.collect::<Result<Vec<Publication>, _>>()? {
                written.push(publication.settled().await?);
            }
        } else {
            for publication in publications {
                written.push(publication?.settled().await?);
            }
        }
        Ok((written, begin.elapsed()))
    }

    async fn get(&mut self, copied: bool, at_once: bool) -> anyhow::Result<Duration> {
        let targets: Vec<Arc<Target>> = if copied { self.objects.targets()? } else { Vec::new() };
        let mut targets = targets.into_iter();
        let mut consumers = Vec::new();
        let handles = self.kept.clone();
        let begin = Instant::now();
        for handle in handles {
            let mut options = ConsumeOptions::within(DEADLINE);
            options.destinations = targets.next().map(|target| vec![target]);
            let mut consumer = self.connector.consume(handle, options)?;
            if !at_once {
                read(&mut consumer).await?;
            }
            consumers.push(consumer);
        }
        if at_once {
            futures::future::try_join_all(consumers.iter_mut().map(read)).await?;
        }
        let took = begin.elapsed();
        for mut consumer in consumers {
            consumer.ack().await?;
            consumer.close().await;
        }
        Ok(took)
    }

    async fn release(&self, handles: Vec<Handle>) -> anyhow::Result<()> {
        for handle in handles {
            self.connector.release_handle(&handle).await?;
        }
        Ok(())
    }

    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        self.connector.close().await;
        let pid = self.child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        kill_process(pid.context("the store has ended")?, Signal::TERM)?;
        let status = self.child.wait().await?;
        ensure!(status.success(), "the store ended with {status}");
        Ok(())
    }
}

async fn read(consumer: &mut Consumer) -> anyhow::Result<()> {
    let chunk = consumer.next().await?.context("there is no chunk")?;
    black_box(chunk.tensors[0].rows().next());
    Ok(())
}
