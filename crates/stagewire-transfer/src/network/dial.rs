//! The reader's side: connecting over TCP.

use std::io;
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::net::sockopt;
use stagewire_core::{Incarnation, ProcessRef};
use tokio::net::TcpStream;

use super::token::Key;
use crate::ConnectError;
use crate::link::{Opened, greeting};
use crate::process::ProcessWatch;
use crate::tcp::LanePool;
use crate::wire::{self, Challenge, Channel, Hello, MAX_FRAME, Role, Stream};

/// Silence after which the kernel asks whether the other host is still there, how often it asks, and how many answers
/// may be missing. A process that died needs none of this: its kernel closes its connections at once.
const IDLE: Duration = Duration::from_secs(5);
const INTERVAL: Duration = Duration::from_secs(2);
const PROBES: u32 = 3;

/// Where a peer listens, and what it wants to hear.
pub(crate) struct Dial {
    /// Tried in this order.
    pub(crate) sockets: Vec<SocketAddr>,
    /// The peer's host, as it calls it.
    pub(crate) peer_host: String,
    /// This host.
    pub(crate) host: String,
    pub(crate) key: Option<Key>,
}

/// How a reader opens lanes of its session.
pub(crate) struct Lanes {
    peer: Incarnation,
    /// The address that answered.
    address: SocketAddr,
    process: ProcessRef,
    host: String,
    key: Option<Key>,
    session: u128,
    /// Those that are open.
    pool: OnceLock<LanePool>,
}

impl Dial {
    /// Opens a control connection at the first address that answers.
    pub(crate) async fn open(&self, peer: Incarnation, process: ProcessRef) -> Result<Opened, ConnectError> {
        let (mut lanes, stream, welcomed) = self.greet(peer, process, Role::Control).await?;
        lanes.session = welcomed.session;
        greeted(&stream, peer)?;
        // On another host the number of a process says nothing here.
        let watch = (self.host == self.peer_host).then(|| ProcessWatch::open(welcomed.process));
        let watch = watch.transpose().map_err(|error| ConnectError::Gone {
            peer,
            how: error.to_string(),
        })?;
        Ok(Opened {
            channel: Channel::Tcp(stream),
            process: welcomed.process,
            watch,
            canary: (0, 0),
            lanes: Some(lanes),
        })
    }

    /// Opens a connection for another protocol.
    pub(crate) async fn open_stream(&self, peer: Incarnation, process: ProcessRef) -> Result<TcpStream, ConnectError> {
        let (_, stream, _) = self.greet(peer, process, Role::Stream).await?;
        greeted(&stream, peer)?;
        bare(stream, peer)
    }

    /// Greets at the first address that answers.
    async fn greet(
        &self,
        peer: Incarnation,
        process: ProcessRef,
        role: Role,
    ) -> Result<(Lanes, Stream, greeting::Welcomed), ConnectError> {
        let mut failed = ConnectError::Gone {
            peer,
            how: "its address names no socket".to_owned(),
        };
        for &address in &self.sockets {
            let lanes = Lanes {
                peer,
                address,
                process,
                host: self.host.clone(),
                key: self.key.clone(),
                session: 0,
                pool: OnceLock::new(),
            };
            match lanes.greet(role).await {
                Ok((stream, welcomed)) => return Ok((lanes, stream, welcomed)),
                // The next address may lead to the same process by another way.
                Err(error @ (ConnectError::Gone { .. } | ConnectError::Io { .. })) => failed = error,
                Err(error) => return Err(error),
            }
        }
        let is_elsewhere = self.host != self.peer_host;
        if let ConnectError::Gone { how, .. } = &mut failed
            && is_elsewhere
            && self.sockets.iter().all(|address| address.ip().is_loopback())
        {
            how.push_str("; it is on another host, and told nobody an address that others reach: set where it binds");
        }
        Err(failed)
    }
}

/// The peer has said who it is; it may be lost from here on.
fn greeted(stream: &Stream, peer: Incarnation) -> Result<(), ConnectError> {
    let what = "prepare a connection";
    stream.greeted().map_err(|error| ConnectError::Io { peer, what, error })
}

/// The socket of a stream that was greeted.
fn bare(stream: Stream, peer: Incarnation) -> Result<TcpStream, ConnectError> {
    stream.into_socket().map_err(|error| ConnectError::Refused {
        peer,
        problem: error.to_string(),
    })
}

impl Lanes {
    /// The peer's address, as it was reached.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The lanes that are open, at most so many.
    pub(crate) fn pool(&self, lanes: usize) -> &LanePool {
        self.pool.get_or_init(|| LanePool::new(lanes))
    }

    /// Opens a data connection that the peer hands to its [`LaneServer`](super::LaneServer), with all pins of this
    /// session. It carries nothing yet.
    ///
    /// # Errors
    /// [`ConnectError`].
    ///
    /// # Cancel safety
    /// Nothing is left behind by a dropped future. It has no deadline of its own.
    pub(crate) async fn open(&self) -> Result<TcpStream, ConnectError> {
        let session = self.session;
        let (stream, _) = self.greet(Role::Lane { session }).await?;
        bare(stream, self.peer)
    }

    async fn greet(&self, role: Role) -> Result<(Stream, greeting::Welcomed), ConnectError> {
        let &Self { peer, address, .. } = self;
        let gone = |how: String| ConnectError::Gone { peer, how };
        let socket = TcpStream::connect(address).await.map_err(|error| match error.kind() {
            // Reset where it died while this process connected.
            io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset => {
                gone(format!("nobody listens at {address} ({error})"))
            }
            _ => ConnectError::Io {
                peer,
                what: "connect",
                error,
            },
        })?;
        let what = "prepare a connection";
        prepare(&socket).map_err(|error| ConnectError::Io { peer, what, error })?;
        let stream = Stream::new(socket);
        let mut buffer = [0; MAX_FRAME];
        let len = receive(&stream, &mut buffer).await.map_err(gone)?;
        let challenge: Challenge = greeting::decode(peer, &buffer[..len])?;
        let hello = Hello {
            expects: peer,
            process: self.process,
            host: self.host.clone(),
            role,
            proof: self.key.as_ref().map(|key| key.prove(&challenge, peer)),
        };
        let sent = async {
            stream.post(&wire::encode_versioned(&hello))?;
            stream.flush_all().await
        };
        sent.await
            .map_err(|error| gone(format!("it does not take the greeting ({error})")))?;
        let len = receive(&stream, &mut buffer).await.map_err(gone)?;
        let welcomed = greeting::judge(peer, &address.to_string(), &buffer[..len])?;
        Ok((stream, welcomed))
    }
}

async fn receive(stream: &Stream, buffer: &mut [u8]) -> Result<usize, String> {
    match stream.receive(buffer).await {
        Ok(Some(len)) => Ok(len),
        Ok(None) => Err(greeting::NO_ANSWER.to_owned()),
        Err(error) => Err(format!("it does not greet ({error})")),
    }
}

/// Small frames go at once, and a host that vanished shows.
pub(crate) fn prepare(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, IDLE)?;
    sockopt::set_tcp_keepintvl(socket, INTERVAL)?;
    sockopt::set_tcp_keepcnt(socket, PROBES)?;
    Ok(())
}
