//! The orchestrator as a service: drives the scheduler, keeps the journal, speaks gRPC to workers and HTTP to people.
//!
//! *What it is.* [`Server::start`] serves one pipeline, described by a [`Config`] (`stagewire.toml`). One port carries
//! the HTTP API (`/v1/jobs`, events, results, timeline, `/metrics`) and the workers' gRPC streams. The host store, where
//! payloads of mode `store` go, is in the server's own memory.
//!
//! *What it is not.* It decides nothing itself: `stagewire-sched` does, and everything that happens becomes one of its
//! inputs. It starts no workers; `stagewire up` does.
//!
//! *Guarantees.* Nothing is acknowledged before the disk has it: what a client or worker was told survives `kill -9`.
//! A server that cannot write its journal stops. A worker's death is noticed at once where it runs on the same host.
//! Nobody is waited for without a bound: a worker that does not read loses its stream, a watcher that does not read gets
//! only the newest progress. A stop takes at most 5 s and leaves nothing in the run directory but the worker token
//! and logs. Names of files are made by the server; what users typed is escaped.
//!
//! *Non-guarantees.* Progress and the newest notes of a job's history may be lost in a crash; its state is not.
//! Payloads in the host store outlive the server, however it ends, only with a keeper ([`ServerOptions::keeper`]) and
//! for as long as that waits; without, their stages run again. The journal grows with the number of jobs.
//!
//! # The HTTP API
//!
//! Errors are `{"error": {"class", "reason", "message", "details"}}`. Times are nanoseconds since the Unix epoch.
//!
//! | route | what |
//! | --- | --- |
//! | `POST /v1/jobs` | submits `{"params": {…}}`; 201, or 200 where the `Idempotency-Key` is known |
//! | `GET /v1/jobs` | newest first; `?state=`, `?limit=`, `?before=ID` |
//! | `GET /v1/jobs/ID` | state, stages, and what it waits for |
//! | `POST /v1/jobs/ID/cancel` | asks it to stop; 202 |
//! | `GET /v1/jobs/ID/events` | server-sent events until it has ended; resumes after `Last-Event-ID` |
//! | `GET /v1/jobs/ID/result` | its files and what the last stage says of them; 409 unless it succeeded |
//! | `GET /v1/jobs/ID/artefacts/ID` | one file |
//! | `GET /v1/dead-letters`, `…/ID` | jobs that failed for good, with what became of their attempts |
//! | `POST /v1/dead-letters/ID/redrive`, `…/discard` | tries one again under its id, 202; keeps it no longer |
//! | `POST /v1/inputs` | keeps a picture, a clip or another file, named by its digest, for jobs to refer to; 201, or 200 again |
//! | `GET /v1/inputs/NAME` | one of them |
//! | `GET /v1/jobs/ID/timeline`, `…/timeline.html` | what ran when and where, and every chunk, as data and as a page |
//! | `GET /v1/pipeline` | stages, edges, parameters, workers |
//! | `GET /v1/stats`, `GET /metrics` | numbers, as JSON and for Prometheus |
//! | `GET /v1/openapi.json` | the API as an OpenAPI document |
//! | `GET /healthz`, `GET /readyz` | 200 where the server lives; where every stage has a worker, else 503 |
//!
//! An event's data is `{"seq", "at_ns", "type", "stage", "attempt", "worker", …}`; `type` is `submitted`, `queued`,
//! `position` (with `position`), `offered`, `running`, `progress` (with `progress`), `published` and `cached` (with `payload`),
//! `chunk` (with `handover`), `stage_done`, `requeued` and `failed` (with `failure`), `cancelling`, `succeeded`, `cancelled`
//! or `redriven`. Progress and positions carry no event id: they are levels, of which a watcher that comes late sees only
//! the newest.
//!
//! ```
//! use stagewire_server::{Config, RunDir, Server, ServerOptions};
//!
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! let dir = tempfile::tempdir()?;
//! let text = r#"
//!     [pipeline]
//!     name = "hello"
//!     module = "hello.py"
//!     [pipeline.params.prompt]
//!     type = "string"
//!     [[stage]]
//!     name = "paint"
//! "#;
//! let config = Config::parse(text, dir.path().join("stagewire.toml"))?;
//! let mut options = ServerOptions::new(config, RunDir::locate(Some(&dir.path().join("run"))));
//! options.data_dir = Some(dir.path().join("data"));
//!
//! let server = Server::start(options).await?;
//! println!("http://{} serves epoch {}", server.http_addr(), server.epoch());
//! server.shutdown().await;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod artefacts;
mod clock;
mod config;
mod driver;
mod history;
mod host;
mod http;
mod inputs;
mod journal;
mod metrics;
mod nearest;
mod note;
mod outlet;
mod pace;
#[doc(hidden)]
pub mod rehearsal;
mod results;
mod run_dir;
mod secret;
mod server;
mod snapshot;
mod timeline;
mod workers;

pub use config::{
    Caches, Config, ConfigError, ParamSpec, ParamType, Params, ParamsError, Pipeline, ServerSettings, Skips, Stage,
    UnknownName,
};
pub use journal::JournalError;
pub use run_dir::OccupyError;
pub use server::{Server, ServerOptions, StartError};
pub use stagewire_api::{RunDir, RunDirError};
