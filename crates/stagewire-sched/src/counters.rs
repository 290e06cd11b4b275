/// What has happened, counted from the applied events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(missing_docs, reason = "each field counts what its name says")]
#[non_exhaustive]
pub struct Counters {
    pub jobs_submitted: u64,
    pub jobs_succeeded: u64,
    pub jobs_failed: u64,
    pub jobs_cancelled: u64,
    pub offers: u64,
    pub offers_declined: u64,
    pub offers_unanswered: u64,
    pub offers_withdrawn: u64,
    pub attempts_granted: u64,
    pub attempts_completed: u64,
    pub attempts_failed: u64,
    pub attempts_fenced: u64,
    pub attempts_lost_with_worker: u64,
    pub attempts_not_running: u64,
    pub attempts_expired: u64,
    pub attempts_without_progress: u64,
    pub attempts_stopped: u64,
    pub attempts_without_input: u64,
    pub payloads_published: u64,
    pub payloads_released: u64,
    pub payloads_lost: u64,
    pub stages_reopened: u64,
    pub stages_skipped: u64,
    pub workers_lost: u64,
}
