//! A deployment in a temporary directory, and its HTTP client.

use std::path::PathBuf;
use std::time::Duration;

use reqwest::{Client, Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use stagewire_sched::Limits;
use stagewire_server::{Config, RunDir, Server, ServerOptions};
use tempfile::TempDir;

use crate::openapi;

/// How long a test waits for what must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) const PIPELINE: &str = r#"
[pipeline]
name = "toy"
module = "toy.py"
[pipeline.params.prompt]
type = "string"
[pipeline.params.steps]
type = "integer"
default = 4
min = 1
max = 100

[[stage]]
name = "encode"
[[stage]]
name = "denoise"
kind = "admission"
[[stage]]
name = "decode"

[[edge]]
from = "encode"
to = "denoise"
mode = "p2p"
[[edge]]
from = "denoise"
to = "decode"
handover = "stream"
chunks = 3
chunk-dim = 2

[server]
store-bytes = "16MiB"
arena-bytes = "64MiB"
"#;

/// Directories and configuration; servers come and go.
pub(crate) struct Site {
    pub(crate) dir: TempDir,
    pub(crate) config: String,
    /// Whether the store of a server that is killed outlives it.
    pub(crate) keeps: bool,
}

impl Site {
    pub(crate) fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            config: PIPELINE.to_owned(),
            keeps: false,
        }
    }

    /// The same with lines for `[server]`.
    pub(crate) fn with(lines: &str) -> Self {
        let mut site = Self::new();
        site.config.push_str(lines);
        site
    }

    /// The same with every payload in the store.
    pub(crate) fn stored() -> Self {
        let mut site = Self::new();
        let config = site.config.replace("mode = \"p2p\"", "mode = \"store\"");
        site.config = config.replace("chunk-dim = 2", "chunk-dim = 2\nmode = \"store\"");
        site
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub(crate) fn options(&self) -> ServerOptions {
        options(self.dir.path().to_owned(), &self.config)
    }

    pub(crate) async fn start(&self) -> Api {
        self.start_with(Limits::default()).await
    }

    pub(crate) async fn start_with(&self, limits: Limits) -> Api {
        let mut options = self.options();
        options.limits = limits;
        Api::of(options).await
    }
}

pub(crate) fn options(dir: PathBuf, config: &str) -> ServerOptions {
    let config = Config::parse(config, dir.join("stagewire.toml")).unwrap();
    let mut options = ServerOptions::new(config, RunDir::locate(Some(&dir.join("run"))));
    options.data_dir = Some(dir.join("data"));
    options
}

/// A running server and a client of it.
pub(crate) struct Api {
    pub(crate) server: Option<Server>,
    pub(crate) http: Http,
}

impl std::ops::Deref for Api {
    type Target = Http;

    fn deref(&self) -> &Http {
        &self.http
    }
}

impl Api {
    pub(crate) async fn of(options: ServerOptions) -> Self {
        let server = Server::start(options).await.unwrap();
        let url = format!("http://{}", server.http_addr());
        Self {
            server: Some(server),
            http: Http::new(url),
        }
    }

    pub(crate) async fn stop(mut self) {
        self.server.take().unwrap().shutdown().await;
    }
}

/// A client.
#[derive(Clone)]
pub(crate) struct Http {
    pub(crate) client: Client,
    pub(crate) url: String,
}

impl Http {
    pub(crate) fn new(url: String) -> Self {
        let client = Client::builder().no_proxy().timeout(PATIENCE).build().unwrap();
        Self { client, url }
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("{}{path}", self.url))
    }

    pub(crate) async fn get(&self, path: &str) -> (StatusCode, Value) {
        answer(self.request(Method::GET, path)).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> (StatusCode, Value) {
        answer(self.request(Method::POST, path).json(body)).await
    }

    /// Submits and returns the id.
    pub(crate) async fn submit(&self, prompt: &str) -> String {
        let (status, job) = self.post("/v1/jobs", &json!({"params": {"prompt": prompt}})).await;
        assert_eq!(status, StatusCode::CREATED, "{job}");
        job["id"].as_str().unwrap().to_owned()
    }

    /// Waits until the job is in one of these states.
    pub(crate) async fn until(&self, job: &str, states: &[&str]) -> Value {
        let path = format!("/v1/jobs/{job}");
        until(&format!("{job} to be {states:?}"), || async {
            let (_, shown) = self.get(&path).await;
            let state = shown["state"].as_str().unwrap_or_default();
            states.contains(&state).then_some(shown)
        })
        .await
    }

    /// Waits until the stage of the job is in this state.
    pub(crate) async fn until_stage(&self, job: &str, stage: &str, state: &str) -> Value {
        let path = format!("/v1/jobs/{job}");
        until(&format!("{stage} of {job} to be {state}"), || async {
            let (_, shown) = self.get(&path).await;
            let stages = shown["stages"].as_array().cloned().unwrap_or_default();
            stages
                .into_iter()
                .find(|run| run["name"] == stage && run["state"] == state)
        })
        .await
    }
}

pub(crate) async fn answer(request: RequestBuilder) -> (StatusCode, Value) {
    let (client, request) = request.build_split();
    let request = request.unwrap();
    let (method, path) = (request.method().clone(), request.url().path().to_owned());
    let response = client.execute(request).await.unwrap();
    let status = response.status();
    let text = response.text().await.unwrap();
    let json = serde_json::from_str(&text).unwrap_or(Value::String(text));
    openapi::check(method.as_str(), &path, status, &json);
    (status, json)
}

/// Asks until there is an answer.
pub(crate) async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut ask: impl FnMut() -> F) -> T {
    let asking = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, asking)
        .await
        .unwrap_or_else(|_| panic!("waited in vain for {what}"))
}
