//! The owner's side of a control connection, after the greetings.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::{Semaphore, watch};

use super::{Shared, stopped};
use crate::Memory;
use crate::network::Session;
use crate::process::ProcessWatch;
use crate::table::{Hold, RegionKey};
use crate::wire::{self, Channel, Kind, MAX_MESSAGE, MAX_RETIRED, Place, Received, Refusal, Reply, Request};

/// Messages that the reader's transports may have unanswered; it waits with more.
const MAX_ASKED: usize = 64;

/// Characters of a transport's refusal that reach the reader.
const MAX_PROBLEM: usize = 1000;

/// One reader.
pub(crate) struct Connection {
    shared: Arc<Shared>,
    channel: Arc<Channel>,
    /// The reader's process, where it is one of this host.
    reader: Option<ProcessWatch>,
    session: Arc<Session>,
    /// Segments whose descriptor the reader has.
    sent: BTreeSet<u64>,
    asked: Arc<Semaphore>,
}

impl Connection {
    pub(crate) fn new(
        shared: Arc<Shared>,
        channel: Channel,
        reader: Option<ProcessWatch>,
        session: Arc<Session>,
    ) -> Self {
        Self {
            shared,
            channel: Arc::new(channel),
            reader,
            session,
            sent: BTreeSet::new(),
            asked: Arc::new(Semaphore::new(MAX_ASKED)),
        }
    }

    /// Serves until the reader has let go of everything: it closed its end, or died. Only then do its pins end.
    ///
    /// When the host stops, or the reader breaks the protocol, it is told that nothing more will come; but its pins
    /// stay, because it may still be looking at the memory. A reader over TCP looks at nothing that is not served, so
    /// that its pins end with the connection, however that ends.
    pub(crate) async fn serve(mut self, mut stop: watch::Receiver<bool>) {
        let counters = self.shared.counters.clone();
        counters.connections.fetch_add(1, Ordering::Relaxed);
        let channel = self.channel.clone();
        let mut buffer = vec![0; channel.max_frame()];
        let mut retired = self.shared.arena.retired();
        let mut ending = false;
        loop {
            let done = tokio::select! {
                received = channel.receive(&mut buffer) => match received {
                    Ok(Received::End) => break,
                    Ok(Received::Frame(len, _)) => self.answer(&buffer[..len], ending).await,
                    // A socket that cannot be read tells nothing more of the reader but its death.
                    Err(_) if ending && !channel.is_remote() => {
                        died(self.reader.as_ref()).await;
                        break;
                    }
                    Err(error) => Err(error.to_string()),
                },
                () = died(self.reader.as_ref()) => break,
                flushed = channel.flush() => flushed.map_err(|error| error.to_string()),
                Ok(()) = retired.changed(), if !ending => self.retire().await,
                () = stopped(&mut stop), if !ending => {
                    self.end_sending(&mut ending);
                    Ok(())
                }
            };
            if let Err(problem) = done
                && !ending
            {
                tracing::warn!(reader = ?self.reader, %problem, "a data connection is ended");
                self.end_sending(&mut ending);
            }
            if ending && channel.is_remote() {
                break;
            }
        }
        let held = self.session.end();
        for hold in &held {
            if let Some(placer) = self.shared.hooks.placer(hold.kind()) {
                placer.lost(hold);
            }
        }
        drop(held);
        if channel.is_remote() {
            for placer in self.shared.hooks.placers() {
                placer.ended(self.session.id());
            }
        }
        counters.connections.fetch_sub(1, Ordering::Relaxed);
    }

    fn end_sending(&self, ending: &mut bool) {
        *ending = true;
        // It fails only where the reader is gone, which the next turn finds out.
        let _ = self.channel.end_sending();
    }

