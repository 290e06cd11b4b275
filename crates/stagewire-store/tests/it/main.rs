//! The host store against the conformance suite, and read by another host.

mod host;
mod recover;
