//! The integration tests of the simulator: the fault harness of the orchestrator.

mod faults;
