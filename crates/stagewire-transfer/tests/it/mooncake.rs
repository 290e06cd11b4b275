//! Mooncake's protocol against unmodified Transfer Engines of the public wheel, in both directions.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use stagewire_core::{Classify, ErrorClass, Peer, Record};
use stagewire_transfer::{
    Borrowed, ConnectOptions, Exposed, Host, Memory, Mooncake, MooncakeError, MooncakeOptions, Network, NetworkOptions,
    Notification, Region, RegisterOptions, Segment, SegmentBuffer, Target, TransferOptions, Transport, Writable,
};

use crate::mooncake_peer::{Engine, keyed, wheel_works};
use crate::support::{run_dir, start};

/// This process as a peer of Mooncake.
pub(crate) struct Ours {
    pub(crate) mooncake: Arc<Mooncake>,
    pub(crate) network: Arc<Network>,
    pub(crate) host: Arc<Host>,
    _dir: tempfile::TempDir,
}

impl Ours {
    pub(crate) async fn start() -> Self {
        Self::start_with(MooncakeOptions::default()).await.expect("it listens")
    }

    pub(crate) async fn start_with(options: MooncakeOptions) -> Result<Self, MooncakeError> {
        let (parent, dir) = run_dir();
        let host = start(&dir).await;
        let network = Network::start(host.clone(), NetworkOptions::default()).await;
        let network = network.expect("it listens");
        let mooncake = Mooncake::start(network.clone(), options).await?;
        Ok(Self {
            mooncake,
            network,
            host,
            _dir: parent,
        })
    }

    /// How our own peers reach it.
    pub(crate) fn peer(&self) -> Peer {
        Peer {
            incarnation: self.host.incarnation(),
            process: self.host.process(),
            socket: String::new(),
            transports: vec![self.mooncake.address()],
        }
    }

    pub(crate) async fn open(&self, name: &str) -> Arc<Segment> {
        let opened = self.mooncake.open(name, ConnectOptions::default()).await;
        opened.expect("the peer answers")
    }

    /// Registers and exposes memory.
    pub(crate) fn expose(&self, memory: impl Into<Memory>) -> (Region, Exposed) {
        let region = self.mooncake.register(memory.into(), RegisterOptions::default());
        let region = region.expect("registered");
        let exposed = self.mooncake.expose(&region).expect("registered");
        (region, exposed)
    }
}

pub(crate) fn whole(len: u64) -> [Record; 1] {
    [Record::contiguous(0, 0, len)]
}

pub(crate) async fn pull(segment: &Segment, src: SegmentBuffer) -> Result<Vec<u8>, MooncakeError> {
    let target = Target::allocate(src.len).expect("memory");
    segment
        .pull(src, &whole(src.len), &target, TransferOptions::default())
        .await?;
    Ok(target.as_slice().expect("pulled").to_vec())
}

