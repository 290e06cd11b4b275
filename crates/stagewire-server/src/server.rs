//! The server as a whole: what starts, in which order, and what stops.

mod checks;
mod error;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::serve::ListenerExt;
use stagewire_api::RunDir;
use stagewire_api::v1::orchestrator_server::OrchestratorServer;
use stagewire_core::{Classify, Failure};
use stagewire_sched::{Flow, Limits, Sched, Topology};
use stagewire_store::{DurableOptions, KeeperCommand};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::artefacts::Artefacts;
use crate::clock::Clock;
use crate::config::{Config, ServerSettings};
use crate::driver::{Drive, LONG, Replayed, replay};
use crate::host::{StoreHost, StoreHostError};
use crate::http::{App, Guard, router};
use crate::inputs::{InputBounds, Inputs};
use crate::journal::{Journal, JournalError};
use crate::metrics::Metrics;
use crate::outlet::Outlet;
use crate::pace::Pace;
use crate::results::Results;
use crate::run_dir::Occupied;
use crate::workers::{Attach, AttachOptions, Workers};

pub use error::StartError;

/// Longest message of a worker: a handle carries the metadata of its payload.
const LONGEST_MESSAGE: usize = 64 << 20;
/// How long each step of a stop may take; together below 5 s.
const END_REQUESTS: Duration = Duration::from_secs(2);
const END_TASKS: Duration = Duration::from_millis(500);
const END_DRIVER: Duration = Duration::from_millis(1500);
const END_CONNECTIONS: Duration = Duration::from_millis(250);
const END_STORE: Duration = Duration::from_millis(500);

/// What a server needs to start.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerOptions {
    /// What to serve.
    pub config: Config,
    /// Where the processes of the deployment find each other.
    pub run_dir: RunDir,
    /// Takes the place of `listen` in the file.
    pub listen: Option<SocketAddr>,
    /// Takes the place of `data-dir` in the file.
    pub data_dir: Option<PathBuf>,
    /// How long things may take; `max_queued` is taken from the file.
    pub limits: Limits,
    /// How to start the process that keeps the store's memory while no server runs. Without one, payloads in the store
    /// die with the server, and are made again.
    pub keeper: Option<KeeperCommand>,
}

impl ServerOptions {
    /// Everything as the file says.
    pub fn new(config: Config, run_dir: RunDir) -> Self {
        Self {
            config,
            run_dir,
            listen: None,
            data_dir: None,
            limits: Limits::default(),
            keeper: None,
        }
    }
}

/// A running server: the orchestrator of one pipeline. Dropping it stops it without waiting.
#[derive(Debug)]
pub struct Server {
    run_dir: Option<Occupied>,
    http: SocketAddr,
    epoch: u64,
    parts: Parts,
}

/// What runs.
#[derive(Debug)]
struct Parts {
    /// Ends requests and streams, and lets nothing new in.
    close: CancellationToken,
    /// Ends the driver, which goes last.
    stop: CancellationToken,
    tasks: TaskTracker,
    serve: JoinHandle<()>,
    drive: JoinHandle<()>,
    store: Arc<StoreHost>,
    failed: watch::Receiver<Option<Failure>>,
}

