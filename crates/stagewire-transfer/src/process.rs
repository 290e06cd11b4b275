use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use stagewire_core::ProcessRef;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::readiness;

/// Watches one process through a pidfd: its death shows at once, and reuse of its pid cannot deceive.
pub struct ProcessWatch {
    process: ProcessRef,
    pidfd: AsyncFd<OwnedFd>,
}

impl ProcessWatch {
    /// Watches `process`. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] where no such process runs any more, else what the system says.
    pub fn open(process: ProcessRef) -> io::Result<Self> {
        let gone = || io::Error::new(io::ErrorKind::NotFound, format!("process {} is gone", process.pid));
        let pid = i32::try_from(process.pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or_else(gone)?;
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Err(rustix::io::Errno::SRCH) => return Err(gone()),
            opened => opened?,
        };
        // The descriptor names whoever had the pid just now; the start time tells whether that is who is meant.
        let started = start_ticks(process.pid).map_err(|_| gone())?;
        let pidfd = readiness::watch(pidfd, Interest::READABLE)?;
        let watch = Self { process, pidfd };
        if started != process.started || !watch.is_alive() {
            return Err(gone());
        }
        Ok(watch)
    }

    /// The process.
    pub fn process(&self) -> ProcessRef {
        self.process
    }

    /// Whether it runs.
    pub fn is_alive(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.pidfd.as_fd(), PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        !matches!(poll(&mut fds, Some(&now)), Ok(ready) if ready > 0)
    }

    /// Resolves when it has ended.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn died(&self) {
        // An error would mean that the runtime's own poller is broken; then nothing is known of the process.
        if self.pidfd.readable().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Ends it at once, unless it has ended.
    ///
    /// # Errors
    /// Where it belongs to somebody else.
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl fmt::Debug for ProcessWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ProcessWatch").field(&self.process).finish()
    }
}

/// This process.
///
/// # Errors
/// Where `/proc` is not mounted.
pub fn this_process() -> io::Result<ProcessRef> {
    let pid = std::process::id();
    Ok(ProcessRef {
        pid,
        started: start_ticks(pid)?,
    })
}

fn start_ticks(pid: u32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_start_ticks(&stat).ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat has no start time")))
}

/// Field 22. The name in field 2 may hold spaces and brackets, so that fields are counted from its last bracket.
fn parse_start_ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(19)?.parse().ok()
}

/// Tells hosts and pid namespaces apart: the boot id, and the namespace in which a pid means something.
pub(crate) fn host_id() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}

/// Has every descriptor of this process but stdin, stdout and stderr closed when it becomes another program.
///
/// # Errors
/// The system's, such as `ENOSYS` before Linux 5.11.
pub fn close_on_exec() -> io::Result<()> {
    // SAFETY: it sets a flag of descriptors, which all stay open.
    let failed = unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if failed == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_program_cannot_shift_the_fields() {
        let fields = (3..=52).map(|field| field.to_string()).collect::<Vec<_>>().join(" ");
        assert_eq!(parse_start_ticks(&format!("7 (a) b) c) {fields}")), Some(22));
        assert_eq!(parse_start_ticks("7 (a"), None);
    }

    #[tokio::test]
    async fn another_life_of_a_pid_is_another_process() {
        let me = this_process().expect("/proc");
        assert!(ProcessWatch::open(me).expect("alive").is_alive());
        let earlier = ProcessRef {
            started: me.started - 1,
            ..me
        };
        let error = ProcessWatch::open(earlier).expect_err("not this life");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[tokio::test]
    async fn a_death_is_noticed_also_before_anybody_has_waited_for_the_process() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("started");
        let (pid, started) = (child.id(), start_ticks(child.id()).expect("it runs"));
        let process = ProcessRef { pid, started };
        let watch = ProcessWatch::open(process).expect("alive");
        watch.kill().expect("ours");
        tokio::time::timeout(std::time::Duration::from_secs(5), watch.died())
            .await
            .expect("noticed");
        assert!(!watch.is_alive());
        let error = ProcessWatch::open(process).expect_err("a zombie is dead");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        child.wait().expect("it ended");
        watch.kill().expect("as good as killed");
    }
}
