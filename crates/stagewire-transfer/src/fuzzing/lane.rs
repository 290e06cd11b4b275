use crate::tcp::frame::{
    self, Direction, FrameKind, HEAD, Head, REQUEST_HEAD, RUN, Refusal, Request, decode_head, decode_request,
    decode_runs, encode_head, encode_request,
};
use crate::tcp::rows::{Cursor, Rows, Run};

/// Bytes of the region that runs are checked against.
const REGION: u64 = 1 << 16;

/// A request on a lane of `tcp` with its runs, whatever its digest, or the head of a frame.
pub fn lane(bytes: &[u8]) -> bool {
    let Some((head, rest)) = bytes.split_first_chunk::<REQUEST_HEAD>() else {
        return bytes.first_chunk::<HEAD>().is_some_and(frame_head);
    };
    let Ok(request) = decode_request(head) else {
        return false;
    };
    assert!(request.runs <= frame::MAX_RUNS);
    let len = (request.runs as usize * RUN).min(rest.len());
    let runs: Vec<Run> = frame::read_runs(&rest[..len]).collect();
    // What is said truly is taken in, whatever was said here.
    let Some(bytes) = runs.iter().try_fold(0_u64, |sum, run| sum.checked_add(run.nbytes()?)) else {
        return false;
    };
    let request = Request {
        runs: runs.len() as u32,
        bytes,
        total: request.total.max(bytes),
        ..request
    };
    let again = encode_request(&request, &runs);
    let (head, rest) = again.split_first_chunk().expect("a head");
    assert_eq!(decode_request(head), Ok(request));
    assert_eq!(decode_runs(head, rest).as_ref(), Ok(&runs));
    let Some(rows) = Rows::new(runs, REGION) else {
        return true;
    };
    let (mut cursor, mut walked) = (Cursor::default(), 0);
    // Long enough to leave the first rows, short enough for many tries.
    cursor.walk(&rows, REGION, |offset, len| {
        assert!(offset + len as u64 <= REGION, "outside of the region");
        walked += len as u64;
    });
    assert_eq!(walked, rows.bytes().min(REGION));
    true
}

fn frame_head(bytes: &[u8; HEAD]) -> bool {
    let Ok(head) = decode_head(bytes) else {
        return false;
    };
    if head.kind == FrameKind::Refused
        && let Ok(refusal) = Refusal::from_detail(head.detail)
    {
        assert_eq!(Refusal::from_detail(refusal.detail()), Ok(refusal));
    }
    assert_eq!(decode_head(&encode_head(&head, 0)), Ok(head));
    true
}

pub(super) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let run = Run {
        offset: 64,
        width: 100,
        rows: 3,
        pitch: 200,
    };
    let request = |direction, more| {
        let request = Request {
            direction,
            digest: true,
            more,
            runs: 2,
            transfer: 1,
            pin: 7,
            bytes: 600,
            total: 600,
            frame_len: frame::MAX_FRAME_LEN,
        };
        encode_request(&request, &[run; 2])
    };
    let head = |kind, detail| {
        let head = Head {
            kind,
            digest: true,
            len: 0,
            transfer: 1,
            detail,
        };
        encode_head(&head, 0).to_vec()
    };
    vec![
        ("pull", request(Direction::Pull, false)),
        ("push", request(Direction::Push, true)),
        ("data", head(FrameKind::Data, 1 << 20)),
        ("refused", head(FrameKind::Refused, Refusal::Corrupt { at: 9 }.detail())),
        ("ready", head(FrameKind::Ready, 0)),
        ("apply", head(FrameKind::Apply, 0)),
    ]
}
