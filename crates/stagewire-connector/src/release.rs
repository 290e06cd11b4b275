//! Ending a payload by its handle, wherever it is.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use stagewire_core::{Handle, Incarnation, Peer, TransferMode};
use tokio::time::Instant;

use crate::ReleaseError;
use crate::connector::Shared;
use crate::store_file::{ANEW_WITHIN, PAUSE};
use crate::wire::{Refusal, Reply, Request};

/// How long each holder may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

pub(crate) async fn release(shared: &Arc<Shared>, handle: &Handle) -> Result<(), ReleaseError> {
    let stored = handle.mode == TransferMode::Store;
    release_from(shared, handle, vec![handle.holder.clone()], stored, None).await
}

/// Ends a payload in each of these stores, any of which may have it, and in those that came in their places, but not in
/// the one that is to keep it.
pub(crate) async fn release_from_each(
    shared: &Arc<Shared>,
    handle: &Handle,
    stores: Vec<Peer>,
    keeper: Option<Incarnation>,
) -> Result<(), ReleaseError> {
    let stores = stores.into_iter().filter(|store| Some(store.incarnation) != keeper);
    let each = stores.map(|store| release_from(shared, handle, vec![store], true, keeper));
    join_all(each).await.into_iter().collect()
}

/// `stored` says that the holders are stores: one that has died has the payload again when it is back. `keeper` is not asked.
async fn release_from(
    shared: &Arc<Shared>,
    handle: &Handle,
    mut holders: Vec<Peer>,
    mut stored: bool,
    keeper: Option<Incarnation>,
) -> Result<(), ReleaseError> {
    let begin = Instant::now();
    let (mut asked, mut error) = (0, None);
    let (mut lost, mut without) = (Vec::new(), Vec::new());
    loop {
        while let Some(holder) = holders.get(asked).cloned() {
            asked += 1;
            if Some(holder.incarnation) == keeper {
                // What it has is what is to be kept.
                without.push(holder);
                continue;
            }
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
                // Its producer may be gone, or have forgotten that it moved.
                Ok(Some(Refusal::Unknown)) => without.push(holder),
                // It has ended in another way.
                Ok(Some(_)) => return Ok(()),
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
