//! What can be set about `tcp`.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;

use rustix::net::sockopt::{set_socket_send_buffer_size, set_tcp_congestion, set_tcp_nodelay};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use stagewire_core::ByteCount;

use crate::StartError;

/// How `tcp` moves bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpOptions {
    /// Data connections to each peer at most, at least one. They are made when they are needed, and carry one transfer
    /// at a time; further transfers wait.
    pub lanes: usize,
    /// Whether each frame carries a digest (XXH3, 64 bits), which who receives it checks. Frames have digests if one of
    /// both sides wants them. TCP's own checksum misses one damaged segment in 65,536.
    pub digest: bool,
    /// Bytes per second that this process sends on data connections, all peers together; `None` for no bound.
    pub send_rate: Option<ByteCount>,
    /// Congestion control of data connections, by its name in the kernel. `None` leaves the system's default; but between
    /// processes of one host it is `reno` where that is allowed, because nothing is congested there: measured, 1.7 times
    /// as fast as `bbr`.
    pub congestion: Option<String>,
    /// Memory for pushes that have arrived in part, of which those of one peer get a quarter at most. More wait. One that
    /// is larger than that quarter goes beside them, one such at a time. From its turn on, a push gets 10 s and one more
    /// for each 4 MiB; if it has not arrived by then, it fails with
    /// [`TransferError::TooSlow`](crate::TransferError::TooSlow).
    pub staging: ByteCount,
    /// Transfers of so many bytes and more use several data connections. `None` means 16 MiB between hosts, and never
    /// on one host, where one connection is as fast.
    pub spread_from: Option<ByteCount>,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            lanes: 2,
            digest: true,
            send_rate: None,
            congestion: None,
            staging: ByteCount(256 << 20),
            spread_from: None,
        }
    }
}

/// From so many bytes, a transfer between hosts uses several lanes.
const SPREAD_FROM: u64 = 16 << 20;

/// Bytes between processes of one host that may be sent and not yet received; the kernel takes it twice, for its books.
/// They stay in the caches. What the kernel chooses itself grows to several MiB, with which some connections stay a third
/// slower than others.
const SEND_BUFFER: usize = 512 << 10;

/// Congestion control between processes of one host.
const ON_ONE_HOST: &str = "reno";

impl TcpOptions {
    /// Bytes from which a transfer to this peer uses several lanes.
    pub(crate) fn spread_from(&self, peer: IpAddr) -> u64 {
        match self.spread_from {
            Some(from) => from.0,
            None if peer.is_loopback() => u64::MAX,
            None => SPREAD_FROM,
        }
    }

    /// Tries the congestion control on a socket made for that.
    pub(crate) fn check_congestion(&self) -> Result<(), StartError> {
        let Some(wanted) = &self.congestion else {
            return Ok(());
        };
        let tried = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .and_then(|socket| set_tcp_congestion(&socket, wanted));
        tried.map_err(|error| StartError::Congestion {
            wanted: wanted.clone(),
            allowed: congestion("tcp_allowed_congestion_control").join(", "),
            default: congestion("tcp_congestion_control").concat(),
            error: error.into(),
        })
    }

    /// Sets up a data connection.
    pub(crate) fn prepare(&self, socket: impl AsFd, peer: IpAddr) -> io::Result<()> {
        set_tcp_nodelay(&socket, true)?;
        if peer.is_loopback() {
            set_socket_send_buffer_size(&socket, SEND_BUFFER)?;
        }
        match &self.congestion {
            Some(wanted) => set_tcp_congestion(&socket, wanted)?,
            None if peer.is_loopback() => {
                // Where it is not allowed, it works as well, slower.
                let _ = set_tcp_congestion(&socket, ON_ONE_HOST);
            }
            None => {}
        }
        Ok(())
    }
}

/// Names of congestion controls, from one of the kernel's settings.
fn congestion(setting: &str) -> Vec<String> {
    let listed = fs::read_to_string(format!("/proc/sys/net/ipv4/{setting}"));
    let listed = listed.unwrap_or_default();
    listed.split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_congestion_control_names_the_allowed_ones() {
        let options = |name: &str| TcpOptions {
            congestion: Some(name.to_owned()),
            ..TcpOptions::default()
        };
        let error = options("no-such-control").check_congestion().unwrap_err();
        let message = error.to_string();
        assert!(message.contains("no-such-control"), "{message}");
        let allowed = congestion("tcp_allowed_congestion_control");
        assert!(
            !allowed.is_empty() && message.contains(&allowed.join(", ")),
            "{message}"
        );
        for name in allowed {
            options(&name).check_congestion().expect("listed as allowed");
        }
    }
}
