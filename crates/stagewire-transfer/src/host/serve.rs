//! The owner's side of the data socket.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::net::{SocketFlags, accept_with};
use rustix::process::geteuid;
use tokio::io::Interest;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{Listener, Shared};
use crate::Memory;
use crate::process::ProcessWatch;
use crate::readiness;
use crate::table::{Pins, RegionKey};
use crate::wire::{self, Hello, MAX_FRAME, MAX_RETIRED, Place, Received, Refusal, Reply, Request, Socket, Welcome};

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
    shared.counters.connections.fetch_add(1, Ordering::Relaxed);
    let counters = shared.counters.clone();
    let connection = Connection {
        pins: Pins::new(shared.table.clone()),
        shared,
        socket,
        reader,
        sent: BTreeSet::new(),
    };
    connection.serve(stop).await;
    counters.connections.fetch_sub(1, Ordering::Relaxed);
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
            (Welcome::Open { process, canary }, Ok(Some(reader)))
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
    let (said, real) = (hello.process.pid, credentials.pid.as_raw_nonzero().get().unsigned_abs());
    if said != real {
        return Err(refused(format!(
            "the reader says that it is process {said}, the kernel says {real}; a host does not survive a fork"
        )));
    }
    ProcessWatch::open(hello.process).map_err(|error| refused(error.to_string()))
}

/// One reader.
struct Connection {
    shared: Arc<Shared>,
    socket: Socket,
    reader: ProcessWatch,
    pins: Pins,
    /// Segments whose descriptor the reader has.
    sent: BTreeSet<u64>,
}

impl Connection {
    /// Serves until the reader has let go of everything: it closed its end, or died. Only then do its pins end.
    ///
    /// When the host stops, or the reader breaks the protocol, it is told that nothing more will come; but its pins
    /// stay, because it may still be looking at the memory.
    async fn serve(mut self, mut stop: watch::Receiver<bool>) {
        let mut buffer = [0; MAX_FRAME];
        let mut retired = self.shared.arena.retired();
        let mut ending = false;
        loop {
            let done = tokio::select! {
                received = self.socket.receive(&mut buffer) => match received {
                    Ok(Received::End) => break,
                    Ok(Received::Frame(len, _)) => self.answer(&buffer[..len], ending).await,
                    // A socket that cannot be read tells nothing more of the reader but its death.
                    Err(_) if ending => {
                        self.reader.died().await;
                        break;
                    }
                    Err(error) => Err(error.to_string()),
                },
                () = self.reader.died() => break,
                Ok(()) = retired.changed(), if !ending => self.retire().await,
                () = stopped(&mut stop), if !ending => {
                    self.end_sending(&mut ending);
                    Ok(())
                }
            };
            if let Err(problem) = done
                && !ending
            {
                tracing::warn!(pid = self.reader.process().pid, %problem, "a data connection is ended");
                self.end_sending(&mut ending);
            }
        }
        self.pins.end();
    }

    fn end_sending(&self, ending: &mut bool) {
        *ending = true;
        // It fails only where the reader is gone, which the next turn finds out.
        let _ = self.socket.end_sending();
    }

    async fn answer(&mut self, frame: &[u8], ending: bool) -> Result<(), String> {
        let request = wire::decode(frame).map_err(|error| error.to_string())?;
        let reply = match request {
            Request::Unpin { pin } => {
                self.pins.unpin(pin);
                return Ok(());
            }
            _ if ending => return Ok(()),
            Request::Confirm { request, pin } if self.pins.is_held(pin) => Reply::Confirmed { request },
            Request::Confirm { request, .. } => Reply::Refused {
                request,
                refusal: Refusal::NotHeld,
            },
            Request::Pin {
                request,
                kind,
                region,
                generation,
                capability,
            } => match self.pins.pin(kind, RegionKey { region, generation }, &capability) {
                Ok((pin, memory)) => return self.pinned(request, pin, kind, memory).await,
                Err(refusal) => Reply::Refused { request, refusal },
            },
        };
        self.send(&reply).await
    }

    /// Tells where pinned memory is. A segment's descriptor goes along with the first region in it.
    async fn pinned(&mut self, request: u64, pin: u64, kind: wire::Kind, memory: Memory) -> Result<(), String> {
        let (len, writable) = (memory.len(), memory.is_writable());
        let reply = |place| {
            wire::encode(&Reply::Pinned {
                request,
                pin,
                place,
                len,
                writable,
            })
        };
        let sent = match &memory {
            Memory::Arena(extent) if kind == wire::Kind::Shm => {
                let segment = extent.segment();
                let place = Place::Segment {
                    segment: segment.id(),
                    segment_len: segment.len(),
                    offset: extent.offset(),
                };
                let descriptor = self.sent.insert(segment.id()).then(|| segment.reader());
                self.socket.send(&reply(place), descriptor).await
            }
            _ if kind == wire::Kind::Tcp => self.socket.send(&reply(Place::Served), None).await,
            memory => {
                let place = Place::Address(memory.as_ptr().addr().get() as u64);
                self.socket.send(&reply(place), None).await
            }
        };
        sent.map_err(|error| error.to_string())
    }

    /// Tells the reader which of its segments hold nothing any more.
    async fn retire(&mut self) -> Result<(), String> {
        let arena = &self.shared.arena;
        let gone: Vec<u64> = self.sent.iter().copied().filter(|id| !arena.has_segment(*id)).collect();
        for segments in gone.chunks(MAX_RETIRED) {
            for id in segments {
                self.sent.remove(id);
            }
            let segments = segments.to_vec();
            self.send(&Reply::Retired { segments }).await?;
        }
        Ok(())
    }

    async fn send(&self, reply: &Reply) -> Result<(), String> {
        let sent = self.socket.send(&wire::encode(reply), None).await;
        sent.map_err(|error| error.to_string())
    }
}
