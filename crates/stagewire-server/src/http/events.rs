//! The event stream of a job.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, Uri, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt, stream};
use serde_json::Value;

use super::error::ApiError;
use super::{Shared, jobs, query};
use crate::history::{Cursor, History, News};
use crate::note::NoteId;

/// A comment is sent when nothing else was for so long.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How long a client should wait before it connects again.
const RETRY: Duration = Duration::from_secs(1);

/// Every note after the one that the client names, then what comes, until the job has ended.
///
/// Notes carry ids; progress does not: it is a level that only the newest report of counts.
pub(super) async fn stream(
    State(app): Shared,
    Path(job): Path<String>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let id = jobs::id(&job)?;
    // For clients that cannot set the header.
    let mut query = query::read(&uri, &["after"])?;
    let after = match headers.get("last-event-id") {
        Some(value) => Some(value.to_str().unwrap_or_default().to_owned()),
        None => query.remove("after"),
    };
    let after = after
        .filter(|after| !after.is_empty())
        .map(|after| after.parse::<NoteId>());
    let after = after.transpose().map_err(|()| {
        ApiError::invalid(
            "http.last_event_id",
            "Last-Event-ID must be the id of an event of this stream, such as 1.17",
        )
    })?;
    let history = app.histories.get(id).ok_or_else(|| ApiError::unknown_job(&job))?;
    let events = events(history, Cursor::after(after)).take_until(app.stop.clone().cancelled_owned());
    let events = stream::once(async { Ok(Event::default().retry(RETRY)) }).chain(events);
    let sse = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    let mut response = sse.into_response();
    // Proxies must not collect what is meant to be seen at once.
    response
        .headers_mut()
        .insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

fn events(history: Arc<History>, cursor: Cursor) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::unfold(Some((history, cursor)), |state| async {
        let (history, mut cursor) = state?;
        let news = history.wait(&mut cursor).await;
        let next = (!news.over).then_some((history, cursor));
        Some((stream::iter(render(&news)), next))
    })
    .flatten()
}

fn render(news: &News) -> Vec<Result<Event, Infallible>> {
    let event = |json: &Value| Event::default().data(json.to_string());
    let notes = news
        .notes
        .iter()
        .map(|note| event(&note.to_json()).id(note.id.to_string()));
    let progress = news
        .progress
        .iter()
        .map(|(stage, note)| event(&note.to_json(news.seq, stage)));
    // What ended a job comes last; nothing makes progress then.
    notes.chain(progress).map(Ok).collect()
}
