//! What a store's next process must know of a payload besides its bytes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use stagewire_core::{Capability, Handle, Manifest, PayloadId, Peer, RegionRef, StageName, TransferMode};

use crate::Owner;

/// Version of the encoding below.
const VERSION: u8 = 1;

/// Everything of a handle but where the bytes are, and who ends the payload when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Label {
    version: u8,
    request: String,
    stage: StageName,
    manifest: Manifest,
    capability: Capability,
    pub(super) owner: Owner,
    /// When it expires, in milliseconds since 1970.
    ends_at: Option<u64>,
}

impl Label {
    /// The label of a payload that is going to be stored.
    pub(super) fn new(handle: &Handle, capability: Capability, owner: Owner, life: Option<Duration>) -> Self {
        let millis = |life: Duration| u64::try_from(life.as_millis()).unwrap_or(u64::MAX);
        Self {
            version: VERSION,
            request: handle.request.clone(),
            stage: handle.stage.clone(),
            manifest: handle.manifest.clone(),
            capability,
            owner,
            ends_at: life.map(|life| now().saturating_add(millis(life))),
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("a label has nothing that postcard cannot encode")
    }

    /// Reads what [`Label::encode`] made.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        match bytes.first() {
            Some(&VERSION) => {}
            found => return Err(format!("its label has version {found:?}, this build reads {VERSION}")),
        }
        postcard::from_bytes(bytes).map_err(|error| error.to_string())
    }

    pub(super) const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// How long the payload has left, if it does not live on.
    pub(super) fn left(&self) -> Option<Duration> {
        self.ends_at.map(|at| Duration::from_millis(at.saturating_sub(now())))
    }

    /// The handle of the payload where it is now. Its id and its capability are those of its first one.
    pub(super) fn handle(self, payload: PayloadId, holder: Peer, regions: Vec<RegionRef>) -> Handle {
        Handle {
            payload,
            request: self.request,
            stage: self.stage,
            manifest: self.manifest,
            mode: TransferMode::Store,
            holder,
            capability: self.capability,
            regions,
        }
    }
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
