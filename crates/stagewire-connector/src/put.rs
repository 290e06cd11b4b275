//! Moving a payload into the store.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use stagewire_core::{Capability, ErrorClass, Failure, Handle, PayloadId, Peer, Token, TransferMode};
use tokio::time::Instant;

use crate::connector::Shared;
use crate::link::{Link, LinkError, Reserved};
use crate::live::{Claim, Gone, Live};
use crate::wire::{self, PutBytes, Refusal, Reply, Request};
use crate::{PutError, PutPlace};

/// How much longer the answer may take than what the store itself waits.
const GRACE: Duration = Duration::from_secs(5);

/// What reaching the store may take of the time that there is, where that is less.
const REACH_AT_LEAST: Duration = Duration::from_secs(1);

/// What a put says besides the payload.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Put<'a> {
    pub(crate) token: Option<Token>,
    /// How long the store waits for missing chunks and for room.
    pub(crate) wait: Duration,
    /// Room that is kept for it, also where this put fails.
    pub(crate) reserved: Option<&'a Reserved>,
    /// Told the connection over which an answer comes soon.
    pub(crate) over: Option<&'a Mutex<Weak<Link>>>,
}

/// Has the store take a payload. It stays here on an error, unless it ended in another way.
pub(crate) async fn put(shared: &Arc<Shared>, live: &Arc<Live>, put: Put<'_>) -> Result<Handle, PutError> {
    let Put {
        token,
        wait,
        reserved,
        over,
    } = put;
    let at = |store| PutPlace::new(live.handle(), store);
    let store = shared.store().ok_or_else(|| PutError::NoStore { at: at(None) })?;
    let begin = Instant::now();
    let right = Capability::from_random(rand::random());
    let moving = live.begin_move(right, Arc::clone(&store));
    let (bytes, claim) = bytes(shared, live, right, &store);
    let soon = matches!(bytes, PutBytes::Sent(_));
    let exchange = async {
        // Room is reserved on one connection.
        let reserved = reserved.filter(|reserved| reserved.link().is_open());
        let reached = async {
            match reserved {
                Some(reserved) => {
                    reserved.link().room().await;
                    Ok(Arc::clone(reserved.link()))
                }
                None => shared.links().to(&store).await,
            }
        };
        let link = reach(&at(Some(&*store)), wait, reached).await?;
        let left = wait.saturating_sub(begin.elapsed());
        let request = |id| Request::Put {
            id,
            handle: live.handle().to_bytes(),
            bytes,
            right,
            token,
            owner: live.owner(),
            expires_ms: live.left().map(millis),
            wait_ms: millis(left),
            reserved: reserved.map(Reserved::id),
        };
        live.asked().add(right, &store, token);
        if let Some(over) = over.filter(|_| soon) {
            *over.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&link);
        }
        let reply = link.ask(request).await;
        Ok((link, reply))
    };
    let at = || at(Some(&*store));
    let waited = wait.saturating_add(GRACE);
    let reply = tokio::time::timeout(waited, exchange).await;
    let error = match reply {
        Ok(Ok((link, Some(reply @ Reply::Stored { .. })))) => {
            let taken = stored(&reply).map(|stored| (stored, claim.map_or(Ok(()), |claim| take_over(claim, &store))));
            match taken {
                Some((stored, Ok(()))) => {
                    shared.table().release_this(live, Gone::Moved(store));
                    return Ok(stored);
                }
                Some((_, Err(_))) => {
                    link.decline(&reply);
                    let failure = ended(live.handle().payload);
                    PutError::Refused { at: at(), failure }
                }
                None => {
                    let answer = "with a handle that does not decode";
                    PutError::Protocol { at: at(), answer }
                }
            }
        }
        Ok(Ok((_, reply))) => {
            if let Some(Reply::Refused { .. }) = reply {
                live.asked().remove(right);
            }
            refused(at(), reply)
        }
        Ok(Err(error)) => error,
        Err(_) => PutError::Deadline { at: at(), waited },
    };
    // From here on the store cannot take it any more. It may have, and its answer was lost.
    drop(moving);
    match shared.table().gone(live.handle().payload) {
        Some(Gone::Moved(store)) if !shared.table().has(live) => Ok(moved(live.handle(), &store)),
        _ => Err(error),
    }
}

