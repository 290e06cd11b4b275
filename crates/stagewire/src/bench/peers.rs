//! Processes that drive the libraries of others, from their public wheels.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

const SCRIPT: &str = include_str!("peers.py");

/// Longest wait for one answer; engines need some seconds to start.
const ANSWER: Duration = Duration::from_secs(60);

/// The interpreter of the environment that `make bench-peers` makes.
pub(super) fn python() -> Result<PathBuf, String> {
    let given = env::var_os("STAGEWIRE_PEERS").map(PathBuf::from);
    let python = |environment: &Path| environment.join("bin/python");
    let beside = [env::current_dir().ok(), env::current_exe().ok()];
    let found = match &given {
        Some(environment) => Some(python(environment)).filter(|python| python.exists()),
        None => beside
            .iter()
            .flatten()
            .flat_map(|start| start.ancestors())
            .map(|folder| python(&folder.join(".peers")))
            .find(|python| python.exists()),
    };
    found.ok_or_else(|| match given {
        Some(environment) => format!("STAGEWIRE_PEERS is {}, which has no bin/python", environment.display()),
        None => "no .peers here: run `make bench-peers`, or say in STAGEWIRE_PEERS where it is".to_owned(),
    })
}

/// One process of one library.
#[derive(Debug)]
pub(super) struct Driver {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Driver {
    /// Starts a process; the inner error is why the library does not work here.
    pub(super) async fn spawn(
        python: &Path,
        library: &str,
        arguments: &[&str],
    ) -> anyhow::Result<Result<Self, String>> {
        let mut child = Command::new(python)
            .args(["-c", SCRIPT, library])
            .args(arguments)
            .env("GLOG_minloglevel", "2")
            .env("NIXL_LOG_LEVEL", "ERROR")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", python.display()))?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        let mut driver = Self {
            orders: orders.context("no pipe")?,
            answers: BufReader::new(answers.context("no pipe")?).lines(),
            child,
        };
        Ok(driver
            .answer()
            .await
            .map(|_| driver)
            .map_err(|error| format!("{error:#}")))
    }

    pub(super) async fn order(&mut self, order: &Value) -> anyhow::Result<Value> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        self.orders.write_all(&line).await.context("the process is gone")?;
        self.answer().await
    }

    async fn answer(&mut self) -> anyhow::Result<Value> {
        let line = tokio::time::timeout(ANSWER, self.answers.next_line()).await;
        let line = line.with_context(|| format!("no answer within {ANSWER:?}"))??;
        let answer: Value = serde_json::from_str(&line.context("the process has ended")?)?;
        match answer["failed"].as_str() {
            Some(why) => bail!("{why}"),
            None => Ok(answer),
        }
    }

    /// How long one operation took, by its own clock.
    pub(super) async fn time(&mut self, operation: &str) -> anyhow::Result<Duration> {
        let answer = self.order(&json!({"do": operation})).await?;
        let nanos = answer["nanos"].as_u64().context("no time was measured")?;
        Ok(Duration::from_nanos(nanos))
    }

    /// Proves that what it read is what was painted.
    pub(super) async fn check(&mut self) -> anyhow::Result<()> {
        self.check_by("check").await
    }

    /// The same, by an order of its own.
    pub(super) async fn check_by(&mut self, order: &str) -> anyhow::Result<()> {
        let answer = self.order(&json!({"do": order})).await?;
        ensure!(answer["exact"] == true, "other bytes were read");
        Ok(())
    }

    pub(super) async fn end(mut self) {
        drop(self.orders);
        // Whatever its libraries do at the end, it was only needed until here.
        if tokio::time::timeout(Duration::from_secs(5), self.child.wait())
            .await
            .is_err()
        {
            drop(self.child.kill().await);
        }
    }
}
