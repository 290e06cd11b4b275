//! The orchestrator's mind: which stage of which job runs where, and what follows from everything that can go wrong.
//!
//! *What it is.* A state machine. [`Sched::decide`] takes an [`Input`] and the time, reads, and says what follows:
//! [`Event`]s, which are facts, and [`Effect`]s, which are things to do outside. [`Sched::apply`] is the only thing that
//! changes state; it is total and deterministic, so replaying the durable events of a journal rebuilds the state.
//! [`Sched::poll_timeout`] says when to call next.
//!
//! *What it is not.* No I/O, no clock, no randomness, no runtime, no order that differs between two runs; `clippy.toml`
//! forbids them. It moves no payload and reads no handle.
//!
//! *Guarantees.* A job reaches exactly one terminal state. A stage of a job has at most one valid token, and what comes
//! with another one changes nothing. The slots of a worker add up, whatever dies. A payload is released once, when
//! nobody can need it any more, and not before. Nothing waits without a deadline or a reason that [`Sched::explain`]
//! can name. A lost worker, payload or offer costs a job no attempt. [`Sched::check`] proves these from the state.
//!
//! *Order.* Classes share the workers of a stage by weight, in predicted seconds, and none of them starves: the module
//! `share` states the bound. Inside a class what is due first goes first, otherwise what was submitted first. A job that
//! has not begun by its queue deadline is dropped. Of the free workers of a work queue, one near what the job reads is
//! preferred, at a price and never by waiting for it: the module `affinity`. Both choices are those of a [`Policy`], which
//! can be another one ([`Sched::with_policy`]); what it chose, and from what, goes out as [`Effect::Chosen`].
//!
//! *Non-guarantees.* Effects may get lost, and a stage function may run more than once: it is its output that counts
//! once.
//!
//! # What workers and stores are expected to do
//!
//! A worker that attaches again says which attempts it runs (those that ended without an answer included) and which
//! payloads it holds, then publishes again what those attempts have published, and completes again what they have completed.
//! It renews each attempt every [`Limits::renew_interval`]. Told to stop an attempt, it stops it, drops what that published,
//! and says so. Refused, it does the same and need not say so. It declines as `Invalid` or `Unsupported`
//! what no worker could run, which fails the job; to decline for another reason costs nothing. The payload of a result is the worker's
//! to drop once its completion is accepted. A store takes and keeps payloads of running attempts
//! ([`Sched::is_running`]) and of jobs that need them ([`Sched::needs_payload`]), and no others.
//!
//! # Driving it
//!
//! Decide, apply the events, poll until nothing is due; make the durable events safe; only then let the effects out.
//!
//! ```
//! # use stagewire_core::{Epoch, JobId, StageName, Timestamp};
//! # use stagewire_sched::{Effect, Input, Limits, Refusal, Sched, StageSpec, Topology, Urgency, WorkerInfo};
//! fn drive(sched: &mut Sched, now: Timestamp, input: Input) -> Result<Vec<Effect>, Refusal> {
//!     let mut journal = Vec::new();
//!     let mut effects = Vec::new();
//!     let mut next = sched.decide(now, input)?;
//!     while !(next.events.is_empty() && next.effects.is_empty()) {
//!         for event in &next.events {
//!             sched.apply(now, event);
//!         }
//!         journal.extend(next.events.into_iter().filter(|event| event.is_durable()));
//!         effects.extend(next.effects);
//!         next = sched.decide(now, Input::Poll)?;
//!     }
//!     // Here the server writes and syncs `journal`.
//!     Ok(effects)
//! }
//!
//! let paint = StageName::new("paint")?;
//! let topology = Topology::new(vec![StageSpec::new(paint.clone())], vec![])?;
//! let mut sched = Sched::new(topology, Limits::default());
//! let now = Timestamp(1_000);
//! drive(&mut sched, now, Input::Restarted { epoch: Epoch(1), stored: Default::default() })?;
//! let worker = WorkerInfo {
//!     incarnation: "00000000-0000-4000-8000-000000000001".parse()?,
//!     stage: paint,
//!     slots: 1,
//!     max_batch: 1,
//!     name: "painter".to_owned(),
//!     member: None,
//!     place: Default::default(),
//! };
//! drive(&mut sched, now, Input::WorkerAttached { worker, running: vec![], holding: vec![] })?;
//! let job: JobId = "00000000-0000-7000-8000-000000000002".parse()?;
//! let (params, urgency) = ("{}".into(), Urgency::default());
//! let effects = drive(&mut sched, now, Input::Submit { job, params, key: None, urgency })?;
//! assert!(effects.iter().any(|effect| matches!(effect, Effect::Offer(_))));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod attempts;
mod backoff;
mod by_id;
mod cache;
mod counters;
mod dead;
mod effect;
mod estimate;
mod event;
mod explain;
mod index;
mod input;
mod job;
mod limits;
mod near;
mod place;
mod policy;
mod queue;
mod ranked;
mod refusal;
mod sched;
mod share;
mod tally;
mod timers;
mod topology;
mod volume;
mod worker;

pub use attempts::{AttemptEnd, AttemptLog, EndedAttempt};
pub use backoff::Backoff;
pub use cache::{CacheKey, CacheTally};
pub use counters::Counters;
pub use dead::{DeadLetter, DeathCause, Discard};
pub use effect::{Decision, Effect, Holder, JobNotice, NoticeKind, Offer, OfferInput};
pub use event::{Event, Loss, OfferEnd};
pub use explain::{Position, WaitCause, Waiting};
pub use input::{
    ArtefactInfo, DrainScope, HandleBytes, IdempotencyKey, Input, PayloadInfo, ResultInfo, Terms, Urgency, WorkerInfo,
};
pub use job::{
    Checkpoint, Job, JobState, Live, Losses, Offering, Outcome, Output, Phase, Preemptor, Running, Shared, StageRun,
};
pub use limits::Limits;
pub use place::Place;
pub use policy::{Candidate, Cheapest, Choice, Contender, FairShare, Ordering, Policy, Routing, TurnOf};
pub use refusal::Refusal;
pub use sched::{ByteCredit, RestoreError, Sched, Snapshot};
pub use tally::{JobTally, StageTally};
pub use topology::{ClassSpec, EdgeSpec, Flow, OutputSpec, StageKind, StageSpec, Topology, TopologyError};
pub use worker::{LinkState, Slot, Slots, Worker};
