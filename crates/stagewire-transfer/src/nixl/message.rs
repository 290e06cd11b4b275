//! What two halves of this transport say to each other over the control connection.

use serde::{Deserialize, Serialize};
use stagewire_core::ProcessRef;

use super::agent::Span;
use super::version::NixlVersion;

/// Bytes of metadata in one message at most; a frame of the control connection takes little more. Metadata grow with
/// the network devices of the owner.
pub(super) const PART: usize = 3072;

/// Registrations that one message names at most.
pub(super) const NUMBERS: usize = 256;

/// From the reader.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Question {
    /// Who serves here, and with which version?
    Greet {
        process: ProcessRef,
        /// Tells whether the process means anything to the owner.
        host: String,
    },
    /// How is the agent reached? From this byte on.
    Connection { from: u32 },
    /// What is behind a registration that this reader has pinned? From this byte on.
    Registration { number: u64, from: u32 },
    /// The reader has no use for these now. Which of them are to be forgotten?
    Unused { numbers: Vec<u64> },
    /// These are forgotten.
    Forgotten { numbers: Vec<u64> },
}

/// From the owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    Greeted { agent: String, version: NixlVersion },
    Connection(Part),
    Registration { span: Span, part: Part },
    Wanted { numbers: Vec<u64> },
    Done,
}

/// Some bytes of `total`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) total: u32,
    pub(super) bytes: Vec<u8>,
}

impl Part {
    pub(super) fn of(whole: &[u8], from: u32) -> Self {
        let rest = whole.get(from as usize..).unwrap_or_default();
        Self {
            total: u32::try_from(whole.len()).unwrap_or(u32::MAX),
            bytes: rest[..rest.len().min(PART)].to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nixl::agent::Space;
    use crate::wire::{self, MAX_FRAME};

    proptest::proptest! {
        #[test]
        fn any_bytes_decode_or_fail_but_never_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200)) {
            let _ = wire::decode::<Question>(&bytes);
            let _ = wire::decode::<Answer>(&bytes);
        }
    }

    #[test]
    fn the_longest_messages_fit_into_a_frame() {
        // What a frame has besides the message.
        let room = MAX_FRAME - 32;
        let numbers = vec![u64::MAX; NUMBERS];
        assert!(
            wire::encode(&Question::Unused {
                numbers: numbers.clone()
            })
            .len()
                <= room
        );
        assert!(
            wire::encode(&Question::Forgotten {
                numbers: numbers.clone()
            })
            .len()
                <= room
        );
        assert!(wire::encode(&Answer::Wanted { numbers }).len() <= room);
        let span = Span {
            space: Space::Cuda(u32::MAX),
            number: u64::MAX,
            address: u64::MAX,
            len: u64::MAX,
        };
        let part = Part::of(&[255; 1 << 20], 7);
        assert_eq!((part.total, part.bytes.len()), (1 << 20, PART));
        assert!(wire::encode(&Answer::Registration { span, part }).len() <= room);
        assert!(Part::of(&[1; 10], 10).bytes.is_empty() && Part::of(&[1; 10], 11).bytes.is_empty());
    }
}
