//! Bodies of requests, bounded.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::http::{HeaderMap, StatusCode, header};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use stagewire_core::{ByteCount, ErrorClass};

use super::error::ApiError;

/// How much of a body that is too long is read and thrown away, so that its sender hears the answer: closing the
/// connection on unread bytes would take the answer with it.
const DRAIN: u64 = 256 << 20;
const DRAIN_TIME: Duration = Duration::from_secs(10);

/// Reads a body of at most `limit` bytes.
///
/// # Errors
/// 413 that names the limit, or 400 where the body breaks off.
pub(super) async fn read(headers: &HeaderMap, body: Body, limit: u64) -> Result<Bytes, ApiError> {
    let declared = body.size_hint().exact();
    let waits = headers.contains_key(header::EXPECT);
    let mut stream = body.into_data_stream();
    if let Some(declared) = declared.filter(|declared| *declared > limit) {
        // A client that asked first has sent nothing yet.
        if !waits {
            drain(&mut stream).await;
        }
        return Err(too_large(Some(declared), limit));
    }
    let mut bytes = BytesMut::new();
    while let Some(part) = stream.next().await {
        let part = part.map_err(|error| ApiError::invalid("http.body", format!("the body broke off: {error}")))?;
        if (bytes.len() + part.len()) as u64 > limit {
            drain(&mut stream).await;
            return Err(too_large(None, limit));
        }
        bytes.extend_from_slice(&part);
    }
    Ok(bytes.freeze())
}

/// Reads and throws away what a client that does not wait still sends.
pub(super) async fn drain(stream: &mut axum::body::BodyDataStream) {
    let drained = async {
        let mut seen = 0;
        while let Some(Ok(part)) = stream.next().await {
            seen += part.len() as u64;
            if seen > DRAIN {
                break;
            }
        }
    };
    // Late or not, the answer goes out.
    let _ = tokio::time::timeout(DRAIN_TIME, drained).await;
}

fn too_large(declared: Option<u64>, limit: u64) -> ApiError {
    let size = declared.map_or_else(|| "more than that".to_owned(), |size| ByteCount(size).to_string());
    ApiError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        ErrorClass::Invalid,
        "http.body_too_large",
        format!(
            "the body is {size}; this server takes at most {} (\"max-body\" in [server])",
            ByteCount(limit)
        ),
    )
    .with("limit_bytes", limit)
}
