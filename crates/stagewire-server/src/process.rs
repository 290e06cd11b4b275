//! Processes of this host: which one is meant, and whether it lives.

use std::io;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use stagewire_core::ProcessRef;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// When the process started: field 22 of `/proc/PID/stat`, in clock ticks since boot. `None` where it is gone.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, field 2, may hold anything, also parentheses: what follows the last one is numbers.
    let rest = stat.rsplit_once(')')?.1;
    let mut fields = rest.split_ascii_whitespace();
    // A zombie has ended: nothing of it runs any more.
    if fields.next()? == "Z" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// This process.
pub(crate) fn current() -> ProcessRef {
    let pid = std::process::id();
    ProcessRef {
        pid,
        started: started(pid).unwrap_or_default(),
    }
}

/// Whether this very process lives, not another one under the same pid.
pub(crate) fn is_alive(process: ProcessRef) -> bool {
    started(process.pid) == Some(process.started)
}

/// Resolves when the process has died, at once where it is dead already.
///
/// # Errors
/// Where the kernel gives no descriptor for it: another user's process, or no descriptors left.
pub(crate) async fn died(process: ProcessRef) -> io::Result<()> {
    let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
    let Some(pid) = pid else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let fd = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    // Checked after the descriptor is held: from here on the pid cannot come to mean another process.
    if !is_alive(process) {
        return Ok(());
    }
    #[expect(
        deprecated,
        reason = "the new name asks in `unsafe` for what an OwnedFd gives: it stays open and the same"
    )]
    let fd = AsyncFd::with_interest(fd, Interest::READABLE)?;
    fd.readable().await?.retain_ready();
    Ok(())
}

/// Ends the process at once, unless it has ended.
///
/// # Errors
/// Where it belongs to somebody else.
pub(crate) fn kill(process: ProcessRef) -> io::Result<()> {
    let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    let fd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    if !is_alive(process) {
        return Ok(());
    }
    match pidfd_send_signal(fd, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_death_is_noticed() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = ProcessRef {
            pid: child.id(),
            started: started(child.id()).unwrap(),
        };
        assert!(is_alive(process));
        let watch = tokio::spawn(died(process));
        kill(process).unwrap();
        tokio::time::timeout(Duration::from_secs(5), watch)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
        child.wait().unwrap();
        assert!(!is_alive(process));
        died(process).await.unwrap();
        kill(process).unwrap();
    }

    #[tokio::test]
    async fn another_process_under_the_same_pid_is_not_meant() {
        let mut other = current();
        assert!(is_alive(other));
        other.started += 1;
        assert!(!is_alive(other));
        died(other).await.unwrap();
        kill(other).unwrap();
    }
}
