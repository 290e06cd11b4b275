//! Everything that the server promises to those outside it.

mod config;
