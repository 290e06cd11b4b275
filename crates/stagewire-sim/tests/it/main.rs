//! The integration tests of the simulator, and the fault harness of the orchestrator.

mod faults;
mod simulate;
mod steps;
mod together;
