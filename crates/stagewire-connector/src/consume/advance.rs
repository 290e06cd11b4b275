//! How a consumer gets from one chunk to the next.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use stagewire_core::{Classify, ErrorClass, Handover, Timestamp};
use stagewire_transfer::{ConnectError, ProcessWatch, TransferError};

use super::access::{Access, AccessError};
use super::{Chunk, ConsumeError, Consumer, Place};
use crate::link::Call;
use crate::wire::{End, Refusal, Reply};

/// How long a holder may take to acknowledge that the consumer is done.
const FINISH_WITHIN: Duration = Duration::from_secs(1);

impl Consumer {
    pub(super) async fn advance(&mut self) -> Result<Option<Chunk>, ConsumeError> {
        if self.next == self.handle.manifest.chunks() {
            self.finish().await?;
            return Ok(None);
        }
        if self.pull.is_none() {
            self.wait_readable().await?;
            let begin = now();
            if self.access.is_none() {
                self.access = Some(self.open_access().await?);
            }
            let access = self.access.as_ref();
            match access.and_then(|access| access.pull(&self.handle, self.next)) {
                Some(pull) => self.pull = Some((pull, begin)),
                None => return Ok(Some(self.take_chunk(begin))),
            }
        }
        let Some((pull, begin)) = self.pull.as_mut() else {
            return Err(self.protocol("a pull vanished"));
        };
        let (result, begin) = (pull.await, *begin);
        self.pull = None;
        match result {
            Ok(()) => Ok(Some(self.take_chunk(begin))),
            Err(error) => Err(self.access_error(error)),
        }
    }

    /// Waits until chunk `next` may be read. A failure of the producer is seen also where chunks are readable.
    async fn wait_readable(&mut self) -> Result<(), ConsumeError> {
        let mut again = false;
        loop {
            self.check_end()?;
            if self.call.is_none() {
                self.call = Some(self.watch().await?);
            }
            let readable = self.state.readable > self.next;
            let Some(call) = &mut self.call else { return Ok(()) };
            let reply = if readable {
                call.pending()
            } else {
                call.next().await.map(Some).ok_or(())
            };
            match reply {
                Ok(Some(reply)) => self.hear(reply)?,
                Ok(None) => return Ok(()),
                // The holder is gone. What was readable may still be: its memory is mapped, or the pull will tell.
                Err(()) if readable => return Ok(()),
                // Only the connection may be gone: a dead holder does not answer to another try.
                Err(()) if !again => {
                    self.call = None;
                    again = true;
                }
                Err(()) => {
                    self.call = None;
                    return Err(self.lost("it ended the connection twice".to_owned()));
                }
            }
        }
    }

    /// Whether the payload has ended without chunk `next`.
    fn check_end(&self) -> Result<(), ConsumeError> {
        match &self.state.end {
            Some(End::Failed(failure)) => Err(ConsumeError::Failed {
                at: self.place(),
                failure: failure.clone(),
            }),
            Some(End::Released) if self.state.readable <= self.next => Err(gone(self.place(), &Refusal::Released)),
            _ => Ok(()),
        }
    }

    async fn watch(&self) -> Result<Call, ConsumeError> {
        let link = self.shared.links().to(&self.handle.holder).await.map_err(|source| {
            if source.is_lost() {
                self.lost(source.to_string())
            } else {
                ConsumeError::Link {
                    at: self.place(),
                    source,
                }
            }
        })?;
        Ok(link.watch(self.handle.payload, self.handle.capability))
    }

    fn hear(&mut self, reply: Reply) -> Result<(), ConsumeError> {
        let at = self.place();
        match reply {
            Reply::State { state, .. } => {
                self.state = state;
                self.check_end()
            }
            Reply::Refused { refusal, .. } => {
                // Another try may find the payload free again.
                self.call = None;
                Err(match refusal {
                    Refusal::Denied => ConsumeError::Denied { at },
                    Refusal::Claimed => ConsumeError::Claimed { at },
                    Refusal::Failed(failure) => ConsumeError::Failed { at, failure },
                    other => gone(at, &other),
                })
            }
            Reply::Finished { .. } | Reply::Stored { .. } => Err(self.protocol("the holder gave an answer to nothing")),
        }
    }

    async fn open_access(&self) -> Result<Access, ConsumeError> {
        let transports: Vec<_> = self.shared.transports().cloned().collect();
        let destinations = self.destinations.as_deref();
        let access = Access::open(&self.handle, &transports, destinations, self.private, self.deadline);
        access.await.map_err(|error| self.access_error(error))
    }

