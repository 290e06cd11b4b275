//! What travels on a lane, as bytes. Pure: no sockets, no memory of regions.
//!
//! All numbers are little endian. After its greeting, a lane carries one transfer at a time. The peer that wants one
//! sends a [`Request`]: a head of [`REQUEST_HEAD`] bytes and [`RUN`] bytes per run. Everything after it, in both
//! directions, is frames: a head of [`HEAD`] bytes, and behind a [`FrameKind::Data`] head as many bytes of payload as it
//! says. A frame of a transfer holds `frame_len` bytes of its stream, the last one the rest; so both sides know where
//! each frame begins before it is sent, and a receiver can have the kernel put payloads where they belong.
//!
//! | transfer | who asks | who owns |
//! | --- | --- | --- |
//! | pull | request | data … data, or refused |
//! | push | request; data … data; apply | ready, or refused; staged, or refused; applied |
//!
//! A push of many runs is several requests with one number: all but the last say that more follows, and `apply` comes
//! only after the last was staged. So nothing is written before everything has arrived.
//!
//! Digests are XXH3 (64 bits). A request carries one over all of it, a head without payload one over itself, always. A
//! data frame carries one over head and payload, unless both sides do without.

use std::time::Duration;

use twox_hash::XxHash3_64;

use super::rows::Run;

/// Bytes of a frame's head.
pub(crate) const HEAD: usize = 32;

/// Bytes of a request without its runs.
pub(crate) const REQUEST_HEAD: usize = 56;

/// Bytes of one run in a request.
pub(crate) const RUN: usize = 32;

/// Runs of one request at most. A larger batch is several requests.
pub(crate) const MAX_RUNS: u32 = 4096;

/// Payload of a frame at most.
pub(crate) const MAX_FRAME_LEN: u32 = 1 << 20;

/// Payload of a frame at least, the last one of a transfer excepted.
pub(crate) const MIN_FRAME_LEN: u32 = 4 << 10;

/// Frames have digests.
const DIGEST: u8 = 1;

/// Another request of the same push follows.
const MORE: u8 = 2;

/// Which way a transfer goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the owner.
    Pull,
    /// To the owner.
    Push,
}

/// The head of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) direction: Direction,
    /// Whether who asks wants digests.
    pub(crate) digest: bool,
    /// Whether another request of the same push follows before it is to be applied.
    pub(crate) more: bool,
    pub(crate) runs: u32,
    /// Names the transfer on this lane.
    pub(crate) transfer: u64,
    /// The pin that keeps the region in place.
    pub(crate) pin: u64,
    /// Sum of the runs.
    pub(crate) bytes: u64,
    /// Sum over all requests of the transfer.
    pub(crate) total: u64,
    /// Payload of each frame but the last.
    pub(crate) frame_len: u32,
}

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum FrameKind {
    /// Bytes of the stream from `detail` on.
    Data = 1,
    /// The owner does not do it; `detail` is a [`Refusal`]. Nothing else of this transfer follows.
    Refused = 2,
    /// The owner takes the bytes of a push.
    Ready = 3,
    /// The owner has all bytes of a push, and has changed nothing yet.
    Staged = 4,
    /// Who pushes still wants it.
    Apply = 5,
    /// The pushed bytes are in place.
    Applied = 6,
}

/// The head of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) kind: FrameKind,
    /// Whether data frames of the transfer have digests.
    pub(crate) digest: bool,
    /// Bytes of payload behind the head.
    pub(crate) len: u32,
    pub(crate) transfer: u64,
    pub(crate) detail: u64,
}

/// Why an owner does not do what was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// This session has no such pin.
    NotHeld,
    /// A run leaves the region, or a push has more bytes than it.
    Bounds,
    /// The region was registered for reading only.
    ReadOnly,
    /// The frame of a push that begins at this byte of the request's stream arrived with other bytes than were sent.
    Corrupt { at: u64 },
    /// There is no memory to stage a push.
    Memory,
    /// A push had not arrived after so long, in whole milliseconds.
    TooSlow { after: Duration },
}

/// Why bytes are no request, or no head that belongs here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("a frame or request of unknown kind {0}")]
    Kind(u8),
    #[error("unknown flags {0:#x}")]
    Flags(u8),
    #[error("reserved bytes that are not 0")]
    Reserved,
    #[error("a request of {found} runs, at most {MAX_RUNS} are allowed")]
    Runs { found: u32 },
    #[error("frames of {found} bytes, allowed are {MIN_FRAME_LEN} to {MAX_FRAME_LEN}")]
    FrameLen { found: u32 },
    #[error("runs that overflow 64-bit offsets")]
    Overflow,
    #[error("runs of {sum} bytes in a request that says {said}, of {total} in all")]
    Sum { said: u64, total: u64, sum: u64 },
    #[error("the digest {said:016x} on bytes with digest {found:016x}")]
    Digest { said: u64, found: u64 },
    #[error("an unknown refusal {0}")]
    Refusal(u64),
}

