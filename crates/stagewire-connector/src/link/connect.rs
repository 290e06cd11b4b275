//! Reaching a holder: over its Unix socket on this host, over its network from any other.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use futures::{SinkExt, StreamExt};
use stagewire_core::Peer;
use stagewire_transfer::{ConnectOptions, Network, ProcessWatch, unix};
use tokio::net::UnixStream;

use super::{CONNECT_WITHIN, LinkError};
use crate::wire::{self, Greeting, Hello, Me, Reader, Writer};

/// Pause before another try where the holder's queue of connections is full.
const BACKLOG_PAUSE: Duration = Duration::from_millis(5);

/// A connection on which both sides have said who they are.
pub(super) struct Opened {
    pub(super) reader: Reader,
    pub(super) writer: Writer,
    /// The socket of a holder on this host, to look whether something has come.
    pub(super) socket: Option<OwnedFd>,
    /// Of a holder on this host.
    pub(super) watch: Option<ProcessWatch>,
}

/// Where a holder is talked to, for people.
pub(super) fn at(peer: &Peer, network: &Network) -> String {
    if network.host().is_host_of(peer) {
        peer.socket.clone()
    } else {
        "the network port of its host".to_owned()
    }
}

pub(super) async fn open(me: Me, peer: &Peer, network: &Network) -> Result<Opened, LinkError> {
    let (pid, at) = (peer.process.pid, at(peer, network));
    let (mut reader, mut writer, socket, watch) = if network.host().is_host_of(peer) {
        on_this_host(me, peer, &at).await?
    } else {
        let options = ConnectOptions {
            deadline: CONNECT_WITHIN,
        };
        let stream = network.open_stream(peer, &options).await;
        let stream = stream.map_err(|source| LinkError::Network { pid, source })?;
        let (read, write) = stream.into_split();
        let (reader, writer) = wire::framed(read, write);
        (reader, writer, None, None)
    };
    let gone = |source| LinkError::Gone {
        pid,
        at: at.clone(),
        source,
    };
    let hello = Hello::new(me, peer.incarnation);
    writer.send(wire::encode(&hello)).await.map_err(gone)?;
    let ended = || gone(io::ErrorKind::UnexpectedEof.into());
    let frame = reader.next().await.ok_or_else(ended)?.map_err(gone)?;
    let greeting = wire::decode(&frame).map_err(|error| LinkError::Malformed {
        at: at.clone(),
        error: error.to_string(),
    })?;
    match greeting {
        Greeting::Welcome => Ok(Opened {
            reader,
            writer,
            socket,
            watch,
        }),
        Greeting::Version(found) => Err(LinkError::Version {
            at,
            found,
            expected: wire::VERSION,
        }),
        Greeting::Incarnation(found) => Err(LinkError::Incarnation {
            at,
            found,
            expected: peer.incarnation,
        }),
    }
}

async fn on_this_host(
    me: Me,
    peer: &Peer,
    at: &str,
) -> Result<(Reader, Writer, Option<OwnedFd>, Option<ProcessWatch>), LinkError> {
    let gone = |source| LinkError::Gone {
        pid: peer.process.pid,
        at: at.to_owned(),
        source,
    };
    // The end of the socket is not enough: a child that the holder left behind may keep it open.
    let watch = match ProcessWatch::open(peer.process) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(gone(error)),
        watch => watch.ok(),
    };
    let stream = loop {
        match UnixStream::connect(&peer.socket).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(BACKLOG_PAUSE).await,
            result => break result.map_err(gone)?,
        }
    };
    let found = stream.peer_cred().map_err(gone)?.uid();
    if found != me.uid {
        return Err(LinkError::User {
            at: at.to_owned(),
            found,
            expected: me.uid,
        });
    }
    let (read, write) = unix::split(stream).map_err(gone)?;
    let socket = read.descriptor().map_err(gone)?;
    let (reader, writer) = wire::framed(read, write);
    Ok((reader, writer, Some(socket), watch))
}
