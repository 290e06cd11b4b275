//! The reader's half: a peer, what is known of its registrations, and when that is forgotten.

mod known;

use std::ffi::CString;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use stagewire_core::Incarnation;
use tokio::time::sleep;

use super::agent::Span;
use super::agent_name;
use super::heading::Heading;
use super::message::{Answer, NUMBERS, Part, Question};
use super::transfer::Held;
use super::version::NixlVersion;
use super::worker::Worker;
use crate::ConnectError;
use crate::link::{AskError, Link};
use crate::process::host_id;
use crate::wire::{self, Kind};
use known::Known;
pub(super) use known::Use;

/// Pauses between two questions whether metadata that nobody uses is to be forgotten. They grow while the answer is no.
/// To forget means to connect anew, which takes some milliseconds: not for little memory, then, and not often.
const SHORT_PAUSE: Duration = Duration::from_millis(100);
const USUAL_PAUSE: Duration = Duration::from_millis(500);
const LONG_PAUSE: Duration = Duration::from_secs(5);

/// From so much memory that may be waiting to be given back, pauses begin short.
const MUCH: u64 = 64 << 20;

/// Metadata are never longer.
const MAX_METADATA: usize = 1 << 20;

/// A peer over one control connection.
pub(super) struct NixlPeer {
    link: Arc<Link>,
    /// What NIXL calls it.
    name: CString,
    heading: Heading,
    meeting: u64,
    worker: Arc<Worker<Held>>,
    known: Known,
}

impl NixlPeer {
    /// Agrees with a peer on the version, and learns how its agent is reached.
    pub(super) async fn greet(
        link: Arc<Link>,
        worker: Arc<Worker<Held>>,
        meeting: u64,
        version: &NixlVersion,
        heading: &Heading,
        process: stagewire_core::ProcessRef,
    ) -> Result<Arc<Self>, ConnectError> {
        let peer = link.peer();
        let greeting = Question::Greet {
            process,
            host: host_id(),
        };
        let refused = |problem: String| ConnectError::Refused { peer, problem };
        let answer = ask(&link, &greeting).await.map_err(|error| error.of_connect(peer))?;
        let Answer::Greeted { agent, version: theirs } = answer else {
            return Err(refused(format!("it answers the greeting of NIXL with {answer:?}")));
        };
        if !theirs.fits(version) {
            return Err(ConnectError::BackendVersion {
                peer,
                transport: Kind::Nixl.name(),
                found: theirs.to_string(),
                expected: version.to_string(),
            });
        }
        let name = agent_of(peer, agent).map_err(refused)?;
        let part = |answer| match answer {
            Answer::Connection(part) => Some(part),
            _ => None,
        };
        let connection = fetch(&link, |from| Question::Connection { from }, part).await;
        let connection = connection.map_err(|error| error.of_connect(peer))?;
        heading
            .check(&connection, &agent_name(peer))
            .map_err(|other| refused(other.to_string()))?;
        worker.meet(&name, meeting, connection);
        let met = Arc::new(Self {
            link,
            name,
            heading: heading.clone(),
            meeting,
            worker,
            known: Known::default(),
        });
        tokio::spawn(met.clone().look_after());
        Ok(met)
    }

    pub(super) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// Registrations that are known.
    pub(super) fn known(&self) -> u64 {
        self.known.len()
    }

    pub(super) fn name(&self) -> &CString {
        &self.name
    }

    pub(super) fn worker(&self) -> &Worker<Held> {
        &self.worker
    }

    /// Makes sure that the metadata of a registration are known for as long as the result lives.
    pub(super) async fn learn(self: &Arc<Self>, number: u64) -> Result<(Use, Span), AskError> {
        let in_use = Known::begin(self, number).await;
        if let Some(span) = self.known.span(number) {
            return Ok((in_use, span));
        }
        let mut found = None;
        let part = |answer| match answer {
            Answer::Registration { span, part } => {
                found = Some(span);
                Some(part)
            }
            _ => None,
        };
        let metadata = fetch(&self.link, |from| Question::Registration { number, from }, part).await?;
        let span = found.filter(|span| span.number == number);
        let span = span.ok_or_else(|| {
            broken(
                &self.link,
                format!("it answers with {found:?} for registration {number}"),
            )
        })?;
        self.heading
            .check(&metadata, &agent_name(self.link.peer()))
            .map_err(|other| broken(&self.link, format!("of registration {number}, {other}")))?;
        self.worker.learn(&self.name, number, metadata);
        self.known.learned(number, span);
        Ok((in_use, span))
    }

