//! The data port: requests one after the other on a connection that stays open, in version 2 of the protocol.
//!
//! Source of the format: `src/transport/tcp_transport/tcp_transport_session_impl.h` of Mooncake's Transfer Engine. A
//! request is 24 bytes in little endian: size (u64), address (u64), operation (u8), 7 bytes of padding. The answer to a
//! read is a status (u64) and, if that is good, the bytes. A write is followed by its bytes, and answered by a status
//! once the last of them is in place. After a refusal the server closes the connection.

mod exchange;
mod pool;
mod server;
mod watermark;

pub(crate) use exchange::{ExchangeError, Job, Local, Unsettled};
pub(crate) use pool::{Pool, PoolError};
pub(crate) use server::serve;

/// Bytes of a request.
pub(crate) const REQUEST: usize = 24;

/// Bytes of a status.
pub(crate) const STATUS: usize = 8;

/// Set in the operation by whoever speaks version 2.
const VERSION_2: u8 = 0x80;

/// High half of each status: `MCTV`.
const MAGIC: u64 = 0x4D43_5456 << 32;

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    /// From the server to the client.
    Read,
    /// From the client to the server.
    Write,
}

/// What a client asks of a server's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) operation: Operation,
    pub(crate) addr: u64,
    /// Never 0.
    pub(crate) len: u64,
}

/// Why bytes are not a request that this server answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("operation {0:#04x} of a protocol without acknowledgements; version 2 is needed")]
    Version(u8),
    #[error("unknown operation {0:#04x}")]
    Operation(u8),
    #[error("{len} bytes at {addr:#x}")]
    Range { addr: u64, len: u64 },
}

impl Request {
    pub(crate) fn encode(&self) -> [u8; REQUEST] {
        let operation = match self.operation {
            Operation::Read => 0,
            Operation::Write => 1,
        };
        let mut bytes = [0; REQUEST];
        bytes[..8].copy_from_slice(&self.len.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_le_bytes());
        bytes[16] = operation | VERSION_2;
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; REQUEST]) -> Result<Self, RequestError> {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let (len, addr, code) = (word(0), word(8), bytes[16]);
        let operation = match code ^ VERSION_2 {
            0 => Operation::Read,
            1 => Operation::Write,
            _ if code & VERSION_2 == 0 => return Err(RequestError::Version(code)),
            _ => return Err(RequestError::Operation(code)),
        };
        if len == 0 || addr.checked_add(len).is_none() {
            return Err(RequestError::Range { addr, len });
        }
        Ok(Self { operation, addr, len })
    }
}

/// A server's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Done,
    /// The memory is not there, or may not be used so.
    Rejected,
    /// Another refusal, of a later release.
    Other(u32),
}

impl Status {
    pub(crate) fn encode(self) -> [u8; STATUS] {
        let code = match self {
            Self::Done => 0,
            Self::Rejected => 1,
            Self::Other(code) => code,
        };
        (MAGIC | u64::from(code)).to_le_bytes()
    }

    /// `None` where the peer does not speak version 2.
    pub(crate) fn decode(bytes: [u8; STATUS]) -> Option<Self> {
        let word = u64::from_le_bytes(bytes);
        if word & !u64::from(u32::MAX) != MAGIC {
            return None;
        }
        Some(match word as u32 {
            0 => Self::Done,
            1 => Self::Rejected,
            code => Self::Other(code),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn as_the_engine_writes_it() {
        let read = Request {
            operation: Operation::Read,
            addr: 0x7f00_0000_1000,
            len: 0x100,
        };
        let mut bytes = *b"\x00\x01\0\0\0\0\0\0\x00\x10\x00\x00\x00\x7f\0\0\x80\0\0\0\0\0\0\0";
        assert_eq!(read.encode(), bytes);
        // The engine leaves the padding as it was.
        bytes[17..].fill(0xEE);
        assert_eq!(Request::decode(&bytes), Ok(read));
        assert_eq!(Status::Done.encode(), *b"\0\0\0\0VTCM");
        assert_eq!(Status::decode(*b"\x01\0\0\0VTCM"), Some(Status::Rejected));
        assert_eq!(Status::decode([7; 8]), None);
    }

    #[test]
    fn what_is_refused() {
        let with = |len: u64, addr: u64, code: u8| {
            let mut bytes = [0; REQUEST];
            bytes[..8].copy_from_slice(&len.to_le_bytes());
            bytes[8..16].copy_from_slice(&addr.to_le_bytes());
            bytes[16] = code;
            Request::decode(&bytes)
        };
        assert_eq!(with(1, 1, 0), Err(RequestError::Version(0)));
        assert_eq!(with(1, 1, 1), Err(RequestError::Version(1)));
        assert_eq!(with(1, 1, 0x82), Err(RequestError::Operation(0x82)));
        assert_eq!(with(0, 1, 0x80), Err(RequestError::Range { addr: 1, len: 0 }));
        let last = u64::MAX;
        assert_eq!(with(1, last, 0x81), Err(RequestError::Range { addr: last, len: 1 }));
    }

    proptest! {
        #[test]
        fn requests_and_statuses_survive(bytes in any::<[u8; REQUEST]>(), code in any::<u32>()) {
            if let Ok(request) = Request::decode(&bytes) {
                prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
                prop_assert_eq!(&request.encode()[..17], &bytes[..17]);
            }
            let status = Status::decode((MAGIC | u64::from(code)).to_le_bytes()).expect("the magic is right");
            prop_assert_eq!(Status::decode(status.encode()), Some(status));
        }
    }
}
