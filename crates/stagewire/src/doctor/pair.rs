//! Hands bytes from one process to another by each transport, as workers do.
//!
//! Two children of this process take part, and none is the other's ancestor: what the kernel lets a process do to its
//! own children says nothing about siblings. A connection proves that the memfd is sealed; every byte is compared.

mod peer;

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

use super::check::Check;
use super::root::Root;
use super::status_file::{CAP_SYS_PTRACE, Rights};
use crate::output::bytes;

pub(crate) use peer::{PeerArgs, peer};

pub(super) const NAMES: &[&str] = &["shm", "cma", "tcp", "mooncake"];

/// What goes from process to process.
const LEN: u64 = 1 << 20;

/// What the reading process found out about one transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Outcome {
    transport: String,
    /// What carries it, where that is not part of this program.
    pub(super) by: Option<String>,
    pub(super) error: Option<String>,
}

pub(super) async fn try_out(root: &Root) -> Vec<Check> {
    let outcomes = hand_over(NAMES, None).await;
    let outcome = |name: &str| match &outcomes {
        Ok(outcomes) => match outcomes.iter().find(|outcome| outcome.transport == name) {
            Some(outcome) => outcome.error.clone().map_or(Ok(()), Err),
            None => Err("the reading process did not try it".to_owned()),
        },
        Err(error) => Err(format!("{error:#}")),
    };
    vec![
        shm(outcome("shm")),
        cma(root, outcome("cma")),
        over_loopback("tcp", "pulled over loopback", outcome("tcp")),
        over_loopback("mooncake", "pulled over Mooncake's wire protocol", outcome("mooncake")),
    ]
}

/// Has one process read from another by these transports. With `environment`, a Python environment is active for both.
pub(super) async fn hand_over(names: &[&str], environment: Option<&Path>) -> anyhow::Result<Vec<Outcome>> {
    let dir = tempfile::Builder::new().prefix("stagewire-doctor-").tempdir()?;
    let peer = |reads| spawn(dir.path(), names, environment, reads);
    let mut owner = peer(false)?;
    let stdout = owner.stdout.take().context("no pipe")?;
    let mut offer = String::new();
    BufReader::new(stdout).read_line(&mut offer).await?;
    if offer.is_empty() {
        bail!("the offering process {}", last_words(&mut owner).await);
    }
    let mut reader = peer(true)?;
    let mut orders = reader.stdin.take().context("no pipe")?;
    orders
        .write_all(offer.as_bytes())
        .await
        .context("the reading process is gone")?;
    drop(orders);
    let mut answer = String::new();
    let mut stdout = reader.stdout.take().context("no pipe")?;
    stdout.read_to_string(&mut answer).await?;
    let Ok(outcomes) = serde_json::from_str(&answer) else {
        bail!("the reading process {}", last_words(&mut reader).await);
    };
    // It ends with its stdin, and removes its socket.
    drop(owner.stdin.take());
    owner.wait().await?;
    Ok(outcomes)
}

fn spawn(dir: &Path, names: &[&str], environment: Option<&Path>, reads: bool) -> anyhow::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg("doctor-peer").arg("--dir").arg(dir);
    command.arg("--transports").arg(names.join(","));
    if reads {
        command.arg("--reads");
    }
    if let Some(environment) = environment {
        command.env("VIRTUAL_ENV", environment);
    }
    let (stdin, stdout, stderr) = (Stdio::piped(), Stdio::piped(), Stdio::piped());
    command.stdin(stdin).stdout(stdout).stderr(stderr).kill_on_drop(true);
    command.spawn().context("cannot start a second process")
}

/// How a process failed, and what it said last.
async fn last_words(child: &mut Child) -> String {
    let mut said = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        // Without them there is less to say.
        let _ = stderr.read_to_string(&mut said).await;
    }
    let ended = child
        .wait()
        .await
        .map_or_else(|error| error.to_string(), |status| status.to_string());
    let last = said.lines().rev().find(|line| !line.trim().is_empty());
    let last = last.map_or_else(String::new, |line| format!(": {}", line.trim_start_matches("error: ")));
    format!("ended with {ended}{last}")
}

