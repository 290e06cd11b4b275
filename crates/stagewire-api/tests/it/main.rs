//! The worker's session against a small orchestrator that speaks the real protocol; the run directory.

mod fake;
mod run_dir;
mod session;
