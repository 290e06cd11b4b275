//! The server's HTTP API, as the commands use it.

mod events;
mod types;

use std::path::Path;
use std::time::Duration;

use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE};
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::Value;
use stagewire_api::{RunDir, RunDirError};
use stagewire_core::{Classify, ErrorClass, Failure};
use tokio::io::AsyncWriteExt;

use crate::args::ServerArgs;
use crate::exit::{Exit, Fault};

pub(crate) use events::Events;
pub(crate) use types::{
    Artefact, Choice, ChoiceClass, ChoiceWorker, DeadLetter, DeadLetters, Event, Input, Job, JobList, JobResult,
    ParamSpec, Pipeline, PoolWorker, Pools, Position, Stats, Waiting,
};

/// Why a call to the server failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    #[error("no server answers at {url}{hint}")]
    Unreachable {
        url: String,
        hint: &'static str,
        source: reqwest::Error,
    },
    #[error("{0}")]
    Refused(Failure),
    #[error("{url} answered {status} with something that is not Stagewire's")]
    Foreign { url: String, status: StatusCode },
    #[error("the answer of {url} broke off")]
    Broken { url: String, source: reqwest::Error },
}

impl ClientError {
    /// Whether the server may be back soon: it restarts, or the connection broke.
    pub(crate) fn is_away(&self) -> bool {
        match self {
            Self::RunDir(error) => matches!(error, RunDirError::NoServer { .. }),
            Self::Unreachable { .. } | Self::Broken { .. } => true,
            Self::Refused(failure) => failure.class == ErrorClass::Unavailable,
            Self::Foreign { .. } => false,
        }
    }

    /// The status that it ends a command with.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::RunDir(RunDirError::NoServer { .. }) | Self::Unreachable { .. } => Exit::NoServer,
            Self::RunDir(error) => Exit::of(error.class()),
            Self::Refused(failure) => Exit::of(failure.class),
            Self::Foreign { .. } | Self::Broken { .. } => Exit::Failed,
        }
    }
}

/// Where the server is.
#[derive(Debug, Clone)]
enum Place {
    /// Wherever the run directory says at the time of each call: a server that restarts has another port.
    RunDir(RunDir),
    Url(String),
}

/// Talks to one server, also when it restarts in between.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    place: Place,
    token: Option<String>,
}

