use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal};
use stagewire_core::ProcessRef;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A worker process, started here or by an earlier `up`. Signals go through its pidfd, so that they never reach a
/// process that got the same pid later.
#[derive(Debug)]
pub(super) struct WorkerProcess {
    process: ProcessRef,
    pidfd: AsyncFd<OwnedFd>,
    /// Set where this process is its parent.
    child: Option<Child>,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    Code(i32),
    Signal(i32),
    /// Not a child of ours: the kernel tells only that it ended.
    Unknown,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "ended with status {code}"),
            Self::Signal(9) => f.write_str("was killed (signal 9; `dmesg` tells whether memory ran out)"),
            Self::Signal(signal) => write!(f, "was killed by signal {signal}"),
            Self::Unknown => f.write_str("ended"),
        }
    }
}

impl WorkerProcess {
    /// Starts `command` as the leader of a process group of its own, so that Ctrl-C reaches only `up`.
    pub(super) fn spawn(command: &mut Command) -> io::Result<Self> {
        let mut child = command.process_group(0).spawn()?;
        let watched = Self::watch(child.id());
        match watched {
            Ok((process, pidfd)) => Ok(Self {
                process,
                pidfd,
                child: Some(child),
            }),
            Err(error) => {
                child.kill()?;
                child.wait()?;
                Err(error)
            }
        }
    }

    /// Takes over a process that an earlier `up` started; `None` where it no longer lives.
    pub(super) fn adopt(recorded: ProcessRef) -> io::Result<Option<Self>> {
        let Ok((process, pidfd)) = Self::watch(recorded.pid) else {
            return Ok(None);
        };
        // The pidfd is open: if the start time fits now, it is that process for as long as the pidfd is held.
        Ok((process == recorded).then_some(Self {
            process,
            pidfd,
            child: None,
        }))
    }

    fn watch(pid: u32) -> io::Result<(ProcessRef, AsyncFd<OwnedFd>)> {
        let pidfd = pidfd_open(pid_of(pid)?, PidfdFlags::NONBLOCK)?;
        let started = started(pid)?;
        #[expect(
            deprecated,
            reason = "the new name asks in `unsafe` for what an OwnedFd gives: it stays open and the same"
        )]
        let pidfd = AsyncFd::with_interest(pidfd, Interest::READABLE)?;
        Ok((ProcessRef { pid, started }, pidfd))
    }

    pub(super) fn process(&self) -> ProcessRef {
        self.process
    }

    /// Waits until the process has ended and ends what it left behind in its group.
    ///
    /// # Cancel safety
    /// May be dropped and called again until it has returned once.
    pub(super) async fn ended(&mut self) -> Ending {
        // A pidfd becomes readable when the process ends, and stays so.
        if self.pidfd.readable().await.is_err() {
            return Ending::Unknown;
        }
        // Before the child is reaped its pid, and so its group's number, cannot be given to anyone else. A process
        // that is not our child may be reaped by now: its group is left alone.
        let Some(child) = &mut self.child else {
            return Ending::Unknown;
        };
        signal_group(self.process.pid, Signal::KILL);
        child.wait().map_or(Ending::Unknown, Ending::from)
    }

    /// Asks the process to finish what runs and leave.
    pub(super) fn terminate(&self) {
        // The only failure is that it has ended, which `ended` tells.
        let _ = pidfd_send_signal(self.pidfd.get_ref(), Signal::TERM);
    }

    /// Ends the process and its group at once.
    pub(super) fn kill(&self) {
        if self.child.is_some() || started(self.process.pid).ok() == Some(self.process.started) {
            signal_group(self.process.pid, Signal::KILL);
        }
        let _ = pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL);
    }
}

impl From<ExitStatus> for Ending {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Unknown,
        }
    }
}

fn signal_group(pid: u32, signal: Signal) {
    if let Ok(pid) = pid_of(pid) {
        // An empty group is the usual case.
        let _ = kill_process_group(pid, signal);
    }
}

fn pid_of(pid: u32) -> io::Result<Pid> {
    i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, format!("{pid} is not a pid")))
}

/// When a process started, in clock ticks since boot: field 22 of its `stat`.
fn started(pid: u32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the program's name in parentheses and may hold anything; the 20th after it is meant.
    let fields = stat.rsplit_once(')').map(|(_, fields)| fields);
    fields
        .and_then(|fields| fields.split_whitespace().nth(19)?.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("cannot read /proc/{pid}/stat")))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    async fn ending(process: &mut WorkerProcess) -> Ending {
        let ended = tokio::time::timeout(Duration::from_secs(10), process.ended());
        ended.await.expect("the process did not end")
    }

    #[tokio::test]
    async fn the_ending_tells_code_and_signal() {
        let mut process = WorkerProcess::spawn(&mut shell("exit 3")).unwrap();
        assert_eq!(ending(&mut process).await, Ending::Code(3));
        let mut process = WorkerProcess::spawn(&mut shell("sleep 60")).unwrap();
        process.terminate();
        assert_eq!(ending(&mut process).await, Ending::Signal(15));
    }

    #[tokio::test]
    async fn what_a_worker_started_ends_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let script = format!("sleep 60 & echo $! > {}; exit 0", file.display());
        let mut process = WorkerProcess::spawn(&mut shell(&script)).unwrap();
        assert_eq!(ending(&mut process).await, Ending::Code(0));
        let pid: u32 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        // It has been killed and is init's to reap: until then it shows as a zombie.
        let gone = || match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat
                .rsplit_once(')')
                .is_some_and(|(_, rest)| rest.trim_start().starts_with('Z')),
            Err(_) => true,
        };
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while !gone() {
            assert!(std::time::Instant::now() < deadline, "process {pid} lives on");
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_recorded_process_is_adopted_only_if_it_is_the_same() {
        let mut process = WorkerProcess::spawn(&mut shell("sleep 60")).unwrap();
        let recorded = process.process();
        let other = ProcessRef {
            started: recorded.started + 1,
            ..recorded
        };
        assert!(WorkerProcess::adopt(other).unwrap().is_none());
        let mut adopted = WorkerProcess::adopt(recorded).unwrap().expect("it lives");
        adopted.kill();
        assert_eq!(ending(&mut adopted).await, Ending::Unknown);
        assert_eq!(ending(&mut process).await, Ending::Signal(9));
        assert!(WorkerProcess::adopt(recorded).unwrap().is_none());
    }
}