impl Server {
    /// Starts: takes the run directory, listens, replays the journal, and tells the world in `server.json`.
    ///
    /// # Errors
    /// [`StartError`]; its message says what to do.
    ///
    /// # Cancel safety
    /// A dropped future leaves nothing running.
    pub async fn start(options: ServerOptions) -> Result<Self, StartError> {
        let address = options.listen.unwrap_or(options.config.server.listen);
        checks::memory(&options.config.server)?;
        let token = checks::token(&options.config.server, address)?;
        let data_dir = checks::data_dir(&options)?;
        let run_dir = Occupied::occupy(options.run_dir)?;
        let worker_token = run_dir.worker_token()?;
        let listener = listen(address).await?;
        let http = listener
            .local_addr()
            .map_err(|source| StartError::Listen { address, source })?;

        let ServerSettings {
            max_body,
            max_queued,
            store_bytes,
            affinity_step,
            ..
        } = options.config.server;
        let limits = Limits {
            max_queued: usize::try_from(max_queued).unwrap_or(usize::MAX),
            payload_bytes: options.limits.payload_bytes.or(Some(store_bytes)),
            affinity_step: affinity_step.unwrap_or(options.limits.affinity_step),
            ..options.limits
        };
        let topology = options.config.topology.clone();
        let name = options.config.pipeline.name.clone();
        let (journal, replayed) = open_journal(&data_dir, name.as_str(), topology.clone(), limits).await?;
        let Replayed {
            sched, histories, last, ..
        } = replayed;
        let (histories, clock) = (Arc::new(histories), Clock::not_before(last));
        let (epoch, deployment) = (journal.epoch().0, journal.deployment());
        let tasks = TaskTracker::new();
        let dir = data_dir.join("artefacts");
        let artefacts = Artefacts::open(&dir, tasks.clone());
        let artefacts = Arc::new(artefacts.map_err(|source| StartError::DataDir { path: dir, source })?);
        artefacts.sweep(results(&sched)).await;

        let inputs = open_inputs(&data_dir, &options.config)?;

        let durable = options.keeper.map(|keeper| DurableOptions {
            dir: data_dir.join("store"),
            keeper,
        });
        let store = StoreHost::start(run_dir.dir(), options.config.server.store_bytes, durable).await;
        let store = Arc::new(store.map_err(|error| match error {
            StoreHostError::Start(error) => StartError::Store(Box::new(error)),
            StoreHostError::Open(error) => StartError::OpenStore(Box::new(error)),
        })?);
        let metrics = Arc::new(Metrics::new());
        let workers = Arc::new(Workers::default());
        let pace = Arc::new(Pace::default());
        let outlet = Outlet {
            workers: Arc::clone(&workers),
            histories: Arc::clone(&histories),
            store: Arc::clone(&store),
            artefacts: Arc::clone(&artefacts),
            inputs: Arc::clone(&inputs),
            metrics: Arc::clone(&metrics),
            pace: Arc::clone(&pace),
        };
        let (driver, mut drive) = Drive::new(sched, journal, clock, Arc::new(outlet));
        if let Err(error) = drive.begin().await {
            store.close().await;
            store.leave().await;
            return Err(error.into());
        }

        let (close, stop) = (CancellationToken::new(), CancellationToken::new());
        let attach = AttachOptions {
            pipeline: name.clone(),
            stages: topology.stages().iter().map(|stage| stage.name.clone()).collect(),
            worker_token,
            epoch,
            renew_interval: limits.renew_interval(),
            silence: limits.grant * 2,
            linger: limits.linger,
            store: store.address(),
            peers: run_dir.dir().join("peers"),
        };
        let results = Results::new(
            Arc::clone(store.connector()),
            Arc::clone(&artefacts),
            Arc::clone(&workers),
        );
        let attach = Attach::new(
            attach,
            Arc::clone(&workers),
            driver.clone(),
            Arc::new(results),
            close.clone(),
            tasks.clone(),
        );
        tasks.spawn(Arc::clone(&inputs).sweep(driver.clone(), close.clone()));
        let app = App {
            guard: Guard::new(token, http, &options.config.server.allowed_hosts),
            pipeline: options.config.pipeline,
            topology,
            driver: driver.clone(),
            histories,
            artefacts,
            inputs,
            metrics,
            pace,
            workers,
            store: Arc::clone(&store),
            max_body: max_body.0,
            epoch,
            deployment,
            stop: close.clone(),
        };
        let service = OrchestratorServer::new(attach).max_decoding_message_size(LONGEST_MESSAGE);
        let grpc = axum::Router::new().route_service("/stagewire.v1.Orchestrator/{method}", service);
        let serve = axum::serve(
            listener.tap_io(|stream| drop(stream.set_nodelay(true))),
            router(Arc::new(app), grpc),
        );
        let (fail, failed) = watch::channel(None);
        let mut parts = Parts {
            serve: tokio::spawn(run_http(serve.with_graceful_shutdown(close.clone().cancelled_owned()))),
            drive: tokio::spawn(run_driver(drive, stop.clone(), close.clone(), fail)),
            close,
            stop,
            tasks,
            store,
            failed,
        };
        if let Err(error) = run_dir.announce(http.to_string(), name.to_string(), epoch) {
            parts.end().await;
            return Err(error.into());
        }
        tracing::info!(%http, pipeline = %name, epoch, data_dir = %data_dir.display(), "the server runs");
        Ok(Self {
            run_dir: Some(run_dir),
            http,
            epoch,
            parts,
        })
    }

    /// The address that serves both HTTP and gRPC.
    pub const fn http_addr(&self) -> SocketAddr {
        self.http
    }

