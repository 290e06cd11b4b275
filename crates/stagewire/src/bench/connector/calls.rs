//! System calls of this process, counted by `strace`.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

/// How long `strace` may take to attach and to sum up.
const WITHIN: Duration = Duration::from_secs(5);

/// A count under way.
pub(super) struct Count {
    strace: Child,
    summary: PathBuf,
    _dir: tempfile::TempDir,
}

impl Count {
    /// Begins to count, or says why that cannot be done here.
    pub(super) async fn begin() -> Result<Self, String> {
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let summary = dir.path().join("summary");
        let strace = Command::new("strace")
            .args(["-f", "-c", "-o"])
            .arg(&summary)
            .args(["-p", &std::process::id().to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| format!("strace is not there: {error}"))?;
        let counting = Self {
            strace,
            summary,
            _dir: dir,
        };
        let attached = async {
            while !all_traced() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(WITHIN, attached)
            .await
            .map_err(|_| "strace cannot attach here".to_owned())?;
        Ok(counting)
    }

    /// Calls since the begin.
    pub(super) async fn end(mut self) -> Result<u64, String> {
        let pid = self.strace.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let pid = pid.ok_or_else(|| "strace has ended".to_owned())?;
        kill_process(pid, Signal::INT).map_err(|error| error.to_string())?;
        let ended = tokio::time::timeout(WITHIN, self.strace.wait()).await;
        ended
            .map_err(|_| "strace does not end".to_owned())?
            .map_err(|error| error.to_string())?;
        let text = std::fs::read_to_string(&self.summary).map_err(|error| error.to_string())?;
        total(&text).ok_or_else(|| "the summary of strace was not understood".to_owned())
    }
}

/// Whether every thread of this process has a tracer.
fn all_traced() -> bool {
    let traced = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
        tracer.is_some_and(|tracer| tracer.trim() != "0")
    };
    std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.flatten().all(traced))
}

/// The calls in the last line of `strace -c`: `100.00 0.001 7 123 4 total`.
fn total(summary: &str) -> Option<u64> {
    let line = summary.lines().rev().find(|line| line.trim_end().ends_with("total"))?;
    line.split_whitespace().nth(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_of_a_summary_is_found() {
        let summary = "\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 90.00    0.000900           9       100           read
 10.00    0.000100           4        23         3 futex
------ ----------- ----------- --------- --------- ----------------
100.00    0.001000           8       123         3 total
";
        assert_eq!(total(summary), Some(123));
        assert_eq!(total("strace: attach failed"), None);
    }
}