fn done(name: &'static str, how: &str) -> Check {
    let value = format!("{} {how}, every byte as sent", bytes(LEN));
    Check::ok(name, value).with("usable", true).with("bytes", LEN)
}

fn shm(outcome: Result<(), String>) -> Check {
    match outcome {
        Ok(()) => done("shm", "mapped from another process's sealed memfd"),
        Err(why) => Check::missing(
            "shm",
            "does not work",
            why,
            "look at memory, open-files and container; allow memfd_create, pidfd_open and Unix sockets. Payloads go by tcp else",
        )
        .with("usable", false),
    }
}

/// A transport that needs nothing but TCP.
fn over_loopback(name: &'static str, how: &str, outcome: Result<(), String>) -> Check {
    match outcome {
        Ok(()) => done(name, how),
        Err(why) => {
            let advice = "allow TCP connections over the loopback interface, and bring it up: ip link set lo up";
            Check::missing(name, "does not work", why, advice).with("usable", false)
        }
    }
}

fn cma(root: &Root, outcome: Result<(), String>) -> Check {
    let scope = root.text("/proc/sys/kernel/yama/ptrace_scope");
    let check = match outcome {
        Ok(()) => done("cma", "read from another process with process_vm_readv"),
        Err(why) => {
            Check::missing("cma", "does not work", why, cma_advice(root, scope.as_deref())).with("usable", false)
        }
    };
    check.with("ptrace_scope", scope.and_then(|scope| scope.parse::<u32>().ok()))
}

/// What would allow it, from what forbids it as far as that shows. Without it a tensor is copied once into shared memory.
fn cma_advice(root: &Root, scope: Option<&str>) -> String {
    let otherwise = "or nothing: tensors are then copied once into shared memory";
    let rights = Rights::of(root);
    match scope {
        Some("3") => format!("ptrace_scope 3 stays until the next boot; boot with another, {otherwise}"),
        Some("1" | "2") if rights.has(CAP_SYS_PTRACE) != Some(true) => format!(
            "as root: sysctl kernel.yama.ptrace_scope=0, or give CAP_SYS_PTRACE (docker run --cap-add SYS_PTRACE), {otherwise}"
        ),
        _ if rights.filtered() => format!(
            "let the seccomp profile pass process_vm_readv and pidfd_open, as docker's does with --cap-add SYS_PTRACE, {otherwise}"
        ),
        _ => format!("run both processes as one user in one PID namespace, {otherwise}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::check::State;
    use crate::doctor::root::Fixture;

    const YAMA: &str = "/proc/sys/kernel/yama/ptrace_scope";
    const STATUS: &str = "/proc/self/status";

    fn refused(files: &[(&str, &str)]) -> Check {
        cma(&Fixture::new(files).root(), Err("process_vm_readv fails".to_owned()))
    }

    #[test]
    fn what_forbids_cma_says_what_allows_it() {
        let advice = |files: &[(&str, &str)]| refused(files).advice.unwrap();
        let no_rights = (STATUS, "CapEff:\t0000000000000000\nSeccomp:\t0\n");
        assert!(advice(&[(YAMA, "1\n"), no_rights]).contains("ptrace_scope=0"));
        assert!(advice(&[(YAMA, "3\n")]).contains("next boot"));
        assert!(advice(&[(YAMA, "0\n"), (STATUS, "Seccomp:\t2\n")]).contains("seccomp profile"));
        assert!(advice(&[no_rights]).contains("PID namespace"));
        let check = refused(&[(YAMA, "1\n")]);
        assert_eq!((check.state, &check.data["ptrace_scope"]), (State::Missing, &1.into()));
        assert_eq!(check.data["usable"], false);
    }

    #[test]
    fn what_worked_is_ok_whatever_the_settings_say() {
        let fixture = Fixture::new(&[(YAMA, "1\n")]);
        assert_eq!(cma(&fixture.root(), Ok(())).state, State::Ok);
        assert_eq!(shm(Ok(())).data["usable"], true);
        assert_eq!(shm(Err("no memfd".to_owned())).state, State::Missing);
        let refused = over_loopback("mooncake", "pulled", Err("refused".to_owned()));
        assert_eq!(
            (refused.state, refused.why.as_deref()),
            (State::Missing, Some("refused"))
        );
    }
}
