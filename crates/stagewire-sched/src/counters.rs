use crate::{Discard, Event, Loss, OfferEnd, Outcome};

/// What has happened, counted from the applied events, those of a replay included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(missing_docs, reason = "each field counts what its name says")]
#[non_exhaustive]
pub struct Counters {
    pub jobs_submitted: u64,
    pub jobs_succeeded: u64,
    pub jobs_failed: u64,
    /// Those among the failed ones that had not begun by their queue deadline.
    pub jobs_dropped: u64,
    pub jobs_cancelled: u64,
    /// Those among the failed ones that became dead letters.
    pub dead_letters: u64,
    pub dead_letters_redriven: u64,
    /// Those that somebody did not want.
    pub dead_letters_discarded: u64,
    /// Those that made room for others.
    pub dead_letters_crowded_out: u64,
    pub offers: u64,
    /// Those to a worker on the NUMA node, or host, of the worker that holds the largest input.
    pub offers_near: u64,
    /// Those to a worker further away.
    pub offers_far: u64,
    pub offers_declined: u64,
    pub offers_unanswered: u64,
    pub offers_withdrawn: u64,
    pub attempts_granted: u64,
    pub attempts_completed: u64,
    pub attempts_failed: u64,
    pub attempts_fenced: u64,
    pub attempts_yielded: u64,
    /// Those among the yielded ones that made way for a job of another class.
    pub attempts_preempted: u64,
    /// Those among the granted ones that went on from a checkpoint.
    pub attempts_resumed: u64,
    /// Steps that those did not have to do again.
    pub steps_saved: u64,
    pub checkpoints: u64,
    pub attempts_lost_with_worker: u64,
    pub attempts_unclaimed: u64,
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
    /// Stages that were done with what another job had made.
    pub stages_cached: u64,
    /// Times that a stage waited for another job that made the same.
    pub stages_awaited: u64,
    /// Payloads that were kept for other jobs.
    pub cache_kept: u64,
    /// Those among them that are not kept any more.
    pub cache_dropped: u64,
    pub workers_lost: u64,
}

impl Counters {
    pub(crate) fn count(&mut self, event: &Event) {
        if let Event::JobEnded {
            outcome: outcome @ Outcome::Failed(_),
            ..
        } = event
        {
            let died = u64::from(outcome.is_death());
            self.dead_letters += died;
            self.jobs_dropped += 1 - died;
        }
        if let Event::JobSubmitted { terms, .. } = event {
            self.stages_skipped += terms.skip.len() as u64;
        }
        if let Event::AttemptGranted { saved, .. } = event {
            self.attempts_resumed += u64::from(*saved > 0);
            self.steps_saved = self.steps_saved.saturating_add(*saved);
        }
        if let Event::AttemptYielded { by: Some(_), .. } = event {
            self.attempts_preempted += 1;
        }
        if let Event::Offered { steps: Some(steps), .. } = event {
            self.offers_near += u64::from(*steps == 0);
            self.offers_far += u64::from(*steps > 0);
        }
        let counter = match event {
            Event::JobSubmitted { .. } => &mut self.jobs_submitted,
            Event::JobEnded { outcome, .. } => match outcome {
                Outcome::Succeeded => &mut self.jobs_succeeded,
                Outcome::Failed(_) => &mut self.jobs_failed,
                Outcome::Cancelled => &mut self.jobs_cancelled,
            },
            Event::Offered { .. } => &mut self.offers,
            Event::OfferEnded { end, .. } => match end {
                OfferEnd::Declined(_) => &mut self.offers_declined,
                OfferEnd::Unanswered => &mut self.offers_unanswered,
                OfferEnd::Withdrawn => &mut self.offers_withdrawn,
            },
            Event::AttemptGranted { .. } => &mut self.attempts_granted,
            Event::AttemptCompleted { .. } => &mut self.attempts_completed,
            Event::AttemptFailed { .. } => &mut self.attempts_failed,
            Event::AttemptFenced { .. } => &mut self.attempts_fenced,
            Event::AttemptYielded { .. } => &mut self.attempts_yielded,
            Event::Checkpointed { .. } => &mut self.checkpoints,
            Event::AttemptLost { loss, .. } => match loss {
                Loss::WorkerLost => &mut self.attempts_lost_with_worker,
                Loss::Unclaimed => &mut self.attempts_unclaimed,
                Loss::NotRunning => &mut self.attempts_not_running,
                Loss::GrantExpired => &mut self.attempts_expired,
                Loss::NoProgress => &mut self.attempts_without_progress,
                Loss::Stopped => &mut self.attempts_stopped,
                Loss::InputLost => &mut self.attempts_without_input,
            },
            Event::Published { .. } => &mut self.payloads_published,
            Event::PayloadReleased { .. } => &mut self.payloads_released,
            Event::PayloadLost { .. } => &mut self.payloads_lost,
            Event::StageReopened { .. } => &mut self.stages_reopened,
            Event::JobRedriven { .. } => &mut self.dead_letters_redriven,
            Event::DeadLetterDiscarded { why, .. } => match why {
                Discard::Asked => &mut self.dead_letters_discarded,
                Discard::Crowded => &mut self.dead_letters_crowded_out,
            },
            Event::StageSkipped { .. } => &mut self.stages_skipped,
            Event::StageCached { .. } => &mut self.stages_cached,
            Event::Awaits { .. } => &mut self.stages_awaited,
            Event::OutputShared { .. } => &mut self.cache_kept,
            Event::CacheDropped { .. } => &mut self.cache_dropped,
            Event::WorkerLost { .. } => &mut self.workers_lost,
            _ => return,
        };
        *counter += 1;
    }
}
