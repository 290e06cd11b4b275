use tempfile::TempDir;

use super::*;

/// A run directory and shell scripts in place of workers.
struct World {
    _dir: TempDir,
    run_dir: RunDir,
    ready: watch::Sender<BTreeSet<u32>>,
    patience: Patience,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::locate(Some(&dir.path().join("run")));
        run_dir.create().unwrap();
        Self {
            _dir: dir,
            run_dir,
            ready: watch::Sender::new(BTreeSet::new()),
            patience: Patience {
                start: Duration::from_secs(30),
                stop: Duration::from_millis(300),
            },
        }
    }

    async fn start(&self, script: &str) -> Supervisor {
        let plan = WorkerPlan {
            name: "decode-0".to_owned(),
            command: ["sh", "-c", script].map(str::to_owned).into(),
            env: vec![("ANSWER".to_owned(), "42".to_owned())],
        };
        let ready = self.ready.subscribe();
        let output = Output::new(false, true);
        Supervisor::start(vec![plan], &self.run_dir, &ready, self.patience, &output)
            .await
            .unwrap()
    }

    /// The pid that is on record, once it is another than `before`.
    async fn pid(&self, before: u32) -> u32 {
        within(async {
            loop {
                match Record::all(&self.run_dir).first() {
                    Some(record) if record.process.pid != before => return record.process.pid,
                    _ => sleep(Duration::from_millis(2)).await,
                }
            }
        })
        .await
    }

    fn is_ready(&self, pid: u32) {
        self.ready.send_replace(BTreeSet::from([pid]));
    }
}

async fn within<T>(task: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), task).await.expect("not within 20 s")
}

fn lives(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[tokio::test]
async fn a_worker_that_raises_before_it_is_ready_fails_the_start_with_its_last_lines() {
    let world = World::new();
    let mut supervisor = world
        .start("echo loading; echo \"ImportError: $ANSWER\" >&2; exit 1")
        .await;
    let fault = within(supervisor.failed()).await;
    let text = fault.error.to_string();
    assert_eq!(fault.exit, Exit::Failed);
    assert!(
        text.starts_with("worker decode-0 ended with status 1 before it was ready. The end of its log, "),
        "{text}"
    );
    assert!(
        text.ends_with("decode-0.log:\n  | loading\n  | ImportError: 42"),
        "{text}"
    );
    assert!(Record::all(&world.run_dir).is_empty());
}

#[tokio::test]
async fn a_worker_that_is_never_ready_runs_into_the_deadline() {
    let mut world = World::new();
    world.patience.start = Duration::from_millis(50);
    let mut supervisor = world.start("echo still loading; exec sleep 60").await;
    let pid = world.pid(0).await;
    let fault = within(supervisor.failed()).await;
    assert_eq!(fault.exit, Exit::Deadline);
    assert!(!lives(pid), "it lives on");
}

#[tokio::test]
async fn a_worker_that_dies_is_started_again() {
    let world = World::new();
    let mut supervisor = world.start("exec sleep 60").await;
    let first = world.pid(0).await;
    world.is_ready(first);
    within(supervisor.settled()).await;
    kill(first);
    let second = world.pid(first).await;
    assert!(lives(second) && !lives(first));
    within(supervisor.stop()).await;
    assert!(!lives(second));
    assert!(Record::all(&world.run_dir).is_empty());
}

#[tokio::test]
async fn a_worker_that_does_not_leave_is_ended() {
    let world = World::new();
    let mut supervisor = world.start("trap '' TERM; while :; do sleep 60; done").await;
    let pid = world.pid(0).await;
    within(supervisor.stop()).await;
    assert!(!lives(pid));
}

#[tokio::test]
async fn the_next_supervisor_takes_over_what_a_killed_one_left() {
    let world = World::new();
    let killed = world.start("exec sleep 60").await;
    let pid = world.pid(0).await;
    world.is_ready(pid);
    within(killed.settled()).await;
    // As if the process had been killed: nobody stops the worker, its record stays.
    drop(killed);
    let mut next = world.start("exec sleep 60").await;
    within(next.settled()).await;
    assert_eq!(world.pid(0).await, pid);
    within(next.stop()).await;
    assert!(Record::all(&world.run_dir).is_empty());
}

#[tokio::test]
async fn a_worker_that_was_started_otherwise_is_replaced() {
    let world = World::new();
    let killed = world.start("exec sleep 61").await;
    let first = world.pid(0).await;
    drop(killed);
    let mut next = world.start("exec sleep 60").await;
    let second = world.pid(first).await;
    assert!(lives(second));
    within(next.stop()).await;
    assert!(!lives(second));
}
