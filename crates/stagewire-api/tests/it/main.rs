//! The worker's session against a small orchestrator that speaks the real protocol.

mod fake;
mod session;
