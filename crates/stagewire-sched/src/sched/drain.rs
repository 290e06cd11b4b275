use super::Sched;
use crate::worker::Worker;
use crate::{Decision, DrainScope, Effect, Event, Refusal};

impl Sched {
    pub(super) fn drain(&self, scope: DrainScope) -> Result<Decision, Refusal> {
        let tell = |worker: &Worker| Effect::Drain {
            worker: worker.incarnation,
        };
        let mut decision = Decision::default();
        match scope {
            DrainScope::All if !self.draining => {
                decision.events.push(Event::Draining);
                let attached = self.workers.values().filter(|worker| worker.is_attached());
                decision.effects.extend(attached.map(tell));
            }
            DrainScope::All => (),
            DrainScope::Worker(worker) => {
                let known = self.attached(worker)?;
                if !known.draining {
                    decision.events.push(Event::WorkerDraining { worker });
                    decision.effects.push(tell(known));
                }
            }
        }
        Ok(decision)
    }
}
