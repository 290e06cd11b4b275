use serde::{Deserialize, Serialize};

use crate::StageName;

/// The place of a worker in a group of processes, the ranks, that run every attempt together.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Member {
    /// The group, of those of its stage.
    pub group: StageName,
    /// Which of the ranks, from 0 on. Rank 0 publishes and completes for all.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
}
