//! Jobs: submit, list, show, cancel.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use stagewire_core::{Classify, Incarnation, JobId, Timestamp};
use stagewire_sched::{Choice, IdempotencyKey, Input, Job, JobState, Outcome, Phase, Sched, StageRun, Urgency};
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

use super::error::ApiError;
use super::{App, Shared, attempts, body, choices, query, waiting};
use crate::driver::DriveError;
use crate::inputs::Pins;
use crate::nearest::known;
use crate::note::place_json;

/// Header that makes a submission repeatable.
const KEY: &str = "idempotency-key";
/// Longest key, in bytes.
const KEY_LEN: usize = 255;
/// Members of the body of a submission.
const MEMBERS: [&str; 4] = ["params", "class", "queue_deadline_s", "pipeline"];

/// The job that a path names.
pub(super) fn id(text: &str) -> Result<JobId, ApiError> {
    text.parse().map_err(|_| ApiError::unknown_job(text))
}

pub(super) async fn submit(State(app): Shared, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    let bytes = body::read(&headers, body, app.max_body).await?;
    let (given, mut urgency) = request(&app, &bytes)?;
    let given = app.pipeline.params.check(given)?;
    urgency.shape = app.pipeline.params.shape(&given);
    urgency.skip = app.pipeline.skips.of(&given);
    urgency.cache = app.pipeline.caches.of(&given);
    let pins = app.inputs.pin(&given);
    let params: Arc<str> = Value::Object(given).to_string().into();
    let key = key(&headers)?.map(|key| IdempotencyKey {
        key,
        hash: xxh3_64(format!("{params}{:?}{:?}", urgency.class, urgency.queue_deadline).as_bytes()),
    });
    let pins = match pins {
        Ok(pins) => pins,
        // The job that was made with this key may have ended since, and let go of its inputs.
        Err(error) => match first(&app, key).await? {
            Some(job) => return answer(&app, StatusCode::OK, job).await,
            None => return Err(error.into()),
        },
    };
    let job = JobId(Uuid::now_v7());
    let new = job;
    let input = Input::Submit {
        job,
        params,
        key,
        urgency,
    };
    let submitted = decide(&app, input, pins).await?;
    let job = submitted.unwrap_or(new);
    let status = if job == new {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    answer(&app, status, job).await
}

/// The job that was made with this key, if there is one.
async fn first(app: &App, key: Option<IdempotencyKey>) -> Result<Option<JobId>, ApiError> {
    let Some(key) = key else { return Ok(None) };
    let first = app.driver.look(move |sched, _| sched.first_of(&key)).await?;
    Ok(first.map_err(DriveError::from)?)
}

async fn answer(app: &App, status: StatusCode, job: JobId) -> Result<Response, ApiError> {
    let mut response = (status, Json(show_job(app, job).await?)).into_response();
    if let Ok(location) = HeaderValue::from_str(&format!("/v1/jobs/{job}")) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(response)
}

/// Submits, and keeps the inputs of the job until the scheduler has it, also where the client does not wait for that.
async fn decide(app: &Arc<App>, input: Input, pins: Pins) -> Result<Option<JobId>, ApiError> {
    let driver = app.driver.clone();
    let deciding = tokio::spawn(async move {
        let decided = driver.decide(input).await;
        drop(pins);
        decided
    });
    let decided = deciding.await.unwrap_or(Err(DriveError::Stopped));
    decided.map_err(|error| refused(app, error))
}

/// What a client is told whose job is not taken; a full queue says when to try again.
pub(super) fn refused(app: &App, error: DriveError) -> ApiError {
    let full = error.reason() == "queue.full";
    let answer = ApiError::from(error);
    if full {
        answer.after(app.pace.next_end(Instant::now()))
    } else {
        answer
    }
}

/// The parameters in the body of a submission, and how urgent it is.
fn request(app: &App, bytes: &[u8]) -> Result<(Map<String, Value>, Urgency), ApiError> {
    let wrong = |message: String| ApiError::invalid("http.body", message);
    let example = "send {\"params\": {…}}";
    let value: Value =
        serde_json::from_slice(bytes).map_err(|error| wrong(format!("the body is not JSON: {error}; {example}")))?;
    let Value::Object(mut members) = value else {
        return Err(wrong(format!("the body must be a JSON object; {example}")));
    };
    if let Some(name) = members.keys().find(|name| !MEMBERS.contains(&name.as_str())) {
        let hint = if app.pipeline.params.0.contains_key(name) {
            "; parameters stand inside \"params\"".to_owned()
        } else {
            known(name, "it may have", MEMBERS)
        };
        let name: String = name.chars().take(64).collect();
        return Err(wrong(format!("the body has an unknown member {name:?}{hint}")));
    }
    match members.remove("pipeline") {
        None => {}
        Some(Value::String(name)) if name == app.pipeline.name.as_str() => {}
        Some(other) => {
            let name = other.as_str().map_or_else(|| other.to_string(), str::to_owned);
            let name: String = name.chars().take(64).collect();
            let message = format!(
                "this server has no pipeline {name:?}; it serves {:?}",
                app.pipeline.name.as_str()
            );
            return Err(ApiError::not_found("pipeline.unknown", message));
        }
    }
    let class = match members.remove("class") {
        None | Some(Value::Null) => None,
        Some(Value::String(class)) => Some(class),
        Some(_) => return Err(wrong("\"class\" must be a string, the name of a class".to_owned())),
    };
    let urgency = Urgency {
        class,
        queue_deadline: queue_deadline(members.remove("queue_deadline_s"))?,
        ..Urgency::default()
    };
    match members.remove("params") {
        Some(Value::Object(params)) => Ok((params, urgency)),
        None => Ok((Map::new(), urgency)),
        Some(_) => Err(wrong(format!("\"params\" must be a JSON object; {example}"))),
    }
}

/// A span of time in seconds that the scheduler can judge; negative ones and what is no number never get that far.
fn queue_deadline(given: Option<Value>) -> Result<Option<Duration>, ApiError> {
    let given = match given {
        None | Some(Value::Null) => return Ok(None),
        Some(given) => given,
    };
    let deadline = given
        .as_f64()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    deadline.map(Some).ok_or_else(|| {
        let shown: String = given.to_string().chars().take(64).collect();
        ApiError::invalid(
            "job.deadline",
            format!(
                "\"queue_deadline_s\" is {shown}; it must be a number of seconds from 0.001 to 31622400 (366 days), or \
                 left out"
            ),
        )
    })
}

fn key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(KEY) else { return Ok(None) };
    match value.to_str() {
        Ok(key) if (1..=KEY_LEN).contains(&key.len()) => Ok(Some(key.to_owned())),
        _ => Err(ApiError::invalid(
            "job.key",
            format!("Idempotency-Key must be 1 to {KEY_LEN} visible ASCII characters"),
        )),
    }
}