/// Bytes of a request, digest included.
pub(crate) fn encode_request(request: &Request, runs: &[Run]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(REQUEST_HEAD + runs.len() * RUN);
    let kind = match request.direction {
        Direction::Pull => 1,
        Direction::Push => 2,
    };
    let more = if request.more { MORE } else { 0 };
    bytes.extend_from_slice(&[kind, u8::from(request.digest) | more, 0, 0]);
    bytes.extend_from_slice(&request.runs.to_le_bytes());
    for word in [request.transfer, request.pin, request.bytes, request.total] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.extend_from_slice(&request.frame_len.to_le_bytes());
    bytes.extend_from_slice(&[0; 12]);
    for run in runs {
        for word in [run.offset, run.width, run.rows, run.pitch] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
    }
    let digest = XxHash3_64::oneshot(&bytes);
    bytes[REQUEST_DIGEST].copy_from_slice(&digest.to_le_bytes());
    bytes
}

/// Where the digest of a request stands. It is computed with zeros there.
pub(crate) const REQUEST_DIGEST: std::ops::Range<usize> = 48..56;

/// Reads the head of a request. Its digest is checked by [`decode_runs`], which sees all of it.
pub(crate) fn decode_request(head: &[u8; REQUEST_HEAD]) -> Result<Request, FrameError> {
    let direction = match head[0] {
        1 => Direction::Pull,
        2 => Direction::Push,
        other => return Err(FrameError::Kind(other)),
    };
    if head[1] & !(DIGEST | MORE) != 0 || (direction == Direction::Pull && head[1] & MORE != 0) {
        return Err(FrameError::Flags(head[1]));
    }
    let request = Request {
        direction,
        digest: head[1] & DIGEST != 0,
        more: head[1] & MORE != 0,
        runs: word32(head, 4),
        transfer: word(head, 8),
        pin: word(head, 16),
        bytes: word(head, 24),
        total: word(head, 32),
        frame_len: word32(head, 40),
    };
    if head[2..4] != [0; 2] || head[44..48] != [0; 4] {
        return Err(FrameError::Reserved);
    }
    if request.runs > MAX_RUNS {
        return Err(FrameError::Runs { found: request.runs });
    }
    if !(MIN_FRAME_LEN..=MAX_FRAME_LEN).contains(&request.frame_len) {
        return Err(FrameError::FrameLen {
            found: request.frame_len,
        });
    }
    Ok(request)
}

/// Reads the runs behind a request's head, [`RUN`] bytes each, and proves digest and sum.
pub(crate) fn decode_runs(head: &[u8; REQUEST_HEAD], runs: &[u8]) -> Result<Vec<Run>, FrameError> {
    let said = word(head, REQUEST_DIGEST.start);
    let mut whole = Vec::with_capacity(REQUEST_HEAD + runs.len());
    whole.extend_from_slice(head);
    whole[REQUEST_DIGEST].fill(0);
    whole.extend_from_slice(runs);
    let found = XxHash3_64::oneshot(&whole);
    if said != found {
        return Err(FrameError::Digest { said, found });
    }
    let runs: Vec<Run> = read_runs(runs).collect();
    let sum = runs
        .iter()
        .try_fold(0_u64, |sum, run| sum.checked_add(run.nbytes()?))
        .ok_or(FrameError::Overflow)?;
    let (said, total) = (word(head, 24), word(head, 32));
    if said != sum || total < sum {
        return Err(FrameError::Sum { said, total, sum });
    }
    Ok(runs)
}

/// Whole runs, as they stand in a request.
pub(crate) fn read_runs(bytes: &[u8]) -> impl Iterator<Item = Run> {
    let (runs, _) = bytes.as_chunks::<RUN>();
    runs.iter().map(|run| Run {
        offset: word(run, 0),
        width: word(run, 8),
        rows: word(run, 16),
        pitch: word(run, 24),
    })
}

