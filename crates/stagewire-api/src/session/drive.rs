//! Keeping a worker attached, stream after stream.

use std::sync::Arc;
use std::time::Duration;

use stagewire_core::Token;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};

use super::connect::{Stream, connect, wrap};
use super::{SessionEvent, SessionOptions, Shared};
use crate::convert::{WireError, payload_id, required};
use crate::v1;
use crate::v1::server_message::Message as FromServer;
use crate::v1::worker_message::Message as ToServer;

/// Progress reports within this time are merged into one.
const MERGE: Duration = Duration::from_millis(20);

/// Keeps the worker attached: one stream after the other, until the handles are gone or the linger time is over.
pub(super) async fn drive(
    options: SessionOptions,
    shared: Arc<Shared>,
    mut changes: watch::Receiver<()>,
    mut stream: Stream,
    events: mpsc::UnboundedSender<SessionEvent>,
) {
    loop {
        let linger = Duration::from_millis(stream.welcome.linger_ms);
        let attached = SessionEvent::Attached {
            epoch: stream.welcome.epoch,
            store: std::mem::take(&mut stream.welcome.store),
        };
        if events.send(attached).is_err() {
            return;
        }
        if matches!(run(&shared, &mut changes, stream, &events).await, Ended::HandlesGone)
            || events.send(SessionEvent::Away).is_err()
        {
            return;
        }
        let again = tokio::select! {
            again = connect(&options, &shared, linger) => again,
            () = handles_gone(&mut changes) => return,
        };
        stream = match again {
            Ok(stream) => stream,
            Err(error) => {
                // Nobody may be left to hear it, which is as well.
                let _ = events.send(SessionEvent::Over(error));
                return;
            }
        };
    }
}

async fn handles_gone(changes: &mut watch::Receiver<()>) {
    while changes.changed().await.is_ok() {}
}

enum Ended {
    HandlesGone,
    StreamDown,
}

/// Runs one stream until it or the handles end.
async fn run(
    shared: &Shared,
    changes: &mut watch::Receiver<()>,
    mut stream: Stream,
    events: &mpsc::UnboundedSender<SessionEvent>,
) -> Ended {
    let mut renew = tokio::time::interval(Duration::from_millis(stream.welcome.renew_interval_ms.max(10)));
    renew.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let repeated = shared.lock().outbox.unanswered();
    if !send(&stream.sender, repeated) {
        return Ended::StreamDown;
    }
    let mut next_news = Instant::now();
    let mut news_wait = true;
    changes.mark_changed();
    loop {
        let alive = tokio::select! {
            changed = changes.changed() => {
                if changed.is_err() {
                    return Ended::HandlesGone;
                }
                news_wait = true;
                flush(shared, &stream.sender)
            }
            () = tokio::time::sleep_until(next_news), if news_wait => {
                news_wait = false;
                next_news = Instant::now() + MERGE;
                let news = shared.lock().outbox.renewal(false);
                send(&stream.sender, news)
            }
            _ = renew.tick() => {
                let renewal = shared.lock().outbox.renewal(true);
                send(&stream.sender, renewal)
            }
            message = stream.receiver.message() => {
                let Ok(Some(message)) = message else { return Ended::StreamDown };
                match receive(shared, message) {
                    Ok(Some(event)) => {
                        if events.send(event).is_err() {
                            return Ended::HandlesGone;
                        }
                    }
                    Ok(None) => {}
                    Err(error) => tracing::warn!(%error, "ignored a message of the server"),
                }
                true
            }
        };
        if !alive {
            return Ended::StreamDown;
        }
    }
}

/// Sends what waits. Returns false where the stream takes no more.
fn flush(shared: &Shared, sender: &mpsc::Sender<v1::WorkerMessage>) -> bool {
    let mut state = shared.lock();
    let queue = std::mem::take(&mut state.queue);
    // News first: a completion ends the attempt that the news is about.
    let news = if queue.is_empty() {
        None
    } else {
        state.outbox.renewal(false)
    };
    send(sender, news.into_iter().chain(queue))
}

fn send(sender: &mpsc::Sender<v1::WorkerMessage>, messages: impl IntoIterator<Item = ToServer>) -> bool {
    messages
        .into_iter()
        .all(|message| sender.try_send(wrap(message)).is_ok())
}

/// Turns a message into an event, and notes in the outbox what it answers.
fn receive(shared: &Shared, message: v1::ServerMessage) -> Result<Option<SessionEvent>, WireError> {
    let event = match required("message", message.message)? {
        FromServer::Welcome(_) => return Ok(None),
        FromServer::Offer(offer) => SessionEvent::Offer(Box::new(offer)),
        FromServer::Grant(token) => {
            let token = Token::try_from(token)?;
            shared.lock().outbox.begin(token);
            SessionEvent::Grant(token)
        }
        FromServer::Cancel(cancel) => {
            let token = Token::try_from(required("cancel.token", cancel.token)?)?;
            SessionEvent::Cancel(token, required("cancel.failure", cancel.failure)?.into())
        }
        FromServer::Release(id) => {
            let id = payload_id("release", &id)?;
            shared.lock().holding.remove(&id);
            SessionEvent::Release(id)
        }
        FromServer::Accepted(token) => {
            let token = Token::try_from(token)?;
            shared.lock().outbox.end(token);
            SessionEvent::Accepted(token)
        }
        FromServer::Yield(asked) => {
            let token = Token::try_from(required("yield.token", asked.token)?)?;
            SessionEvent::Yield(token, required("yield.failure", asked.failure)?.into())
        }
        FromServer::Refused(refused) => {
            let token = Token::try_from(required("refused.token", refused.token)?)?;
            shared.lock().outbox.end(token);
            SessionEvent::Refused(token, required("refused.failure", refused.failure)?.into())
        }
        FromServer::Drain(drain) => SessionEvent::Drain(drain.deadline_ms.map(Duration::from_millis)),
    };
    Ok(Some(event))
}