pub(super) async fn list(State(app): Shared, uri: Uri) -> Result<Json<Value>, ApiError> {
    let mut query = query::read(&uri, &["state", "limit", "before"])?;
    let state = query.remove("state");
    if let Some(state) = state.as_deref().filter(|state| !JobState::NAMES.contains(state)) {
        let hint = known(state, "the states are", JobState::NAMES);
        return Err(query::wrong(format!("there is no state {}{hint}", query::shown(state))));
    }
    let before = query.get("before").map(|before| id(before)).transpose()?;
    let limit = query::limit(&query)?;
    let jobs = app.driver.look(move |sched, _| {
        let names = Names::of(sched);
        let wanted = |job: &&Job| {
            before.is_none_or(|before| job.id() < before)
                && state.as_deref().is_none_or(|state| job.state().name() == state)
        };
        let mut jobs: Vec<Value> = sched
            .jobs()
            .rev()
            .filter(wanted)
            .take(limit + 1)
            .map(|job| summary(job, &names))
            .collect();
        let next = (jobs.len() > limit)
            .then(|| jobs.pop())
            .and(jobs.last().map(|job| job["id"].clone()));
        json!({"jobs": jobs, "next": next})
    });
    Ok(Json(jobs.await?))
}

pub(super) async fn show(State(app): Shared, Path(job): Path<String>) -> Result<Json<Value>, ApiError> {
    Ok(Json(show_job(&app, id(&job)?).await?))
}

pub(super) async fn cancel(State(app): Shared, Path(job): Path<String>) -> Result<(StatusCode, Json<Value>), ApiError> {
    let job = id(&job)?;
    app.driver.decide(Input::Cancel { job }).await?;
    Ok((StatusCode::ACCEPTED, Json(show_job(&app, job).await?)))
}

