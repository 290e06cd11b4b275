//! HTTP for people and programs, and gRPC for workers on the same port.

mod attempts;
mod body;
mod choices;
mod dead_letters;
mod error;
mod events;
mod file;
mod guard;
mod inputs;
mod jobs;
mod openapi;
mod operate;
mod pipeline;
mod pools;
mod query;
mod results;
mod timeline;
mod waiting;

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use stagewire_sched::Topology;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::artefacts::Artefacts;
use crate::config::Pipeline;
use crate::driver::Driver;
use crate::history::Histories;
use crate::host::StoreHost;
use crate::inputs::Inputs;
use crate::metrics::Metrics;
use crate::pace::Pace;
use crate::workers::Workers;

pub(crate) use guard::Guard;

use self::error::ApiError;

/// What the handlers work with.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) pipeline: Pipeline,
    pub(crate) topology: Topology,
    pub(crate) driver: Driver,
    pub(crate) histories: Arc<Histories>,
    pub(crate) artefacts: Arc<Artefacts>,
    pub(crate) inputs: Arc<Inputs>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) pace: Arc<Pace>,
    pub(crate) workers: Arc<Workers>,
    pub(crate) store: Arc<StoreHost>,
    pub(crate) guard: Guard,
    pub(crate) max_body: u64,
    pub(crate) epoch: u64,
    pub(crate) deployment: Uuid,
    /// Ends the streams.
    pub(crate) stop: CancellationToken,
}

type Shared = State<Arc<App>>;

/// All routes. `grpc` is the service for workers.
pub(crate) fn router(app: Arc<App>, grpc: Router) -> Router {
    let api = Router::new()
        .route("/v1/jobs", post(jobs::submit).get(jobs::list))
        .route("/v1/jobs/{job}", get(jobs::show))
        .route("/v1/jobs/{job}/cancel", post(jobs::cancel))
        .route("/v1/jobs/{job}/events", get(events::stream))
        .route("/v1/jobs/{job}/result", get(results::show))
        .route("/v1/jobs/{job}/artefacts/{artefact}", get(results::download))
        .route("/v1/jobs/{job}/timeline", get(timeline::json))
        .route("/v1/jobs/{job}/timeline.html", get(timeline::page_html))
        .route("/v1/dead-letters", get(dead_letters::list))
        .route("/v1/dead-letters/{job}", get(dead_letters::show))
        .route("/v1/dead-letters/{job}/redrive", post(dead_letters::redrive))
        .route("/v1/dead-letters/{job}/discard", post(dead_letters::discard))
        .route("/v1/inputs", post(inputs::upload))
        .route("/v1/inputs/{name}", get(inputs::download))
        .route("/v1/pipeline", get(pipeline::show))
        .route("/v1/pipeline/pause", post(operate::pause))
        .route("/v1/pipeline/resume", post(operate::resume))
        .route("/v1/pipeline/drain", post(operate::drain))
        .route("/v1/pools", get(pools::show))
        .route("/v1/stats", get(pipeline::stats))
        .route("/v1/openapi.json", get(openapi::show))
        .route("/healthz", get(pipeline::health))
        .route("/readyz", get(pipeline::ready))
        .route("/metrics", get(pipeline::metrics))
        .fallback(unknown_path)
        .method_not_allowed_fallback(unknown_method)
        .with_state(Arc::clone(&app));
    grpc.merge(api)
        .layer(from_fn_with_state(Arc::clone(&app), guard::check))
        .layer(from_fn_with_state(app, measure))
}

async fn unknown_path(request: Request) -> ApiError {
    let path: String = request.uri().path().chars().take(100).collect();
    ApiError::not_found(
        "http.path",
        format!("there is nothing at {path}; the API begins at /v1/jobs and /v1/pipeline"),
    )
}

async fn unknown_method(request: Request) -> ApiError {
    let (method, path) = (request.method().as_str(), request.uri().path());
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        stagewire_core::ErrorClass::Invalid,
        "http.method",
        format!("{path} does not take {method}"),
    )
}

async fn measure(State(app): Shared, request: Request, next: Next) -> Response {
    let begin = Instant::now();
    let method = known_method(request.method());
    let route = route(request.uri().path());
    let response = next.run(request).await;
    app.metrics
        .request(method, route.to_owned(), response.status().as_u16(), begin.elapsed());
    response
}

const fn known_method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::HEAD => "HEAD",
        _ => "other",
    }
}

/// The route of a path, from a closed set.
fn route(path: &str) -> &'static str {
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    match parts.as_slice() {
        ["v1", "jobs"] => "/v1/jobs",
        ["v1", "jobs", _] => "/v1/jobs/{job}",
        ["v1", "jobs", _, "cancel"] => "/v1/jobs/{job}/cancel",
        ["v1", "jobs", _, "events"] => "/v1/jobs/{job}/events",
        ["v1", "jobs", _, "result"] => "/v1/jobs/{job}/result",
        ["v1", "jobs", _, "artefacts", _] => "/v1/jobs/{job}/artefacts/{artefact}",
        ["v1", "jobs", _, "timeline"] => "/v1/jobs/{job}/timeline",
        ["v1", "jobs", _, "timeline.html"] => "/v1/jobs/{job}/timeline.html",
        ["v1", "dead-letters"] => "/v1/dead-letters",
        ["v1", "dead-letters", _] => "/v1/dead-letters/{job}",
        ["v1", "dead-letters", _, "redrive"] => "/v1/dead-letters/{job}/redrive",
        ["v1", "dead-letters", _, "discard"] => "/v1/dead-letters/{job}/discard",
        ["v1", "inputs"] => "/v1/inputs",
        ["v1", "inputs", _] => "/v1/inputs/{name}",
        ["v1", "pipeline"] => "/v1/pipeline",
        ["v1", "pipeline", "pause"] => "/v1/pipeline/pause",
        ["v1", "pipeline", "resume"] => "/v1/pipeline/resume",
        ["v1", "pipeline", "drain"] => "/v1/pipeline/drain",
        ["v1", "pools"] => "/v1/pools",
        ["v1", "stats"] => "/v1/stats",
        ["v1", "openapi.json"] => "/v1/openapi.json",
        ["healthz"] => "/healthz",
        ["readyz"] => "/readyz",
        ["metrics"] => "/metrics",
        ["stagewire.v1.Orchestrator", "Attach"] => "/stagewire.v1.Orchestrator/Attach",
        _ => "other",
    }
}
