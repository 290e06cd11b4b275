use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;
use stagewire_core::{Incarnation, ProcessRef};
use tokio::sync::{Notify, watch};

use super::{Link, lock};
use crate::ConnectError;
use crate::host::Counters;
use crate::process::ProcessWatch;
use crate::wire::{self, Hello, MAX_FRAME, Received, Socket, Welcome, WireError};

/// Pause before another try at a listener whose queue is full.
const BUSY_PAUSE: Duration = Duration::from_millis(2);

/// The connections of this host, one per peer.
pub(crate) struct Links {
    process: ProcessRef,
    counters: Arc<Counters>,
    stop: watch::Receiver<bool>,
    /// A lock of its own for each peer, so that two who need the same peer make one connection, and a slow peer keeps
    /// nobody from another.
    links: Mutex<HashMap<Incarnation, Arc<Place>>>,
}

type Place = tokio::sync::Mutex<Option<Arc<Link>>>;

impl Links {
    pub(crate) fn new(process: ProcessRef, counters: Arc<Counters>, stop: watch::Receiver<bool>) -> Arc<Self> {
        Arc::new(Self {
            process,
            counters,
            stop,
            links: Mutex::default(),
        })
    }

    /// The connection to a peer: the one there is, if it still stands, else a new one.
    pub(crate) async fn connect(
        self: &Arc<Self>,
        peer: Incarnation,
        path: &str,
        deadline: Duration,
    ) -> Result<Arc<Link>, ConnectError> {
        let place = lock(&self.links).entry(peer).or_default().clone();
        let connected = tokio::time::timeout(deadline, async {
            let mut link = place.lock().await;
            if let Some(link) = link.as_ref().filter(|link| link.is_alive()) {
                return Ok(link.clone());
            }
            let made = self.make(peer, path).await?;
            *link = Some(made.clone());
            Ok(made)
        });
        let after = deadline;
        let connected = connected.await.unwrap_or(Err(ConnectError::Deadline { peer, after }));
        if connected.is_err() {
            self.forget(peer);
        }
        connected
    }

    /// Lets go of all connections. Those with pins stay until the pins end.
    pub(crate) fn close(&self) {
        let links = std::mem::take(&mut *lock(&self.links));
        drop(links);
    }

    /// Forgets a peer without a living connection.
    fn forget(&self, peer: Incarnation) {
        let mut links = lock(&self.links);
        let dead = links.get(&peer).is_some_and(|place| {
            let link = place.try_lock();
            link.is_ok_and(|link| link.as_ref().is_none_or(|link| !link.is_alive()))
        });
        if dead {
            let place = links.remove(&peer);
            drop(links);
            drop(place);
        }
    }

    async fn make(self: &Arc<Self>, peer: Incarnation, path: &str) -> Result<Arc<Link>, ConnectError> {
        let failed = |what| move |error| ConnectError::Io { peer, what, error };
        let socket = Socket::new(open(peer, path).await?).map_err(failed("watch a socket"))?;
        let credentials = socket.credentials().map_err(failed("ask who listens"))?;
        let (found, expected) = (credentials.uid.as_raw(), geteuid().as_raw());
        if found != expected {
            let path = path.to_owned();
            return Err(ConnectError::User { path, found, expected });
        }
        let hello = Hello {
            expects: peer,
            process: self.process,
        };
        let (process, canary) = greet(&socket, peer, path, &hello).await?;
        if process.pid != credentials.pid.as_raw_nonzero().get().unsigned_abs() {
            return Err(ConnectError::Refused {
                peer,
                problem: format!(
                    "it says that it is process {}, the kernel says {:?}",
                    process.pid, credentials.pid
                ),
            });
        }
        let watch = ProcessWatch::open(process).map_err(|error| ConnectError::Gone {
            peer,
            how: error.to_string(),
        })?;
        self.counters.connections.fetch_add(1, Ordering::Relaxed);
        let link = Arc::new(Link {
            peer,
            watch,
            canary,
            socket,
            counters: self.counters.clone(),
            owner: std::process::id(),
            next_request: AtomicU64::new(0),
            pending: Mutex::default(),
            segments: Mutex::default(),
            backlog: Mutex::default(),
            backlog_filled: Notify::new(),
            lost: watch::Sender::new(None),
        });
        let (running, links) = (link.clone().run(self.stop.clone()), Arc::downgrade(self));
        tokio::spawn(async move {
            running.await;
            if let Some(links) = links.upgrade() {
                links.forget(peer);
            }
        });
        Ok(link)
    }
}

/// Connects a socket.
async fn open(peer: Incarnation, path: &str) -> Result<OwnedFd, ConnectError> {
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

/// Says hello and judges the answer.
async fn greet(
    socket: &Socket,
    peer: Incarnation,
    path: &str,
    hello: &Hello,
) -> Result<(ProcessRef, (u64, u64)), ConnectError> {
    let gone = |how: String| ConnectError::Gone { peer, how };
    let sent = socket.send(&wire::encode_versioned(hello), None).await;
    sent.map_err(|error| gone(format!("it does not take the greeting ({error})")))?;
    let mut buffer = [0; MAX_FRAME];
    let received = socket.receive(&mut buffer).await;
    let received = received.map_err(|error| gone(format!("it does not answer the greeting ({error})")))?;
    let Received::Frame(len, _) = received else {
        return Err(gone(
            "it closed the connection instead of an answer to the greeting".to_owned(),
        ));
    };
    match wire::decode_versioned(&buffer[..len]) {
        Ok(Welcome::Open { process, canary }) => Ok((process, canary)),
        Ok(Welcome::Incarnation { found }) => Err(ConnectError::Incarnation {
            path: path.to_owned(),
            expected: peer,
            found,
        }),
        Ok(Welcome::Refused { problem }) => Err(ConnectError::Refused { peer, problem }),
        Err(WireError::Version { found }) => Err(ConnectError::Version {
            peer,
            found,
            expected: wire::VERSION,
        }),
        Err(error) => Err(ConnectError::Refused {
            peer,
            problem: format!("it answers the greeting with {error}"),
        }),
    }
}