/// What memory holds, once nobody else does.
pub(crate) async fn owned(memory: &mut Writable) -> Vec<u8> {
    let alone = async {
        loop {
            if let Some(bytes) = memory.bytes() {
                return bytes.to_vec();
            }
            tokio::task::yield_now().await;
        }
    };
    let limit = Duration::from_secs(10);
    tokio::time::timeout(limit, alone)
        .await
        .expect("nobody holds it any more")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn we_read_and_write_an_engines_memory() {
    if !wheel_works() {
        return;
    }
    let (ours, mut engine) = (Ours::start().await, Engine::start().await);
    let (listed, _) = engine.allocate(100, None).await;
    let segment = ours.open(engine.name()).await;
    assert_eq!(segment.buffers(), [listed]);
    for len in [1, 4095, 1 << 20, (9 << 20) + 3] {
        let (readable, _) = engine.allocate(len, Some(17)).await;
        let (writable, index) = engine.allocate(len, None).await;
        assert!(
            pull(&segment, readable).await.expect("pulled") == keyed(len as usize, 17),
            "{len} bytes"
        );
        let source = Borrowed::from(keyed(len as usize, 3)).into();
        let pushed = segment
            .push(writable, &whole(len), &source, TransferOptions::default())
            .await;
        pushed.expect("pushed");
        assert!(engine.holds(index, 3, 0, len).await, "{len} bytes");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strided_records_and_5000_of_them() {
    if !wheel_works() {
        return;
    }
    let (ours, mut engine) = (Ours::start().await, Engine::start().await);
    let (src, _) = engine.allocate(4 << 20, Some(9)).await;
    let (dst, index) = engine.allocate(4 << 20, None).await;
    let segment = ours.open(engine.name()).await;
    let bytes = keyed(4 << 20, 9);
    // 128 rows of 1000 bytes, packed; then 5000 records in reverse, so that no two become one.
    let rows = Record {
        src_offset: 5,
        dst_offset: 0,
        width: 1000,
        rows: 128,
        src_pitch: 30_000,
        dst_pitch: 1000,
    };
    let many: Vec<_> = (0..5000)
        .map(|index| Record::contiguous(index * 200, (4999 - index) * 150, 150))
        .collect();
    for records in [vec![rows], many] {
        let len = records
            .iter()
            .map(|record| record.dst_offset + record.nbytes())
            .max()
            .expect("some");
        let target = Target::allocate(len).expect("memory");
        segment
            .pull(src, &records, &target, TransferOptions::default())
            .await
            .expect("pulled");
        let mut expected = vec![0; len as usize];
        for (record, (from, to)) in records
            .iter()
            .flat_map(|record| record.row_offsets().map(move |at| (record, at)))
        {
            let width = record.width as usize;
            expected[to as usize..][..width].copy_from_slice(&bytes[from as usize..][..width]);
        }
        assert!(target.as_slice().expect("all of it") == expected);
    }
    let source = Borrowed::from(keyed(5000 * 200, 30)).into();
    let many: Vec<_> = (0..5000)
        .rev()
        .map(|index| Record::contiguous(index * 200, index * 200, 200))
        .collect();
    segment
        .push(dst, &many, &source, TransferOptions::default())
        .await
        .expect("pushed");
    assert!(engine.holds(index, 30, 0, 5000 * 200).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_reads_and_writes_ours() {
    if !wheel_works() {
        return;
    }
    let (ours, mut engine) = (Ours::start().await, Engine::start().await);
    let name = ours.mooncake.name();
    for len in [1, 4095, 1 << 20, (9 << 20) + 3] {
        let (_region, exposed) = ours.expose(Borrowed::from(keyed(len, 40)));
        let address = exposed.buffer().address;
        let read = engine
            .call(json!({"do": "read", "peer": name, "address": address, "size": len, "key": 40}))
            .await;
        assert_eq!(
            (&read["code"], &read["differs"]),
            (&json!(0), &json!(-1)),
            "{len} bytes"
        );

        let mut memory = Writable::allocate(len as u64).expect("memory");
        let (region, exposed) = ours.expose(memory.clone());
        let address = exposed.buffer().address;
        let write = json!({"do": "write", "peer": name, "address": address, "size": len, "key": 41});
        assert_eq!(engine.code(write).await, 0, "{len} bytes");
        region.release();
        region.idle().await;
        drop((region, exposed));
        assert!(
            memory.bytes().expect("nobody holds it") == keyed(len, 41),
            "{len} bytes"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_reads_in_batches() {
    if !wheel_works() {
        return;
    }
    let (ours, mut engine) = (Ours::start().await, Engine::start().await);
    let (_region, exposed) = ours.expose(Borrowed::from(keyed(400 * 1000, 2)));
    let addresses: Vec<u64> = (0..400).map(|index| exposed.buffer().address + index * 1000).collect();
    let command =
        json!({"do": "batch_read", "peer": ours.mooncake.name(), "addresses": addresses, "size": 1000, "key": 2});
    let read = engine.call(command).await;
    assert_eq!((&read["code"], &read["differs"]), (&json!(0), &json!(-1)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_gets_no_further_than_granted() {
    if !wheel_works() {
        return;
    }
    let (ours, mut engine) = (Ours::start().await, Engine::start().await);
    let name = ours.mooncake.name().to_owned();
    let (region, exposed) = ours.expose(Borrowed::from(keyed(8192, 50)));
    let address = exposed.buffer().address;
    let write =
        |address: u64, size: u64| json!({"do": "write", "peer": name, "address": address, "size": size, "key": 1});
    let read =
        |address: u64, size: u64| json!({"do": "read", "peer": name, "address": address, "size": size, "key": 50});
    assert_eq!(
        engine.code(write(address, 8192)).await,
        -1,
        "read-only memory was written"
    );
    // The engine waits for one second before it connects again to a peer that closed on it.
    for (address, size) in [(address, 8193), (address - 1, 1), (address + 8192, 1), (4096, 1)] {
        assert_eq!(
            engine.code(read(address, size)).await,
            -1,
            "{size} bytes at {address:#x}"
        );
    }
    assert_eq!(
        engine.code(read(address, 0)).await,
        0,
        "nothing is read without a request"
    );
    let good = engine.call(read(address, 8192)).await;
    assert_eq!(
        (&good["code"], &good["differs"]),
        (&json!(0), &json!(-1)),
        "it was written, or it is gone"
    );
    region.release();
    assert_eq!(engine.code(read(address, 8192)).await, -1, "released memory was read");
    let (_other, other) = ours.expose(Borrowed::from(keyed(8192, 50)));
    assert_ne!(other.buffer().address, address, "an address was used again");
    assert_eq!(engine.code(read(address, 8192)).await, -1);
    assert_eq!(engine.code(read(other.buffer().address, 8192)).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_refuses_what_is_not_registered() {
    if !wheel_works() {
        return;
    }
    let (ours, mut engine) = (Ours::start().await, Engine::start().await);
    let (buffer, index) = engine.allocate(4096, Some(6)).await;
    let segment = ours.open(engine.name()).await;
    let refused = |error: MooncakeError, address: u64, len: u64| match error {
        MooncakeError::Rejected {
            address: found,
            len: found_len,
            ..
        } => assert_eq!((found, found_len), (address, len)),
        other => panic!("{other}"),
    };
    let SegmentBuffer { address, len } = buffer;
    for (address, len) in [(address + len, 1), (4096, 10), (address, len + 1)] {
        let buffer = SegmentBuffer { address, len };
        refused(pull(&segment, buffer).await.expect_err("not registered"), address, len);
        let source = Borrowed::from(vec![0; len as usize]).into();
        let pushed = segment
            .push(buffer, &whole(len), &source, TransferOptions::default())
            .await;
        refused(pushed.expect_err("not registered"), address, len);
    }
    // One bad record of three: the error names it, and nothing counts as written.
    let (target, beyond) = (
        Target::allocate(300).expect("memory"),
        SegmentBuffer { address, len: 8192 },
    );
    let records = [(0, 0), (5000, 100), (100, 200)].map(|(src, dst)| Record::contiguous(src, dst, 100));
    let pulled = segment
        .pull(beyond, &records, &target, TransferOptions::default())
        .await;
    refused(pulled.expect_err("not registered"), address + 5000, 100);
    assert!(target.slice(0..1).is_err() && target.is_idle());
    // A large write is refused while it is under way; a connection closed with bytes unread may take the refusal back.
    let large = SegmentBuffer {
        address: 4096,
        len: 64 << 20,
    };
    let source = Borrowed::from(vec![0; large.len as usize]).into();
    let pushed = segment
        .push(large, &whole(large.len), &source, TransferOptions::default())
        .await;
    let error = pushed.expect_err("not registered");
    assert!(
        matches!(error, MooncakeError::Rejected { .. } | MooncakeError::InDoubt { .. }),
        "{error}"
    );

    let error = pull(&segment, SegmentBuffer { address, len: 0 }).await.err();
    assert!(error.is_none(), "nothing to do: {error:?}");
    assert!(pull(&segment, buffer).await.expect("still there") == keyed(4096, 6));
    assert_eq!(engine.code(json!({"do": "unregister", "index": index})).await, 0);
    let error = pull(&segment, buffer).await.expect_err("unregistered");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::NotFound, "mooncake.rejected")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notifications_and_probes_both_ways() {
    if !wheel_works() {
        return;
    }
    let (ours, mut engine) = (Ours::start().await, Engine::start().await);
    let segment = ours.open(engine.name()).await;
    segment.probe(ConnectOptions::default()).await.expect("alive");
    let sent: Vec<_> = (0..20)
        .map(|index| Notification {
            name: "stagewire".to_owned(),
            message: format!("chunk {index} — “ready”\n"),
        })
        .collect();
    for notification in &sent {
        segment
            .notify(notification, ConnectOptions::default())
            .await
            .expect("taken");
    }
    let found = engine.call(json!({"do": "notifies"})).await;
    let expected: Vec<_> = sent.iter().map(|one| json!([one.name, one.message])).collect();
    assert_eq!(found["notifies"], json!(expected));

    let name = ours.mooncake.name().to_owned();
    assert_eq!(engine.code(json!({"do": "probe", "peer": name})).await, 0);
    let (region, exposed) = ours.expose(Writable::allocate(100).expect("memory"));
    let SegmentBuffer { address, .. } = exposed.buffer();
    assert_eq!(
        engine.call(json!({"do": "first_buffer", "peer": name})).await["address"],
        address
    );
    for index in 0..20 {
        let command = json!({
            "do": "write_and_notify", "peer": name, "address": address, "size": 100, "key": index,
            "name": "engine", "message": format!("{index}"),
        });
        assert_eq!(engine.code(command).await, 0);
    }
    let first = ours.mooncake.notification().await;
    assert_eq!((first.name.as_str(), first.message.as_str()), ("engine", "0"));
    let rest: Vec<_> = ours
        .mooncake
        .notifications()
        .into_iter()
        .map(|one| one.message)
        .collect();
    assert_eq!(rest, (1..20).map(|index| index.to_string()).collect::<Vec<_>>());
    drop(region);
    let too_long = Notification {
        name: String::new(),
        message: "x".repeat(1 << 20),
    };
    let error = segment
        .notify(&too_long, ConnectOptions::default())
        .await
        .expect_err("longer than allowed");
    assert!(error.to_string().contains("at most 1048576"), "{error}");
}
