//! Keeps worker processes running: starts them, takes over those of an `up` that was killed, starts again what dies,
//! stops all in order.

mod backoff;
mod log;
mod process;
mod record;

use std::collections::BTreeSet;
use std::io;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use stagewire_api::RunDir;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use self::backoff::Backoff;
use self::log::WorkerLog;
use self::process::{Ending, WorkerProcess};
use self::record::Record;
use crate::exit::{Exit, Fault};
use crate::output::{Output, duration};

/// Lines of a worker's log that are shown when it dies.
const TAIL: usize = 12;

/// Deaths by signal that a worker may have before it was ever ready.
const START_TRIES: u32 = 3;

/// One worker process that should run.
#[derive(Debug, Clone)]
pub(crate) struct WorkerPlan {
    /// Unique in the deployment: `decode-0`.
    pub(crate) name: String,
    /// Program and arguments.
    pub(crate) command: Vec<String>,
    /// Variables beside the inherited ones.
    pub(crate) env: Vec<(String, String)>,
}

/// Times of a supervisor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// Until a worker must have become ready for the first time.
    pub(crate) start: Duration,
    /// Between the request to leave and the end by force.
    pub(crate) stop: Duration,
}

/// What the workers shall do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    Run,
    Leave,
    Die,
}

/// The workers of one deployment.
#[derive(Debug)]
pub(crate) struct Supervisor {
    order: watch::Sender<Order>,
    keepers: JoinSet<Result<(), Fault>>,
    /// Names of the workers that have been ready.
    settled: watch::Sender<BTreeSet<String>>,
    wanted: usize,
}

impl Supervisor {
    /// Starts, or takes over, one process for each plan and keeps it running. `ready` holds the pids of the workers
    /// that the server can give work to. Must be called by the holder of the server's lock on `run_dir`: only one
    /// supervisor at a time may own the records there.
    pub(crate) async fn start(
        plans: Vec<WorkerPlan>,
        run_dir: &RunDir,
        ready: &watch::Receiver<BTreeSet<u32>>,
        patience: Patience,
        output: &Output,
    ) -> Result<Self, Fault> {
        let mut found = adopt(&plans, run_dir, patience, output).await?;
        let (order, orders) = watch::channel(Order::Run);
        let settled = watch::Sender::new(BTreeSet::new());
        let wanted = plans.len();
        let mut keepers = JoinSet::new();
        for plan in plans {
            let adopted = found.iter().position(|worker| worker.0 == plan.name);
            let adopted = adopted.map(|index| found.swap_remove(index).1);
            let keeper = Keeper {
                plan,
                run_dir: run_dir.clone(),
                ready: ready.clone(),
                settled: settled.clone(),
                orders: orders.clone(),
                patience,
                output: output.clone(),
            };
            keepers.spawn(keeper.keep(adopted));
        }
        Ok(Self {
            order,
            keepers,
            settled,
            wanted,
        })
    }

