use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// How this process takes part in Mooncake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MooncakeOptions {
    /// Where the handshake port listens; the data port listens on the same address, at a port of its own. Default:
    /// `127.0.0.1:0`. The protocol knows neither encryption nor authentication: name the one interface of a network that
    /// you trust.
    pub bind: SocketAddr,
    /// The address that others are told, where it is not the one that is bound. Needed with `0.0.0.0` and `[::]`.
    pub advertise: Option<IpAddr>,
    /// Data connections to one peer at most; further transfers wait. Default: 4, as in the engine.
    pub connections: usize,
}

impl Default for MooncakeOptions {
    fn default() -> Self {
        Self {
            bind: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            advertise: None,
            connections: 4,
        }
    }
}