/// Bytes of a head. For a data frame with a digest, `payload` is that of its payload; else it is ignored.
pub(crate) fn encode_head(head: &Head, payload: u64) -> [u8; HEAD] {
    let mut bytes = [0; HEAD];
    bytes[0] = head.kind as u8;
    bytes[1] = u8::from(head.digest);
    bytes[4..8].copy_from_slice(&head.len.to_le_bytes());
    bytes[8..16].copy_from_slice(&head.transfer.to_le_bytes());
    bytes[16..24].copy_from_slice(&head.detail.to_le_bytes());
    let digest = match head.kind {
        FrameKind::Data if !head.digest => 0,
        FrameKind::Data => joined(&bytes, payload),
        _ => joined(&bytes, 0),
    };
    bytes[24..].copy_from_slice(&digest.to_le_bytes());
    bytes
}

/// Reads a head. The digest of one without payload is proven here, that of data by [`check_payload`].
pub(crate) fn decode_head(bytes: &[u8; HEAD]) -> Result<Head, FrameError> {
    let kind = match bytes[0] {
        1 => FrameKind::Data,
        2 => FrameKind::Refused,
        3 => FrameKind::Ready,
        4 => FrameKind::Staged,
        5 => FrameKind::Apply,
        6 => FrameKind::Applied,
        other => return Err(FrameError::Kind(other)),
    };
    if bytes[2..4] != [0; 2] {
        return Err(FrameError::Reserved);
    }
    let head = Head {
        kind,
        digest: flag(bytes[1])?,
        len: word32(bytes, 4),
        transfer: word(bytes, 8),
        detail: word(bytes, 16),
    };
    if kind != FrameKind::Data {
        let (said, found) = (word(bytes, 24), joined(bytes, 0));
        if said != found {
            return Err(FrameError::Digest { said, found });
        }
    }
    Ok(head)
}

/// Proves that the payload behind this head, with this digest of its own, is what was sent.
///
/// # Errors
/// The digest that the head says, and the one found.
pub(crate) fn check_payload(head: &[u8; HEAD], payload: u64) -> Result<(), (u64, u64)> {
    let (said, found) = (word(head, 24), joined(head, payload));
    if said == found { Ok(()) } else { Err((said, found)) }
}

impl Refusal {
    /// As the detail of a head: a number in the lowest byte, a place in the stream above it.
    pub(crate) fn detail(self) -> u64 {
        match self {
            Self::NotHeld => 1,
            Self::Bounds => 2,
            Self::ReadOnly => 3,
            Self::Corrupt { at } => 4 | at << 8,
            Self::Memory => 5,
            Self::TooSlow { after } => 6 | u64::try_from(after.as_millis()).unwrap_or(u64::MAX) << 8,
        }
    }

    pub(crate) fn from_detail(detail: u64) -> Result<Self, FrameError> {
        Ok(match (detail & 0xff, detail >> 8) {
            (1, 0) => Self::NotHeld,
            (2, 0) => Self::Bounds,
            (3, 0) => Self::ReadOnly,
            (4, at) => Self::Corrupt { at },
            (5, 0) => Self::Memory,
            (6, millis) => Self::TooSlow {
                after: Duration::from_millis(millis),
            },
            _ => return Err(FrameError::Refusal(detail)),
        })
    }
}

/// The digest of a head and the digest of its payload, as one number.
fn joined(head: &[u8; HEAD], payload: u64) -> u64 {
    XxHash3_64::oneshot(&head[..24]).rotate_left(1) ^ payload
}

