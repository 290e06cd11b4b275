//! Groups: workers, the ranks, that run every attempt together.
//!
//! A group is one unit with one slot, that of rank 0. It is offered work while every rank is there with nothing to do; the
//! others get the attempt when rank 0 was granted it. Rank 0 publishes, reports progress and completes for all. Whatever
//! ends the attempt otherwise, a failure or the loss of any rank, ends it on every rank. Where a rank does not run what was
//! granted, the group gets no offers for a while, as a worker that declines.
//!
//! A rank serves its group alone, so there is nothing that smaller jobs could take from a group piece by piece: where
//! groups of several sizes serve a stage, each takes the job whose turn it is.

use stagewire_core::{ErrorClass, Failure, Incarnation, Member, StageName, Token};

use super::Sched;
use super::plan::JobPlan;
use crate::topology::{StageIndex, StageKind};
use crate::worker::Worker;
use crate::{Event, Loss, Refusal, WaitCause, WorkerInfo};

/// Ranks of a group, at most.
const MAX_WORLD: u32 = 256;

impl Sched {
    /// Whether this worker may be the rank of its group that it says it is.
    pub(super) fn admit_member(&self, info: &WorkerInfo, stage: StageIndex) -> Result<(), Refusal> {
        let Some(member) = &info.member else { return Ok(()) };
        let (worker, name) = (info.incarnation, &info.stage);
        let possible = (1..=MAX_WORLD).contains(&member.world) && member.rank < member.world;
        if !possible || info.places() > 1 || self.topology.spec(stage).kind != StageKind::Admission {
            return Err(Refusal::Member {
                worker,
                stage: name.clone(),
                member: member.clone(),
                most: MAX_WORLD,
            });
        }
        let known = self.groups.get(&(stage, member.group.clone())).into_iter().flatten();
        for (rank, other) in known.filter(|(_, other)| **other != worker) {
            let world = self.member_of(*other).map_or(member.world, |other| other.world);
            if *rank == member.rank || world != member.world {
                return Err(Refusal::RankTaken {
                    worker,
                    stage: name.clone(),
                    member: member.clone(),
                    other: *other,
                    rank: *rank,
                    world,
                });
            }
        }
        Ok(())
    }

    /// The other ranks of the group that this worker leads, in order; none for a worker on its own. `None` where one of
    /// them is missing or not free.
    pub(super) fn followers(&self, worker: &Worker) -> Option<Vec<Incarnation>> {
        let Some(member) = worker.member() else {
            return Some(Vec::new());
        };
        let key = (worker.place?, member.group.clone());
        let ranks = self.groups.get(&key)?;
        let free = |rank: &Incarnation| {
            let follower = self.workers.get(rank);
            follower.is_some_and(|follower| follower.stays() && follower.slots.is_empty())
        };
        let followers: Vec<Incarnation> = ranks.range(1..).map(|(_, rank)| *rank).collect();
        let whole = ranks.get(&0) == Some(&worker.incarnation) && ranks.len() == member.world as usize;
        (whole && followers.iter().all(free)).then_some(followers)
    }

    /// The first group of the stage that lacks ranks, where there is one.
    pub(super) fn missing_ranks(&self, stage: StageIndex) -> Option<WaitCause> {
        let mut groups = self.groups.iter().filter(|((place, _), _)| *place == stage);
        groups.find_map(|((_, group), ranks)| {
            let known = || ranks.values().filter_map(|rank| self.workers.get(rank));
            let there = known().filter(|rank| rank.stays()).count();
            let (attached, world) = (u32::try_from(there).ok()?, known().find_map(Worker::member)?.world);
            (1..world).contains(&attached).then(|| WaitCause::Ranks {
                group: group.clone(),
                attached,
                world,
            })
        })
    }

    fn member_of(&self, worker: Incarnation) -> Option<&Member> {
        self.workers.get(&worker)?.member()
    }

    /// The worker has become a rank of its group.
    pub(super) fn join(&mut self, worker: Incarnation) {
        if let Some((key, rank)) = self.group_of(worker) {
            self.groups.entry(key).or_default().insert(rank, worker);
            self.regroup(worker);
        }
    }

    /// The worker is no rank of its group any more.
    pub(super) fn part_from_group(&mut self, worker: Incarnation) {
        let Some((key, rank)) = self.group_of(worker) else {
            return;
        };
        let Some(ranks) = self.groups.get_mut(&key) else { return };
        ranks.remove(&rank);
        let leader = ranks.get(&0).copied();
        if ranks.is_empty() {
            self.groups.remove(&key);
        }
        self.count_group(leader);
    }

    /// A rank has changed: whether its group can be offered something may have, too.
    pub(super) fn regroup(&mut self, worker: Incarnation) {
        if let Some((key, _)) = self.group_of(worker) {
            let leader = self.groups.get(&key).and_then(|ranks| ranks.get(&0).copied());
            self.count_group(leader);
        }
    }

    fn group_of(&self, worker: Incarnation) -> Option<((StageIndex, StageName), u32)> {
        let worker = self.workers.get(&worker)?;
        let member = worker.member()?;
        Some(((worker.place?, member.group.clone()), member.rank))
    }

    fn count_group(&mut self, leader: Option<Incarnation>) {
        let whole = |leader: &Incarnation| {
            let worker = self.workers.get(leader)?;
            let whole = self.followers(worker).is_some();
            (worker.whole != whole).then_some((*leader, whole))
        };
        if let Some((leader, whole)) = leader.as_ref().and_then(whole) {
            self.change_worker(leader, |worker| worker.whole = whole);
        }
    }
}

impl JobPlan<'_, '_> {
    /// The attempt ends on one rank of a group, which need not be told to stop. One that is away was not waited for.
    pub(super) fn rank_stopped(&mut self, worker: Incarnation, token: Token) {
        if self.is_attached(worker) {
            self.push(Event::AttemptStopped { worker, token });
        }
    }

    /// A rank does not run what rank 0 was granted. Like an offer that is declined this costs the job nothing.
    pub(super) fn lose_rank(&mut self, worker: Incarnation, token: Token, failure: &Failure) {
        let message = format!("rank {worker} does not run attempt {token}: {}", failure.message);
        self.push(Event::AttemptLost {
            token,
            worker,
            loss: Loss::NotRunning,
            failure: Failure::new(ErrorClass::Unavailable, "attempt.not_running", message),
        });
        self.rank_stopped(worker, token);
    }
}
