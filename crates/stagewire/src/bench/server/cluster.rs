use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use serde_json::json;
use stagewire_api::{RunDir, SessionEvent, SessionOptions, WorkerSession};
use stagewire_core::{Incarnation, JobId, StageName, Token};
use stagewire_transfer::this_process;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::client::Client;

const PIPELINE: &str = "[pipeline]\nname = \"bench\"\nmodule = \"work.py\"\n\n[[stage]]\nname = \"work\"\n";
/// Workers that attach at the same time.
const AT_ONCE: usize = 16;
/// Nothing here takes so long.
const DEADLINE: Duration = Duration::from_secs(60);

/// A server process, and its workers and clients in this one.
pub(super) struct Cluster {
    child: Child,
    pid: Pid,
    run_dir: RunDir,
    data_dir: PathBuf,
    client: Client,
    workers: Vec<WorkerSession>,
    /// Jobs that may run, and since when.
    granted: mpsc::UnboundedReceiver<(JobId, Instant)>,
    grants: mpsc::UnboundedSender<(JobId, Instant)>,
    _dir: TempDir,
}

impl Cluster {
    pub(super) async fn start() -> anyhow::Result<Self> {
        // A socket for each worker here, and one more file for each there.
        let files = getrlimit(Resource::Nofile);
        let current = files.maximum;
        setrlimit(Resource::Nofile, Rlimit { current, ..files }).context("cannot raise the limit of open files")?;
        let dir = tempfile::tempdir()?;
        let [file, run, data_dir] = ["stagewire.toml", "run", "data"].map(|name| dir.path().join(name));
        std::fs::write(&file, PIPELINE)?;
        std::fs::write(dir.path().join("work.py"), "")?;
        let mut child = Command::new("/proc/self/exe")
            .args(["serve", "--json", "--quiet", "--listen", "127.0.0.1:0", "--data-dir"])
            .arg(&data_dir)
            .arg("--run-dir")
            .args([&run, &file])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start the server")?;
        let mut lines = BufReader::new(child.stdout.take().context("no pipe")?).lines();
        lines.next_line().await?.context("the server does not start")?;
        let pid = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let run_dir = RunDir::locate(Some(&run));
        let (grants, granted) = mpsc::unbounded_channel();
        Ok(Self {
            pid: pid.context("the server has ended")?,
            child,
            client: Client::of_run_dir(&run_dir, None),
            run_dir,
            data_dir,
            workers: Vec::new(),
            granted,
            grants,
            _dir: dir,
        })
    }

    pub(super) fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// Workers that take every offer and have done with it at once.
    pub(super) async fn attach(&mut self, count: usize) -> anyhow::Result<()> {
        let process = this_process()?;
        let stage = StageName::new("work").expect("it is a name");
        let attach = |number: usize| {
            let options = SessionOptions {
                run_dir: self.run_dir.clone(),
                incarnation: Incarnation(Uuid::new_v4()),
                process,
                pipeline: String::new(),
                stage: stage.clone(),
                name: format!("worker-{number}"),
                slots: 1,
                max_batch: 1,
                member: None,
                numa: None,
                rail: None,
                attach_within: DEADLINE,
            };
            let grants = self.grants.clone();
            async move {
                let (session, events) = WorkerSession::attach(options).await?;
                tokio::spawn(work(session.clone(), events, grants));
                anyhow::Ok(session)
            }
        };
        let sessions = stream::iter((0..count).map(attach)).buffer_unordered(AT_ONCE);
        self.workers = sessions.try_collect().await?;
        Ok(())
    }

    /// How long it takes until so many jobs are submitted and dispatched, with so many submissions under way at once.
    pub(super) async fn burst(&mut self, jobs: u32, at_once: usize) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let submissions = stream::iter((0..jobs).map(|_| submit(&self.client)));
        let submissions = submissions.buffer_unordered(at_once).try_collect::<Vec<_>>();
        let (submitted, granted) = tokio::try_join!(submissions, grants(&mut self.granted, jobs as usize))?;
        let took = begin.elapsed();
        let all = submitted.iter().all(|job| granted.contains_key(job));
        ensure!(all, "other jobs were dispatched than those that were submitted");
        Ok(took)
    }

    /// How long each of so many jobs takes from the call that submits it until it is dispatched, where one comes at every
    /// tick, whether or not others are still waiting.
    pub(super) async fn paced(&mut self, jobs: usize, every: Duration) -> anyhow::Result<Vec<Duration>> {
        let client = &self.client;
        let ticks = stream::unfold(tokio::time::interval(every), async |mut ticks| {
            ticks.tick().await;
            Some((Instant::now(), ticks))
        });
        let submissions = ticks
            .take(jobs)
            .map(|begin| async move { anyhow::Ok((submit(client).await?, begin)) })
            .buffer_unordered(jobs)
            .try_collect::<Vec<_>>();
        let (submitted, granted) = tokio::try_join!(submissions, grants(&mut self.granted, jobs))?;
        let time = |(job, begin): &(JobId, Instant)| Some(granted.get(job)?.duration_since(*begin));
        let times = submitted.iter().map(time).collect::<Option<_>>();
        times.context("other jobs were dispatched than those that were submitted")
    }

    /// CPU time of the server so far.
    pub(super) fn cpu(&self) -> anyhow::Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid.as_raw_nonzero()))?;
        let fields = stat
            .rsplit_once(") ")
            .map(|(_, rest)| rest.split(' ').collect::<Vec<_>>());
        // utime and stime of proc(5), counted from the state.
        let ticks = fields.and_then(|fields| {
            Some((
                fields.get(11)?.parse::<u64>().ok()?,
                fields.get(12)?.parse::<u64>().ok()?,
            ))
        });
        let (user, system) = ticks.context("/proc/PID/stat has another form than proc(5) says")?;
        Ok(Duration::from_millis(
            (user + system) * 1000 / rustix::param::clock_ticks_per_second(),
        ))
    }

    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        self.workers.clear();
        kill_process(self.pid, Signal::TERM)?;
        let status = tokio::time::timeout(DEADLINE, self.child.wait()).await??;
        ensure!(status.success(), "it ended with {status}");
        Ok(())
    }
}

async fn submit(client: &Client) -> anyhow::Result<JobId> {
    let job = client.submit(&json!({}), &Uuid::new_v4().to_string()).await?;
    Ok(job.id.parse()?)
}

/// The next jobs that are dispatched.
async fn grants(
    granted: &mut mpsc::UnboundedReceiver<(JobId, Instant)>,
    jobs: usize,
) -> anyhow::Result<BTreeMap<JobId, Instant>> {
    let all = async {
        let mut all = BTreeMap::new();
        while all.len() < jobs {
            all.extend(granted.recv().await);
        }
        all
    };
    tokio::time::timeout(DEADLINE, all)
        .await
        .context("the server does not dispatch what was submitted")
}

async fn work(
    session: WorkerSession,
    mut events: mpsc::UnboundedReceiver<SessionEvent>,
    grants: mpsc::UnboundedSender<(JobId, Instant)>,
) {
    while let Some(event) = events.recv().await {
        match event {
            SessionEvent::Offer(offer) => {
                if let Some(Ok(token)) = offer.token.map(Token::try_from) {
                    session.accept(token);
                }
            }
            SessionEvent::Grant(token) => {
                // Nobody listens any more at the end.
                let _ = grants.send((token.job, Instant::now()));
                session.completed(token, None, Vec::new());
            }
            _ => (),
        }
    }
}
