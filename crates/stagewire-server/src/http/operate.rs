//! What operators do to a pipeline that runs: drain workers, pause, resume.

use std::collections::BTreeSet;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use serde_json::{Value, json};
use stagewire_core::{Incarnation, StageName};
use stagewire_sched::{DrainScope, Input, Worker};

use super::error::ApiError;
use super::{App, Shared, body, pipeline, pools};
use crate::nearest::known;

/// Members of the body of a drain.
const MEMBERS: [&str; 3] = ["worker", "stage", "deadline_s"];
/// Longest time that what runs may have, in seconds.
const LONGEST: f64 = 31_622_400.0;

pub(super) async fn pause(State(app): Shared) -> Result<Json<Value>, ApiError> {
    let input = Input::Pause;
    set_paused(&app, input).await
}

pub(super) async fn resume(State(app): Shared) -> Result<Json<Value>, ApiError> {
    let input = Input::Resume;
    set_paused(&app, input).await
}

async fn set_paused(app: &App, input: Input) -> Result<Json<Value>, ApiError> {
    app.driver.decide(input).await?;
    let paused = app.driver.look(|sched, _| sched.is_paused()).await?;
    Ok(Json(json!({"paused": paused})))
}

/// The answer names the workers that drain now because of it.
pub(super) async fn drain(
    State(app): Shared,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let bytes = body::read(&headers, body, app.max_body).await?;
    let Wanted { pool, within } = Wanted::read(&bytes)?;
    let (scopes, workers) = match pool {
        Pool::Worker(name) => {
            let workers = workers_called(&app, name).await?;
            (
                workers.iter().map(|worker| DrainScope::Worker(*worker)).collect(),
                workers,
            )
        }
        Pool::Stage(stage) => {
            let workers = workers_of(&app, stage.clone()).await?;
            (vec![DrainScope::Stage(stage)], workers)
        }
    };
    for scope in scopes {
        app.driver.decide(Input::Drain { scope, within }).await?;
    }
    let snapshot = pipeline::snapshot(&app).await?;
    let workers = pools::of(&app, &snapshot, &workers);
    Ok((StatusCode::ACCEPTED, Json(json!({"workers": workers}))))
}

async fn workers_of(app: &App, stage: StageName) -> Result<BTreeSet<Incarnation>, ApiError> {
    let found = app.driver.look(move |sched, _| {
        let workers = sched.workers().filter(|worker| *worker.stage() == stage);
        workers.map(Worker::incarnation).collect()
    });
    Ok(found.await?)
}

/// The workers of this name, which need not be unique, or of this incarnation, which is.
async fn workers_called(app: &App, name: String) -> Result<BTreeSet<Incarnation>, ApiError> {
    let wanted = name.clone();
    let (found, names) = app
        .driver
        .look(move |sched, _| {
            let name = |worker: &Worker| worker.info().map(|info| info.name.clone());
            let found: BTreeSet<Incarnation> = sched
                .workers()
                .filter(|worker| name(worker).as_ref() == Some(&wanted) || worker.incarnation().to_string() == wanted)
                .map(Worker::incarnation)
                .collect();
            let names: BTreeSet<String> = sched.workers().filter_map(name).collect();
            (found, names)
        })
        .await?;
    if found.is_empty() {
        let hint = known(&name, "there are", names.iter().map(String::as_str));
        let name: String = name.chars().take(64).collect();
        let message = format!("no worker {name:?} is known{hint}");
        return Err(ApiError::not_found("worker.not_found", message));
    }
    Ok(found)
}

/// The body of a drain.
struct Wanted {
    pool: Pool,
    within: Option<Duration>,
}

enum Pool {
    Worker(String),
    Stage(StageName),
}

impl Wanted {
    fn read(bytes: &[u8]) -> Result<Self, ApiError> {
        let wrong = |message: String| ApiError::invalid("http.body", message);
        let example = "send {\"worker\": NAME} or {\"stage\": NAME}, and \"deadline_s\" if you like";
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|error| wrong(format!("the body is not JSON: {error}; {example}")))?;
        let Value::Object(mut members) = value else {
            return Err(wrong(format!("the body must be a JSON object; {example}")));
        };
        if let Some(name) = members.keys().find(|name| !MEMBERS.contains(&name.as_str())) {
            let hint = known(name, "it may have", MEMBERS);
            let name: String = name.chars().take(64).collect();
            return Err(wrong(format!("the body has an unknown member {name:?}{hint}")));
        }
        let pool = match (members.remove("worker"), members.remove("stage")) {
            (Some(Value::String(worker)), None) => Pool::Worker(worker),
            (None, Some(Value::String(stage))) => {
                Pool::Stage(StageName::new(&stage).map_err(|error| wrong(error.to_string()))?)
            }
            _ => {
                return Err(wrong(format!(
                    "the body must name either a worker or a stage; {example}"
                )));
            }
        };
        let within = match members.remove("deadline_s") {
            None | Some(Value::Null) => None,
            Some(given) => {
                let seconds = given.as_f64().filter(|seconds| (0.0..=LONGEST).contains(seconds));
                let seconds = seconds.ok_or_else(|| {
                    let shown: String = given.to_string().chars().take(64).collect();
                    let message =
                        format!("\"deadline_s\" is {shown}; it must be a number of seconds from 0 to {LONGEST}");
                    wrong(message)
                })?;
                Some(Duration::from_secs_f64(seconds))
            }
        };
        Ok(Self { pool, within })
    }
}
