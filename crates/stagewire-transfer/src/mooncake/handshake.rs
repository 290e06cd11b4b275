//! The handshake port: one request and one answer per TCP connection, as JSON in a frame.
//!
//! Source of the format: the sources of Mooncake's Transfer Engine, `include/common.h` (`writeString`, `readString`) and
//! `src/transfer_metadata*.cpp`. A frame is a u64 in little endian, the length of what follows; then a byte that says
//! which message it is; then JSON.

mod client;
mod descriptor;
mod server;

pub(crate) use client::{AskError, ask};
pub(crate) use descriptor::{Buffer, Descriptor, DescriptorError};
pub(crate) use server::{Answerer, serve};

use serde::{Deserialize, Serialize};

/// Longest message, its type byte included: what a Transfer Engine accepts unless configured otherwise.
pub(crate) const MAX_MESSAGE: u64 = 1 << 20;

/// Bytes before the JSON.
pub(crate) const HEAD: usize = 9;

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageKind {
    /// Set-up of a queue pair, which only RDMA needs.
    Connection,
    Metadata,
    Notify,
    Probe,
}

impl MessageKind {
    const fn code(self) -> u8 {
        match self {
            Self::Connection => 0,
            Self::Metadata => 1,
            Self::Notify => 2,
            Self::Probe => 3,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        [Self::Connection, Self::Metadata, Self::Notify, Self::Probe]
            .into_iter()
            .find(|kind| kind.code() == code)
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Connection => "connection",
            Self::Metadata => "metadata",
            Self::Notify => "notify",
            Self::Probe => "probe",
        }
    }
}

/// Why bytes are not a handshake message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error("a message of {len} bytes; at most {MAX_MESSAGE} are allowed")]
    TooLong { len: u64 },
    #[error("a message without content")]
    Empty,
    #[error("a message of unknown type {0}; releases before the type byte are not served")]
    Kind(u8),
    #[error("a message cut off after {found} of {expected} bytes")]
    Truncated { found: usize, expected: usize },
    #[error("a {kind} message that is not the JSON expected: {problem}")]
    Json { kind: &'static str, problem: String },
}

/// Reads the bytes before the JSON: what the message is, and how long its JSON is.
pub(crate) fn parse_head(head: &[u8; HEAD]) -> Result<(MessageKind, usize), HandshakeError> {
    let (len, code) = (u64::from_le_bytes(head[..8].try_into().expect("8 bytes")), head[8]);
    if len > MAX_MESSAGE {
        return Err(HandshakeError::TooLong { len });
    }
    let json = len.checked_sub(1).ok_or(HandshakeError::Empty)?;
    let kind = MessageKind::from_code(code).ok_or(HandshakeError::Kind(code))?;
    Ok((kind, json as usize))
}

/// Takes a whole message apart: what it is, and its JSON.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn parse(frame: &[u8]) -> Result<(MessageKind, &[u8]), HandshakeError> {
    let (head, rest) = frame.split_first_chunk().ok_or(HandshakeError::Truncated {
        found: frame.len(),
        expected: HEAD,
    })?;
    let (kind, len) = parse_head(head)?;
    let json = rest.get(..len).ok_or(HandshakeError::Truncated {
        found: rest.len(),
        expected: len,
    })?;
    Ok((kind, json))
}

/// Makes a message.
pub(crate) fn frame(kind: MessageKind, json: &[u8]) -> Result<Vec<u8>, HandshakeError> {
    let len = json.len() as u64 + 1;
    if len > MAX_MESSAGE {
        return Err(HandshakeError::TooLong { len });
    }
    let mut bytes = Vec::with_capacity(HEAD + json.len());
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.push(kind.code());
    bytes.extend_from_slice(json);
    Ok(bytes)
}

/// A short message from one peer to another, beside the data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notification {
    /// Who or what it is from; chosen by the sender.
    pub name: String,
    /// What it says.
    #[serde(rename = "notify_msg")]
    pub message: String,
}

