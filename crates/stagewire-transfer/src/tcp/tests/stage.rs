//! Pushes of peers that are slow, large, or do not check what they ask for.

use crate::tcp::frame::{FrameKind, Head};
use crate::tcp::rows::Rows;
use crate::tcp::send::{Framing, Source, send};
use crate::tcp::serve::{receive_head, send_head};

use super::*;

const RUN: Run = run(0, 100, 1, 100);

const fn run(offset: u64, width: u64, rows: u64, pitch: u64) -> Run {
    Run {
        offset,
        width,
        rows,
        pitch,
    }
}

/// Asks for a push as a peer may say it that does not check what it asks for.
async fn request(lane: &mut Lane, runs: &[Run], total: u64, more: bool) -> Head {
    let request = Request {
        direction: Direction::Push,
        digest: false,
        more,
        runs: runs.len() as u32,
        transfer: 7,
        pin: 1,
        bytes: runs.iter().map(|run| run.width * run.rows).sum(),
        total,
        frame_len: 1 << 20,
    };
    let encoded = encode_request(&request, runs);
    say(lane, &encoded).await.expect("it listens");
    receive_head(&lane.stream).await.expect("a head")
}

/// Sends the bytes of a request that the owner takes.
async fn data(lane: &Lane, ready: Head, bytes: &mut [u8]) -> Head {
    assert_eq!(ready.kind, FrameKind::Ready, "{ready:?}");
    let framing = Framing {
        transfer: 7,
        frame_len: 1 << 20,
        digest: ready.digest,
    };
    let len = bytes.len() as u64;
    let source = Source {
        base: Base(std::ptr::NonNull::from(bytes).cast()),
        changes: false,
    };
    let rows = Rows::new([run(0, len, 1, len)], len).expect("inside");
    // SAFETY: the row is all bytes.
    let sent = unsafe { send(&lane.stream, framing, &Pace::new(None), source, &rows).await };
    sent.expect("it listens");
    receive_head(&lane.stream).await.expect("a head")
}

async fn apply(lane: &Lane) -> Head {
    let apply = Head {
        kind: FrameKind::Apply,
        digest: false,
        len: 0,
        transfer: 7,
        detail: 0,
    };
    send_head(&lane.stream, &apply).await.expect("it listens");
    receive_head(&lane.stream).await.expect("a head")
}

#[tokio::test]
async fn a_push_larger_than_its_region_is_refused_before_it_takes_memory() {
    let mut owner = owner(true).await;
    let len = LEN as u64;
    for (run, total) in [
        (run(0, len, 1, len), u64::MAX),
        (run(0, 1, 1, 1), len + 1),
        (run(0, len, 2, 0), 2 * len),
    ] {
        let answer = request(&mut owner.lane, &[run], total, false).await;
        let found = (answer.kind, answer.detail);
        assert_eq!(found, (FrameKind::Refused, Refusal::Bounds.detail()));
    }
    let (source, whole) = (bytes(1), vec![Record::contiguous(0, 0, len)]);
    let pushed = owner.push(1, true, &source, &[whole]).await;
    pushed.expect("nothing is in its way");
    let (ended, written) = owner.end().await;
    ended.expect("in order");
    assert!(written == source);
}

/// Whoever may push may write the region as often as it likes: rows that overlap, in a run, between runs and between the
/// requests of one push, do what pushes one after the other would do, and nothing outside of them.
#[tokio::test]
async fn rows_that_overlap_are_written_one_after_the_other() {
    let mut owner = owner(false).await;
    let requests = [
        vec![run(10, 4, 3, 2)],
        vec![run(100, 50, 1, 50), run(120, 10, 1, 10)],
        vec![run(12, 2, 1, 2), run(90, 15, 1, 15)],
    ];
    let total = 12 + 60 + 17;
    let (mut expected, mut value) = (vec![0; LEN], 0);
    for (index, runs) in requests.iter().enumerate() {
        let mut bytes = Vec::new();
        for run in runs {
            for row in 0..run.rows {
                value += 1;
                bytes.extend(vec![value; run.width as usize]);
                let at = (run.offset + row * run.pitch) as usize;
                expected[at..at + run.width as usize].fill(value);
            }
        }
        let ready = request(&mut owner.lane, runs, total, index < 2).await;
        assert_eq!(data(&owner.lane, ready, &mut bytes).await.kind, FrameKind::Staged);
    }
    assert_eq!(apply(&owner.lane).await.kind, FrameKind::Applied);
    let (ended, written) = owner.end().await;
    ended.expect("in order");
    assert!(written == expected, "{:?}", &written[..160]);
}

