//! What two processes say to each other on a control connection.
//!
//! On one host, one `SOCK_SEQPACKET` packet of a Unix socket is one frame; over TCP, a frame stands behind its length.
//! Greetings come first: [`MAGIC`], the version (u16, little endian), then postcard; so a reader of any version can tell
//! a foreign one. Over TCP the owner begins with a [`Challenge`]. The reader says [`Hello`], the owner answers
//! [`Welcome`]. All later frames are bare postcard: [`Request`] from the reader of memory, [`Reply`] from its owner. The
//! descriptor of a segment travels with the first reply that names it.

mod channel;
mod frames;
mod socket;
mod stream;

use serde::Serialize;
use serde::de::DeserializeOwned;
use stagewire_core::Peer;

pub(crate) use channel::Channel;
pub(crate) use frames::{
    Address, Challenge, Full, Hello, Kind, NetworkAddress, Place, Refusal, Reply, Request, Role, Scarce, Welcome,
};
pub(crate) use socket::{Received, Socket};
#[cfg(feature = "fuzzing")]
pub(crate) use stream::Incoming;
pub(crate) use stream::{MAX_STREAM_FRAME, Stream};

use crate::ConnectError;

/// Version of the frames and of the addresses.
pub(crate) const VERSION: u16 = 2;

const MAGIC: [u8; 4] = *b"SWD\n";

/// No greeting, and no frame on a Unix socket, is longer.
pub(crate) const MAX_FRAME: usize = 4096;

/// Segments that one [`Reply::Retired`] names at most.
pub(crate) const MAX_RETIRED: usize = 256;

/// Bytes of one of a transport's own messages at most.
pub(crate) const MAX_MESSAGE: usize = MAX_STREAM_FRAME - 64;

/// Why bytes are not what they should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WireError {
    #[error("{len} bytes that are not a greeting of a Stagewire data socket")]
    NotAGreeting { len: usize },
    #[error("version {found} of the data protocol, this build speaks {VERSION}")]
    Version { found: u16 },
    #[error("a frame that does not decode: {0}")]
    Malformed(postcard::Error),
    #[error("a frame with {0} bytes too many")]
    Trailing(usize),
}

pub(crate) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    postcard::to_stdvec(value).expect("frames have nothing that postcard cannot encode")
}

pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    let (value, rest) = postcard::take_from_bytes(bytes).map_err(WireError::Malformed)?;
    if rest.is_empty() {
        Ok(value)
    } else {
        Err(WireError::Trailing(rest.len()))
    }
}

/// Encodes with magic and version in front.
pub(crate) fn encode_versioned<T: Serialize>(value: &T) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&encode(value));
    bytes
}

/// Decodes what [`encode_versioned`] of this version made.
pub(crate) fn decode_versioned<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    let rest = bytes.strip_prefix(&MAGIC).and_then(|rest| rest.split_first_chunk());
    let (version, rest) = rest.ok_or(WireError::NotAGreeting { len: bytes.len() })?;
    match u16::from_le_bytes(*version) {
        VERSION => decode(rest),
        found => Err(WireError::Version { found }),
    }
}

/// Where a peer listens for other hosts, over whichever transport it says so.
pub(crate) fn network_address(peer: &Peer) -> Result<NetworkAddress, ConnectError> {
    let offered = |kind: &Kind| peer.transports.iter().any(|address| address.transport == kind.name());
    let of_network = [Kind::Tcp, Kind::Mooncake, Kind::Nixl, Kind::Engine];
    address_of(of_network.into_iter().find(offered).unwrap_or(Kind::Tcp), peer)
}

/// The host of a peer, as it calls it; `None` where none of its addresses says.
pub(crate) fn host_of(peer: &Peer) -> Option<String> {
    if let Ok(address) = network_address(peer) {
        return Some(address.host);
    }
    let local = [Kind::Shm, Kind::Cma]
        .into_iter()
        .find_map(|kind| address_of::<Address>(kind, peer).ok());
    local.map(|address| address.host)
}

/// How a peer says that it is reached over a transport.
pub(crate) fn address_of<T: DeserializeOwned>(kind: Kind, peer: &Peer) -> Result<T, ConnectError> {
    let (transport, peer, offered) = (kind.name(), peer.incarnation, &peer.transports);
    let found = offered.iter().find(|address| address.transport == transport);
    let found = found.ok_or_else(|| ConnectError::NotOffered {
        peer,
        transport,
        offered: offered.iter().map(|address| address.transport.clone()).collect(),
    })?;
    decode_versioned(&found.address).map_err(|error| ConnectError::Address {
        peer,
        transport,
        problem: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_foreign_version_is_told_before_its_content() {
        let mut bytes = encode_versioned(&7_u64);
        assert_eq!(decode_versioned(&bytes), Ok(7_u64));
        bytes.push(0);
        assert_eq!(decode_versioned::<u64>(&bytes), Err(WireError::Trailing(1)));
        bytes[4] = 9;
        bytes.truncate(6);
        assert_eq!(decode_versioned::<u64>(&bytes), Err(WireError::Version { found: 9 }));
        assert_eq!(
            decode_versioned::<u64>(b"GET / HTTP/1.1"),
            Err(WireError::NotAGreeting { len: 14 })
        );
    }

    #[test]
    fn the_longest_frames_fit() {
        let segments = vec![u64::MAX; MAX_RETIRED];
        assert!(encode(&Reply::Retired { segments }).len() <= MAX_FRAME);
        let (request, message) = (u64::MAX, vec![0; MAX_MESSAGE]);
        assert!(encode(&Reply::Answered { request, message }).len() <= MAX_STREAM_FRAME);
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail_but_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = decode::<Request>(&bytes);
            let _ = decode::<Reply>(&bytes);
            let _ = decode_versioned::<Challenge>(&bytes);
            let _ = decode_versioned::<Hello>(&bytes);
            let _ = decode_versioned::<Welcome>(&bytes);
            let _ = decode_versioned::<Address>(&bytes);
            let _ = decode_versioned::<NetworkAddress>(&bytes);
        }
    }
}
