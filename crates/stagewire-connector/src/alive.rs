//! Whether a peer lives: this very incarnation of it, not just its process.

use std::io;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use stagewire_core::Peer;
use stagewire_transfer::ProcessWatch;
use tokio::time::Instant;

use crate::connector::Shared;

/// Pause before a peer that did not answer, or ended a connection, is asked again.
const AGAIN: Duration = Duration::from_millis(200);
/// How long a peer of another host may be out of reach, in which it may live on: several times what a connection may take.
const OUT_OF_REACH: Duration = Duration::from_secs(15);

impl Shared {
    /// Whether a peer is a process of this host.
    pub(crate) fn is_here(&self, peer: &Peer) -> bool {
        self.host().is_host_of(peer)
    }

    /// Whether a peer lives, for all that the kernel says: of other hosts it knows nothing. A process whose connector was
    /// started anew is another peer.
    pub(crate) fn is_alive(&self, peer: &Peer) -> bool {
        if self.links().sees_alive(peer.incarnation) || !self.is_here(peer) {
            return true;
        }
        // A connection ends with the process, but a moment later.
        if ProcessWatch::open(peer.process).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return false;
        }
        // Its socket has its incarnation in its name.
        self.links().has(peer.incarnation) || is_listened_to(&peer.socket)
    }

    /// Waits until a peer is no more: its process has died, or its connector has closed. Of another host, until nothing
    /// answers where it was, or it was out of reach for [`OUT_OF_REACH`].
    ///
    /// # Cancel safety
    /// Safe.
    pub(crate) async fn lost(&self, peer: &Peer) {
        let mut reached = Instant::now();
        loop {
            match self.links().to(peer).await {
                Ok(link) => {
                    link.closed().await;
                    reached = Instant::now();
                }
                Err(error) if error.is_lost() => return,
                Err(_) => {}
            }
            // A connection ends for other reasons as well; whether this is one, the next tells.
            let lost = match self.is_here(peer) {
                true => !self.is_alive(peer),
                false => reached.elapsed() >= OUT_OF_REACH,
            };
            if lost {
                return;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }
}

/// Whether somebody listens at a Unix socket. What cannot be known is taken to be so.
fn is_listened_to(path: &str) -> bool {
    let Ok(address) = SocketAddrUnix::new(path) else {
        return true;
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None) else {
        return true;
    };
    !matches!(connect(&socket, &address), Err(Errno::CONNREFUSED | Errno::NOENT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_was_left_behind_is_not_listened_to() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("x.ctl");
        let name = path.to_str().expect("text");
        assert!(!is_listened_to(name), "nothing is there");
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
        assert!(is_listened_to(name));
        drop(listener);
        assert!(
            path.exists() && !is_listened_to(name),
            "who was killed leaves its socket"
        );
    }
}
