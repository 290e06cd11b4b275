//! Both ends of a lane over a real socket, without a network around them.

mod stage;
mod wakes;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use stagewire_core::{ByteCount, Device, Record};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::ask::{self, Local, Wish};
use super::frame::{Direction, FrameError, HEAD, MAX_RUNS, REQUEST_HEAD, Refusal, Request, encode_request};
use super::line::Line;
use super::pace::Pace;
use super::parts::parts;
use super::pool::Lane;
use super::receive::ReceiveError;
use super::rows::Run;
use super::send::Base;
use super::serve::{LaneError, Service, serve};
use super::vectors::Vectors;
use crate::network::Session;
use crate::table::{RegionKey, Registration, Table};
use crate::wire::Kind;
use crate::{Borrowed, Memory, TcpOptions, Writable};

struct Owner {
    lane: Lane,
    writable: Writable,
    session: Arc<Session>,
    serving: JoinHandle<Result<(), LaneError>>,
}

const LEN: usize = 5 << 18;

fn bytes(seed: usize) -> Vec<u8> {
    (0..LEN).map(|at| ((at * 31 + seed) >> 3) as u8 ^ at as u8).collect()
}

/// An owner with little room for pushes.
fn service(digest: bool) -> Arc<Service> {
    Arc::new(Service::new(TcpOptions {
        digest,
        staging: ByteCount(1 << 20),
        ..TcpOptions::default()
    }))
}

async fn owner(digest: bool) -> Owner {
    owner_of(&service(digest)).await
}

fn lane(stream: TcpStream) -> Lane {
    Lane::new(Line::new(stream).expect("connected"))
}

/// Sends what a peer may say.
async fn say(lane: &Lane, bytes: &[u8]) -> std::io::Result<()> {
    let mut vectors = Vectors::default();
    // SAFETY: the bytes outlive the vectors, and are only read.
    unsafe { vectors.push(std::ptr::NonNull::from(bytes).cast(), bytes.len()) };
    vectors.send(&lane.stream, bytes.len()).await
}

/// A lane as it is after its greeting, and who serves it, in a session of its own.
async fn owner_of(service: &Arc<Service>) -> Owner {
    let writable = Writable::allocate(LEN as u64).expect("memory");
    let table = Arc::new(Table::default());
    let session = Session::local(table.clone(), std::process::id());
    // Pin 0 is read-only, pin 1 writable; pin 2 is being written by its owner.
    let mut growing = vec![0; LEN];
    let base = std::ptr::NonNull::from(growing.as_mut_slice()).cast();
    // SAFETY: the owner keeps the Vec, which nobody touches but by this address.
    let growing: Memory = unsafe { Borrowed::new(base, LEN, Arc::new(growing)) }.into();
    let memories = [Borrowed::from(bytes(0)).into(), writable.clone().into(), growing];
    for (pin, memory) in memories.into_iter().enumerate() {
        let registration = Registration {
            kind: Kind::Tcp,
            memory,
            device: Device::Cpu,
            guard: None,
        };
        let reference = table.register(registration).expect("registered");
        let key = RegionKey {
            region: reference.region,
            generation: reference.generation,
        };
        table.set_open(key, pin == 2);
        let hold = session.pin(Kind::Tcp, key, &reference.capability).expect("pinned");
        assert_eq!((hold.pin(), hold.may_change()), (pin as u64, pin > 0));
        table.release(key);
    }
    let (lane, serving) = lane_of(service, &session).await;
    Owner {
        lane,
        writable,
        session,
        serving,
    }
}

