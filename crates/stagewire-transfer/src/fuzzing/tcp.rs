use crate::tcp::frame::{
    Direction, FrameError, FrameKind, HEAD, Head, MAX_FRAME_LEN, MAX_RUNS, REQUEST_DIGEST, REQUEST_HEAD, RUN, Refusal,
    Request, decode_head, decode_request, decode_runs, encode_head, encode_request,
};
use crate::tcp::rows::{Cursor, Rows, Run};

/// Region in which the runs of a request have to lie.
const REGION: u64 = 1 << 16;

/// Steps that are walked over the rows of a request.
const STEPS: u64 = 4;

/// A request on a lane with its runs, after a 0, or the head of a frame. A wrong digest is put right first: no fuzzer
/// finds one.
pub fn tcp_frame(bytes: &[u8]) -> bool {
    match bytes.split_first() {
        Some((0, request)) => request_with_runs(request),
        Some((_, head)) => head.first_chunk().is_some_and(frame_head),
        None => false,
    }
}

fn request_with_runs(bytes: &[u8]) -> bool {
    let Some((head, rest)) = bytes.split_first_chunk::<REQUEST_HEAD>() else {
        return false;
    };
    let Ok(request) = decode_request(head) else {
        return false;
    };
    assert!(request.runs <= MAX_RUNS);
    let Some(runs) = rest.get(..request.runs as usize * RUN) else {
        return false;
    };
    let mut head = *head;
    if let Err(FrameError::Digest { found, .. }) = decode_runs(&head, runs) {
        head[REQUEST_DIGEST].copy_from_slice(&found.to_le_bytes());
    }
    let Ok(runs) = decode_runs(&head, runs) else {
        return false;
    };
    let again = encode_request(&request, &runs);
    let (again_head, again_runs) = again.split_first_chunk().expect("a head");
    assert_eq!(decode_request(again_head), Ok(request));
    assert_eq!(decode_runs(again_head, again_runs).as_ref(), Ok(&runs));
    if let Some(rows) = Rows::new(runs, REGION) {
        assert_eq!(rows.bytes(), request.bytes);
        let mut cursor = Cursor::default();
        for _ in 0..STEPS {
            cursor.walk(&rows, u64::from(request.frame_len) / STEPS, |offset, len| {
                let end = offset.checked_add(len as u64);
                assert!(
                    end.is_some_and(|end| end <= REGION),
                    "{len} bytes at {offset} of the region"
                );
            });
        }
    }
    true
}

fn frame_head(bytes: &[u8; HEAD]) -> bool {
    let mut bytes = *bytes;
    if let Err(FrameError::Digest { found, .. }) = decode_head(&bytes) {
        bytes[24..].copy_from_slice(&found.to_le_bytes());
    }
    let Ok(head) = decode_head(&bytes) else {
        return false;
    };
    assert_eq!(decode_head(&encode_head(&head, 0)), Ok(head));
    if head.kind == FrameKind::Refused
        && let Ok(refusal) = Refusal::from_detail(head.detail)
    {
        assert_eq!(refusal.detail(), head.detail);
    }
    true
}

pub(super) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let request = |direction, more, runs: &[Run]| {
        let bytes = runs.iter().map(|run| run.width * run.rows).sum();
        let request = Request {
            direction,
            digest: true,
            more,
            runs: runs.len() as u32,
            transfer: 7,
            pin: 9,
            bytes,
            total: bytes,
            frame_len: MAX_FRAME_LEN,
        };
        [&[0][..], &encode_request(&request, runs)].concat()
    };
    let rows = Run {
        offset: 16,
        width: 100,
        rows: 8,
        pitch: 400,
    };
    let whole = Run {
        offset: 0,
        width: 4096,
        rows: 1,
        pitch: 4096,
    };
    let head = |kind, detail| {
        let head = Head {
            kind,
            digest: true,
            len: if kind == FrameKind::Data { 4096 } else { 0 },
            transfer: 7,
            detail,
        };
        [&[1][..], &encode_head(&head, 0)].concat()
    };
    vec![
        ("pull", request(Direction::Pull, false, &[whole])),
        ("pull-rows", request(Direction::Pull, false, &[rows, whole])),
        ("push", request(Direction::Push, true, &[rows])),
        ("nothing", request(Direction::Pull, false, &[])),
        ("data", head(FrameKind::Data, 0)),
        ("refused", head(FrameKind::Refused, Refusal::Bounds.detail())),
        (
            "corrupt",
            head(FrameKind::Refused, Refusal::Corrupt { at: 1 << 20 }.detail()),
        ),
        ("ready", head(FrameKind::Ready, 0)),
        ("staged", head(FrameKind::Staged, 0)),
        ("apply", head(FrameKind::Apply, 0)),
        ("applied", head(FrameKind::Applied, 0)),
    ]
}
