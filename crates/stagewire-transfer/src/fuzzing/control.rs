use std::fmt::Debug;
use std::net::{Ipv4Addr, Ipv6Addr};

use serde::Serialize;
use serde::de::DeserializeOwned;
use stagewire_core::{Capability, Incarnation, ProcessRef};
use uuid::Uuid;

use crate::wire::{
    self, Address, Challenge, Hello, Incoming, Kind, MAX_STREAM_FRAME, NetworkAddress, Place, Refusal, Reply, Request,
    Role, Welcome,
};

/// Frames of a control connection, addresses, and the stream that carries frames. The first byte says which.
pub fn control(bytes: &[u8]) -> bool {
    let Some((kind, frame)) = bytes.split_first() else {
        return false;
    };
    match kind {
        0 => bare::<Request>(frame),
        1 => bare::<Reply>(frame),
        2 => versioned::<Hello>(frame),
        3 => versioned::<Welcome>(frame),
        4 => versioned::<Address>(frame),
        5 => versioned::<Challenge>(frame),
        6 => versioned::<NetworkAddress>(frame),
        7 => stream(frame),
        _ => false,
    }
}

fn bare<T: Serialize + DeserializeOwned + PartialEq + Debug>(frame: &[u8]) -> bool {
    let Ok(value) = wire::decode::<T>(frame) else {
        return false;
    };
    let again = wire::decode::<T>(&wire::encode(&value));
    assert_eq!(again.expect("what was encoded decodes"), value);
    true
}

fn versioned<T: Serialize + DeserializeOwned + PartialEq + Debug>(frame: &[u8]) -> bool {
    let Ok(value) = wire::decode_versioned::<T>(frame) else {
        return false;
    };
    let again = wire::decode_versioned::<T>(&wire::encode_versioned(&value));
    assert_eq!(again.expect("what was encoded decodes"), value);
    true
}

/// Frames out of a TCP stream, as they arrive: never more bytes are taken than belong to the frame under way.
fn stream(mut bytes: &[u8]) -> bool {
    let mut incoming = Incoming::new();
    let mut buffer = vec![0; MAX_STREAM_FRAME];
    let mut frames = 0;
    while !bytes.is_empty() {
        let missing = incoming.missing();
        assert!((1..=MAX_STREAM_FRAME).contains(&missing), "{missing} bytes are missing");
        let (some, rest) = bytes.split_at(missing.min(bytes.len()));
        incoming.extend(some);
        bytes = rest;
        match incoming.take(&mut buffer) {
            Ok(Some(len)) => frames += usize::from(some.ends_with(&buffer[..len])),
            Ok(None) => {}
            Err(_) => return false,
        }
    }
    frames > 0
}

pub(super) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut seeds = requests();
    seeds.extend(replies());
    seeds.extend(greetings());
    seeds.push(("stream", vec![7, 3, 0, 0, 0, b'a', b'b', b'c', 1, 0, 0, 0, b'd']));
    seeds
}

fn with(kind: u8, frame: &[u8]) -> Vec<u8> {
    [&[kind][..], frame].concat()
}

fn requests() -> Vec<(&'static str, Vec<u8>)> {
    let request = |request: &Request| with(0, &wire::encode(request));
    let pin = Request::Pin {
        request: 1,
        kind: Kind::Cma,
        region: 3,
        generation: 4,
        capability: Capability::from_random([5; 16]),
    };
    let ask = Request::Ask {
        request: 1,
        kind: Kind::Nixl,
        message: vec![1, 2, 3],
    };
    vec![
        ("pin", request(&pin)),
        ("confirm", request(&Request::Confirm { request: 1, pin: 2 })),
        ("unpin", request(&Request::Unpin { pin: 2 })),
        ("ask", request(&ask)),
    ]
}

fn replies() -> Vec<(&'static str, Vec<u8>)> {
    let reply = |reply: &Reply| with(1, &wire::encode(reply));
    let pinned = |place| {
        reply(&Reply::Pinned {
            request: 1,
            pin: 2,
            place,
            len: 1 << 20,
            writable: true,
        })
    };
    let segment = Place::Segment {
        segment: 0,
        segment_len: 1 << 30,
        offset: 4096,
    };
    let refused = |refusal| reply(&Reply::Refused { request: 1, refusal });
    let answered = Reply::Answered {
        request: 1,
        message: vec![1, 2, 3],
    };
    let segments = vec![0, 1, u64::MAX];
    vec![
        ("pinned-segment", pinned(segment)),
        ("pinned-address", pinned(Place::Address(0x7f00_0000_1000))),
        ("pinned-served", pinned(Place::Served)),
        ("answered", reply(&answered)),
        ("refused-generation", refused(Refusal::Generation { current: 9 })),
        ("refused-registered", refused(Refusal::Registered { kind: Kind::Shm })),
        ("retired", reply(&Reply::Retired { segments })),
    ]
}

fn greetings() -> Vec<(&'static str, Vec<u8>)> {
    let process = ProcessRef { pid: 4711, started: 42 };
    let hello = Hello {
        expects: Incarnation(Uuid::from_u128(7)),
        process,
        host: "host".to_owned(),
        role: Role::Lane { session: 5 },
        proof: Some([6; 32]),
    };
    let welcome = Welcome::Open {
        process,
        canary: (1, 2),
        session: 5,
    };
    let address = Address {
        host: "host".to_owned(),
        socket: "/run/peers/1.data".to_owned(),
    };
    let sockets = vec![(Ipv4Addr::LOCALHOST, 1).into(), (Ipv6Addr::LOCALHOST, 2).into()];
    let network = NetworkAddress {
        host: "host".to_owned(),
        sockets,
        extra: vec![1, 2, 3],
    };
    let challenge = Challenge { nonce: [1; 32] };
    vec![
        ("hello", with(2, &wire::encode_versioned(&hello))),
        ("welcome", with(3, &wire::encode_versioned(&welcome))),
        ("address", with(4, &wire::encode_versioned(&address))),
        ("challenge", with(5, &wire::encode_versioned(&challenge))),
        ("network-address", with(6, &wire::encode_versioned(&network))),
    ]
}
