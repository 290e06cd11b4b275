//! What the Python of the workers has: Stagewire's package, and the wheel of Mooncake's engine.
//!
//! Each package is imported in a process of its own: one that hangs or crashes says so, and
//! harms nothing else.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::process::Command;

use super::Setting;
use super::check::{Check, State};

const LOOK: &str = include_str!("python/look.py");

/// What `look.py` prints.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Answer {
    /// Version of Python.
    python: String,
    program: String,
    found: Option<Distribution>,
    /// Why it cannot be used.
    error: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Distribution {
    distribution: String,
    version: String,
}

const NAME: &str = "mooncake-engine";
/// The wheels' names begin so.
const PREFIX: &str = "mooncake-transfer-engine";
const MODULE: &str = "mooncake.engine";
const INSTALL: &str = "pip install mooncake-transfer-engine-non-cuda, or mooncake-transfer-engine where there is CUDA";

/// Whether the workers' Python runs and has the package.
pub(super) async fn stagewire(setting: Arc<Setting>) -> Vec<Check> {
    const NAME: &str = "python";
    let shown = setting.python.to_string();
    let answer = match ask(&setting.python.program, "stagewire", "stagewire.worker").await {
        Ok(answer) => answer,
        Err(why) => {
            let advice = "name a Python with --python, or make a virtual environment beside the pipeline";
            return vec![Check::missing(NAME, shown, why, advice)];
        }
    };
    let version = answer.found.as_ref().map(|found| found.version.clone());
    let package = version
        .as_ref()
        .map_or_else(String::new, |version| format!(", stagewire {version}"));
    let check = Check::ok(NAME, format!("{}{package}, {shown}", answer.python))
        .with("version", answer.python)
        .with("program", answer.program)
        .with("package", version);
    vec![match answer.error {
        None => check,
        Some(error) => check.but(
            State::Missing,
            format!("workers cannot import the package stagewire: {error}"),
            "in Stagewire's own folder `make setup`; elsewhere install the package into that Python, or name another \
             with --python",
        ),
    }]
}

pub(super) async fn mooncake_engine(setting: Arc<Setting>) -> Vec<Check> {
    let workers = ask(&setting.python.program, PREFIX, MODULE);
    let peers = async {
        let program = setting.peers.as_ref()?.join("bin/python");
        Some(ask(&program, PREFIX, MODULE).await)
    };
    let (workers, peers) = futures::join!(workers, peers);
    vec![judge(workers, peers)]
}

fn judge(workers: Result<Answer, String>, peers: Option<Result<Answer, String>>) -> Check {
    let data = |answer: &Result<Answer, String>| match answer {
        Ok(answer) => serde_json::to_value(answer).unwrap_or_default(),
        Err(why) => serde_json::json!({"error": why}),
    };
    let beside = peers.as_ref().and_then(|peers| {
        let Answer { found, error, .. } = peers.as_ref().ok()?;
        let Distribution { distribution, version } = found.as_ref()?;
        let broken = error
            .as_ref()
            .map_or_else(String::new, |error| format!(", which does not load: {error}"));
        Some(format!("the peers' environment has {distribution} {version}{broken}"))
    });
    let check = match &workers {
        Err(why) => Check::unknown(NAME, format!("the workers' Python was not asked: {why}"), "see python"),
        Ok(Answer {
            found: Some(found),
            error,
            ..
        }) => {
            let value = format!("{} ({})", found.version, found.distribution);
            match error {
                None => Check::ok(NAME, value),
                Some(error) => {
                    let why = format!("it is installed but does not load: {error}");
                    Check::missing(NAME, value, why, load_advice(error))
                }
            }
        }
        Ok(Answer { program, .. }) => {
            let why = format!("{program} has no {PREFIX}*; only Mooncake's own engine needs the wheel");
            match &beside {
                Some(beside) => {
                    let advice = format!("nothing for the benchmarks; for workers {INSTALL}");
                    Check::note(NAME, format!("not for workers; {beside}"), why, advice)
                }
                None => Check::missing(NAME, "not installed", why, format!("nothing, or {INSTALL}")),
            }
        }
    };
    check
        .with("workers", data(&workers))
        .with("peers", peers.as_ref().map_or(serde_json::Value::Null, data))
}

