//! The scheduler driven through its public face: one file for each rule, and a random world for all of them at once.

mod world;

mod affinity;
mod batches;
mod bytes;
mod cache;
mod cancel;
mod checkpoints;
mod classes;
mod credits;
mod dead;
mod drain;
mod events;
mod explain;
mod groups;
mod jobs;
mod lost;
mod negative;
mod offers;
mod pause;
mod payloads;
mod policy;
mod preempt;
mod random;
mod restart;
mod retries;
mod skip;
mod streams;
mod workers;