    async fn answer(&mut self, frame: &[u8], ending: bool) -> Result<(), String> {
        let request = wire::decode(frame).map_err(|error| error.to_string())?;
        let reply = match request {
            Request::Unpin { pin } => {
                if let Some(hold) = self.session.unpin(pin) {
                    self.unpinned(&hold);
                }
                return Ok(());
            }
            _ if ending => return Ok(()),
            Request::Confirm { request, pin } if self.session.hold(pin).is_some() => Reply::Confirmed { request },
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
            } => match self.session.pin(kind, RegionKey { region, generation }, &capability) {
                Ok(hold) => return self.pinned(request, &hold).await,
                Err(refusal) => Reply::Refused { request, refusal },
            },
            Request::Ask { request, kind, message } => return self.ask(request, kind, message).await,
        };
        self.send(&reply).await
    }

    /// Tells where pinned memory is. A segment's descriptor goes along with the first region in it.
    async fn pinned(&mut self, request: u64, hold: &Arc<Hold>) -> Result<(), String> {
        let memory = hold.memory();
        let mut descriptor = None;
        let place = match (memory, hold.kind()) {
            (Memory::Arena(extent), Kind::Shm) => {
                let segment = extent.segment();
                descriptor = self.sent.insert(segment.id()).then(|| segment.reader());
                Ok(Place::Segment {
                    segment: segment.id(),
                    segment_len: segment.len(),
                    offset: extent.offset(),
                })
            }
            (_, Kind::Tcp) => Ok(Place::Served),
            (memory, Kind::Shm | Kind::Cma) => Ok(Place::Address(memory.as_ptr().addr().get() as u64)),
            (_, kind) => match self.shared.hooks.placer(kind) {
                Some(placer) => placer.place(hold),
                None => Err(format!("{} is not running there", kind.name())),
            },
        };
        let reply = match place {
            Ok(place) => Reply::Pinned {
                request,
                pin: hold.pin(),
                place,
                len: memory.len(),
                writable: memory.is_writable(),
            },
            Err(problem) => {
                drop(self.session.unpin(hold.pin()));
                refused(request, problem)
            }
        };
        let sent = self.channel.send(&wire::encode(&reply), descriptor).await;
        sent.map_err(|error| error.to_string())
    }

    fn unpinned(&self, hold: &Arc<Hold>) {
        if let Some(placer) = self.shared.hooks.placer(hold.kind()) {
            placer.unpinned(hold);
        }
    }

    /// Has a transport answer its other half, without keeping the reader from its pins meanwhile.
    async fn ask(&self, request: u64, kind: Kind, message: Vec<u8>) -> Result<(), String> {
        let Some(placer) = self.shared.hooks.placer(kind) else {
            let problem = format!("{} is not running there", kind.name());
            return self.send(&refused(request, problem)).await;
        };
        let answer = placer.asked(self.session.id(), message);
        let Ok(permit) = self.asked.clone().acquire_owned().await else {
            unreachable!("it is never closed");
        };
        let (channel, session) = (self.channel.clone(), self.session.clone());
        tokio::spawn(async move {
            let answer = tokio::select! {
                answer = answer => answer,
                () = session.over() => return,
            };
            let reply = match answer {
                Ok(message) if message.len() <= MAX_MESSAGE => Reply::Answered { request, message },
                Ok(message) => refused(request, format!("its answer has {} bytes", message.len())),
                Err(problem) => refused(request, problem),
            };
            // Where it fails, the connection's own task finds out why.
            let _ = channel.send(&wire::encode(&reply), None).await;
            drop(permit);
        });
        Ok(())
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
        let sent = self.channel.send(&wire::encode(reply), None).await;
        sent.map_err(|error| error.to_string())
    }
}

fn refused(request: u64, problem: String) -> Reply {
    let problem = problem.chars().take(MAX_PROBLEM).collect();
    let refusal = Refusal::Backend { problem };
    Reply::Refused { request, refusal }
}

/// Resolves when the process is known to have ended.
async fn died(process: Option<&ProcessWatch>) {
    match process {
        Some(process) => process.died().await,
        None => std::future::pending().await,
    }
}
