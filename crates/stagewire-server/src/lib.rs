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
//! Payloads in the host store die with the server: their stages run again. The journal grows with the number of jobs.
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
mod journal;
mod metrics;
mod nearest;
mod note;
mod outlet;
mod process;
mod results;
mod run_dir;
mod secret;
mod server;
mod snapshot;
mod timeline;
mod workers;

pub use config::{
    Config, ConfigError, ParamSpec, ParamType, Params, ParamsError, Pipeline, ServerSettings, Stage, UnknownName,
};
pub use journal::JournalError;
pub use run_dir::OccupyError;
pub use server::{Server, ServerOptions, StartError};
pub use stagewire_api::{RunDir, RunDirError};
