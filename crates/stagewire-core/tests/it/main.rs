//! Schema, chunk plans and handles against independent oracles.

mod chunks;
mod handles;
mod leases;
mod manifests;