/// The push ended because it took too long, and its peer was told so.
async fn too_slow(owner: &mut Owner, allowed: Duration) {
    let ended = timeout(Duration::from_secs(300), &mut owner.serving).await;
    let ended = ended.expect("cut off").expect("no panic");
    assert!(
        matches!(&ended, Err(LaneError::TooSlow { after, .. }) if *after == allowed),
        "{ended:?}"
    );
    let told = receive_head(&owner.lane.stream).await.expect("the reason");
    let refusal = Refusal::TooSlow { after: allowed };
    assert_eq!((told.kind, told.detail), (FrameKind::Refused, refusal.detail()));
}

#[tokio::test]
async fn who_stands_still_between_the_requests_of_a_push_is_cut_off() {
    let mut owner = owner(false).await;
    let ready = request(&mut owner.lane, &[RUN], 200, true).await;
    let staged = data(&owner.lane, ready, &mut [3; 100]).await;
    assert_eq!(staged.kind, FrameKind::Staged);
    // The clock goes on as fast as it can.
    tokio::time::pause();
    too_slow(&mut owner, Duration::from_micros(10_000_047)).await;
}

#[tokio::test]
async fn who_brings_a_byte_now_and_then_is_cut_off() {
    let mut owner = owner(false).await;
    let len = 1 << 20;
    request(&mut owner.lane, &[run(0, len, 1, len)], len, false).await;
    tokio::time::pause();
    let began = tokio::time::Instant::now();
    while !owner.serving.is_finished() {
        assert!(began.elapsed() < Duration::from_secs(60), "still patient");
        tokio::time::sleep(Duration::from_secs(1)).await;
        // The first byte of a head, over and over: it is not looked at before all of it is there.
        let _ = say(&owner.lane, &[1]).await;
    }
    too_slow(&mut owner, Duration::from_millis(10_250)).await;
}

#[tokio::test]
async fn who_pushes_too_slowly_learns_why_its_lane_was_closed() {
    let mut owner = owner(true).await;
    let source = bytes(1);
    tokio::time::pause();
    let local = Local {
        base: Base(std::ptr::NonNull::from(source.as_slice()).cast()),
        len: LEN as u64,
        changes: false,
    };
    let (pace, asked) = (Pace::new(Some(ByteCount(10_000))), AtomicBool::new(false));
    let (wish, parts) = (
        Wish { pin: 1, digest: true },
        [vec![Record::contiguous(0, 0, LEN as u64)]],
    );
    // SAFETY: only read.
    let pushed = unsafe { ask::push(&mut owner.lane, &pace, wish, local, &parts, &asked).await };
    let after = Duration::from_micros(10_312_500);
    let told = Refusal::from_detail(Refusal::TooSlow { after }.detail()).expect("a refusal");
    assert!(
        matches!(pushed, Err(ReceiveError::Refused(refusal)) if refusal == told),
        "{pushed:?}"
    );
    let (_, written) = owner.end().await;
    assert!(written.iter().all(|byte| *byte == 0), "part of a push was written");
}

/// Resolves when the owner takes the bytes of a push that was asked for.
async fn taken(lane: &mut Lane, len: u64) {
    let ready = request(lane, &[run(0, len, 1, len)], len, false).await;
    assert_eq!(ready.kind, FrameKind::Ready, "{ready:?}");
}

#[tokio::test]
async fn a_session_that_pushes_slowly_keeps_only_itself_from_pushing() {
    let service = service(false);
    let (mut slow, mut other) = (owner_of(&service).await, owner_of(&service).await);
    let share = (1 << 20) / 4;
    let limit = Duration::from_secs(10);
    timeout(limit, taken(&mut slow.lane, share))
        .await
        .expect("there is room");
    // It has its share: more of it waits.
    let (mut second, _serving) = lane_of(&service, &slow.session).await;
    let waits = timeout(Duration::from_millis(100), taken(&mut second, 4096)).await;
    assert!(waits.is_err(), "more than its share");
    let source = bytes(1);
    for len in [share, LEN as u64] {
        let part = vec![Record::contiguous(0, 0, len)];
        let pushed = timeout(limit, other.push(1, false, &source, &[part])).await;
        pushed.expect("others are not kept waiting").expect("pushed");
    }
    // A push larger than its share keeps others only from such pushes, and not for longer than it is allowed.
    let (mut slow, mut third) = (owner_of(&service).await, owner_of(&service).await);
    timeout(limit, taken(&mut slow.lane, share + 1)).await.expect("alone");
    let part = vec![Record::contiguous(0, 0, share)];
    let pushed = timeout(limit, other.push(1, false, &source, &[part])).await;
    pushed.expect("others are not kept waiting").expect("pushed");
    tokio::time::pause();
    let began = tokio::time::Instant::now();
    let part = vec![Record::contiguous(0, 0, LEN as u64)];
    third.push(1, false, &source, &[part]).await.expect("its turn came");
    assert!(
        began.elapsed() <= Duration::from_secs(11),
        "after {:?}",
        began.elapsed()
    );
}
