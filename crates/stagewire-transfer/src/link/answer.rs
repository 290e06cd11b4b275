use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{Grip, Link, PeerSegment, Waiting, lock};
use crate::wire::{self, Place, Reply};

impl Link {
    /// Hands the answer in a frame to whoever waits for it.
    ///
    /// # Errors
    /// Where the peer breaks the protocol.
    pub(super) fn answered(self: &Arc<Self>, frame: &[u8], descriptor: Option<OwnedFd>) -> Result<(), String> {
        match wire::decode(frame).map_err(|error| error.to_string())? {
            Reply::Pinned {
                request,
                pin,
                place,
                len,
                writable,
            } => {
                // From here on, the pin ends when this is dropped.
                let mut grip = Grip::new(self.clone(), pin, place, len, writable);
                if let Place::Segment {
                    segment,
                    segment_len,
                    offset,
                } = place
                {
                    let inside = offset.checked_add(len).is_some_and(|end| end <= segment_len);
                    if !inside {
                        return Err(format!("{len} bytes at {offset} of a segment of {segment_len} bytes"));
                    }
                    grip.set_segment(self.segment(segment, segment_len, descriptor)?);
                }
                match self.take(request) {
                    // Whoever asked may have stopped waiting: then the grip comes back and is dropped.
                    Some(Waiting::Pin(answer)) => drop(answer.send(Ok(grip))),
                    _ => return Err(format!("an answer to request {request}, which was not asked")),
                }
            }
            Reply::Confirmed { request } => match self.take(request) {
                Some(Waiting::Confirm(answer)) => drop(answer.send(Ok(()))),
                _ => return Err(format!("an answer to request {request}, which was not asked")),
            },
            Reply::Answered { request, message } => match self.take(request) {
                Some(Waiting::Ask(answer)) => drop(answer.send(Ok(message))),
                _ => return Err(format!("an answer to request {request}, which was not asked")),
            },
            Reply::Refused { request, refusal } => match self.take(request) {
                Some(Waiting::Pin(answer)) => drop(answer.send(Err(refusal))),
                Some(Waiting::Confirm(answer)) => drop(answer.send(Err(refusal))),
                Some(Waiting::Ask(answer)) => drop(answer.send(Err(refusal))),
                None => return Err(format!("an answer to request {request}, which was not asked")),
            },
            Reply::Retired { segments } => {
                let mut known = lock(&self.segments);
                let gone: Vec<_> = segments.iter().filter_map(|id| known.remove(id)).collect();
                drop(known);
                drop(gone);
            }
        }
        Ok(())
    }

    /// Who waits for the answer to a request.
    fn take(&self, request: u64) -> Option<Waiting> {
        lock(&self.pending).waiting.remove(&request)
    }

    /// The segment with this number: known already, or by the descriptor that just came.
    fn segment(&self, id: u64, len: u64, descriptor: Option<OwnedFd>) -> Result<Arc<PeerSegment>, String> {
        let mut known = lock(&self.segments);
        if let Some(descriptor) = descriptor {
            let segment = PeerSegment::new(descriptor, len, self.counters.clone());
            let segment = Arc::new(segment.map_err(|error| error.to_string())?);
            known.insert(id, segment.clone());
            return Ok(segment);
        }
        match known.get(&id) {
            Some(segment) if segment.len() == len => Ok(segment.clone()),
            _ => Err(format!("segment {id} of {len} bytes was named without its descriptor")),
        }
    }
}
