//! Whoever waits for bytes is woken by what comes, however little it is and whatever came before it.

use std::iter::repeat_n;
use std::ptr::NonNull;

use twox_hash::XxHash3_64;

use super::super::frame::{FrameKind, Head, RUN, decode_request, encode_head};
use super::super::send::Framing;
use super::*;

/// About a segment of loopback.
const MARK: usize = 64 << 10;

/// How the owner's end of a lane ends its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Whole,
    /// With a refusal behind so many frames.
    Refused(usize),
    /// Without the last byte.
    Closed,
}

/// Bytes of the first write of an answer, of those between, and of the last.
type Writes = (usize, usize, usize);

/// A head apart from all that it promises.
const AT_ONCE: Writes = (HEAD, usize::MAX, 0);

/// The least that can come, at both ends, and so much between.
const fn bit_by_bit(between: usize) -> Writes {
    (HEAD - 1, between, 1)
}

/// Answers one pull, in pieces between which its reader falls asleep.
async fn answer(stream: &mut TcpStream, bytes: &[u8], end: End, (first, between, last): Writes) {
    let mut request = [0; REQUEST_HEAD + RUN];
    stream.read_exact(&mut request).await.expect("a request");
    let request = decode_request(request.first_chunk().expect("longer")).expect("a request");
    let framing = Framing {
        transfer: request.transfer,
        frame_len: request.frame_len,
        digest: request.digest,
    };
    let frames = match end {
        End::Refused(frames) => frames,
        End::Whole | End::Closed => usize::MAX,
    };
    let (mut answer, mut at) = (Vec::new(), 0);
    for payload in bytes.chunks(request.frame_len as usize).take(frames) {
        let head = framing.head(at, request.bytes);
        answer.extend(encode_head(&head, XxHash3_64::oneshot(payload)));
        answer.extend(payload);
        at += payload.len() as u64;
    }
    match end {
        End::Whole => {}
        End::Refused(_) => {
            let head = Head {
                kind: FrameKind::Refused,
                digest: false,
                len: 0,
                transfer: request.transfer,
                detail: Refusal::NotHeld.detail(),
            };
            answer.extend(encode_head(&head, 0));
        }
        End::Closed => drop(answer.pop()),
    }
    let (front, last) = answer.split_at(answer.len() - last);
    let (first, rest) = front.split_at(first);
    for piece in [first].into_iter().chain(rest.chunks(between)).chain([last]) {
        stream.write_all(piece).await.expect("it listens");
        for () in repeat_n((), 4) {
            tokio::task::yield_now().await;
        }
    }
}

/// Both ends of one lane, on one thread: the owner's writes only while the reader waits.
async fn ends() -> (Lane, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let (connected, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    let (served, _) = accepted.expect("connected");
    served.set_nodelay(true).expect("connected");
    (lane(connected.expect("it listens")), served)
}

async fn pull(
    lane: &mut Lane,
    owner: &mut TcpStream,
    digest: bool,
    record: Record,
    end: End,
    writes: Writes,
) -> Result<(), ReceiveError> {
    let (source, mut dst) = (bytes(3), vec![0xEE; LEN]);
    let local = Local {
        base: Base(NonNull::from(dst.as_mut_slice()).cast()),
        len: LEN as u64,
        changes: false,
    };
    let stream = &source[..record.nbytes() as usize];
    let answered = answer(owner, stream, end, writes);
    // SAFETY: the bytes are this function's alone.
    let pulled = unsafe { ask::pull(lane, Wish { pin: 0, digest }, local, std::slice::from_ref(&record)) };
    let both = async { tokio::join!(pulled, answered) };
    let Ok((pulled, ())) = timeout(Duration::from_secs(10), both).await else {
        panic!("nobody wakes the reader of {record:?} with digest {digest}, {writes:?}, {end:?}");
    };
    if pulled.is_ok() {
        let mut expected = vec![0xEE; LEN];
        copied(&source, &mut expected, &[record]);
        assert!(dst == expected, "other bytes: {record:?}, {digest}, {writes:?}");
    }
    pulled
}

fn contiguous(len: usize) -> Record {
    Record::contiguous(0, 0, len as u64)
}

fn strided(width: u64, rows: u64) -> Record {
    Record {
        width,
        rows,
        src_pitch: width,
        dst_pitch: width + 3,
        ..Record::contiguous(0, 0, width)
    }
}

#[tokio::test]
async fn every_byte_of_a_pull_wakes_its_reader_in_time() {
    let frames = [256 << 10, 1 << 20];
    let near = |len: usize| [len - 1, len, len + 1];
    let ends_of_frames = frames
        .iter()
        .flat_map(|frame| [*frame, frame + MARK - HEAD, frame + MARK]);
    let lens = [HEAD, MARK - HEAD, MARK, MARK + HEAD, 2 * MARK];
    let lens = [1]
        .into_iter()
        .chain(lens.into_iter().chain(ends_of_frames).flat_map(near));
    let strided = [strided(100, 3000), strided(5000, 200)];
    let records: Vec<Record> = lens.map(contiguous).chain(strided).collect();
    for digest in [false, true] {
        // All on one lane: each begins with whatever the one before it left.
        let (mut lane, mut owner) = ends().await;
        for record in &records {
            for writes in [AT_ONCE, bit_by_bit(MARK - 1), bit_by_bit(3 * MARK + 7)] {
                let pulled = pull(&mut lane, &mut owner, digest, *record, End::Whole, writes).await;
                pulled.expect("pulled");
            }
        }
    }
}

#[tokio::test]
async fn a_refusal_wakes_who_waits_for_much_and_leaves_the_lane_as_it_was() {
    for (digest, most) in [(false, 1), (true, 4)] {
        let (mut lane, mut owner) = ends().await;
        for frames in 0..=most {
            for writes in [AT_ONCE, bit_by_bit(MARK - 1), bit_by_bit(1 << 20)] {
                let mut ended =
                    async |len, end, writes| pull(&mut lane, &mut owner, digest, contiguous(len), end, writes).await;
                for (len, frames) in [(LEN, frames), (MARK, 0)] {
                    ended(len, End::Whole, writes).await.expect("pulled");
                    let refused = ended(LEN, End::Refused(frames), bit_by_bit(MARK - 1)).await;
                    assert!(
                        matches!(refused, Err(ReceiveError::Refused(Refusal::NotHeld))),
                        "{refused:?}"
                    );
                    ended(1, End::Whole, bit_by_bit(1)).await.expect("pulled");
                }
            }
        }
    }
}

#[tokio::test]
async fn an_end_wakes_who_waits_for_much() {
    for (digest, len) in [(false, 1), (false, LEN), (true, MARK + 1), (true, LEN)] {
        let (mut lane, owner) = ends().await;
        let (source, mut dst) = (bytes(3), vec![0; LEN]);
        let local = Local {
            base: Base(NonNull::from(dst.as_mut_slice()).cast()),
            len: LEN as u64,
            changes: false,
        };
        let record = [contiguous(len)];
        let answered = async move {
            let mut owner = owner;
            answer(&mut owner, &source[..len], End::Closed, bit_by_bit(MARK - 1)).await;
        };
        // SAFETY: the bytes are this function's alone.
        let pulled = unsafe { ask::pull(&mut lane, Wish { pin: 0, digest }, local, &record) };
        let both = async { tokio::join!(pulled, answered) };
        let (pulled, ()) = timeout(Duration::from_secs(10), both).await.expect("woken");
        let Err(ReceiveError::Io(error)) = pulled else {
            panic!("{pulled:?}")
        };
        assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
    }
}
