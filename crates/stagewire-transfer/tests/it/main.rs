//! Tests over the public interface, with real processes where a peer has to die, stop or be somebody else.

mod arena;
mod child;
mod conformance;
mod corpus;
mod decorate;
mod directory;
mod engine;
mod mooncake;
mod mooncake_child;
mod mooncake_faults;
mod mooncake_peer;
mod mooncake_ports;
mod mooncake_transport;
mod nixl;
mod oracle;
mod process_death;
mod processes;
mod stopped;
mod support;
mod tcp;