/// One more lane of a session.
async fn lane_of(service: &Arc<Service>, session: &Arc<Session>) -> (Lane, JoinHandle<Result<(), LaneError>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let (connected, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    let (served, _) = accepted.expect("somebody connects");
    let (service, session) = (service.clone(), session.clone());
    let serving = tokio::spawn(async move { serve(served, &service, &session).await });
    (lane(connected.expect("somebody listens")), serving)
}

impl Owner {
    async fn pull(&mut self, pin: u64, digest: bool, part: &[Record]) -> Result<Vec<u8>, ReceiveError> {
        let mut dst = vec![0xEE; LEN];
        let local = Local {
            base: Base(std::ptr::NonNull::from(dst.as_mut_slice()).cast()),
            len: LEN as u64,
            changes: false,
        };
        let wish = Wish { pin, digest };
        // SAFETY: the bytes are this function's alone.
        unsafe { ask::pull(&mut self.lane, wish, local, part).await? };
        Ok(dst)
    }

    async fn push(&mut self, pin: u64, digest: bool, src: &[u8], parts: &[Vec<Record>]) -> Result<(), ReceiveError> {
        let asked = AtomicBool::new(false);
        let pushed = self.push_until(pin, digest, src, parts, &asked).await;
        assert_eq!(asked.load(Ordering::Relaxed), pushed.is_ok());
        pushed
    }

    async fn push_until(
        &mut self,
        pin: u64,
        digest: bool,
        src: &[u8],
        parts: &[Vec<Record>],
        asked: &AtomicBool,
    ) -> Result<(), ReceiveError> {
        let local = Local {
            base: Base(std::ptr::NonNull::from(src).cast()),
            len: LEN as u64,
            changes: false,
        };
        let wish = Wish { pin, digest };
        // SAFETY: only read.
        unsafe { ask::push(&mut self.lane, &Pace::new(None), wish, local, parts, asked).await }
    }

    /// How serving ended, after this end was closed, and what was written.
    async fn end(self) -> (Result<(), LaneError>, Vec<u8>) {
        drop(self.lane);
        let ended = timeout(Duration::from_secs(10), self.serving).await.expect("ends");
        drop(self.session.end());
        let mut writable = self.writable;
        let written = writable.bytes().expect("nobody else holds it").to_vec();
        (ended.expect("no panic"), written)
    }
}

/// The same copies, byte by byte.
fn copied(src: &[u8], dst: &mut [u8], records: &[Record]) {
    for record in records {
        for (from, to) in record.row_offsets() {
            let (from, to, width) = (from as usize, to as usize, record.width as usize);
            dst[to..to + width].copy_from_slice(&src[from..from + width]);
        }
    }
}

prop_compose! {
    /// Records whose destinations do not overlap.
    fn batch()(shapes in prop::collection::vec((0_u64..500_000, 1_u64..70_000, 1_u64..30, 0_u64..70_000, 0_u64..200), 1..8)) -> Vec<Record> {
        let mut dst_offset = 0;
        let mut records = Vec::new();
        for (src_offset, width, rows, src_pitch, gap) in shapes {
            let dst_pitch = width + gap;
            let record = Record { src_offset, dst_offset, width, rows, src_pitch, dst_pitch };
            if record.check(LEN as u64, LEN as u64).is_ok() {
                records.push(record);
                dst_offset += rows * dst_pitch;
            }
        }
        records
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn pulls_and_pushes_move_exactly_the_bytes(records in batch(), narrow in 1_u64..2500, asks: bool, wants: bool, max in 1_usize..5) {
        let mut records = records;
        // One with many narrow rows, or by chance wide ones, behind the others.
        let used = records.iter().map(|record| record.dst_offset + record.rows * record.dst_pitch).max().unwrap_or(0);
        let many = Record { src_offset: 7, dst_offset: used, width: narrow, rows: 300, src_pitch: narrow + 3, dst_pitch: narrow + 1 };
        records.extend(many.check(LEN as u64, LEN as u64).is_ok().then_some(many));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let mut owner = owner(wants).await;
            let mut expected = vec![0xEE; LEN];
            copied(&bytes(0), &mut expected, &records);
            let pulled = owner.pull(0, asks, &records).await.expect("pulled");
            assert!(pulled == expected, "other bytes were pulled");
            let source = bytes(1);
            owner.push(1, asks, &source, &parts(&records, max, 400_000)).await.expect("pushed");
            let (ended, written) = owner.end().await;
            ended.expect("in order");
            let mut expected = vec![0; LEN];
            copied(&source, &mut expected, &records);
            assert!(written == expected, "other bytes were pushed");
        });
    }
}