/// What to do about a library that does not load.
fn load_advice(error: &str) -> String {
    // The packages of Debian that the wheels need.
    let packages = [
        ("libibverbs", "libibverbs1"),
        ("librdmacm", "librdmacm1"),
        ("libnuma", "libnuma1"),
        ("libcurl", "libcurl4"),
    ];
    match packages.into_iter().find(|(library, _)| error.contains(library)) {
        Some((_, package)) => format!("install the library: apt-get install {package}"),
        None => "install what it lacks, or another version".to_owned(),
    }
}

/// Runs `look.py`. The process is killed with the future.
async fn ask(program: &Path, prefix: &str, module: &str) -> Result<Answer, String> {
    let mut command = Command::new(program);
    command.args(["-c", LOOK, prefix, module]);
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = command
        .output()
        .await
        .map_err(|error| format!("{} does not run: {error}", program.display()))?;
    // What is imported may print, too.
    let stdout = String::from_utf8_lossy(&output.stdout);
    if let Some(answer) = stdout
        .lines()
        .next_back()
        .and_then(|line| serde_json::from_str(line).ok())
    {
        return Ok(answer);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().rev().find(|line| !line.trim().is_empty());
    let last = last.map_or_else(String::new, |line| format!(": {line}"));
    Err(format!(
        "{} imported {module} and ended with {}{last}",
        program.display(),
        output.status
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(found: bool, error: Option<&str>) -> Answer {
        let found = found.then(|| Distribution {
            distribution: "mooncake-transfer-engine-non-cuda".to_owned(),
            version: "0.3.13".to_owned(),
        });
        Answer {
            python: "3.11.2".to_owned(),
            program: "/venv/bin/python".to_owned(),
            found,
            error: error.map(str::to_owned),
        }
    }

    #[test]
    fn a_wheel_counts_where_workers_can_load_it() {
        let found = judge(Ok(answer(true, None)), None);
        assert_eq!(
            (found.state, found.value.as_str()),
            (State::Ok, "0.3.13 (mooncake-transfer-engine-non-cuda)")
        );
        let absent = answer(false, Some("ModuleNotFoundError: No module named 'mooncake'"));
        let none = judge(Ok(absent.clone()), Some(Ok(absent.clone())));
        assert_eq!((none.state, none.value.as_str()), (State::Missing, "not installed"));
        let beside = judge(Ok(absent.clone()), Some(Ok(answer(true, None))));
        assert_eq!(beside.state, State::Note);
        assert!(beside.value.contains("the peers' environment has"), "{}", beside.value);
        let error = "ImportError: libibverbs.so.1: cannot open shared object file";
        let broken = judge(Ok(answer(true, Some(error))), None);
        assert_eq!(broken.state, State::Missing);
        assert!(broken.advice.unwrap().contains("libibverbs1"));
        let unasked = judge(Err("no python".to_owned()), None);
        assert_eq!(unasked.state, State::Unknown);
    }

    /// A program in place of Python. Another process writes it: a file that is open for writing here could not be run
    /// while another test forks.
    fn program(dir: &Path, script: &str) -> std::path::PathBuf {
        let path = dir.join("python");
        let made = std::process::Command::new("sh")
            .args(["-c", "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$0\" && chmod 755 \"$0\""])
            .arg(&path)
            .arg(script)
            .status()
            .unwrap();
        assert!(made.success());
        path
    }

    #[tokio::test]
    async fn the_last_line_is_the_answer_and_a_crash_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let expected = answer(true, None);
        let json = serde_json::to_string(&expected).unwrap();
        let noisy = program(dir.path(), &format!("echo noise; echo '{json}'"));
        assert_eq!(ask(&noisy, "x", "y").await, Ok(expected));
        let crashing = program(dir.path(), "echo 'first' >&2; echo 'the reason' >&2; kill -SEGV $$");
        let why = ask(&crashing, "x", "module").await.unwrap_err();
        assert!(why.contains("imported module") && why.contains("signal: 11"), "{why}");
        assert!(why.ends_with("the reason"), "{why}");
        let absent = ask(Path::new("/nowhere/python"), "x", "y").await.unwrap_err();
        assert!(absent.starts_with("/nowhere/python does not run: "), "{absent}");
    }
}
