//! The event stream of a job.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, Uri, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt, stream};
use serde_json::Value;
use stagewire_core::{JobId, StageName};
use stagewire_sched::{Job, Phase, Position};
use tokio::time::{Instant, sleep_until};

use super::error::ApiError;
use super::{App, Shared, jobs, query};
use crate::history::{Cursor, History, News};
use crate::note::{NoteId, position_json};

/// A comment is sent when nothing else was for so long.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How long a job waits in a queue before a watcher is told where it stands there: most wait shorter than that.
const SETTLE: Duration = Duration::from_millis(250);
/// How long it stands there before he is told that it has moved.
const POSITIONS: Duration = Duration::from_secs(1);
/// How long a client should wait before it connects again.
const RETRY: Duration = Duration::from_secs(1);

/// Every note after the one that the client names, then what comes, until the job has ended.
///
/// Notes carry ids; progress and positions do not: they are levels that only the newest report of counts.
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
    let watcher = Watcher {
        app: Arc::clone(&app),
        job: id,
        history,
        cursor: Cursor::after(after),
        seq: 0,
        look: None,
        told: BTreeMap::new(),
    };
    let events = events(watcher).take_until(app.stop.clone().cancelled_owned());
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

/// Somebody who watches a job.
struct Watcher {
    app: Arc<App>,
    job: JobId,
    history: Arc<History>,
    cursor: Cursor,
    /// Number of the last note, for what has none.
    seq: u64,
    /// When to see where the job stands in its queues, while it does in any.
    look: Option<Instant>,
    /// Where it stood when that was told last.
    told: BTreeMap<StageName, Position>,
}

impl Watcher {
    /// The next events, and whether they are the last.
    async fn next(&mut self) -> (Vec<Event>, bool) {
        loop {
            let look = self.look;
            tokio::select! {
                news = self.history.wait(&mut self.cursor) => {
                    self.seq = news.seq;
                    if news.notes.iter().any(|note| note.kind.queues()) {
                        self.look.get_or_insert(Instant::now() + SETTLE);
                    }
                    return (render(&news), news.over);
                }
                () = sleep_until(look.unwrap_or_else(Instant::now)), if look.is_some() => {
                    let events = self.positions().await;
                    if !events.is_empty() {
                        return (events, false);
                    }
                }
            }
        }
    }

    /// Where the job stands now, in queues where it does not stand as it did. Each watcher asks for himself, and not often:
    /// whoever gets ahead costs nobody anything.
    async fn positions(&mut self) -> Vec<Event> {
        let job = self.job;
        let look = self.app.driver.look(move |sched, now| {
            let waits = sched.job(job).into_iter().flat_map(Job::stages);
            let waits = waits.filter(|run| matches!(run.phase(), Phase::Queued { .. })).count() > 0;
            let positions = sched.positions(job).map(|(stage, position)| (stage.clone(), position));
            (waits, now, positions.collect::<BTreeMap<_, _>>())
        });
        // A server that stops has told its watchers.
        let Ok((waits, now, positions)) = look.await else {
            self.look = None;
            return Vec::new();
        };
        self.look = waits.then(|| Instant::now() + POSITIONS);
        let news = positions
            .iter()
            .filter(|(stage, position)| self.told.get(*stage) != Some(*position));
        let events = news.map(|(stage, position)| event(&position_json(self.seq, now, stage, *position)));
        let events = events.collect();
        self.told = positions;
        events
    }
}

fn events(watcher: Watcher) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::unfold(Some(watcher), |watcher| async {
        let mut watcher = watcher?;
        let (events, over) = watcher.next().await;
        Some((stream::iter(events.into_iter().map(Ok)), (!over).then_some(watcher)))
    })
    .flatten()
}

fn event(json: &Value) -> Event {
    Event::default().data(json.to_string())
}

fn render(news: &News) -> Vec<Event> {
    let notes = news
        .notes
        .iter()
        .map(|note| event(&note.to_json()).id(note.id.to_string()));
    let progress = news
        .progress
        .iter()
        .map(|(stage, note)| event(&note.to_json(news.seq, stage)));
    // What ended a job comes last; nothing makes progress then.
    notes.chain(progress).collect()
}