#[tokio::test]
async fn what_the_owner_refuses_leaves_the_lane_usable() {
    let mut owner = owner(true).await;
    let whole = [Record::contiguous(0, 0, LEN as u64)];
    let refused = |outcome: Result<_, ReceiveError>| match outcome {
        Err(ReceiveError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    };
    let pulled = owner.pull(9, true, &whole).await;
    assert_eq!(refused(pulled.map(drop)), Refusal::NotHeld);
    let outside = [Record::contiguous(1, 0, LEN as u64)];
    assert_eq!(refused(owner.pull(0, false, &outside).await.map(drop)), Refusal::Bounds);
    let (source, outside) = (bytes(1), vec![vec![Record::contiguous(0, 1, LEN as u64)]]);
    let pushed = owner.push(0, true, &source, &[whole.to_vec()]).await;
    assert_eq!(refused(pushed), Refusal::ReadOnly);
    assert_eq!(refused(owner.push(1, true, &source, &outside).await), Refusal::Bounds);
    assert!(owner.pull(0, true, &whole).await.expect("pulled") == bytes(0));
    let (ended, written) = owner.end().await;
    ended.expect("in order");
    assert!(written.iter().all(|byte| *byte == 0), "a refused push wrote");
}

#[tokio::test]
async fn a_busy_lane_has_a_thread_and_one_that_was_idle_is_served_as_well() {
    let service = service(true);
    let mut owner = owner_of(&service).await;
    let whole = [Record::contiguous(0, 0, LEN as u64)];
    for _ in 0..2 {
        assert!(owner.pull(0, true, &whole).await.expect("pulled") == bytes(0));
        for threads in [1, 0] {
            let reached = async {
                while service.attended() != threads {
                    tokio::task::yield_now().await;
                }
            };
            timeout(Duration::from_secs(10), reached)
                .await
                .expect("one thread, then none");
        }
    }
    // One that is given up while a thread waits for it is left by the thread.
    owner.pull(0, true, &whole).await.expect("pulled");
    owner.serving.abort();
    let left = async {
        while service.attended() > 0 || !owner.serving.is_finished() {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(10), left).await.expect("the thread leaves");
}

/// Peers may write the same memory, also while it is sent, or its owner, where the region is open: the digest is that of
/// what was sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_changes_while_it_is_pulled_is_not_corrupt() {
    for pin in [1, 2] {
        pull_what_changes(pin).await;
    }
}

async fn pull_what_changes(pin: u64) {
    let mut owner = owner(true).await;
    // The writer keeps the memory, also where this test fails.
    let hold = owner.session.hold(pin).expect("pinned");
    let (memory, stop) = (hold.memory().clone(), Arc::new(AtomicBool::new(false)));
    let stopped = stop.clone();
    let writer = std::thread::spawn(move || {
        for round in (0..=u8::MAX).cycle() {
            if stopped.load(Ordering::Relaxed) {
                return;
            }
            for offset in (0..LEN).step_by(64) {
                // SAFETY: inside the memory. Others only copy it, whatever it is.
                unsafe { memory.as_ptr().add(offset).write_volatile(round) };
            }
        }
    });
    let whole = [Record::contiguous(0, 0, LEN as u64)];
    for _ in 0..20 {
        owner.pull(pin, true, &whole).await.expect("what was sent arrived");
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().expect("no panic");
}

/// Copies between two sockets, and changes one byte at this place.
async fn damage(mut from: tokio::net::tcp::OwnedReadHalf, mut to: tokio::net::tcp::OwnedWriteHalf, at: Option<usize>) {
    let (mut buffer, mut passed) = (vec![0; 1 << 16], 0);
    while let Ok(len @ 1..) = from.read(&mut buffer).await {
        if let Some(at) = at
            && (passed..passed + len).contains(&at)
        {
            buffer[at - passed] ^= 0x40;
        }
        passed += len;
        if to.write_all(&buffer[..len]).await.is_err() {
            return;
        }
    }
}

/// Puts a proxy into the lane that changes one byte of what the owner, or who asks, sends.
async fn damaged(mut owner: Owner, of_owner: Option<usize>, of_asker: Option<usize>) -> Owner {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let (connected, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    let (from_asker, to_asker) = accepted.expect("connected").0.into_split();
    let real = std::mem::replace(&mut owner.lane, lane(connected.expect("connected")));
    let (from_owner, to_owner) = real.stream.into_stream().into_split();
    tokio::spawn(damage(from_asker, to_owner, of_asker));
    tokio::spawn(damage(from_owner, to_asker, of_owner));
    owner
}

#[tokio::test]
async fn changed_bytes_are_corrupt_and_a_changed_head_is_an_error() {
    let whole = [Record::contiguous(0, 0, LEN as u64)];
    let frame = 256 << 10;
    for at in [HEAD, HEAD + 100_000, 3 * (frame + HEAD) + HEAD + 5] {
        let mut owner = damaged(owner(true).await, Some(at), None).await;
        let error = owner.pull(0, true, &whole).await.expect_err("one bit is wrong");
        let begin = (at / (frame + HEAD) * frame) as u64;
        assert!(
            matches!(error, ReceiveError::Corrupt { at, .. } if at == begin),
            "{error}"
        );
        assert!(owner.pull(0, true, &whole).await.is_ok(), "the lane is still good");
    }
    for at in 0..HEAD {
        let mut owner = damaged(owner(true).await, Some(frame + HEAD + at), None).await;
        let error = owner.pull(0, true, &whole).await.expect_err("one bit is wrong");
        let expected = matches!(
            error,
            ReceiveError::Corrupt { .. } | ReceiveError::Malformed(_) | ReceiveError::Unexpected { .. }
        );
        assert!(expected, "byte {at} of a head: {error}");
    }
}

#[tokio::test]
async fn a_push_that_arrives_changed_writes_nothing() {
    let whole = vec![Record::contiguous(0, 0, LEN as u64)];
    let request = REQUEST_HEAD + super::frame::RUN;
    let mut owner = damaged(owner(true).await, None, Some(request + HEAD + 12345)).await;
    let pushed = owner.push(1, true, &bytes(1), &[whole]).await;
    assert!(
        matches!(pushed, Err(ReceiveError::Refused(Refusal::Corrupt { at: 0 }))),
        "{pushed:?}"
    );
    let (_, written) = owner.end().await;
    assert!(written.iter().all(|byte| *byte == 0), "changed bytes were written");
}

#[tokio::test]
async fn a_push_in_parts_that_arrives_changed_is_told_by_the_place_in_all_of_it() {
    let (half, request) = (LEN as u64 / 2, REQUEST_HEAD + super::frame::RUN);
    let parts = [0, half].map(|at| vec![Record::contiguous(at, at, half)]);
    let frame = (256 << 10).min(half as usize);
    // Behind all of the first part.
    let first = request + half as usize + (half as usize).div_ceil(frame) * HEAD;
    let damage = first + request + HEAD + 777;
    let mut owner = damaged(owner(true).await, None, Some(damage)).await;
    let pushed = owner.push(1, true, &bytes(1), &parts).await;
    assert!(
        matches!(pushed, Err(ReceiveError::Refused(Refusal::Corrupt { at })) if at == half),
        "{pushed:?}"
    );
}

#[tokio::test]
async fn a_push_whose_sender_leaves_before_it_applies_writes_nothing() {
    let source = bytes(1);
    let halves = parts(&[Record::contiguous(0, 0, LEN as u64)], 1, LEN as u64 / 2);
    let (mut dropped, mut done) = (0, false);
    // Dropped after no step, after one, after two, until it is done before it is dropped.
    for steps in 0.. {
        let (mut owner, asked) = (owner(true).await, AtomicBool::new(false));
        {
            let mut push = std::pin::pin!(owner.push_until(1, true, &source, &halves, &asked));
            for _ in 0..steps {
                tokio::select! {
                    biased;
                    pushed = &mut push => {
                        pushed.expect("pushed");
                        done = true;
                        break;
                    }
                    () = tokio::task::yield_now() => {}
                }
            }
        }
        let (_, written) = owner.end().await;
        if !asked.load(Ordering::Relaxed) {
            dropped += 1;
            assert!(
                written.iter().all(|byte| *byte == 0),
                "part of a push was written, dropped after {steps} steps"
            );
        }
        if done {
            assert!(written == source);
            break;
        }
    }
    assert!(dropped > 3, "dropped at {dropped} different points only");
}

#[tokio::test]
async fn a_peer_that_breaks_the_protocol_is_cut_off() {
    let request = |runs: u32| Request {
        direction: Direction::Pull,
        digest: true,
        more: false,
        runs,
        transfer: 1,
        pin: 0,
        bytes: 0,
        total: 0,
        frame_len: 4096,
    };
    let run = Run {
        offset: 0,
        width: 0,
        rows: 0,
        pitch: 0,
    };
    let too_many = encode_request(&request(MAX_RUNS + 1), &[]);
    let mut changed = encode_request(&request(1), &[run]);
    changed[REQUEST_HEAD] = 1;
    let mut trailing = encode_request(&request(1), &[run]);
    trailing.push(0);
    let http = b"GET / HTTP/1.1\r\nhost: somebody.example.org\r\naccept: everything\r\n\r\n".to_vec();
    type Expected = fn(&LaneError) -> bool;
    let cases: [(Vec<u8>, Expected); 4] = [
        (too_many, |error| {
            matches!(error, LaneError::Frame(FrameError::Runs { .. }))
        }),
        (changed, |error| {
            matches!(error, LaneError::Frame(FrameError::Digest { .. }))
        }),
        (trailing, |error| {
            matches!(error, LaneError::Frame(FrameError::Reserved))
        }),
        (http, |error| matches!(error, LaneError::Frame(FrameError::Kind(b'G')))),
    ];
    for (bytes, expected) in cases {
        let mut owner = owner(true).await;
        say(&owner.lane, &bytes).await.expect("it listens");
        let ended = timeout(Duration::from_secs(10), &mut owner.serving)
            .await
            .expect("cut off");
        let error = ended.expect("no panic").expect_err("that is no request");
        assert!(expected(&error), "{error}");
        let mut rest = Vec::new();
        let mut stream = owner.lane.stream.into_stream();
        let left = timeout(Duration::from_secs(10), stream.read_to_end(&mut rest)).await;
        // Closed with bytes unread, a socket is reset.
        assert!(left.expect("closed").is_err() || rest.is_empty());
    }
}