    fn take_chunk(&mut self, begin: Timestamp) -> Chunk {
        let (index, count) = (self.next, self.handle.manifest.chunks());
        let access = self.access.as_ref();
        let tensors = access
            .map(|access| access.views(&self.handle, Some(index)))
            .unwrap_or_default();
        self.next += 1;
        Chunk {
            index,
            count,
            tensors,
            handover: Handover {
                payload: self.handle.payload,
                from: self.handle.stage.clone(),
                chunk: index,
                chunks: count,
                nbytes: self.handle.manifest.chunk_nbytes(index).0,
                mode: self.handle.mode,
                path: access.map(|access| access.path().to_owned()).unwrap_or_default(),
                begin,
                end: now(),
            },
        }
    }

    /// Lets go of the pins and tells the holder. One that does not answer has other worries.
    async fn finish(&mut self) -> Result<(), ConsumeError> {
        self.access = None;
        self.pull = None;
        if self.done {
            return Ok(());
        }
        if self.call.is_none() {
            // Acknowledged before anything was read, or the connection was lost.
            self.call = self.watch().await.ok();
        }
        if let Some(call) = &mut self.call {
            call.finish();
            let finished = async {
                loop {
                    match call.next().await {
                        None | Some(Reply::Finished { .. }) => return None,
                        Some(refused @ Reply::Refused { .. }) => return Some(refused),
                        Some(Reply::State { .. } | Reply::Stored { .. }) => {}
                    }
                }
            };
            match tokio::time::timeout(FINISH_WITHIN, finished).await {
                Ok(None) => {}
                Ok(Some(refused)) => self.hear(refused)?,
                Err(_) => {
                    tracing::warn!(payload = %self.handle.payload, "the holder did not answer that the payload was consumed");
                }
            }
        }
        self.call = None;
        self.done = true;
        Ok(())
    }

    pub(super) fn place(&self) -> Box<Place> {
        Place::new(&self.handle, self.next)
    }

    fn lost(&self, how: String) -> ConsumeError {
        ConsumeError::PeerLost { at: self.place(), how }
    }

    fn protocol(&self, message: &'static str) -> ConsumeError {
        ConsumeError::Protocol {
            at: self.place(),
            message,
        }
    }

    pub(super) fn no_transport(&self, transport: String) -> ConsumeError {
        let ours = self
            .shared
            .transports()
            .map(|transport| transport.name())
            .collect::<Vec<_>>()
            .join(", ");
        ConsumeError::NoTransport {
            at: self.place(),
            transport,
            ours,
        }
    }

    fn access_error(&self, error: AccessError) -> ConsumeError {
        let at = self.place();
        match error {
            AccessError::NoTransport(transport) => self.no_transport(transport),
            AccessError::Connect(error @ (ConnectError::Gone { .. } | ConnectError::Incarnation { .. })) => {
                self.lost(error.to_string())
            }
            AccessError::Connect(error) if self.died_in_between(error.class()) => self.lost(error.to_string()),
            AccessError::Connect(source) => ConsumeError::Connect { at, source },
            AccessError::Transfer(error @ TransferError::PeerLost { .. }) => self.lost(error.to_string()),
            AccessError::Transfer(
                TransferError::Released { .. } | TransferError::UnknownRegion { .. } | TransferError::Generation { .. },
            ) => gone(at, &Refusal::Released),
            AccessError::Transfer(error) if self.died_in_between(error.class()) => self.lost(error.to_string()),
            AccessError::Transfer(source) => ConsumeError::Transfer { at, source },
        }
    }

    /// Whether an error is only how the holder's death looked from here.
    fn died_in_between(&self, class: ErrorClass) -> bool {
        let gone = |error: &std::io::Error| error.kind() == std::io::ErrorKind::NotFound;
        class == ErrorClass::Unavailable
            && ProcessWatch::open(self.handle.holder.process).is_err_and(|error| gone(&error))
    }
}

fn gone(at: Box<Place>, refusal: &Refusal) -> ConsumeError {
    let why = match refusal {
        Refusal::Unknown => "its holder never had it, or released it long ago",
        Refusal::Expired => "nobody consumed it in time, or its lease is over",
        Refusal::Consumed => "it was consumed, and deleted by that",
        _ => "it was released, or consumed and deleted by that",
    };
    ConsumeError::Gone { at, why }
}

fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}
