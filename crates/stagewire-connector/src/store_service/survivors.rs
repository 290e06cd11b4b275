//! Payloads of the process before, which consumers find here by their old handles.

use std::sync::Arc;

use stagewire_core::PayloadId;
use stagewire_store::{HostStore, OpenError, Recovery, StoreOptions};

use super::label::Label;
use super::{StoreService, Stored};
use crate::Connector;
use crate::connector::Shared;
use crate::live::Live;
use crate::wire;

impl StoreService {
    /// Opens a store in the arena of `connector` and serves it, see [`StoreService::serve`]; a durable one with
    /// everything that the process before had, which consumers read by the handles that they have.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is served then.
    pub async fn open(connector: &Connector, options: StoreOptions) -> Result<(Arc<Self>, Recovery), OpenError> {
        // First: with another data directory, both would open, and the second take the first one's place.
        connector.shared().claim_run_dir()?;
        let (store, recovery) = HostStore::open(connector.host(), options).await?;
        // All of them before the first is served: a store that is not opened leaves everything to the next one.
        let labels = recovery.survivors.iter().map(|survivor| {
            let payload = survivor.payload;
            let label = Label::decode(&survivor.label);
            label.map_err(|problem| OpenError::Label { payload, problem })
        });
        let labels = labels.collect::<Result<Vec<_>, _>>()?;
        for (survivor, label) in recovery.survivors.iter().zip(labels) {
            restore(connector.shared(), &store, survivor.payload, label);
        }
        Ok((Self::serve(connector, store), recovery))
    }
}

fn restore(shared: &Arc<Shared>, store: &HostStore, payload: PayloadId, label: Label) {
    let (owner, left) = (label.owner, label.left());
    let regions = wire::nowhere(label.manifest());
    let handle = label.handle(payload, shared.peer().clone(), regions);
    let keep = Stored::new(store, payload);
    let live = Live::new(handle, owner, Arc::new(keep));
    match shared.hold(live, left) {
        Some(publication) => publication.seal(),
        // Its producer, this very process, has published it again. That one goes on.
        None => tracing::warn!(%payload, "a payload of the store before is held already"),
    }
}
