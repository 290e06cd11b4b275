//! Drives the real binary. Whatever needs Python workers is in `tests/` at the top of the repository.

mod bench;
mod doctor;
mod errors;
mod help;
mod kv;
mod serve;
mod sim;
mod store;
mod world;
