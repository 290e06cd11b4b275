//! Inputs of jobs: send one, fetch one.

use std::time::Instant;

use axum::Json;
use axum::body::{Body, HttpBody};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use stagewire_core::ErrorClass;
use tokio_util::io::ReaderStream;

use super::error::ApiError;
use super::{App, Shared, body, file};
use crate::inputs::{InputError, InputInfo};

/// Where inputs are sent to.
pub(super) const PATH: &str = "/v1/inputs";
/// Media type of an input whose sender names none.
const UNKNOWN_TYPE: &str = "application/octet-stream";
/// Longest media type, in bytes.
const TYPE_LEN: usize = 127;
/// Bytes of a file that are read at once.
const PIECE: usize = 64 << 10;

pub(super) async fn upload(State(app): Shared, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    let media_type = media_type(&headers)?;
    let declared = body.size_hint().exact();
    let mut stream = body.into_data_stream();
    let received = app.inputs.receive(&app.driver, media_type, declared, &mut stream).await;
    let (info, new) = match received {
        Ok(received) => received,
        Err(error) => {
            // A client that asked first has sent nothing yet; one whose bytes broke off or stopped sends no more.
            let over = matches!(
                error,
                InputError::Broken { .. } | InputError::Stalled { .. } | InputError::Slow { .. }
            );
            if !over && !headers.contains_key(header::EXPECT) {
                body::drain(&mut stream).await;
            }
            return Err(refusal(&app, error));
        }
    };
    let status = if new { StatusCode::CREATED } else { StatusCode::OK };
    let url = format!("{PATH}/{}", info.name);
    let mut response = (status, Json(shown(&info, &url))).into_response();
    if let Ok(location) = HeaderValue::from_str(&url) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(response)
}

fn shown(info: &InputInfo, url: &str) -> serde_json::Value {
    json!({
        "name": info.name.to_string(),
        "nbytes": info.nbytes,
        "media_type": info.media_type,
        "url": url,
    })
}

fn refusal(app: &App, error: InputError) -> ApiError {
    let full = matches!(error, InputError::Room { .. });
    let status = match &error {
        InputError::TooLarge { .. } => Some(StatusCode::PAYLOAD_TOO_LARGE),
        InputError::Room { .. } => Some(StatusCode::INSUFFICIENT_STORAGE),
        InputError::Stalled { .. } | InputError::Slow { .. } => Some(StatusCode::REQUEST_TIMEOUT),
        _ => None,
    };
    let answer = ApiError::from(error);
    let answer = match status {
        Some(status) => answer.under(status),
        None => answer,
    };
    match full {
        // Room comes when a job ends that needs an input.
        true => answer.after(app.pace.next_end(Instant::now())),
        false => answer,
    }
}

/// The type that the sender names. Forms are refused: what they wrap is not the file, and a page of another site can send
/// them unasked.
fn media_type(headers: &HeaderMap) -> Result<String, ApiError> {
    let Some(shown) = headers.get(header::CONTENT_TYPE) else {
        return Ok(UNKNOWN_TYPE.to_owned());
    };
    let text = shown.to_str().unwrap_or_default();
    let essence = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let token = |part: &str| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$&-^_.+".contains(&byte);
        !part.is_empty() && part.bytes().all(allowed)
    };
    let form = matches!(
        essence.as_str(),
        "multipart/form-data" | "application/x-www-form-urlencoded"
    );
    match essence.split_once('/') {
        Some((kind, rest)) if token(kind) && token(rest) && text.len() <= TYPE_LEN && !form => Ok(text.to_owned()),
        _ => Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ErrorClass::Invalid,
            "http.content_type",
            format!(
                "an input is the bytes of a file, of the type that `Content-Type` says, such as image/png; not {:?}",
                text.chars().take(100).collect::<String>()
            ),
        )),
    }
}

pub(super) async fn download(State(app): Shared, Path(name): Path<String>) -> Result<Response, ApiError> {
    let (info, opened) = app.inputs.open_file(&name).await?;
    let body = Body::from_stream(ReaderStream::with_capacity(opened, PIECE));
    Ok(file::response(
        body,
        info.nbytes,
        &info.media_type,
        &info.name.to_string(),
    ))
}
