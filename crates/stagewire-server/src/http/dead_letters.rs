//! Jobs that failed for good: list, show, redrive, discard.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri};
use serde_json::{Value, json};
use stagewire_core::JobId;
use stagewire_sched::{DeadLetter, Discard, Input, Refusal, Sched};

use super::error::ApiError;
use super::{App, Shared, attempts, jobs, query};
use crate::driver::DriveError;

pub(super) async fn list(State(app): Shared, uri: Uri) -> Result<Json<Value>, ApiError> {
    let query = query::read(&uri, &["limit", "before"])?;
    let before = query.get("before").map(|before| jobs::id(before)).transpose()?;
    let limit = query::limit(&query)?;
    let page = app.driver.look(move |sched, _| page(sched, before, limit));
    Ok(Json(page.await?))
}

/// A page of dead letters, the job that was submitted last first: so that a page stays where it is when those of the page
/// before are redriven.
fn page(sched: &Sched, before: Option<JobId>, limit: usize) -> Value {
    let mut letters: Vec<DeadLetter<'_>> = sched
        .dead_letters()
        .filter(|letter| before.is_none_or(|before| letter.job.id() < before))
        .collect();
    letters.sort_unstable_by_key(|letter| std::cmp::Reverse(letter.job.id()));
    let more = letters.len() > limit;
    letters.truncate(limit);
    let next = letters.last().filter(|_| more).map(|letter| letter.job.id());
    let letters: Vec<Value> = letters.into_iter().map(json).collect();
    json!({"dead_letters": letters, "next": next})
}

pub(super) async fn show(State(app): Shared, Path(job): Path<String>) -> Result<Json<Value>, ApiError> {
    let id = jobs::id(&job)?;
    let found = app.driver.look(move |sched, _| {
        let job = sched.job(id).ok_or(Refusal::UnknownJob { job: id })?;
        let state = job.state().name();
        let letter = job.dead_letter().ok_or(Refusal::NotDead { job: id, state })?;
        let mut json = json(letter);
        json["params"] = serde_json::from_str(job.params()).unwrap_or_default();
        Ok(json)
    });
    Ok(Json(found.await?.map_err(DriveError::Refused)?))
}

pub(super) async fn redrive(
    State(app): Shared,
    Path(job): Path<String>,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let job = jobs::id(&job)?;
    settle(&app, job, Input::Redrive { job })
        .await
        .map(|json| (StatusCode::ACCEPTED, json))
}

pub(super) async fn discard(State(app): Shared, Path(job): Path<String>) -> Result<Json<Value>, ApiError> {
    let job = jobs::id(&job)?;
    let why = Discard::Asked;
    settle(&app, job, Input::Discard { job, why }).await
}

/// Decides what becomes of a dead letter, and shows the job as it is then.
async fn settle(app: &Arc<App>, job: JobId, input: Input) -> Result<Json<Value>, ApiError> {
    let decided = app.driver.decide(input).await;
    decided.map_err(|error| jobs::refused(app, error))?;
    Ok(Json(jobs::show_job(app, job).await?))
}

fn json(letter: DeadLetter<'_>) -> Value {
    let job = letter.job;
    json!({
        "id": job.id(),
        "class": job.terms().class,
        "submitted_ns": job.submitted(),
        "died_ns": letter.died,
        "cause": letter.cause,
        "failure": letter.failure,
        "losses": jobs::losses(job),
        "attempts": attempts::json(job.attempts()),
        "attempts_dropped": job.attempts().dropped(),
        "redrives": job.redrives(),
    })
}
