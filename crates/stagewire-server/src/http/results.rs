//! What a job made.

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde_json::{Map, Value, json};
use stagewire_core::{ErrorClass, JobId};
use stagewire_sched::{ArtefactInfo, Job, Outcome, ResultInfo};

use super::error::ApiError;
use super::{Shared, jobs};

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
    let file = found
        .ok_or_else(|| ApiError::unknown_job(&job))?
        .ok_or_else(|| unknown(id, &artefact))?;
    let object = app.artefacts.get(id, &file).await?;
    let mut response = Response::new(Body::from_stream(object.into_stream()));
    let headers = response.headers_mut();
    let value = |text: &str| HeaderValue::from_str(text);
    headers.insert(header::CONTENT_LENGTH, file.nbytes.0.into());
    headers.insert(
        header::CONTENT_TYPE,
        value(&file.media_type).unwrap_or(HeaderValue::from_static("application/octet-stream")),
    );
    if let Ok(disposition) = value(&disposition(&file)) {
        headers.insert(header::CONTENT_DISPOSITION, disposition);
    }
    // What a stage made is data, never a page of this server.
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("sandbox"));
    Ok(response)
}

fn find(job: &Job, artefact: &str) -> Option<ArtefactInfo> {
    let mut files = job.results().flat_map(|(_, result)| &result.artefacts);
    files.find(|file| file.id == artefact).cloned()
}

fn unknown(job: JobId, artefact: &str) -> ApiError {
    let artefact: String = artefact.chars().take(64).collect();
    ApiError::not_found("artefact.unknown", format!("job {job} has no artefact {artefact:?}"))
}

/// Pictures and films may be shown; everything else is saved. The name is encoded as RFC 8187 says.
fn disposition(file: &ArtefactInfo) -> String {
    let kind = file.media_type.split('/').next().unwrap_or_default();
    let shown = matches!(kind, "image" | "video" | "audio");
    let encoded: String = file
        .name
        .bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' | b'_' => char::from(byte).to_string(),
            byte => format!("%{byte:02X}"),
        })
        .collect();
    format!(
        "{}; filename*=UTF-8''{encoded}",
        if shown { "inline" } else { "attachment" }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_cannot_break_out_of_the_header() {
        let file = |name: &str, media_type: &str| {
            disposition(&ArtefactInfo {
                id: String::new(),
                name: name.to_owned(),
                media_type: media_type.to_owned(),
                nbytes: stagewire_core::ByteCount(0),
            })
        };
        assert_eq!(
            file("a red cat.mp4", "video/mp4"),
            "inline; filename*=UTF-8''a%20red%20cat.mp4"
        );
        assert_eq!(
            file("x\"\r\n/ü", "text/html"),
            "attachment; filename*=UTF-8''x%22%0D%0A%2F%C3%BC"
        );
    }
}
