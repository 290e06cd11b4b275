//! The host store against the conformance suite, its model, and read by another host.

mod host;
mod model;
mod recover;
mod spill;
mod stress;
mod world;
