//! Where the rules leave a choice, a policy makes it: which class starts a job next, and which worker gets that.
//!
//! A policy is given numbers and names a position. It changes no state and breaks no promise about jobs, tokens and
//! credits: who is asked is whoever may start, and those who may get it are free workers. What it chose goes out as an
//! [`Effect::Chosen`](crate::Effect::Chosen), with what it chose from. Replay asks nobody: events say what was done. So
//! another policy can take the place of the first one at a restart, and one that decides elsewhere, from numbers that it was
//! told, can stand in for a central one. It must say the same of the same numbers, or a simulation is not repeated.
//!
//! What a policy does decide is who waits for how long. That no class starves holds for [`FairShare`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{Incarnation, JobId, StageName, Timestamp, Token};

use crate::share::Turn;

/// A class whose first job may start at a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contender {
    /// The class.
    pub class: StageName,
    /// Its first job.
    pub job: JobId,
    /// When that is due, which is its order within the class. Without a deadline it is an hour after the job came.
    pub due: Timestamp,
    /// How long it is predicted to take.
    pub predicted: Duration,
    /// Turns until the share of the class covers that.
    pub turns: u64,
    /// Whether an attempt has yielded for the sake of the class.
    pub owed: bool,
    pub(crate) turn: Turn,
}

/// A free worker that may get an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// The worker.
    pub worker: Incarnation,
    /// Slots that it uses.
    pub used: u32,
    /// Slots that it has.
    pub slots: u32,
    /// How far it is from the largest of the inputs that workers hold ([`Place::steps`](crate::Place::steps)); `None` where
    /// that makes no difference.
    pub steps: Option<u32>,
    /// What the steps cost, and what its slots in use are expected to.
    pub cost: Duration,
}

/// Which class starts a job next at a stage.
pub trait Ordering: fmt::Debug + Send + Sync {
    /// A position in `contenders`, of which there is at least one. They come in the order of their turns.
    fn next(&self, stage: &StageName, contenders: &[Contender]) -> usize;
}

/// Which worker gets an attempt.
pub trait Routing: fmt::Debug + Send + Sync {
    /// A position in `candidates`, of which there is at least one: the least busy worker of each place on the host of the
    /// largest input, of its rail, and of all; where nothing is near, the least busy of all alone.
    fn choose(&self, stage: &StageName, job: JobId, candidates: &[Candidate]) -> usize;
}

/// Who decides.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Which class is next.
    pub ordering: Arc<dyn Ordering>,
    /// Which worker gets the job.
    pub routing: Arc<dyn Routing>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            ordering: Arc::new(FairShare),
            routing: Arc::new(Cheapest),
        }
    }
}

/// Whose turn it is: deficit round robin by predicted seconds, so that no class starves.
#[derive(Debug, Clone, Copy)]
pub struct FairShare;

impl Ordering for FairShare {
    fn next(&self, _: &StageName, _: &[Contender]) -> usize {
        0
    }
}

/// The worker that costs least; of several, the one with the fewest slots in use.
#[derive(Debug, Clone, Copy)]
pub struct Cheapest;

impl Routing for Cheapest {
    fn choose(&self, _: &StageName, _: JobId, candidates: &[Candidate]) -> usize {
        let price = |(_, one): &(usize, &Candidate)| (one.cost, one.used, one.worker);
        candidates.iter().enumerate().min_by_key(price).map_or(0, |(at, _)| at)
    }
}

/// Why an attempt was offered to whom: what was chosen, and from what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The attempt.
    pub token: Token,
    /// The stage.
    pub stage: StageName,
    /// Why this job.
    pub turn: TurnOf,
    /// Workers that could have got it.
    pub candidates: Vec<Candidate>,
    /// Position of the one that did.
    pub chosen: usize,
}

/// Why a job started before others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TurnOf {
    /// Its class was chosen.
    Class {
        /// Classes with a job that could have started, in the order of their turns.
        contenders: Vec<Contender>,
        /// Position of its class.
        chosen: usize,
    },
    /// Nothing else goes on: it is the oldest of those that hold what others wait for, and no policy was asked.
    Oldest,
    /// It came along with this job, in a batch.
    Along(JobId),
}
