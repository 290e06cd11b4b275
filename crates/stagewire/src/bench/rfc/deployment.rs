//! A server with its workers, as `stagewire up` starts them.

use std::path::{Path, PathBuf};
use std::process::{Command as StdCommand, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use stagewire_api::RunDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use uuid::Uuid;

use super::served::Served;
use crate::client::{Client, Stats};
use crate::exit::Fault;
use crate::python::Python;

/// The example that the stages are made of.
const EXAMPLE: [(&str, &str); 5] = [
    ("stages.py", include_str!("stages.py")),
    ("pipeline.py", include_str!("../../../../../examples/wan/pipeline.py")),
    ("model.py", include_str!("../../../../../examples/wan/model.py")),
    ("files.py", include_str!("../../../../../examples/wan/files.py")),
    (
        "causal_decoder.py",
        include_str!("../../../../../examples/wan/causal_decoder.py"),
    ),
];
const PARAMS: &str = include_str!("params.toml");
/// What the example imports besides the package.
const LIBRARIES: &str = "torch diffusers transformers tokenizers ftfy imageio PIL numpy";

/// Until the models are loaded.
const START: Duration = Duration::from_secs(300);
const STOP: Duration = Duration::from_secs(30);
/// Nothing that is asked of it takes so long.
const DEADLINE: Duration = Duration::from_secs(120);
/// What is asked meanwhile must not take the workers' time.
const LOOK: Duration = Duration::from_millis(50);

/// One running pipeline.
#[derive(Debug)]
pub(super) struct Deployment {
    child: Child,
    pid: Pid,
    client: Client,
    log: PathBuf,
    submitted: u64,
}

/// The Python of the workers, or why there is none that can run the example.
pub(super) fn python(given: Option<&Path>) -> Result<Python, String> {
    let first_line = |fault: Fault| {
        format!("{:#}", fault.error)
            .lines()
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    let python = Python::find(given, Path::new("stagewire.toml")).map_err(first_line)?;
    let look = format!(
        "import importlib.util as u; print(*(n for n in '{LIBRARIES}'.split() if u.find_spec(n) is None), end='')"
    );
    let found = StdCommand::new(&python.program).args(["-c", &look]).output();
    let missing = found.map_err(|error| format!("cannot run Python {python}: {error}"))?;
    match String::from_utf8_lossy(&missing.stdout).as_ref() {
        "" if missing.status.success() => Ok(python),
        missing => Err(format!(
            "Python {python} lacks {missing}: `make setup` makes one that has it"
        )),
    }
}

impl Deployment {
    /// Starts a pipeline in a folder of its own; ready when every worker has loaded its model.
    pub(super) async fn start(folder: &Path, pipeline: &str, python: &Python) -> anyhow::Result<Self> {
        std::fs::create_dir(folder)?;
        for (name, text) in EXAMPLE {
            std::fs::write(folder.join(name), text)?;
        }
        let [file, run, data, log] = ["stagewire.toml", "run", "data", "up.log"].map(|name| folder.join(name));
        std::fs::write(&file, format!("{pipeline}\n{PARAMS}"))?;
        let mut child = Command::new("/proc/self/exe")
            .args(["up", "--json", "--quiet", "--python"])
            .arg(&python.program)
            .arg("--run-dir")
            .arg(&run)
            .arg("--data-dir")
            .args([&data, &file])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log)?)
            .spawn()
            .context("cannot start `stagewire up`")?;
        let pid = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let mut lines = BufReader::new(child.stdout.take().context("no pipe")?).lines();
        let deployment = Self {
            pid: pid.context("`stagewire up` has ended")?,
            child,
            client: Client::of_run_dir(&RunDir::locate(Some(&run)), None),
            log,
            submitted: 0,
        };
        match tokio::time::timeout(START, lines.next_line()).await {
            Ok(Ok(Some(_))) => Ok(deployment),
            _ => {
                let said = std::fs::read_to_string(&deployment.log).unwrap_or_default();
                deployment.end().await?;
                bail!("the workers do not start: {}", said.trim());
            }
        }
    }

    /// Submits a job that paints what no other seed does.
    pub(super) async fn submit(&self, seed: u64) -> anyhow::Result<String> {
        let body = json!({"params": {"seed": seed}});
        Ok(self.client.submit(&body, &Uuid::new_v4().to_string()).await?.id)
    }

    /// Waits until these jobs have ended, all of them well, and says what became of each.
    pub(super) async fn served(&mut self, jobs: &[String]) -> anyhow::Result<Vec<Served>> {
        self.submitted += jobs.len() as u64;
        let done = async {
            loop {
                let stats: Stats = self.client.get("/v1/stats").await?;
                let count = |state| stats.jobs.get(state).copied().unwrap_or(0);
                ensure!(count("failed") == 0, "a job has failed: {}", self.why(jobs).await);
                if count("succeeded") >= self.submitted {
                    return Ok(());
                }
                tokio::time::sleep(LOOK).await;
            }
        };
        let ended = tokio::time::timeout(DEADLINE, done).await;
        ended.with_context(|| format!("{} jobs do not end within {DEADLINE:?}", jobs.len()))??;
        let mut served = Vec::with_capacity(jobs.len());
        for job in jobs {
            let mut events = self.client.events(job, None).await?;
            let mut all = Vec::new();
            while let Some(event) = events.next().await? {
                all.push(event);
            }
            let result: Value = self.client.get(&format!("/v1/jobs/{job}/result")).await?;
            served.push(Served::of(&all, &result["info"]).with_context(|| format!("job {job}"))?);
        }
        Ok(served)
    }

    async fn why(&self, jobs: &[String]) -> String {
        for job in jobs {
            if let Ok(job) = self.client.job(job).await
                && job.failure.is_some()
            {
                return job.summary();
            }
        }
        "none of these".to_owned()
    }

    /// Ends server and workers.
    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        // It may have ended by itself.
        let _ = kill_process(self.pid, Signal::TERM);
        match tokio::time::timeout(STOP, self.child.wait()).await {
            Ok(_) => Ok(()),
            Err(_) => Ok(self.child.kill().await?),
        }
    }
}
