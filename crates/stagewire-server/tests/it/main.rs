//! Everything that the server promises to those outside it.

mod cache;
mod child;
mod config;
mod crash;
mod dead_letters;
mod events;
mod http;
mod inputs;
mod jobs;
mod leave;
mod limits;
mod openapi;
mod operate;
mod preempt;
mod protocol;
mod site;
mod stages;
mod start;
mod store;
