use crate::wire::{Full, Scarce};

/// What peers may have open at a [`Network`](crate::Network) at the same time. One more is refused, to whoever asks for
/// it; nobody else notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetworkLimits {
    /// Control connections of all peers; 1024 by default.
    pub sessions: usize,
    /// Control connections of one process, as it names itself; 64 by default. It needs one for each of its networks.
    pub sessions_per_process: usize,
    /// Data connections that belong to one control connection; 64 by default. No peer may set
    /// [`TcpOptions::lanes`](crate::TcpOptions::lanes) higher.
    pub lanes: usize,
    /// Pins of one control connection; 65,536 by default, as on the Unix socket of every host.
    pub pins: usize,
}

impl Default for NetworkLimits {
    fn default() -> Self {
        Self {
            sessions: 1024,
            sessions_per_process: 64,
            lanes: 64,
            pins: 65_536,
        }
    }
}

/// Whether there may be one more.
pub(super) fn one_more(what: Scarce, held: usize, most: usize) -> Result<(), Full> {
    if held < most {
        return Ok(());
    }
    let (held, most) = (held as u64, most as u64);
    Err(Full { what, held, most })
}
