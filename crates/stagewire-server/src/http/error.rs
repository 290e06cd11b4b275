//! Errors as the API shows them: `{"error": {"class", "reason", "message", "details"}}`.

use std::fmt;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use stagewire_core::{Classify, ErrorClass, Failure};

/// An answer that is not what was asked for.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    failure: Box<Failure>,
    /// Seconds.
    retry_after: Option<u64>,
}

/// The status of a class, where nothing more precise is known.
const fn status(class: ErrorClass) -> StatusCode {
    match class {
        ErrorClass::Invalid => StatusCode::BAD_REQUEST,
        ErrorClass::NotFound => StatusCode::NOT_FOUND,
        ErrorClass::Conflict | ErrorClass::Fenced | ErrorClass::Cancelled => StatusCode::CONFLICT,
        ErrorClass::Exhausted | ErrorClass::RateLimited => StatusCode::TOO_MANY_REQUESTS,
        ErrorClass::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        ErrorClass::Deadline => StatusCode::GATEWAY_TIMEOUT,
        ErrorClass::Unauthenticated => StatusCode::UNAUTHORIZED,
        ErrorClass::Denied => StatusCode::FORBIDDEN,
        ErrorClass::Unsupported => StatusCode::NOT_IMPLEMENTED,
        ErrorClass::Corrupt | ErrorClass::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, class: ErrorClass, reason: &str, message: impl Into<String>) -> Self {
        Self {
            status,
            failure: Box::new(Failure::new(class, reason, message)),
            retry_after: None,
        }
    }

    pub(crate) fn invalid(reason: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, ErrorClass::Invalid, reason, message)
    }

    pub(crate) fn not_found(reason: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, ErrorClass::NotFound, reason, message)
    }

    pub(crate) fn unknown_job(job: &str) -> Self {
        let job: String = job.chars().take(64).collect();
        Self::not_found("job.unknown", format!("job {job} does not exist, or was forgotten"))
    }

    /// The failure itself as the answer, under another status than its class has.
    pub(crate) fn failure(status: StatusCode, failure: Failure) -> Self {
        Self {
            status,
            failure: Box::new(failure),
            retry_after: None,
        }
    }

    /// The same under another status than its class has.
    #[must_use]
    pub(crate) fn under(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// The same, to be tried again after so many seconds.
    #[must_use]
    pub(crate) fn after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self.with("retry_after_s", seconds)
    }

    /// The same with one more detail.
    #[must_use]
    pub(crate) fn with(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.failure.details.insert(name.to_owned(), value.to_string());
        self
    }
}

impl<E: Classify> From<E> for ApiError {
    fn from(error: E) -> Self {
        let failure = error.to_failure();
        let status = status(failure.class);
        let busy = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
        Self {
            status,
            failure: Box::new(failure),
            retry_after: busy.then_some(1),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(json!({"error": self.failure}))).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
