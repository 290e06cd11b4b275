//! The owner's side of the Unix socket: who may connect.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{SocketFlags, accept_with};
use rustix::process::geteuid;
use tokio::io::Interest;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{Connection, Listener, Shared};
use crate::network::Session;
use crate::process::ProcessWatch;
use crate::readiness;
use crate::wire::{self, Channel, Hello, MAX_FRAME, Received, Role, Socket, Welcome};

/// Who says nothing for so long after connecting is cut off.
const GREETING: Duration = Duration::from_secs(5);

/// Pause after a failed accept, which means that descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts peers until the host stops.
pub(super) fn accept(
    listener: Listener,
    shared: Arc<Shared>,
    mut stop: watch::Receiver<bool>,
) -> io::Result<JoinHandle<()>> {
    let listener = readiness::watch(listener, Interest::READABLE)?;
    Ok(tokio::spawn(async move {
        loop {
            let accepted = tokio::select! {
                accepted = listener.async_io(Interest::READABLE, |fd| {
                    Ok(accept_with(fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?)
                }) => accepted,
                _ = stopped(&mut stop) => return,
            };
            match accepted {
                Ok(fd) => {
                    tokio::spawn(greet_and_serve(fd, shared.clone(), stop.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "a peer could not be accepted on the data socket");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }))
}

/// Resolves when the host stops or is gone.
pub(crate) async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stopped| *stopped).await;
}

async fn greet_and_serve(fd: OwnedFd, shared: Arc<Shared>, stop: watch::Receiver<bool>) {
    let socket = match Socket::new(fd) {
        Ok(socket) => socket,
        Err(error) => return tracing::warn!(%error, "a data connection could not be watched"),
    };
    let greeted = timeout(GREETING, greet(&socket, &shared)).await;
    let reader = match greeted {
        Ok(Ok(Some(reader))) => reader,
        // Somebody looked whether this process lives.
        Ok(Ok(None)) => return,
        Ok(Err(problem)) => return tracing::warn!(%problem, "a data connection was refused"),
        Err(_) => return tracing::warn!("a data connection was cut off: it said nothing for {GREETING:?}"),
    };
    let session = Session::local(shared.table.clone(), reader.process().pid);
    let connection = Connection::new(shared, Channel::Unix(socket), Some(reader), session);
    connection.serve(stop).await;
}

/// Agrees with a reader who it is. `None` where it left without a word.
async fn greet(socket: &Socket, shared: &Shared) -> Result<Option<ProcessWatch>, String> {
    let mut buffer = [0; MAX_FRAME];
    let len = match socket.receive(&mut buffer).await.map_err(|error| error.to_string())? {
        Received::Frame(len, _) => len,
        Received::End => return Ok(None),
    };
    let (welcome, outcome) = match judge(socket, shared, &buffer[..len]) {
        Ok(reader) => {
            let canary = (std::ptr::from_ref(&*shared.canary).addr() as u64, *shared.canary);
            let process = shared.process;
            let welcome = Welcome::Open {
                process,
                canary,
                session: 0,
            };
            (welcome, Ok(Some(reader)))
        }
        Err(refused) => {
            let problem = format!("{refused:?}");
            (refused, Err(problem))
        }
    };
    let sent = socket.send(&wire::encode_versioned(&welcome), None).await;
    sent.map_err(|error| error.to_string())?;
    outcome
}

fn judge(socket: &Socket, shared: &Shared, hello: &[u8]) -> Result<ProcessWatch, Welcome> {
    let refused = |problem: String| Welcome::Refused { problem };
    let credentials = socket.credentials().map_err(|error| refused(error.to_string()))?;
    let (found, expected) = (credentials.uid.as_raw(), geteuid().as_raw());
    if found != expected {
        return Err(refused(format!("it serves user {expected}, not {found}")));
    }
    let hello: Hello = wire::decode_versioned(hello).map_err(|error| refused(format!("it received {error}")))?;
    if hello.expects != shared.incarnation {
        return Err(Welcome::Incarnation {
            found: shared.incarnation,
        });
    }
    if hello.role != Role::Control {
        return Err(refused("a lane on a Unix socket".to_owned()));
    }
    let (said, real) = (hello.process.pid, credentials.pid.as_raw_nonzero().get().unsigned_abs());
    if said != real {
        return Err(refused(format!(
            "the reader says that it is process {said}, the kernel says {real}; a host does not survive a fork"
        )));
    }
    ProcessWatch::open(hello.process).map_err(|error| refused(error.to_string()))
}
