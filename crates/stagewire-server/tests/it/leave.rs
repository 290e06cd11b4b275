//! Servers that end, however: what their store has is there under the next one, and nothing is made again.

use reqwest::Method;
use serde_json::{Value, json};
use stagewire_core::Classify;
use stagewire_server::Server;

use crate::child::{ChildServer, keeper};
use crate::site::{Site, until};
use crate::stages::{Workers, video};

fn site() -> Site {
    let mut site = Site::stored();
    site.keeps = true;
    site
}

/// Two jobs, the conditions of the second of which wait in the store for the only denoiser.
struct Between {
    first: String,
    second: String,
    /// The encoder's run for the second one.
    encoded: Value,
}

impl Between {
    async fn begin(server: &ChildServer) -> Self {
        let first = server.http.submit("hold").await;
        server.http.until_stage(&first, "denoise", "running").await;
        let second = server.http.submit("a red cat").await;
        let encoded = server.http.until_stage(&second, "encode", "done").await;
        Self { first, second, encoded }
    }

    /// The next server ends both, without a second run of the encoder.
    async fn end(self, server: &ChildServer) {
        let cancel = format!("/v1/jobs/{}/cancel", self.first);
        assert_eq!(server.http.post(&cancel, &json!({})).await.0, 202);
        let shown = server.http.until(&self.second, &["succeeded", "failed"]).await;
        assert_eq!(shown["state"], "succeeded", "{shown}");
        let stages = shown["stages"].as_array().unwrap();
        let encode = stages.iter().find(|stage| stage["name"] == "encode");
        assert_eq!(encode, Some(&self.encoded), "it ran again");
        let (_, result) = server.http.get(&format!("/v1/jobs/{}/result", self.second)).await;
        let url = result["artefacts"][0]["url"].as_str().unwrap();
        let got = server.http.request(Method::GET, url).send().await.unwrap();
        assert_eq!(got.bytes().await.unwrap(), video("a red cat", 4));
        until("the store to be empty", || async {
            let (_, stats) = server.http.get("/v1/stats").await;
            (stats["store"]["bytes"] == 0 && stats["store"]["payloads"] == 0).then_some(())
        })
        .await;
    }
}

/// Processes other than this one that were started for the deployment: servers, and keepers of their stores.
fn processes(site: &Site) -> Vec<String> {
    let dir = site.dir.path().as_os_str().as_encoded_bytes();
    let mine = std::process::id().to_string();
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let names = pids.map(|pid| pid.file_name().into_string().unwrap());
    let of_site = |pid: &String| {
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        *pid != mine && environ.windows(dir.len()).any(|part| part == dir)
    };
    names.filter(of_site).collect()
}

fn files(site: &Site, dir: &str) -> Vec<String> {
    let entries = std::fs::read_dir(site.dir.path().join(dir)).into_iter().flatten();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A server without jobs that have not ended leaves neither processes, which would keep memory, nor sockets.
pub(crate) async fn nothing_stays_behind(site: &Site, server: ChildServer, workers: Workers) {
    workers.close().await;
    server.terminate();
    until("every process to end", || async {
        processes(site).is_empty().then_some(())
    })
    .await;
    assert_eq!(files(site, "run"), ["worker.token"]);
    let left = files(site, "data/store");
    assert!(!left.contains(&"keeper.sock".to_owned()), "{left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_store_has_is_not_made_again_after_kill_9() {
    let site = site();
    let server = ChildServer::start(&site).await;
    let workers = Workers::attach(&site.run_dir()).await;
    let between = Between::begin(&server).await;
    server.kill();
    let server = ChildServer::start(&site).await;
    between.end(&server).await;
    nothing_stays_behind(&site, server, workers).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nor_after_an_orderly_stop() {
    let site = site();
    let server = ChildServer::start(&site).await;
    let workers = Workers::attach(&site.run_dir()).await;
    let between = Between::begin(&server).await;
    server.terminate();
    assert_eq!(processes(&site).len(), 1, "the keeper");
    let server = ChildServer::start(&site).await;
    // Nor after another one, by a server that only had what was left to it.
    server.terminate();
    let server = ChildServer::start(&site).await;
    between.end(&server).await;
    nothing_stays_behind(&site, server, workers).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nor_after_the_journal_failed() {
    let site = site();
    let server = ChildServer::start(&site).await;
    let workers = Workers::attach(&site.run_dir()).await;
    let between = Between::begin(&server).await;
    server.lose_its_disk().await;
    let server = ChildServer::start(&site).await;
    between.end(&server).await;
    nothing_stays_behind(&site, server, workers).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nor_after_a_start_that_failed_or_was_given_up() {
    let site = site();
    let server = ChildServer::start(&site).await;
    let workers = Workers::attach(&site.run_dir()).await;
    let between = Between::begin(&server).await;
    server.terminate();

    let options = || {
        let mut options = site.options();
        options.keeper = Some(keeper());
        options
    };
    let in_the_way = site.run_dir().join("server.json.new");
    std::fs::create_dir(&in_the_way).unwrap();
    let error = Server::start(options()).await.unwrap_err();
    assert!(error.to_string().contains("server.json"), "{error}");
    assert_eq!(error.reason(), "server.run_dir");
    std::fs::remove_dir(&in_the_way).unwrap();
    // Dropped, without a word.
    drop(Server::start(options()).await.unwrap());

    let server = until_it_starts(&site).await;
    between.end(&server).await;
    nothing_stays_behind(&site, server, workers).await;
}

/// What was dropped goes on to hold the data directory for a moment.
async fn until_it_starts(site: &Site) -> ChildServer {
    until("the data directory to be free", || async {
        let mut options = site.options();
        options.keeper = Some(keeper());
        let server = Server::start(options).await.ok()?;
        server.shutdown().await;
        Some(())
    })
    .await;
    ChildServer::start(site).await
}