    /// Forgets what is no longer of use and the owner wants back, until the connection is over; then everything.
    async fn look_after(self: Arc<Self>) {
        tokio::select! {
            _ = self.link.closed() => {}
            () = self.forget_unused() => {}
        }
        self.worker.part(&self.name, self.meeting);
    }

    async fn forget_unused(&self) {
        loop {
            self.known.unused().await;
            let first = || {
                if self.known.unused_bytes() < MUCH {
                    USUAL_PAUSE
                } else {
                    SHORT_PAUSE
                }
            };
            let (mut pause, mut after) = (first(), 0);
            loop {
                sleep(pause).await;
                let numbers = self.known.list_unused(after, NUMBERS);
                let Some(&last) = numbers.last() else {
                    if after == 0 {
                        break;
                    }
                    after = 0;
                    continue;
                };
                after = last;
                pause = match self.forget(numbers).await {
                    Ok(true) => first(),
                    Ok(false) => (pause * 2).min(LONG_PAUSE),
                    // The connection is over, or the peer breaks the protocol and keeps its memory for that.
                    Err(_) => LONG_PAUSE,
                };
            }
        }
    }

    /// Forgets those that the owner wants back. Whether there were any.
    async fn forget(&self, numbers: Vec<u64>) -> Result<bool, AskError> {
        let Answer::Wanted { numbers } = ask(&self.link, &Question::Unused { numbers }).await? else {
            return Ok(false);
        };
        // Between question and answer, somebody may have pinned one of them again.
        let numbers = self.known.forget(&numbers);
        if numbers.is_empty() {
            return Ok(false);
        }
        self.worker.unlearn(&self.name, numbers.clone()).await;
        let told = ask(
            &self.link,
            &Question::Forgotten {
                numbers: numbers.clone(),
            },
        )
        .await;
        self.known.forgotten(&numbers);
        told.map(|_| true)
    }
}

impl fmt::Debug for NixlPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlPeer")
            .field("name", &self.name)
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}

/// The agent of a peer, which must have the peer's name.
fn agent_of(peer: Incarnation, found: String) -> Result<CString, String> {
    let expected = agent_name(peer);
    if found != expected {
        return Err(format!(
            "it gives {found:?} as its agent of NIXL instead of {expected:?}"
        ));
    }
    CString::new(found).map_err(|error| format!("the name of its agent: {error}"))
}

fn broken(link: &Link, problem: String) -> AskError {
    AskError::Refused {
        kind: Kind::Nixl,
        peer: link.peer(),
        problem,
    }
}

/// Asks and decodes. The caller bounds the time.
async fn ask(link: &Arc<Link>, question: &Question) -> Result<Answer, AskError> {
    let answer = link.ask(Kind::Nixl, &wire::encode(question), None).await?;
    wire::decode(&answer).map_err(|error| broken(link, format!("its answer does not decode: {error}")))
}

/// Fetches metadata part by part.
async fn fetch(
    link: &Arc<Link>,
    question: impl Fn(u32) -> Question,
    mut part: impl FnMut(Answer) -> Option<Part>,
) -> Result<Vec<u8>, AskError> {
    let mut whole = Vec::new();
    loop {
        let from = u32::try_from(whole.len()).unwrap_or(u32::MAX);
        let answer = ask(link, &question(from)).await?;
        let Part { total, bytes } =
            part(answer).ok_or_else(|| broken(link, "it answers another question".to_owned()))?;
        let (total, empty) = (total as usize, bytes.is_empty());
        whole.extend_from_slice(&bytes);
        if whole.len() == total {
            return Ok(whole);
        }
        if empty || whole.len() > total || total > MAX_METADATA {
            return Err(broken(
                link,
                format!("{} of {total} bytes of metadata arrived", whole.len()),
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_peer_cannot_have_the_agent_of_another() {
        let (peer, other) = (Incarnation(Uuid::from_u128(1)), Incarnation(Uuid::from_u128(2)));
        agent_of(peer, agent_name(peer)).expect("its own");
        for name in [agent_name(other), String::new(), format!("{}-reader", agent_name(peer))] {
            let problem = agent_of(peer, name.clone()).expect_err("not its own");
            assert!(problem.contains(&format!("{name:?}")), "{problem}");
        }
    }
}