impl Notification {
    pub(crate) fn parse(json: &[u8]) -> Result<Self, HandshakeError> {
        parse_json(MessageKind::Notify, json)
    }

    /// What says that a notification was taken.
    pub(crate) fn taken() -> Self {
        Self {
            name: String::new(),
            message: "success".to_owned(),
        }
    }
}

/// The answer to a probe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Alive {
    status: String,
}

impl Alive {
    pub(crate) fn success() -> Self {
        Self {
            status: "success".to_owned(),
        }
    }

    pub(crate) fn parse(json: &[u8]) -> Result<Self, HandshakeError> {
        parse_json(MessageKind::Probe, json)
    }
}

fn parse_json<'a, T: Deserialize<'a>>(kind: MessageKind, json: &'a [u8]) -> Result<T, HandshakeError> {
    serde_json::from_slice(json).map_err(|error| HandshakeError::Json {
        kind: kind.name(),
        problem: error.to_string(),
    })
}

pub(crate) fn to_json<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("strings and numbers always encode")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_message_of_the_transfer_engine_reads_as_it_stands() {
        let frame = b"\x03\x00\x00\x00\x00\x00\x00\x00\x01{}";
        assert_eq!(parse(frame), Ok((MessageKind::Metadata, &b"{}"[..])));
        assert_eq!(super::frame(MessageKind::Metadata, b"{}").expect("short"), frame);
        let notify = br#"{"name":"a","notify_msg":"done 7"}"#;
        let found = Notification::parse(notify).expect("as the engine writes it");
        assert_eq!((found.name.as_str(), found.message.as_str()), ("a", "done 7"));
        assert_eq!(to_json(&found), notify);
        assert_eq!(to_json(&Alive::success()), br#"{"status":"success"}"#);
    }

    #[test]
    fn what_is_no_message() {
        let head = |len: u64, code: u8| {
            let mut head = [0; HEAD];
            head[..8].copy_from_slice(&len.to_le_bytes());
            head[8] = code;
            head
        };
        assert_eq!(
            parse_head(&head(MAX_MESSAGE, 2)),
            Ok((MessageKind::Notify, (1 << 20) - 1))
        );
        let too_long = MAX_MESSAGE + 1;
        assert_eq!(
            parse_head(&head(too_long, 2)),
            Err(HandshakeError::TooLong { len: too_long })
        );
        assert_eq!(parse_head(&head(0, 2)), Err(HandshakeError::Empty));
        assert_eq!(parse_head(&head(9, b'{')), Err(HandshakeError::Kind(b'{')));
        assert!(matches!(
            parse(b"\x05\0\0\0\0\0\0\0\x01{}"),
            Err(HandshakeError::Truncated { .. })
        ));
        assert!(frame(MessageKind::Notify, &vec![b' '; 1 << 20]).is_err());
        assert!(Notification::parse(br#"{"name":1,"notify_msg":""}"#).is_err());
        assert!(Alive::parse(b"[]").is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_upset_the_decoder(bytes in prop::collection::vec(any::<u8>(), 0..200), code in 0_u8..5) {
            let mut framed = (bytes.len() as u64 + 1).to_le_bytes().to_vec();
            framed.push(code);
            framed.extend_from_slice(&bytes);
            for bytes in [&bytes, &framed] {
                if let Ok((kind, json)) = parse(bytes) {
                    prop_assert_eq!(&frame(kind, json).expect("it was short enough")[..], &bytes[..HEAD + json.len()]);
                    let _ = (Notification::parse(json), Alive::parse(json), Descriptor::parse(json));
                }
            }
        }

        #[test]
        fn notifications_survive(name in ".*", message in ".*") {
            let sent = Notification { name, message };
            prop_assert_eq!(Notification::parse(&to_json(&sent)).expect("decodes"), sent);
        }
    }
}