fn flag(flags: u8) -> Result<bool, FrameError> {
    match flags {
        0 => Ok(false),
        DIGEST => Ok(true),
        other => Err(FrameError::Flags(other)),
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes[at..at + 8].try_into().expect("eight bytes");
    u64::from_le_bytes(bytes)
}

fn word32(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes[at..at + 4].try_into().expect("four bytes");
    u32::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(runs: &[Run]) -> Request {
        let bytes = runs.iter().map(|run| run.width * run.rows).sum();
        Request {
            direction: Direction::Push,
            digest: true,
            more: true,
            runs: runs.len() as u32,
            transfer: 7,
            pin: 9,
            bytes,
            total: bytes + 5,
            frame_len: MAX_FRAME_LEN,
        }
    }

    fn decode(bytes: &[u8]) -> Result<(Request, Vec<Run>), FrameError> {
        let (head, runs) = bytes.split_first_chunk().expect("a head");
        let request = decode_request(head)?;
        assert_eq!(runs.len(), request.runs as usize * RUN, "the head says how long it is");
        Ok((request, decode_runs(head, runs)?))
    }

    fn head(kind: FrameKind) -> Head {
        Head {
            kind,
            digest: true,
            len: 5,
            transfer: u64::MAX,
            detail: 3,
        }
    }

    #[test]
    fn limits_of_requests() {
        let run = Run {
            offset: 1,
            width: 2,
            rows: 3,
            pitch: 4,
        };
        let encode = |change: &dyn Fn(&mut Request), runs: &[Run]| {
            let mut request = request(runs);
            change(&mut request);
            encode_request(&request, runs)
        };
        let found = |bytes: Vec<u8>| {
            let head = bytes.first_chunk().expect("a head");
            decode_request(head).and_then(|_| decode_runs(head, &bytes[REQUEST_HEAD..]))
        };
        assert_eq!(found(encode(&|_| (), &[run; 2])), Ok(vec![run; 2]));
        let runs = MAX_RUNS + 1;
        assert_eq!(
            found(encode(&|request| request.runs = runs, &[run])),
            Err(FrameError::Runs { found: runs })
        );
        for frame_len in [0, MIN_FRAME_LEN - 1, MAX_FRAME_LEN + 1, u32::MAX] {
            let bytes = encode(&|request| request.frame_len = frame_len, &[run]);
            assert_eq!(found(bytes), Err(FrameError::FrameLen { found: frame_len }));
        }
        let bytes = encode(&|request| request.bytes = 5, &[run]);
        let (said, total, sum) = (5, 11, 6);
        assert_eq!(found(bytes), Err(FrameError::Sum { said, total, sum }));
        let (said, total) = (6, 5);
        let bytes = encode(&|request| request.total = total, &[run]);
        assert_eq!(found(bytes), Err(FrameError::Sum { said, total, sum }));
        let huge = Run { width: u64::MAX, ..run };
        let mut request = request(&[run]);
        request.bytes = u64::MAX;
        assert_eq!(found(encode_request(&request, &[huge])), Err(FrameError::Overflow));
        request.direction = Direction::Pull;
        let flags = found(encode_request(&request, &[run]));
        assert_eq!(flags, Err(FrameError::Flags(3)), "only a push goes on");
    }

    proptest! {
        #[test]
        fn any_changed_byte_of_a_request_is_found(
            runs in prop::collection::vec((0_u64..99, 0_u64..99, 0_u64..99, 0_u64..99), 0..4),
            at in any::<prop::sample::Index>(),
            change in 1_u8..,
        ) {
            let runs: Vec<Run> = runs.into_iter().map(|(offset, width, rows, pitch)| Run { offset, width, rows, pitch }).collect();
            let (request, mut bytes) = (request(&runs), encode_request(&request(&runs), &runs));
            prop_assert_eq!(decode(&bytes), Ok((request, runs)));
            let at = at.index(bytes.len());
            // Bytes that say how many runs follow would be found by their absence.
            prop_assume!(!(4..8).contains(&at));
            bytes[at] ^= change;
            prop_assert!(decode(&bytes).is_err());
        }

        #[test]
        fn any_changed_byte_of_a_head_is_found(kind in 1_u8..7, payload: u64, at in 0..HEAD, change in 1_u8..) {
            let kind = [FrameKind::Data, FrameKind::Refused, FrameKind::Ready, FrameKind::Staged, FrameKind::Apply, FrameKind::Applied][kind as usize - 1];
            let head = Head { len: if kind == FrameKind::Data { 5 } else { 0 }, ..head(kind) };
            let mut bytes = encode_head(&head, payload);
            prop_assert_eq!(decode_head(&bytes), Ok(head));
            if kind == FrameKind::Data {
                prop_assert_eq!(check_payload(&bytes, payload), Ok(()));
                prop_assert!(check_payload(&bytes, payload ^ 1).is_err());
            }
            bytes[at] ^= change;
            // A receiver takes only the head that is due, with the digest that it computes.
            let same = decode_head(&bytes) == Ok(head) && (kind != FrameKind::Data || check_payload(&bytes, payload).is_ok());
            prop_assert!(!same);
        }

        #[test]
        fn any_bytes_decode_or_fail_but_never_panic(request: [u8; 32], rest: [u8; 24], runs in prop::collection::vec(any::<u8>(), 0..100)) {
            let mut head = [0; REQUEST_HEAD];
            head[..32].copy_from_slice(&request);
            head[32..].copy_from_slice(&rest);
            let _ = decode_request(&head);
            let _ = decode_runs(&head, &runs);
            let _ = decode_head(&request);
        }

        #[test]
        fn refusals_come_back(at in 0_u64..1 << 56) {
            for refusal in [Refusal::NotHeld, Refusal::Bounds, Refusal::ReadOnly, Refusal::Corrupt { at }, Refusal::Memory] {
                prop_assert_eq!(Refusal::from_detail(refusal.detail()), Ok(refusal));
            }
            prop_assert!(Refusal::from_detail(at << 8 | 9).is_err());
        }
    }
}
