use crate::mooncake::data::{REQUEST, Request, STATUS, Status};
use crate::mooncake::handshake::{Alive, Buffer, Descriptor, HEAD, MessageKind, Notification, frame, parse, to_json};

/// A message of Mooncake's handshake port, and what its JSON says, whatever its type claims.
pub fn mooncake_handshake(bytes: &[u8]) -> bool {
    let Ok((kind, json)) = parse(bytes) else {
        return false;
    };
    let again = frame(kind, json).expect("it was short enough");
    assert_eq!(again, bytes[..HEAD + json.len()]);
    let notification = Notification::parse(json);
    if let Ok(notification) = &notification {
        assert_eq!(Notification::parse(&to_json(notification)).as_ref(), Ok(notification));
    }
    let alive = Alive::parse(json);
    if let Ok(alive) = &alive {
        assert_eq!(Alive::parse(&to_json(alive)).as_ref(), Ok(alive));
    }
    let descriptor = Descriptor::parse(json);
    if let Ok(descriptor) = &descriptor {
        let again = Descriptor::parse(&descriptor.to_json());
        assert_eq!(again.as_ref(), Ok(descriptor));
        assert!(
            descriptor
                .buffers
                .iter()
                .all(|buffer| buffer.addr.checked_add(buffer.length).is_some())
        );
    }
    match kind {
        MessageKind::Connection => false,
        MessageKind::Metadata => descriptor.is_ok(),
        MessageKind::Notify => notification.is_ok(),
        MessageKind::Probe => alive.is_ok(),
    }
}

/// The head of a request on Mooncake's data port, or the status that answers one.
pub fn mooncake_data(bytes: &[u8]) -> bool {
    if let Some(head) = bytes.first_chunk::<REQUEST>() {
        let Ok(request) = Request::decode(head) else {
            return false;
        };
        assert!(request.len > 0 && request.addr.checked_add(request.len).is_some());
        assert_eq!(Request::decode(&request.encode()), Ok(request));
        return true;
    }
    let Some(status) = bytes.first_chunk::<STATUS>().and_then(|word| Status::decode(*word)) else {
        return false;
    };
    assert_eq!(Status::decode(status.encode()), Some(status));
    true
}

pub(super) fn handshake_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let message = |kind, json: &[u8]| frame(kind, json).expect("short");
    let descriptor = Descriptor {
        name: "127.0.0.1:16986".to_owned(),
        data_host: Some("127.0.0.1".to_owned()),
        data_port: 15113,
        buffers: vec![Buffer::new(0x7f61_8800_0010, 1 << 20, "cpu:0".to_owned())],
    };
    let notification = Notification {
        name: "a".to_owned(),
        message: "done 7".to_owned(),
    };
    vec![
        ("metadata", message(MessageKind::Metadata, &descriptor.to_json())),
        ("notify", message(MessageKind::Notify, &to_json(&notification))),
        ("probe", message(MessageKind::Probe, &to_json(&Alive::success()))),
    ]
}

pub(super) fn data_seeds() -> Vec<(&'static str, Vec<u8>)> {
    use crate::mooncake::data::Operation;
    let request = |operation| {
        let request = Request {
            operation,
            addr: 0x7f00_0000_1000,
            len: 1 << 20,
        };
        request.encode().to_vec()
    };
    vec![
        ("read", request(Operation::Read)),
        ("write", request(Operation::Write)),
        ("done", Status::Done.encode().to_vec()),
        ("rejected", Status::Rejected.encode().to_vec()),
        ("other", Status::Other(7).encode().to_vec()),
    ]
}
