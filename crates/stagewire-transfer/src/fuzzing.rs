//! Decoders of bytes that come from others, for `fuzz/` and for the replay of its corpus.
//!
//! A target takes any bytes. It panics where a decoder does, or where something that was taken in does not survive
//! being sent out again.

mod control;
mod handle;
mod lane;
mod mooncake;
mod tcp;

pub use control::control;
pub use handle::handle;
pub use lane::lane;
pub use mooncake::{mooncake_data, mooncake_handshake};
pub use tcp::tcp_frame;

/// One thing to fuzz.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name of the binary in `fuzz/fuzz_targets` and of the folder in `fuzz/corpus`.
    pub name: &'static str,
    /// Decodes, and says whether the bytes were taken in.
    pub run: fn(&[u8]) -> bool,
    /// Bytes that are taken in, by name, to begin with.
    pub seeds: fn() -> Vec<(&'static str, Vec<u8>)>,
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target {
        name: "control",
        run: control,
        seeds: control::seeds,
    },
    Target {
        name: "handle",
        run: handle,
        seeds: handle::seeds,
    },
    Target {
        name: "lane",
        run: lane,
        seeds: lane::seeds,
    },
    Target {
        name: "mooncake_data",
        run: mooncake_data,
        seeds: mooncake::data_seeds,
    },
    Target {
        name: "mooncake_handshake",
        run: mooncake_handshake,
        seeds: mooncake::handshake_seeds,
    },
    Target {
        name: "tcp_frame",
        run: tcp_frame,
        seeds: tcp::seeds,
    },
];
