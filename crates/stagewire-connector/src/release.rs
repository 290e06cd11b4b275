//! Ending a payload by its handle, wherever it is.

use std::time::Duration;

use stagewire_core::{Handle, Peer, Token, TransferMode};
use tokio::time::Instant;

use crate::ReleaseError;
use crate::connector::Shared;
use crate::live::Live;
use crate::store_file::{ANEW_WITHIN, PAUSE};
use crate::wire::{Refusal, Reply, Request};

/// How long each holder may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// `token` is that of the attempt that made it, without which a store of an orchestrator ends nothing.
pub(crate) async fn release(shared: &Shared, handle: &Handle, token: Option<Token>) -> Result<(), ReleaseError> {
    let stored = handle.mode == TransferMode::Store;
    release_from(shared, handle, token, vec![handle.holder.clone()], stored, None).await
}

/// Ends a payload in each of the stores that may have taken it, and in those that came in their places, but not in the one
/// that has it by then.
pub(crate) async fn release_elsewhere(shared: &Shared, live: &Live) -> Result<(), ReleaseError> {
    let asked = live.asked();
    release_from(shared, live.handle(), asked.token(), asked.stores(), true, Some(live)).await
}

/// `stored` says that the holders are stores: one that has died has the payload again when it is back. Any of them may have
/// it, and one does; of a payload that was on its way, `live`, several may.
async fn release_from(
    shared: &Shared,
    handle: &Handle,
    token: Option<Token>,
    mut holders: Vec<Peer>,
    mut stored: bool,
    live: Option<&Live>,
) -> Result<(), ReleaseError> {
    let begin = Instant::now();
    let (mut asked, mut error) = (0, None);
    let (mut lost, mut without) = (Vec::new(), Vec::new());
    loop {
        while let Some(holder) = holders.get(asked).cloned() {
            asked += 1;
            match ask(shared, handle, token, &holder, live).await {
                Ok(Some(Refusal::Denied)) => {
                    let (request, payload) = (handle.request.clone(), handle.payload);
                    return Err(ReleaseError::Denied { request, payload });
                }
                Ok(Some(Refusal::Moved(store))) => {
                    holders.push(store);
                    stored = true;
                }
                Ok(Some(Refusal::Fenced(failure))) => {
                    let (request, payload) = (handle.request.clone(), handle.payload);
                    error = Some(ReleaseError::Refused {
                        request,
                        payload,
                        failure,
                    });
                }
                // Its producer may be gone, or have forgotten that it moved.
                Ok(Some(Refusal::Unknown)) => without.push(holder),
                // Or it has ended in another way.
                Ok(_) if live.is_none() => return Ok(()),
                Ok(_) => without.push(holder),
                Err(Some(silent)) => error = Some(silent),
                Err(None) if stored => lost.push(holder),
                Err(None) => {}
            }
            look_for_stores(shared, &mut holders);
        }
        let current = shared.store_of_run_dir();
        let current = current.filter(|store| without.iter().any(|other| other.incarnation == store.incarnation));
        if let Some(current) = &current {
            lost.retain(|dead| !shared.succeeds(current, dead));
        }
        let Some(dead) = lost.last() else {
            return error.map_or(Ok(()), Err);
        };
        if begin.elapsed() >= ANEW_WITHIN {
            let (request, payload, waited) = (handle.request.clone(), handle.payload, ANEW_WITHIN);
            return Err(ReleaseError::StoreLost {
                request,
                payload,
                pid: dead.process.pid,
                waited,
            });
        }
        tokio::time::sleep(PAUSE).await;
        look_for_stores(shared, &mut holders);
    }
}

/// Adds the stores that were not there before.
fn look_for_stores(shared: &Shared, holders: &mut Vec<Peer>) {
    for store in shared.stores_of_run_dir() {
        if holders.iter().all(|known| known.incarnation != store.incarnation) {
            holders.push((*store).clone());
        }
    }
}

/// What one holder says; its death is `Err(None)`. One that is to keep the payload is not asked, nor is one that is taking it:
/// who has it do so sees to the rest.
async fn ask(
    shared: &Shared,
    handle: &Handle,
    token: Option<Token>,
    holder: &Peer,
    live: Option<&Live>,
) -> Result<Option<Refusal>, Option<ReleaseError>> {
    let Handle {
        payload, capability, ..
    } = *handle;
    let request = || handle.request.clone();
    if holder.incarnation == shared.peer().incarnation {
        let release = || shared.table().release_by(payload, capability).err();
        return Ok(match live {
            Some(live) => live.end_at(holder.incarnation, release).flatten(),
            None => release(),
        });
    }
    let exchange = async {
        let link = shared.links().to(holder).await?;
        let request = |id| Request::Release {
            id,
            payload,
            capability,
            token,
        };
        let asked = match live {
            Some(live) => live.end_at(holder.incarnation, || link.ask(request)),
            None => Some(link.ask(request)),
        };
        Ok(match asked {
            Some(asked) => Some(asked.await),
            None => None,
        })
    };
    match tokio::time::timeout(ANSWER_WITHIN, exchange).await {
        Ok(Ok(Some(Some(Reply::Refused { refusal, .. })))) => Ok(Some(refusal)),
        Ok(Ok(Some(Some(_)) | None)) => Ok(None),
        Ok(Ok(Some(None))) => Err(None),
        Ok(Err(source)) if crate::LinkError::is_lost(&source) => Err(None),
        Ok(Err(source)) => Err(Some(ReleaseError::Link {
            request: request(),
            payload,
            source,
        })),
        Err(_) => Err(Some(ReleaseError::Silent {
            request: request(),
            payload,
            pid: holder.process.pid,
            waited: ANSWER_WITHIN,
        })),
    }
}
