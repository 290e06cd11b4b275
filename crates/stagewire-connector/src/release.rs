//! Ending a payload by its handle, wherever it is.

use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{Handle, Peer, TransferMode};
use tokio::time::Instant;

use crate::ReleaseError;
use crate::connector::Shared;
use crate::store_file::{ANEW_WITHIN, PAUSE};
use crate::wire::{Refusal, Reply, Request};

/// How long each holder may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

pub(crate) async fn release(shared: &Arc<Shared>, handle: &Handle) -> Result<(), ReleaseError> {
    let stored = handle.mode == TransferMode::Store;
    release_from(shared, handle, vec![handle.holder.clone()], stored).await
}

/// Ends a payload of this process that a store may have taken, whatever became of it here.
pub(crate) async fn release_from_stores(shared: &Arc<Shared>, handle: &Handle) -> Result<(), ReleaseError> {
    let stores = shared.stores_of_run_dir().collect();
    release_from(shared, handle, stores, true).await
}

/// `stored` says that the holders are stores: one that has died has the payload again when it is back.
async fn release_from(
    shared: &Arc<Shared>,
    handle: &Handle,
    mut holders: Vec<Peer>,
    mut stored: bool,
) -> Result<(), ReleaseError> {
    let begin = Instant::now();
    let (mut asked, mut error, mut lost) = (0, None, None);
    loop {
        while let Some(holder) = holders.get(asked).cloned() {
            asked += 1;
            match ask(shared, handle, &holder).await {
                Ok(None) => return Ok(()),
                Ok(Some(Refusal::Denied)) => {
                    let (request, payload) = (handle.request.clone(), handle.payload);
                    return Err(ReleaseError::Denied { request, payload });
                }
                Ok(Some(Refusal::Moved(store))) => {
                    holders.push(store);
                    stored = true;
                }
                // Its producer may be gone, or have forgotten that it moved. The next store would know it.
                Ok(Some(Refusal::Unknown)) => lost = None,
                // It has ended in another way.
                Ok(Some(_)) => return Ok(()),
                Err(Some(silent)) => error = Some(silent),
                Err(None) if stored => lost = Some(holder.process.pid),
                Err(None) => {}
            }
            look_for_stores(shared, &mut holders);
        }
        let Some(pid) = lost else {
            return error.map_or(Ok(()), Err);
        };
        if begin.elapsed() >= ANEW_WITHIN {
            let (request, payload, waited) = (handle.request.clone(), handle.payload, ANEW_WITHIN);
            return Err(ReleaseError::StoreLost {
                request,
                payload,
                pid,
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
            holders.push(store);
        }
    }
}

/// What one holder says; its death is `Err(None)`.
async fn ask(shared: &Shared, handle: &Handle, holder: &Peer) -> Result<Option<Refusal>, Option<ReleaseError>> {
    let Handle {
        payload, capability, ..
    } = *handle;
    let request = || handle.request.clone();
    let exchange = async {
        let link = shared.links().to(holder).await?;
        let reply = link
            .ask(|id| Request::Release {
                id,
                payload,
                capability,
            })
            .await;
        Ok(reply)
    };
    match tokio::time::timeout(ANSWER_WITHIN, exchange).await {
        Ok(Ok(Some(Reply::Refused { refusal, .. }))) => Ok(Some(refusal)),
        Ok(Ok(Some(_))) => Ok(None),
        Ok(Ok(None)) => Err(None),
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