    /// Resolves when every worker has been ready once.
    pub(crate) fn settled(&self) -> impl Future<Output = ()> + Send + use<> {
        let (mut settled, wanted) = (self.settled.subscribe(), self.wanted);
        async move {
            if settled.wait_for(|names| names.len() == wanted).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Returns when a worker cannot be kept running, with the reason.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(crate) async fn failed(&mut self) -> Fault {
        loop {
            match self.keepers.join_next().await {
                Some(Ok(Err(fault))) => return fault,
                Some(Err(error)) => return error.into(),
                // A keeper ends well when it was told to stop, or its worker was told to leave.
                Some(Ok(Ok(()))) => {}
                None => std::future::pending().await,
            }
        }
    }

    /// Asks all workers to leave, and returns when all have ended, those that do not leave in time by force.
    /// May be dropped and followed by [`Supervisor::kill`].
    pub(crate) async fn stop(&mut self) {
        self.order(Order::Leave).await;
    }

    /// Ends all workers at once.
    pub(crate) async fn kill(&mut self) {
        self.order(Order::Die).await;
    }

    async fn order(&mut self, order: Order) {
        self.order.send_replace(order);
        while self.keepers.join_next().await.is_some() {}
    }
}

/// Finds the living workers that an earlier `up` recorded. Those that are not planned as they run are stopped.
async fn adopt(
    plans: &[WorkerPlan],
    run_dir: &RunDir,
    patience: Patience,
    output: &Output,
) -> Result<Vec<(String, WorkerProcess)>, Fault> {
    let mut adopted = Vec::new();
    let mut leaving = JoinSet::new();
    for record in Record::all(run_dir) {
        let Some(mut process) = WorkerProcess::adopt(record.process)? else {
            Record::remove(run_dir, &record.name);
            continue;
        };
        let pid = record.process.pid;
        if plans
            .iter()
            .any(|plan| plan.name == record.name && plan.command == record.command)
        {
            output.topic("worker", format_args!("{} goes on (pid {pid})", record.name));
            adopted.push((record.name, process));
        } else {
            output.topic(
                "worker",
                format_args!("{} (pid {pid}) is not what the file says now: stopping it", record.name),
            );
            let run_dir = run_dir.clone();
            leaving.spawn(async move {
                process.terminate();
                if timeout(patience.stop, process.ended()).await.is_err() {
                    process.kill();
                    process.ended().await;
                }
                Record::remove(&run_dir, &record.name);
            });
        }
    }
    while leaving.join_next().await.is_some() {}
    Ok(adopted)
}

/// Keeps one worker running.
struct Keeper {
    plan: WorkerPlan,
    run_dir: RunDir,
    ready: watch::Receiver<BTreeSet<u32>>,
    settled: watch::Sender<BTreeSet<String>>,
    orders: watch::Receiver<Order>,
    patience: Patience,
    output: Output,
}

/// How one life of a worker ended.
struct Death {
    ending: Ending,
    pid: u32,
    /// How long it was ready; `None` where it never was.
    ready: Option<Duration>,
    log: WorkerLog,
}

impl Keeper {
    async fn keep(mut self, mut adopted: Option<WorkerProcess>) -> Result<(), Fault> {
        let mut backoff = Backoff::default();
        let mut was_ready = adopted.is_some();
        let mut tries = 0;
        loop {
            let (process, log) = match adopted.take() {
                Some(process) => (process, WorkerLog::of_running(self.log_path())),
                None => self.start().map_err(|error| {
                    let program = &self.plan.command[0];
                    Fault::failed(format!("cannot start worker {} ({program}): {error}", self.plan.name))
                })?,
            };
            let lived = self.live(process, log, was_ready).await;
            Record::remove(&self.run_dir, &self.plan.name);
            let Some(death) = lived? else { return Ok(()) };
            was_ready |= death.ready.is_some();
            if was_ready && matches!(death.ending, Ending::Code(0)) {
                self.say("has left as it was told, and is not started again");
                return Ok(());
            }
            tries += 1;
            let killed = matches!(death.ending, Ending::Signal(_) | Ending::Unknown);
            if !was_ready && (!killed || tries >= START_TRIES) {
                return Err(self.never_ready(&death));
            }
            let wait = backoff.after(death.ready.unwrap_or_default());
            self.report(&death, wait);
            tokio::select! {
                () = sleep(wait) => {}
                () = ordered(&mut self.orders, Order::Leave) => return Ok(()),
            }
        }
    }

    fn log_path(&self) -> std::path::PathBuf {
        self.run_dir.join(format!("logs/{}.log", self.plan.name))
    }

    fn start(&self) -> io::Result<(WorkerProcess, WorkerLog)> {
        let (log, file) = WorkerLog::open(self.log_path())?;
        let mut command = Command::new(&self.plan.command[0]);
        command
            .args(&self.plan.command[1..])
            .envs(self.plan.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file);
        let process = WorkerProcess::spawn(&mut command)?;
        let record = Record::new(&self.plan.name, process.process(), self.plan.command.clone());
        if let Err(error) = record.write(&self.run_dir) {
            process.kill();
            return Err(io::Error::other(error));
        }
        self.say(format_args!("starts (pid {})", process.process().pid));
        Ok((process, log))
    }

    /// One life, until the process has ended by itself (`Some`) or was stopped (`None`).
    async fn live(
        &mut self,
        mut process: WorkerProcess,
        log: WorkerLog,
        was_ready: bool,
    ) -> Result<Option<Death>, Fault> {
        let pid = process.process().pid;
        let began = Instant::now();
        let mut ready = None;
        let too_long = sleep(self.patience.start);
        tokio::pin!(too_long);
        let ending = loop {
            tokio::select! {
                ending = process.ended() => break ending,
                () = ordered(&mut self.orders, Order::Leave) => {
                    self.stop(process).await;
                    return Ok(None);
                }
                () = listed(&mut self.ready, pid), if ready.is_none() => {
                    ready = Some(Instant::now());
                    self.say(format_args!("ready after {}", duration(began.elapsed())));
                    self.settled.send_modify(|names| _ = names.insert(self.plan.name.clone()));
                }
                () = &mut too_long, if ready.is_none() && !was_ready => {
                    self.stop(process).await;
                    let text = format!(
                        "worker {} was not ready after {}; --start-timeout gives it more time.{}",
                        self.plan.name,
                        duration(self.patience.start),
                        self.last_lines(&log)
                    );
                    return Err(Fault::new(Exit::Deadline, text));
                }
            }
        };
        Ok(Some(Death {
            ending,
            pid,
            ready: ready.map(|since| since.elapsed()),
            log,
        }))
    }

    async fn stop(&mut self, mut process: WorkerProcess) {
        if *self.orders.borrow() < Order::Die {
            process.terminate();
            tokio::select! {
                _ = process.ended() => return,
                () = sleep(self.patience.stop) => {
                    self.output.warn(format_args!(
                        "worker {} has not left within {}: ending it",
                        self.plan.name,
                        duration(self.patience.stop)
                    ));
                }
                () = ordered(&mut self.orders, Order::Die) => {}
            }
        }
        process.kill();
        process.ended().await;
    }

    fn never_ready(&self, death: &Death) -> Fault {
        Fault::failed(format!(
            "worker {} {} before it was ready.{}",
            self.plan.name,
            death.ending,
            self.last_lines(&death.log)
        ))
    }

    fn report(&self, death: &Death, wait: Duration) {
        let lived = death
            .ready
            .map_or_else(String::new, |ready| format!(" after {} of service", duration(ready)));
        self.output.warn(format_args!(
            "worker {} (pid {}) {}{lived}; starting it again in {}.{}",
            self.plan.name,
            death.pid,
            death.ending,
            duration(wait),
            self.last_lines(&death.log)
        ));
    }

    /// The end of the log, as the continuation of a message.
    fn last_lines(&self, log: &WorkerLog) -> String {
        let lines = log.tail(TAIL);
        if lines.is_empty() {
            return format!(" Its log is empty: {}", log.path().display());
        }
        let lines = lines.join("\n  | ");
        format!(" The end of its log, {}:\n  | {lines}", log.path().display())
    }

    fn say(&self, line: impl std::fmt::Display) {
        self.output.topic("worker", format_args!("{} {line}", self.plan.name));
    }
}

/// Waits for an order that is at least this one; a supervisor that is gone orders everything.
async fn ordered(orders: &mut watch::Receiver<Order>, least: Order) {
    let _ = orders.wait_for(|order| *order >= least).await;
}

/// Waits until the server lists this pid; for ever where nobody looks any more.
async fn listed(ready: &mut watch::Receiver<BTreeSet<u32>>, pid: u32) {
    if ready.wait_for(|pids| pids.contains(&pid)).await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests;
