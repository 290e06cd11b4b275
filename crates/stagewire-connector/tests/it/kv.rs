//! Caches handed over from prefill to decode.

mod odd;
mod pages;
mod rooms;
mod sides;
