//! Payloads of the process before, which consumers find here by their old handles.

use std::sync::Arc;

use stagewire_core::{Capability, Manifest, RegionRef};
use stagewire_store::{HostStore, OpenError, Recovery, StoreOptions, Survivor};

use super::label::Label;
use super::{StoreService, Stored};
use crate::Connector;
use crate::connector::Shared;
use crate::live::Live;

impl StoreService {
    /// Opens a store in the arena of `connector` and serves it, see [`StoreService::serve`]; a durable one with
    /// everything that the process before had, which consumers read by the handles that they have.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is served then.
    pub async fn open(connector: &Connector, options: StoreOptions) -> Result<(Arc<Self>, Recovery), OpenError> {
        let (store, recovery) = HostStore::open(connector.host(), options).await?;
        for survivor in &recovery.survivors {
            if let Err(problem) = restore(connector.shared(), &store, survivor) {
                // Nobody could ask for it, nor release it.
                tracing::warn!(payload = %survivor.payload, problem, "a payload of the store before is given up");
                store.remove(survivor.payload);
            }
        }
        Ok((Self::serve(connector, store), recovery))
    }
}

fn restore(shared: &Arc<Shared>, store: &HostStore, survivor: &Survivor) -> Result<(), String> {
    let payload = survivor.payload;
    let label = Label::decode(&survivor.label)?;
    let (owner, left) = (label.owner, label.left());
    let regions = elsewhere(label.manifest());
    let handle = label.handle(payload, shared.peer().clone(), regions);
    let keep = Stored {
        store: store.clone(),
        payload,
    };
    let live = Live::new(handle, owner, Arc::new(keep));
    let publication = shared.hold(live, left).ok_or("another payload of its id is held")?;
    publication.seal();
    Ok(())
}

/// Regions that nobody has: where the bytes are is said once somebody asks for them.
fn elsewhere(manifest: &Manifest) -> Vec<RegionRef> {
    let region = |len| RegionRef {
        transport: "shm".to_owned(),
        region: u64::MAX,
        generation: 0,
        capability: Capability::from_random([0; 16]),
        len,
    };
    manifest.tensors().map(|tensor| region(tensor.nbytes().0)).collect()
}
