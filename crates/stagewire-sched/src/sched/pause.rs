use super::Sched;
use crate::{Decision, Event};

impl Sched {
    /// From here on only jobs that have begun are dispatched, or all again. What is offered stays so: a worker may have
    /// accepted it.
    pub(super) fn pause(&self, pause: bool) -> Decision {
        let mut decision = Decision::default();
        if self.paused != pause {
            decision.events.push(if pause { Event::Paused } else { Event::Resumed });
        }
        decision
    }
}