pub(super) async fn show_job(app: &App, job: JobId) -> Result<Value, ApiError> {
    let choices = app
        .histories
        .get(job)
        .map(|history| history.choices())
        .unwrap_or_default();
    let json = app
        .driver
        .look(move |sched, now| sched.job(job).map(|found| full(sched, now, found, &choices)));
    json.await?.ok_or_else(|| ApiError::unknown_job(&job.to_string()))
}

/// Names of workers.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeMap<Incarnation, String>);

impl Names {
    fn of(sched: &Sched) -> Self {
        let infos = sched.workers().filter_map(|worker| worker.info());
        Self(infos.map(|info| (info.incarnation, info.name.clone())).collect())
    }

    /// The name, or the incarnation of one that has not attached since the server started.
    pub(super) fn name(&self, worker: Incarnation) -> String {
        self.0.get(&worker).cloned().unwrap_or_else(|| worker.to_string())
    }
}

/// What a list shows of a job.
fn summary(job: &Job, names: &Names) -> Value {
    let mut json = json!({
        "id": job.id(),
        "state": job.state().name(),
        "class": job.terms().class,
        "submitted_ns": job.submitted(),
        "stages": job.stages().iter().map(|run| stage(run, names)).collect::<Vec<_>>(),
    });
    if let Some(due) = job.due() {
        json["queue_deadline_ns"] = json!(due);
    }
    if let Some(ended) = job.ended() {
        json["ended_ns"] = json!(ended);
    }
    if let Some(Outcome::Failed(failure)) = job.outcome() {
        json["failure"] = json!(failure);
    }
    json
}

/// What went wrong with it without counting as a failure of a stage.
pub(super) fn losses(job: &Job) -> Value {
    json!({
        "killed_workers": job.losses().killed_workers,
        "expired": job.losses().expired,
        "lost_inputs": job.losses().lost_inputs,
        "unaccepted_offers": job.losses().unaccepted,
    })
}

fn full(sched: &Sched, now: Timestamp, job: &Job, choices: &[Arc<Choice>]) -> Value {
    let names = Names::of(sched);
    let mut json = summary(job, &names);
    json["params"] = serde_json::from_str(job.params()).unwrap_or_default();
    json["losses"] = losses(job);
    json["attempts"] = attempts::json(job.attempts());
    json["attempts_dropped"] = json!(job.attempts().dropped());
    json["redrives"] = json!(job.redrives());
    json["dead_letter"] = json!(job.dead_letter().is_some());
    let mut positions: BTreeMap<_, _> = sched.positions(job.id()).collect();
    for (run, json) in job
        .stages()
        .iter()
        .zip(json["stages"].as_array_mut().into_iter().flatten())
    {
        if let Some(position) = positions.remove(run.name()) {
            json["position"] = place_json(position);
        }
    }
    let waiting = sched.explain(now, job.id());
    json["waiting"] = waiting.iter().map(|waiting| waiting::json(waiting, &names)).collect();
    json["choices"] = choices.iter().map(|choice| choices::json(choice, &names)).collect();
    let url = format!("/v1/jobs/{}", job.id());
    json["links"] = json!({
        "events": format!("{url}/events"),
        "result": format!("{url}/result"),
        "timeline": format!("{url}/timeline.html"),
    });
    json
}

fn stage(run: &StageRun, names: &Names) -> Value {
    let phase = run.phase();
    let mut json = json!({
        "name": run.name(),
        "state": phase.name(),
        "since_ns": phase.since(),
        "failures": run.failures(),
    });
    if let Some(token) = phase.token() {
        json["attempt"] = json!(token.attempt);
    }
    if let Some(worker) = phase.worker() {
        json["worker"] = json!(names.name(worker));
    }
    if let Phase::Running(running) = phase
        && let Some(progress) = &running.progress
    {
        json["progress"] = json!(progress);
    }
    if let Some(kept) = run.checkpoint() {
        json["checkpoint"] = json!(kept.progress);
    }
    if run.preemptions() > 0 {
        json["preemptions"] = json!(run.preemptions());
    }
    if let Some(failure) = run.last_failure() {
        json["failure"] = json!(failure);
    }
    json
}
