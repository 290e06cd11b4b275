//! A server in a process of its own, which can be killed.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use reqwest::Method;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use serde_json::json;
use stagewire_server::{RunDir, Server};
use stagewire_store::{KeeperCommand, KeeperOptions, run_keeper};
use tokio::signal::unix::{SignalKind, signal};

use crate::site::{Http, PATIENCE, Site, options, until};

/// Names the directory of the deployment to the child.
const DIR: &str = "STAGEWIRE_TEST_SITE";

/// Set where the store of the child outlives it.
const KEEPS: &str = "STAGEWIRE_TEST_KEEPS";

/// The keeper of the child's store, not a test.
#[test]
#[ignore = "run as a child process by the tests that kill servers"]
fn keep() {
    if let Some(options) = KeeperOptions::from_env() {
        run_keeper(&options).unwrap();
    }
}

pub(crate) fn keeper() -> KeeperCommand {
    let program = std::env::current_exe().unwrap();
    let args = ["child::keep", "--exact", "--ignored", "--nocapture"];
    KeeperCommand {
        linger: PATIENCE,
        ..KeeperCommand::new(program, args)
    }
}

/// The child itself, not a test: what `ChildServer` starts.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "run as a child process by the tests that kill servers"]
async fn serve() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let dir = Path::new(&dir);
    let config = std::fs::read_to_string(dir.join("stagewire.toml")).unwrap();
    let mut options = options(dir.to_owned(), &config);
    options.keeper = std::env::var_os(KEEPS).map(|_| keeper());
    let mut asked = signal(SignalKind::terminate()).unwrap();
    // A file that may not grow is an error to whoever writes it, and not the end of the process.
    let _heard = signal(SignalKind::from_raw(Signal::XFSZ.as_raw())).unwrap();
    let server = Server::start(options).await.unwrap();
    tokio::select! {
        _ = asked.recv() => {}
        _ = server.stopped() => {}
    }
    server.shutdown().await;
}

/// Killed when dropped.
pub(crate) struct ChildServer {
    child: Child,
    pub(crate) http: Http,
    pub(crate) epoch: u64,
}

impl ChildServer {
    pub(crate) async fn start(site: &Site) -> Self {
        std::fs::write(site.dir.path().join("stagewire.toml"), &site.config).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["child::serve", "--exact", "--ignored", "--nocapture"])
            .env(DIR, site.dir.path())
            .stdout(Stdio::null());
        if site.keeps {
            command.env(KEEPS, "1");
        }
        let child = command.spawn().unwrap();
        let run_dir = RunDir::locate(Some(&site.run_dir()));
        let pid = child.id();
        let file = until("the child to announce itself", || async {
            run_dir.server().ok().filter(|file| file.process.pid == pid)
        })
        .await;
        Self {
            child,
            http: Http::new(format!("http://{}", file.http)),
            epoch: file.epoch,
        }
    }

    /// `kill -9`.
    pub(crate) fn kill(mut self) {
        self.end();
    }

    /// SIGTERM.
    pub(crate) fn terminate(mut self) {
        kill_process(self.pid(), Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }

    /// Lets nothing be written to files any more, and waits until the server has ended because of that.
    pub(crate) async fn lose_its_disk(mut self) {
        let nothing = Rlimit {
            current: Some(0),
            maximum: None,
        };
        prlimit(Some(self.pid()), Resource::Fsize, nothing).unwrap();
        // Nobody is told that it is there: it cannot be written.
        let job = json!({"params": {"prompt": "never written"}});
        let answer = self.http.request(Method::POST, "/v1/jobs").json(&job).send().await;
        assert!(answer.is_err() || answer.is_ok_and(|answer| !answer.status().is_success()));
        let status = until("the server to end", || {
            std::future::ready(self.child.try_wait().unwrap())
        });
        assert!(status.await.success());
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn end(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for ChildServer {
    fn drop(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            self.end();
        }
    }
}
