use std::collections::BTreeSet;

use stagewire_core::{Epoch, PayloadId, Timestamp};

use super::Sched;
use super::plan::Plan;
use crate::job::Phase;
use crate::{Decision, Event, Holder, OfferEnd, Refusal, StageRun};

impl Sched {
    /// The server has started on a replayed journal. What workers ran and held is kept until they attach, for a while; what
    /// the store held is lost where it is not among `there`. Every job is looked at, as the pipeline may be another one than
    /// before.
    pub(super) fn restarted(
        &self,
        now: Timestamp,
        epoch: Epoch,
        there: &BTreeSet<PayloadId>,
    ) -> Result<Decision, Refusal> {
        if epoch <= self.epoch {
            let current = self.epoch;
            return Err(Refusal::Epoch { epoch, current });
        }
        let mut plan = Plan::after_restart(self, now);
        for (_, id) in self.index.active.iter() {
            let Some(job) = self.jobs.get(id) else { continue };
            let offers = job.stages.iter().filter_map(|run| match &run.phase {
                Phase::Offered(offer) => Some(offer.token),
                _ => None,
            });
            let payloads = job.stages.iter().flat_map(StageRun::payloads);
            let stored = payloads.filter(|(.., holder)| *holder == Holder::Store);
            let stored = stored.map(|(payload, ..)| payload.id);
            let stored = stored.filter(|payload| !there.contains(payload));
            let awaiting = job.stages.iter().filter(|run| run.awaits.is_some());
            let awaiting: Vec<_> = awaiting.map(|run| run.name.clone()).collect();
            let (offers, stored): (Vec<_>, Vec<_>) = (offers.collect(), stored.collect());
            plan.change(*id, |job| {
                for token in offers {
                    let end = OfferEnd::Withdrawn;
                    job.push(Event::OfferEnded { token, end });
                }
                for stage in awaiting {
                    let job_id = job.job().id;
                    job.push(Event::AwaitEnded { job: job_id, stage });
                }
                for payload in stored {
                    job.lose_payload(payload);
                }
            });
        }
        for payload in self.cache.payloads().filter(|payload| !there.contains(payload)) {
            plan.push(Event::CacheDropped { payload });
        }
        plan.push(Event::Restarted { epoch });
        Ok(plan.decision)
    }
}
