//! The planner through its public face: published cases, refusals, errors of one room, and random geometries against a
//! naive oracle.

mod cases;
mod hybrid;
mod memory;
mod models;
mod mutants;
mod published;
mod random;
mod refusals;
mod rooms;
mod world;
