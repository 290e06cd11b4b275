//! Connecting to a process of this host.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;
use stagewire_core::{Incarnation, ProcessRef};

use super::connect::Opened;
use super::greeting;
use crate::ConnectError;
use crate::process::ProcessWatch;
use crate::wire::{self, Channel, Hello, MAX_FRAME, Received, Role, Socket};

/// Pause before another try at a listener whose queue is full.
const BUSY_PAUSE: Duration = Duration::from_millis(2);

/// Connects to the data socket at `path`.
pub(super) async fn open(
    peer: Incarnation,
    path: &str,
    host: &str,
    process: ProcessRef,
) -> Result<Opened, ConnectError> {
    let failed = |what| move |error| ConnectError::Io { peer, what, error };
    let socket = Socket::new(connected(peer, path).await?).map_err(failed("watch a socket"))?;
    let credentials = socket.credentials().map_err(failed("ask who listens"))?;
    let (found, expected) = (credentials.uid.as_raw(), geteuid().as_raw());
    if found != expected {
        let path = path.to_owned();
        return Err(ConnectError::User { path, found, expected });
    }
    let hello = Hello {
        expects: peer,
        process,
        host: host.to_owned(),
        role: Role::Control,
        proof: None,
    };
    let gone = |how: String| ConnectError::Gone { peer, how };
    let sent = socket.send(&wire::encode_versioned(&hello), None).await;
    sent.map_err(|error| gone(format!("it does not take the greeting ({error})")))?;
    let mut buffer = [0; MAX_FRAME];
    let received = socket.receive(&mut buffer).await;
    let received = received.map_err(|error| gone(format!("it does not answer the greeting ({error})")))?;
    let Received::Frame(len, _) = received else {
        return Err(gone(greeting::NO_ANSWER.to_owned()));
    };
    let welcomed = greeting::judge(peer, path, &buffer[..len])?;
    let process = welcomed.process;
    if process.pid != credentials.pid.as_raw_nonzero().get().unsigned_abs() {
        return Err(ConnectError::Refused {
            peer,
            problem: format!(
                "it says that it is process {}, the kernel says {:?}",
                process.pid, credentials.pid
            ),
        });
    }
    let watch = ProcessWatch::open(process).map_err(|error| gone(error.to_string()))?;
    Ok(Opened {
        channel: Channel::Unix(socket),
        process,
        watch: Some(watch),
        canary: welcomed.canary,
        lanes: None,
    })
}

/// Connects a socket.
async fn connected(peer: Incarnation, path: &str) -> Result<OwnedFd, ConnectError> {
    let failed = |what| {
        move |error: rustix::io::Errno| ConnectError::Io {
            peer,
            what,
            error: error.into(),
        }
    };
    let address = SocketAddrUnix::new(path).map_err(failed("use the path of the data socket"))?;
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let socket = socket.map_err(failed("make a socket"))?;
        match connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            Err(rustix::io::Errno::AGAIN) => tokio::time::sleep(BUSY_PAUSE).await,
            Err(error @ (rustix::io::Errno::CONNREFUSED | rustix::io::Errno::NOENT)) => {
                let how = format!("nobody listens at {path} ({error})");
                return Err(ConnectError::Gone { peer, how });
            }
            Err(error) => return Err(failed("connect")(error)),
        }
    }
}
