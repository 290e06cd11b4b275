//! Caches handed over from prefill to decode.

mod pages;
mod rooms;
mod sides;
