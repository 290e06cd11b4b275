use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use stagewire_core::{Capability, Device, Incarnation, ProcessRef};

/// One transport: with which memory was registered, or with which it is pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    Shm,
    Cma,
    Tcp,
    Mooncake,
    Nixl,
    Engine,
}

impl Kind {
    pub(crate) const COUNT: usize = 6;

    pub(crate) const ALL: [Self; Self::COUNT] = [
        Self::Shm,
        Self::Cma,
        Self::Tcp,
        Self::Mooncake,
        Self::Nixl,
        Self::Engine,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Cma => "cma",
            Self::Tcp => "tcp",
            Self::Mooncake => "mooncake",
            Self::Nixl => "nixl",
            Self::Engine => "mooncake-engine",
        }
    }

    /// Whether it pins regions that were registered with the transport of this name. The owner itself serves `tcp`, from
    /// any of its memory.
    pub(crate) fn pins(self, registered: &str) -> bool {
        registered == self.name() || self == Self::Tcp && Self::ALL.iter().any(|kind| kind.name() == registered)
    }
}

/// How a host is reached on its own machine, as it stands in [`TransportAddress`](stagewire_core::TransportAddress).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) socket: String,
}

/// How a host is reached from anywhere, as it stands in [`TransportAddress`](stagewire_core::TransportAddress).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NetworkAddress {
    pub(crate) host: String,
    /// Tried in this order.
    pub(crate) sockets: Vec<SocketAddr>,
    /// What else the transport needs.
    pub(crate) extra: Vec<u8>,
}

/// The owner's first words over TCP.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Challenge {
    /// Random, never used again.
    pub(crate) nonce: [u8; 32],
}

/// The reader's greeting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) expects: Incarnation,
    pub(crate) process: ProcessRef,
    /// Tells whether `process` means anything to the owner.
    pub(crate) host: String,
    pub(crate) role: Role,
    /// That the reader has the deployment's token.
    pub(crate) proof: Option<[u8; 32]>,
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Role {
    /// Pins.
    Control,
    /// Bytes of regions that the control connection of this session pinned.
    Lane { session: u128 },
    /// Another protocol, of the program that uses this crate.
    Stream,
}

/// The owner's greeting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Welcome {
    Open {
        process: ProcessRef,
        /// Address and value of a word by which cma is tried out; zeros over TCP.
        canary: (u64, u64),
        /// Random; names this connection's pins to its lanes. Zero on a Unix socket.
        session: u128,
    },
    /// Another incarnation listens here.
    Incarnation {
        found: Incarnation,
    },
    /// The proof is missing, wrong, or not expected.
    Token {
        problem: String,
    },
    Refused {
        problem: String,
    },
    Full(Full),
}

/// Something of which a peer may have no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Full {
    pub(crate) what: Scarce,
    pub(crate) held: u64,
    pub(crate) most: u64,
}

/// What there may be only so many of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Scarce {
    Sessions,
    SessionsOfProcess,
    Lanes,
    Pins,
}

impl Scarce {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Sessions => "control connections",
            Self::SessionsOfProcess => "control connections of this process",
            Self::Lanes => "data connections of this process",
            Self::Pins => "pins of this process",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    Pin {
        request: u64,
        kind: Kind,
        region: u64,
        generation: u64,
        capability: Capability,
    },
    /// Asks whether the pin has been held until now.
    Confirm {
        request: u64,
        pin: u64,
    },
    Unpin {
        pin: u64,
    },
    /// A transport's own message to its other half.
    Ask {
        request: u64,
        kind: Kind,
        message: Vec<u8>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    Pinned {
        request: u64,
        pin: u64,
        place: Place,
        len: u64,
        writable: bool,
    },
    Confirmed {
        request: u64,
    },
    Answered {
        request: u64,
        message: Vec<u8>,
    },
    Refused {
        request: u64,
        refusal: Refusal,
    },
    /// These segments hold nothing any more and are never named again.
    Retired {
        segments: Vec<u64>,
    },
}

/// Where a pinned region is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Place {
    Segment {
        segment: u64,
        segment_len: u64,
        offset: u64,
    },
    /// An address in the owner's process, or one that stands for it.
    Address(u64),
    /// The owner itself reads and writes it; the pin's number says which.
    Served,
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    Unknown,
    Released,
    Generation {
        current: u64,
    },
    Capability,
    Registered {
        kind: Kind,
    },
    /// Memory of a device, which only the transport that it was registered with reaches.
    Device {
        device: Device,
    },
    NotHeld,
    /// The transport's other half says no.
    Backend {
        problem: String,
    },
    Full(Full),
}
