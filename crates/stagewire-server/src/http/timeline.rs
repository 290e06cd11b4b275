//! The timeline of a job, as data and as a page.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::{Html, IntoResponse, Response};
use serde_json::Value;

use super::error::ApiError;
use super::{App, Shared, jobs};
use crate::timeline::{Timeline, page};

async fn timeline(app: &App, job: &str) -> Result<(Timeline, String), ApiError> {
    let id = jobs::id(job)?;
    let unknown = || ApiError::unknown_job(job);
    let found = app.driver.look(move |sched, now| {
        let job = sched.job(id)?;
        Some((job.state().name(), std::sync::Arc::clone(job.params()), now))
    });
    let (state, params, now) = found.await?.ok_or_else(unknown)?;
    let notes = app.histories.get(id).ok_or_else(unknown)?.notes();
    let stages: Vec<_> = app.topology.stages().iter().map(|stage| stage.name.clone()).collect();
    Ok((Timeline::of(id, state, &stages, &notes, now), params.to_string()))
}

pub(super) async fn json(State(app): Shared, Path(job): Path<String>) -> Result<Json<Value>, ApiError> {
    Ok(Json(timeline(&app, &job).await?.0.to_json()))
}

pub(super) async fn page_html(State(app): Shared, Path(job): Path<String>) -> Result<Response, ApiError> {
    let (timeline, params) = timeline(&app, &job).await?;
    let policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";
    let headers = [
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    Ok((headers, Html(page(&timeline, app.pipeline.name.as_str(), &params))).into_response())
}
