//! Caches handed over from prefill to decode.

mod leaving;
mod odd;
mod pages;
mod peers;
mod rooms;
mod second;
mod sides;
mod soak;
