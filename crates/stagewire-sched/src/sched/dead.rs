use stagewire_core::{ByteCount, JobId, Timestamp};

use super::Sched;
use super::plan::Plan;
use crate::{DeadLetter, Decision, Discard, Event, Job, Refusal};

impl Sched {
    /// Dead letters, the first to die first.
    pub fn dead_letters(&self) -> impl DoubleEndedIterator<Item = DeadLetter<'_>> + ExactSizeIterator {
        let letter = |(_, job): &(Timestamp, JobId)| {
            let letter = self.jobs.get(job).and_then(Job::dead_letter);
            letter.expect("the index holds dead letters that are there")
        };
        self.index.dead.iter().map(letter)
    }

    /// The dead letter gets a new life: it is submitted again, under its id and key, on the same terms.
    pub(super) fn redrive(&self, now: Timestamp, job: JobId) -> Result<Decision, Refusal> {
        let letter = self.dead_letter(job)?;
        self.has_room(ByteCount(letter.params.len() as u64))?;
        self.check_bytes(letter.terms.shape)?;
        let mut plan = Plan::new(self, now);
        plan.change(job, |plan| plan.push(Event::JobRedriven { job }));
        Ok(plan.decision)
    }

    /// The dead letter is not kept: from now on it is a job that has failed, like others.
    pub(super) fn discard(&self, job: JobId, why: Discard) -> Result<Decision, Refusal> {
        self.dead_letter(job)?;
        Ok(Self::discarded(job, why))
    }

    /// Discards the job that died first, where there are more dead letters than are kept.
    pub(super) fn discard_one(&self) -> Option<Decision> {
        let too_many = self.index.dead.len() > self.limits.max_dead_letters;
        let (_, job) = *self.index.dead.first().filter(|_| too_many)?;
        Some(Self::discarded(job, Discard::Crowded))
    }

    fn discarded(job: JobId, why: Discard) -> Decision {
        Decision {
            events: vec![Event::DeadLetterDiscarded { job, why }],
            ..Decision::default()
        }
    }

    fn dead_letter(&self, job: JobId) -> Result<&Job, Refusal> {
        let known = self.jobs.get(&job).ok_or(Refusal::UnknownJob { job })?;
        match known.dead_letter() {
            Some(_) => Ok(known),
            None => Err(Refusal::NotDead {
                job,
                state: known.state.name(),
            }),
        }
    }
}