    /// How often a server has started on this journal.
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Resolves when the server has stopped by itself, with the reason: it could not write its journal. Call
    /// [`Server::shutdown`] then as well.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn stopped(&self) -> Failure {
        let mut failed = self.parts.failed.clone();
        let failure = failed
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|failure| failure.clone());
        match failure {
            Some(failure) => failure,
            // The driver ended because somebody stops the server.
            None => std::future::pending().await,
        }
    }

    /// Stops within 5 s: no new requests, streams end, the journal is closed, nothing of the server is left in the run
    /// directory but the worker token and logs. Jobs stay in the journal; workers run on for their linger time. What jobs
    /// that have not ended have in the store is left to the next server, with the keeper; without any nothing is left.
    ///
    /// # Cancel safety
    /// A dropped future goes on stopping, without waiting.
    pub async fn shutdown(mut self) {
        self.parts.end().await;
        if let Some(run_dir) = self.run_dir.take() {
            run_dir.leave();
        }
        tracing::info!(epoch = self.epoch, "the server has stopped");
    }
}

impl Parts {
    /// Ends everything, in an order in which what was promised is kept.
    async fn end(&mut self) {
        self.close.cancel();
        self.tasks.close();
        wait("requests", END_REQUESTS, &mut self.serve).await;
        self.serve.abort();
        wait("tasks", END_TASKS, self.tasks.wait()).await;
        self.stop.cancel();
        wait("the driver", END_DRIVER, &mut self.drive).await;
        self.drive.abort();
        wait("the store's connections", END_CONNECTIONS, self.store.close()).await;
        // Whatever becomes of those: what is not left is lost to the next server.
        wait("the store", END_STORE, self.store.leave()).await;
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        self.close.cancel();
        self.stop.cancel();
        self.serve.abort();
    }
}

async fn wait(what: &str, limit: Duration, done: impl Future) {
    if tokio::time::timeout(limit, done).await.is_err() {
        tracing::warn!(what, ?limit, "did not end in time and is left behind");
    }
}

async fn run_http<F: IntoFuture<Output = std::io::Result<()>>>(serve: F) {
    if let Err(error) = serve.into_future().await {
        tracing::error!(%error, "serving HTTP ended");
    }
}

async fn run_driver(
    drive: Drive,
    stop: CancellationToken,
    close: CancellationToken,
    fail: watch::Sender<Option<Failure>>,
) {
    if let Err(error) = drive.run(stop).await {
        let failure = error.to_failure();
        tracing::error!(%failure, "the server stops");
        close.cancel();
        fail.send_replace(Some(failure));
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener, StartError> {
    TcpListener::bind(address).await.map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => StartError::AddressInUse { address },
        _ => StartError::Listen { address, source },
    })
}

/// Opens and replays, on a thread that may wait for the disk.
async fn open_journal(
    dir: &Path,
    pipeline: &str,
    topology: Topology,
    limits: Limits,
) -> Result<(Journal, Replayed), StartError> {
    let (dir, scope) = (dir.to_owned(), scope(pipeline, &topology));
    let opened = tokio::task::spawn_blocking(move || {
        let mut journal = Journal::open(&dir, &scope)?;
        let replayed = replay(&mut journal, &dir.join("journal.redb"), &topology, limits, LONG)?;
        let (events, epoch) = (replayed.events, journal.epoch().0);
        tracing::info!(events, epoch, "the journal is replayed");
        Ok::<_, JournalError>((journal, replayed))
    });
    Ok(opened.await.map_err(|error| JournalError::task(&error))??)
}

fn open_inputs(data_dir: &Path, config: &Config) -> Result<Arc<Inputs>, StartError> {
    let bounds = InputBounds {
        largest: config.server.max_input,
        total: config.server.input_bytes,
        idle: config.server.input_idle,
    };
    let dir = data_dir.join("inputs");
    let inputs = Inputs::open(&dir, bounds, config.pipeline.params.inputs().cloned());
    Ok(Arc::new(
        inputs.map_err(|source| StartError::DataDir { path: dir, source })?,
    ))
}

/// What the journal is about: its events make sense for these stages and edges only, and for consumers that may start
/// before their producer is done only where they were allowed to.
fn scope(pipeline: &str, topology: &Topology) -> String {
    let stages: Vec<&str> = topology.stages().iter().map(|stage| stage.name.as_str()).collect();
    let edges: Vec<String> = topology
        .edges()
        .iter()
        .map(|edge| match edge.flow {
            Flow::Whole => format!("{}>{}", edge.from, edge.to),
            Flow::Stream { .. } => format!("{}>{} streamed", edge.from, edge.to),
        })
        .collect();
    format!(
        "pipeline {pipeline} (stages {}; edges {})",
        stages.join(", "),
        edges.join(", ")
    )
}

fn results(sched: &Sched) -> impl Iterator<Item = (stagewire_core::JobId, &stagewire_sched::ResultInfo)> {
    sched
        .jobs()
        .flat_map(|job| job.results().map(move |(_, result)| (job.id(), result)))
}
