//! What a job made.

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Map, Value, json};
use stagewire_core::{ErrorClass, JobId};
use stagewire_sched::{ArtefactInfo, Job, Outcome, ResultInfo};

use super::error::ApiError;
use super::{Shared, file, jobs};

pub(super) async fn show(State(app): Shared, Path(job): Path<String>) -> Result<Json<Value>, ApiError> {
    let id = jobs::id(&job)?;
    let shown = app.driver.look(move |sched, _| sched.job(id).map(result)).await?;
    Ok(Json(shown.unwrap_or_else(|| Err(ApiError::unknown_job(&job)))?))
}

fn result(job: &Job) -> Result<Value, ApiError> {
    let id = job.id();
    match job.outcome() {
        Some(Outcome::Succeeded) => {}
        Some(Outcome::Failed(failure)) => return Err(ApiError::failure(StatusCode::CONFLICT, failure.clone())),
        Some(Outcome::Cancelled) => {
            let message = format!("job {id} was cancelled and has no result");
            return Err(ApiError::new(
                StatusCode::CONFLICT,
                ErrorClass::Cancelled,
                "job.cancelled",
                message,
            ));
        }
        None => {
            let state = job.state().name();
            let message = format!("job {id} has not ended; it is {state}. Watch /v1/jobs/{id}/events");
            let error = ApiError::new(StatusCode::CONFLICT, ErrorClass::Conflict, "job.not_ended", message);
            return Err(error.with("state", state));
        }
    }
    let artefacts: Vec<Value> = job
        .results()
        .flat_map(|(stage, result)| result.artefacts.iter().map(move |file| (stage, file)))
        .map(|(stage, file)| {
            json!({
                "id": file.id,
                "stage": stage,
                "name": file.name,
                "media_type": file.media_type,
                "nbytes": file.nbytes,
                "url": format!("/v1/jobs/{id}/artefacts/{}", file.id),
            })
        })
        .collect();
    let mut infos: Map<String, Value> = job
        .results()
        .map(|(stage, result)| (stage.to_string(), info(result)))
        .collect();
    // With one last stage its info stands alone, else under the name of its stage.
    let info = match infos.len() {
        1 => infos.values_mut().next().map(Value::take).unwrap_or_default(),
        _ => Value::Object(infos),
    };
    Ok(json!({"id": id, "state": job.state().name(), "artefacts": artefacts, "info": info}))
}

fn info(result: &ResultInfo) -> Value {
    serde_json::from_str(&result.info).unwrap_or_else(|_| json!({}))
}

pub(super) async fn download(
    State(app): Shared,
    Path((job, artefact)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    let id = jobs::id(&job)?;
    let wanted = artefact.clone();
    let found = app
        .driver
        .look(move |sched, _| sched.job(id).map(|job| find(job, &wanted)))
        .await?;
    let found = found
        .ok_or_else(|| ApiError::unknown_job(&job))?
        .ok_or_else(|| unknown(id, &artefact))?;
    let object = app.artefacts.get(id, &found).await?;
    let body = Body::from_stream(object.into_stream());
    Ok(file::response(body, found.nbytes.0, &found.media_type, &found.name))
}

fn find(job: &Job, artefact: &str) -> Option<ArtefactInfo> {
    let mut files = job.results().flat_map(|(_, result)| &result.artefacts);
    files.find(|file| file.id == artefact).cloned()
}

fn unknown(job: JobId, artefact: &str) -> ApiError {
    let artefact: String = artefact.chars().take(64).collect();
    ApiError::not_found("artefact.unknown", format!("job {job} has no artefact {artefact:?}"))
}
