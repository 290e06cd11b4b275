use serde::{Deserialize, Serialize};

use crate::{PayloadId, StageName, Timestamp, TransferMode};

/// How far an attempt has come, in units that the stage names: `step 3 of 4`, `frame 5 of 33`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Progress {
    /// Units done.
    pub done: u64,
    /// Units in all.
    pub total: u64,
    /// What is counted, in the singular: `step`, `frame`.
    pub unit: String,
}

/// One chunk as its consumer received it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handover {
    /// The payload.
    pub payload: PayloadId,
    /// Stage that produced it.
    pub from: StageName,
    /// Index of the chunk.
    pub chunk: u32,
    /// Number of chunks of the payload.
    pub chunks: u32,
    /// Bytes of the chunk, over all its tensors.
    pub nbytes: u64,
    /// Straight from the producer, or through a store.
    pub mode: TransferMode,
    /// What carried it: transports, as `shm`, `tcp` or `cma+shm`, or `socket` for bytes that came along with the store's
    /// answer; empty where there were none.
    pub path: String,
    /// When the consumer began to wait for the bytes of this visible chunk.
    pub begin: Timestamp,
    /// When the chunk was complete at the consumer.
    pub end: Timestamp,
}
