//! Starting and stopping, and what stands in the way.

use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use stagewire_core::Classify;
use stagewire_server::Server;

use crate::site::Site;
use crate::stages::Workers;

async fn refused(site: &Site) -> (&'static str, String) {
    let error = Server::start(site.options()).await.unwrap_err();
    (error.reason(), error.to_string())
}

/// Names in a directory.
fn names(path: std::path::PathBuf) -> Vec<String> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_server_is_refused_and_the_first_goes_on() {
    let site = Site::new();
    let api = site.start().await;
    let (reason, message) = refused(&site).await;
    assert_eq!(reason, "server.already_running");
    assert!(message.contains(&api.url) && message.contains("--run-dir"), "{message}");
    assert_eq!(api.get("/healthz").await.0, 200);
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let site = Site::with(&format!("listen = \"{address}\"\n"));
    let (reason, message) = refused(&site).await;
    assert_eq!(reason, "server.port_in_use");
    assert!(
        message.contains(&address.to_string()) && message.contains("--listen"),
        "{message}"
    );
    assert_eq!(names(site.run_dir()), ["worker.token"], "nothing else is left");
    drop(taken);
    site.start().await.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_larger_than_the_memory_is_refused() {
    let mut site = Site::new();
    site.config = site.config.replace("16MiB", "4000TiB");
    let (reason, message) = refused(&site).await;
    assert_eq!(reason, "server.memory");
    assert!(
        message.starts_with("\"store-bytes\" in [server] is 4000.0 TiB, more than the memory of this host"),
        "{message}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn token_files_are_checked() {
    let site = Site::with("token-file = \"api.token\"\n");
    let path = site.dir.path().join("api.token");
    assert!(refused(&site).await.1.contains("No such file"));
    std::fs::write(&path, "0123456789abcdef").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(refused(&site).await.1.contains("chmod 600"));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::write(&path, "short").unwrap();
    assert!(refused(&site).await.1.contains("at least 16"));

    let site = Site::new();
    let mut options = site.options();
    options.listen = Some(([0, 0, 0, 0], 0).into());
    let error = Server::start(options).await.unwrap_err();
    assert!(error.to_string().contains("token-file"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_pipelines_journal_is_refused() {
    let mut site = Site::new();
    site.start().await.stop().await;
    site.config = site.config.replace("\"toy\"", "\"other\"");
    let (reason, message) = refused(&site).await;
    assert_eq!(reason, "journal.scope");
    assert!(
        message.contains("pipeline toy (stages encode, denoise, decode"),
        "{message}"
    );
    // A finished decoder that began before its input was complete means nothing where it may not.
    site.config = site.config.replace("\"other\"", "\"toy\"");
    let streamed = "handover = \"stream\"\nchunks = 3\nchunk-dim = 2\n";
    site.config = site.config.replace(streamed, "");
    let (reason, message) = refused(&site).await;
    assert_eq!(reason, "journal.scope");
    assert!(message.contains("denoise>decode streamed"), "{message}");
    std::fs::write(
        site.dir.path().join("data/journal.redb"),
        "not a journal at all".repeat(500),
    )
    .unwrap();
    assert_eq!(refused(&site).await.0, "journal.corrupt");
    assert_eq!(names(site.run_dir()), ["worker.token"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_takes_no_longer_than_promised_and_leaves_nothing() {
    let site = Site::new();
    let api = site.start().await;
    let workers = Workers::attach(&site.run_dir()).await;
    let job = api.submit("hold").await;
    api.until_stage(&job, "denoise", "running").await;
    // Somebody watches, somebody keeps a connection open and says nothing.
    let watcher = api
        .request(reqwest::Method::GET, &format!("/v1/jobs/{job}/events"))
        .send()
        .await
        .unwrap();
    let address = api.url.strip_prefix("http://").unwrap();
    let silent = tokio::net::TcpStream::connect(address).await.unwrap();
    let begin = Instant::now();
    api.stop().await;
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    watcher.text().await.unwrap();
    drop(silent);
    workers.close().await;
    assert_eq!(names(site.run_dir().join("peers")), Vec::<String>::new());
    assert!(!names(site.run_dir()).contains(&"server.json".to_owned()));
    assert!(!names(site.run_dir()).contains(&"server.lock".to_owned()));
}
