//! What waiting costs: the CPU time of this process while an operation on a stopped peer waits for its deadline.

use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use stagewire_core::Record;
use stagewire_transfer::{ConnectOptions, Network, Target, TransferOptions};

use super::network::network_options;
use super::owner::Memory;
use super::{Bench, MIB};
use crate::bench::report::{self, Goal};

const BLOCKED: Duration = Duration::from_secs(3);

const IDLE: report::Target = report::Target {
    text: "<= 20 ms",
    goal: Goal::AtMost(20.0),
};

/// CPU time of all threads of this process so far.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0))
}

/// Lets the process go on also where the measurement fails.
struct Stopped(Pid);

impl Stopped {
    /// Returns once all its threads stand still, which takes a moment.
    async fn stop(process: u32) -> anyhow::Result<Self> {
        let pid = i32::try_from(process)
            .ok()
            .and_then(Pid::from_raw)
            .context("no process")?;
        kill_process(pid, Signal::STOP)?;
        let stopped = Self(pid);
        let stands = |task: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
        };
        while !std::fs::read_dir(format!("/proc/{process}/task"))?
            .flatten()
            .all(stands)
        {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(stopped)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // It fails only where the process is gone.
        let _ = kill_process(self.0, Signal::CONT);
    }
}

impl Bench<'_> {
    /// What each transport must ask a stopped owner for: a pin, and over `tcp` and `mooncake` also the bytes. The threads of
    /// NIXL are not only ours: what the one that is costs, a test says.
    pub(super) async fn idle(&mut self) -> anyhow::Result<()> {
        let network = Network::start(self.host.clone(), network_options(false)).await?;
        let mut blocked = vec![(Memory::Arena, self.host.shm(), false)];
        match self.host.cma() {
            Ok(cma) => blocked.push((Memory::Borrowed, cma, false)),
            Err(error) => self
                .report
                .skip("cma idle, pin blocked for 3 s".to_owned(), "cpu", error.to_string()),
        }
        blocked.push((Memory::Borrowed, network.tcp(), true));
        self.owner.mooncake().await?;
        blocked.push((Memory::Borrowed, self.ours().await?, true));
        for (memory, transport, pulls) in blocked {
            let what = if pulls { "pull" } else { "pin" };
            let case = format!("{} idle, {what} blocked for 3 s", transport.name());
            if !self.wants(&case) {
                continue;
            }
            self.output.say(&case);
            let held = self.owner.hold(memory, MIB, &[transport.name()]).await?;
            let remote = transport.connect(&held.peer, ConnectOptions::default()).await?;
            let region = held.region(transport.name()).map_err(anyhow::Error::msg)?;
            let pinned = remote.pin(region, TransferOptions::default()).await?;
            let target = Target::allocate(MIB)?;
            let records = [Record::contiguous(0, 0, MIB)];
            let stopped = Stopped::stop(self.owner.pid().context("the owner has ended")?).await?;
            let before = cpu();
            let options = TransferOptions {
                deadline: Some(BLOCKED),
            };
            let outcome = if pulls {
                pinned.pull(&records, &target, options).await
            } else {
                remote.pin(region, options).await.map(drop)
            };
            let spent = cpu() - before;
            drop(stopped);
            ensure!(outcome.is_err(), "a stopped process has answered");
            self.report.count(case, "cpu", spent.as_secs_f64() * 1e3, "ms", IDLE);
        }
        network.shutdown().await;
        self.owner.release().await
    }
}