/// The handle of a payload that is in the store, which has not said where in it.
pub(crate) fn moved(handle: &Handle, store: &Peer) -> Handle {
    Handle {
        mode: TransferMode::Store,
        holder: store.clone(),
        regions: wire::nowhere(&handle.manifest),
        ..handle.clone()
    }
}

/// How the bytes of a payload get to the store. Where they are complete, the producer stands in for the store at its own
/// table, and few go along with the put. The store has to consume the payload where they are not, or are to be compared,
/// where somebody else is at them, and where it is in this very process.
fn bytes(shared: &Shared, live: &Live, right: Capability, store: &Peer) -> (PutBytes, Option<Claim>) {
    if store.incarnation == shared.peer().incarnation || !live.is_exact() {
        return (PutBytes::Consumed, None);
    }
    let Ok(claim) = shared.table().admit(live.handle().payload, right) else {
        return (PutBytes::Consumed, None);
    };
    let bytes = live.bytes(wire::SENT_ALONG).map_or(PutBytes::Complete, PutBytes::Sent);
    (bytes, Some(claim))
}

/// The store has it: nobody else is to have it from now on.
fn take_over(claim: Claim, store: &Peer) -> Result<(), Refusal> {
    match claim.finish() {
        // By another put of the same payload.
        Err(Refusal::Moved(to)) if to.incarnation == store.incarnation => Ok(()),
        finished => finished,
    }
}

fn stored(reply: &Reply) -> Option<Handle> {
    let Reply::Stored { handle, .. } = reply else {
        return None;
    };
    Handle::from_bytes(handle).ok()
}

/// Why a store does not keep a payload that its producer does not have any more.
pub(crate) fn ended(payload: PayloadId) -> Failure {
    let message = format!("payload {payload} ended, or was asked back, before the store had taken it");
    Failure::new(ErrorClass::NotFound, "payload.gone", message)
}

/// Keeps room for a payload in the store, so that it can move there at any time.
pub(crate) async fn reserve(shared: &Arc<Shared>, live: &Live, wait: Duration) -> Result<Reserved, PutError> {
    /// The store counts whole pages of this size for each tensor.
    const PAGE: u64 = 4096;
    let at = |store| PutPlace::new(live.handle(), store);
    let store = shared.store().ok_or_else(|| PutError::NoStore { at: at(None) })?;
    let at = || at(Some(&*store));
    let tensors = live.handle().manifest.tensors();
    let nbytes = tensors.map(|tensor| tensor.nbytes().0.next_multiple_of(PAGE)).sum();
    let exchange = async {
        let link = reach(&at(), wait, shared.links().to(&store)).await?;
        link.reserve(nbytes, wait).await.map_err(|reply| refused(at(), reply))
    };
    let waited = wait.saturating_add(GRACE);
    let reserved = tokio::time::timeout(waited, exchange).await;
    reserved.unwrap_or_else(|_| Err(PutError::Deadline { at: at(), waited }))
}

/// Waits for a connection that takes a request, no longer than there is time.
async fn reach(
    at: &PutPlace,
    wait: Duration,
    reached: impl Future<Output = Result<Arc<Link>, LinkError>>,
) -> Result<Arc<Link>, PutError> {
    let at = || Box::new(at.clone());
    let waited = wait.max(REACH_AT_LEAST);
    match tokio::time::timeout(waited, reached).await {
        Ok(link) => link.map_err(|source| PutError::Link { at: at(), source }),
        Err(_) => Err(PutError::Deadline { at: at(), waited }),
    }
}

fn refused(at: Box<PutPlace>, reply: Option<Reply>) -> PutError {
    let answer = match reply {
        None => return PutError::StoreLost { at },
        Some(Reply::Refused { refusal, .. }) => match refusal {
            Refusal::Put(failure) => return PutError::Refused { at, failure },
            Refusal::NoStore => "that it keeps none",
            _ => "with a refusal that is not about a put",
        },
        Some(_) => "to something else",
    };
    PutError::Protocol { at, answer }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
