//! One module for each command.

pub(crate) mod bench;
pub(crate) mod dlq;
pub(crate) mod doctor;
pub(crate) mod drain;
pub(crate) mod explain;
pub(crate) mod job;
pub(crate) mod jobs;
pub(crate) mod keeper;
pub(crate) mod kv;
pub(crate) mod pause;
pub(crate) mod pools;
pub(crate) mod serve;
pub(crate) mod sim;
pub(crate) mod status;
pub(crate) mod store;
pub(crate) mod submit;
pub(crate) mod up;
pub(crate) mod worker;
