use std::time::Duration;

use stagewire_core::ByteCount;

/// How long things may take and how often they may go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// An offer that is not accepted for so long is withdrawn.
    pub offer: Duration,
    /// A worker that declined an offer, or let it run out, gets no other one for so long; twice as long with each offer
    /// in a row, up to 64 times.
    pub pause: Duration,
    /// A grant that is not renewed for so long is lost.
    pub grant: Duration,
    /// What a worker holds and runs is kept for so long after its stream broke or the server restarted.
    pub linger: Duration,
    /// A job that is being cancelled is cancelled after so long, whatever its workers do.
    pub cancel: Duration,
    /// A worker that does not stop an attempt for so long after it was told is given up.
    pub stop: Duration,
    /// What each step costs that a worker of a work queue is further away from what it reads: a free one nearby is
    /// preferred to a less busy one further away where that makes up for it. Zero switches that off.
    pub affinity_step: Duration,
    /// Jobs that have not ended, at most.
    pub max_queued: usize,
    /// Bytes of the parameters of jobs that have not ended, at most: they are kept in memory.
    pub max_queued_bytes: ByteCount,
    /// Bytes that outputs may take that are made or held, wherever they are; `None` is no bound. It is what the store has
    /// room for, so that each of them can go there.
    pub payload_bytes: Option<ByteCount>,
    /// Jobs that have ended and are remembered, at most; the one that ended first is forgotten first.
    pub max_ended: usize,
    /// Dead letters that are kept beside those; the job that died first is discarded first.
    pub max_dead_letters: usize,
    /// Slots that one worker may advertise, at most.
    pub max_slots: u32,
    /// Workers that may die while they run a job, each counted once, before the job is taken for the cause and fails. A
    /// process that is started again is another worker.
    pub max_killed_workers: u32,
    /// Attempts of a job that may fall silent or stop unasked, before the job fails.
    pub max_expired: u32,
    /// Inputs of a job that its consumers may report as lost, before the job fails.
    pub max_lost_inputs: u32,
}

impl Limits {
    /// How long a worker pauses that has missed so many offers in a row.
    pub(crate) fn pause_after(&self, misses: u32) -> Duration {
        self.pause.saturating_mul(1 << misses.saturating_sub(1).min(6))
    }

    /// How often a worker should renew its grants: three times within [`Limits::grant`].
    pub fn renew_interval(&self) -> Duration {
        self.grant / 3
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            offer: Duration::from_secs(1),
            pause: Duration::from_secs(1),
            grant: Duration::from_secs(15),
            linger: Duration::from_secs(60),
            cancel: Duration::from_secs(30),
            stop: Duration::from_secs(60),
            affinity_step: Duration::from_millis(20),
            max_queued: 10_000,
            max_queued_bytes: ByteCount(256 << 20),
            payload_bytes: None,
            max_ended: 10_000,
            max_dead_letters: 1_000,
            max_slots: 1024,
            max_killed_workers: 3,
            max_expired: 3,
            max_lost_inputs: 8,
        }
    }
}