impl Client {
    /// The server that the command line names, else the one of the run directory. Connects at the first call.
    pub(crate) fn new(run_dir: Option<&Path>, server: &ServerArgs) -> Result<Self, Fault> {
        let place = match &server.url {
            None => Place::RunDir(RunDir::locate(run_dir)),
            Some(url) if url.starts_with("http://") => Place::Url(url.trim_end_matches('/').to_owned()),
            Some(url) => return Err(Fault::usage(format!("--url {url} must start with http://"))),
        };
        let token = match &server.token_file {
            None => None,
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .map_err(|error| Fault::usage(format!("cannot read --token-file {}: {error}", path.display())))?;
                Some(text.trim().to_owned())
            }
        };
        Ok(Self::at(place, token))
    }

    /// The server of this run directory.
    pub(crate) fn of_run_dir(run_dir: &RunDir, token: Option<String>) -> Self {
        Self::at(Place::RunDir(run_dir.clone()), token)
    }

    fn at(place: Place, token: Option<String>) -> Self {
        let http = reqwest::Client::builder()
            .no_proxy()
            .connect_timeout(Duration::from_secs(5))
            .user_agent(concat!("stagewire/", env!("CARGO_PKG_VERSION")))
            .build()
            .expect("a client without TLS has nothing to load");
        Self { http, place, token }
    }

    /// Address of the server, without a slash at the end.
    pub(crate) fn url(&self) -> Result<String, ClientError> {
        match &self.place {
            Place::RunDir(run_dir) => Ok(format!("http://{}", run_dir.server()?.http)),
            Place::Url(url) => Ok(url.clone()),
        }
    }

    pub(crate) async fn pipeline(&self) -> Result<Pipeline, ClientError> {
        self.get("/v1/pipeline").await
    }

    pub(crate) async fn submit(&self, body: &Value, key: &str) -> Result<Job, ClientError> {
        let answer = self
            .send(Method::POST, "/v1/jobs", |request| {
                request.header("Idempotency-Key", key).json(body)
            })
            .await?;
        decode(answer).await
    }

    /// Sends a file, for jobs to refer to.
    pub(crate) async fn upload(
        &self,
        file: tokio::fs::File,
        nbytes: u64,
        media_type: &str,
    ) -> Result<Input, ClientError> {
        let answer = self.send(Method::POST, "/v1/inputs", |request| {
            let request = request.header(CONTENT_TYPE, media_type).header(CONTENT_LENGTH, nbytes);
            request.body(file)
        });
        decode(answer.await?).await
    }

    pub(crate) async fn job(&self, id: &str) -> Result<Job, ClientError> {
        self.get(&format!("/v1/jobs/{}", segment(id))).await
    }

    /// The newest jobs, as the server's document.
    pub(crate) async fn jobs(&self, state: Option<&str>, limit: u16) -> Result<Value, ClientError> {
        let state = state
            .map(|state| format!("&state={}", segment(state)))
            .unwrap_or_default();
        self.get(&format!("/v1/jobs?limit={limit}{state}")).await
    }

    pub(crate) async fn cancel(&self, id: &str) -> Result<Job, ClientError> {
        let path = format!("/v1/jobs/{}/cancel", segment(id));
        decode(self.send(Method::POST, &path, |request| request).await?).await
    }

    /// A dead letter, as the server's document.
    pub(crate) async fn dead_letter(&self, id: &str) -> Result<Value, ClientError> {
        self.get(&format!("/v1/dead-letters/{}", segment(id))).await
    }

    /// Redrives or discards a dead letter.
    pub(crate) async fn settle(&self, id: &str, what: &str) -> Result<Job, ClientError> {
        self.post(&format!("/v1/dead-letters/{}/{what}", segment(id)), None)
            .await
    }

    /// The events of a job after the one with the id `seen`, until the job has ended.
    pub(crate) async fn events(&self, id: &str, seen: Option<&str>) -> Result<Events, ClientError> {
        let path = format!("/v1/jobs/{}/events", segment(id));
        let answer = self
            .send(Method::GET, &path, |request| match seen {
                Some(seen) => request.header("Last-Event-ID", seen),
                None => request,
            })
            .await?;
        Ok(Events::new(answer))
    }

    /// Any document of the API.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        decode(self.send(Method::GET, path, |request| request).await?).await
    }

    /// Asks for something to be done, with a body where it takes one.
    pub(crate) async fn post<T: DeserializeOwned>(&self, path: &str, body: Option<&Value>) -> Result<T, ClientError> {
        let answer = self.send(Method::POST, path, |request| match body {
            Some(body) => request.json(body),
            None => request,
        });
        decode(answer.await?).await
    }

    /// Writes the document at `path` to a file, which is there whole or not at all.
    pub(crate) async fn save(&self, path: &str, file: &Path) -> Result<u64, Fault> {
        let mut answer = self.send(Method::GET, path, |request| request).await?;
        let url = answer.url().to_string();
        let part = file.with_extension("part");
        let write = async {
            let mut out = tokio::fs::File::create(&part).await?;
            let mut written = 0;
            while let Some(piece) = answer.chunk().await.map_err(|source| ClientError::Broken {
                url: url.clone(),
                source,
            })? {
                out.write_all(&piece).await?;
                written += piece.len() as u64;
            }
            out.flush().await?;
            tokio::fs::rename(&part, file).await?;
            anyhow::Ok(written)
        };
        match write.await {
            Ok(written) => Ok(written),
            Err(error) => {
                // What could not be written whole is not left half.
                let _ = tokio::fs::remove_file(&part).await;
                Err(error.context(format!("cannot write {}", file.display())).into())
            }
        }
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        finish: impl FnOnce(RequestBuilder) -> RequestBuilder,
    ) -> Result<Response, ClientError> {
        let base = self.url()?;
        let mut request = finish(self.http.request(method, format!("{base}{path}")));
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        let answer = request.send().await.map_err(|source| ClientError::Unreachable {
            url: base,
            hint: match &self.place {
                Place::RunDir(_) => ", although server.json says so: it has died, or is about to start again",
                Place::Url(_) => "",
            },
            source,
        })?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let (url, status) = (answer.url().to_string(), answer.status());
        match answer.json::<types::Refusal>().await {
            Ok(refusal) => Err(ClientError::Refused(refusal.error)),
            Err(_) => Err(ClientError::Foreign { url, status }),
        }
    }
}

async fn decode<T: DeserializeOwned>(answer: Response) -> Result<T, ClientError> {
    let (url, status) = (answer.url().to_string(), answer.status());
    answer.json().await.map_err(|source| {
        if source.is_decode() {
            ClientError::Foreign { url, status }
        } else {
            ClientError::Broken { url, source }
        }
    })
}

/// An id or a name from the command line as a part of a path; what is none finds nothing.
fn segment(id: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    id.chars().map(allowed).collect()
}
