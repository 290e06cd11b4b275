//! Frames of the journal file: what is whole, what is torn, what is damaged.
//!
//! ```text
//! file   = "SWSTORE\n", version (u32 LE), 4 zero bytes, frame…
//! frame  = length (u32 LE), check of the length (u32 LE), xxh3-64 of the body (u64 LE), body (postcard)
//! ```
//!
//! A writer that was killed leaves a beginning of its last frame, a machine that lost power leaves anything in the place
//! of what it had not synced: the end of a file is *torn* where nothing after the first bad byte is a frame. Where a
//! frame follows, the bad bytes were good once, and what they said is unknown: the file is *damaged*.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

pub(super) const MAGIC: [u8; 8] = *b"SWSTORE\n";
pub(super) const VERSION: u32 = 1;
/// Bytes before the first frame.
pub(super) const FILE_HEADER: usize = 16;
/// Bytes of a frame before its body.
pub(super) const HEADER: usize = 16;
/// Longest body: a handle holds metadata of up to 16 MiB.
const MAX_BODY: u32 = 64 << 20;

/// What stands before the first frame.
pub(super) fn file_header() -> [u8; FILE_HEADER] {
    let mut header = [0; FILE_HEADER];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header
}

/// Appends a frame to `out`.
pub(super) fn encode(body: &[u8], out: &mut Vec<u8>) {
    let len = u32::try_from(body.len()).expect("records are bounded by the size of a handle");
    out.reserve(HEADER + body.len());
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(&check(len).to_le_bytes());
    out.extend_from_slice(&xxh3_64(body).to_le_bytes());
    out.extend_from_slice(body);
}

/// Keeps a damaged length from hiding everything behind it.
fn check(len: u32) -> u32 {
    let seed = u64::from_le_bytes(MAGIC);
    xxh3_64_with_seed(&len.to_le_bytes(), seed) as u32
}

/// The frames of a file, from its first one on.
#[derive(Debug)]
pub(super) struct Frames<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// What stands at a place.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found<'a> {
    /// A whole frame: where it begins, and its body.
    Frame(u64, &'a [u8]),
    /// The file ends here, as it should.
    End,
    /// The file ends in so many bytes that are no frame.
    Torn(u64),
    /// A damaged frame: where it begins, the checksum that it should have, the one that it has.
    Damaged { offset: u64, expected: u64, found: u64 },
}

/// Why there is no frame at a place.
enum Bad {
    /// It does not fit in the file.
    Short,
    /// Checksums do not match: expected, found.
    Checksum(u64, u64),
}

impl<'a> Frames<'a> {
    /// Those of a file whose header was checked.
    pub(super) fn new(file: &'a [u8]) -> Self {
        Self {
            bytes: file,
            at: FILE_HEADER.min(file.len()),
        }
    }

    /// Bytes of the file up to the place where it is now.
    pub(super) fn offset(&self) -> u64 {
        self.at as u64
    }

    /// The next frame, or what is there instead.
    pub(super) fn next(&mut self) -> Found<'a> {
        let offset = self.offset();
        let rest = &self.bytes[self.at..];
        if rest.is_empty() {
            return Found::End;
        }
        match frame(rest) {
            Ok(body) => {
                self.at += HEADER + body.len();
                Found::Frame(offset, body)
            }
            Err(bad) => {
                let follows = (1..rest.len()).any(|skip| frame(&rest[skip..]).is_ok());
                match bad {
                    _ if !follows => Found::Torn(rest.len() as u64),
                    Bad::Short => Found::Damaged {
                        offset,
                        expected: 0,
                        found: 0,
                    },
                    Bad::Checksum(expected, found) => Found::Damaged {
                        offset,
                        expected,
                        found,
                    },
                }
            }
        }
    }
}

/// The body of the frame that `bytes` begin with.
fn frame(bytes: &[u8]) -> Result<&[u8], Bad> {
    let (header, rest) = bytes.split_first_chunk::<HEADER>().ok_or(Bad::Short)?;
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
    let (len, expected) = (word(0), word(4));
    if check(len) != expected || len > MAX_BODY {
        return Err(Bad::Checksum(expected.into(), check(len).into()));
    }
    let body = rest.get(..len as usize).ok_or(Bad::Short)?;
    let expected = u64::from_le_bytes(header[8..].try_into().expect("eight bytes"));
    let found = xxh3_64(body);
    if found != expected {
        return Err(Bad::Checksum(expected, found));
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(bodies: &[Vec<u8>]) -> Vec<u8> {
        let mut file = file_header().to_vec();
        for body in bodies {
            encode(body, &mut file);
        }
        file
    }

    /// The bodies, and how the file ends.
    fn read(file: &[u8]) -> (Vec<Vec<u8>>, Found<'_>) {
        let (mut frames, mut bodies) = (Frames::new(file), Vec::new());
        loop {
            match frames.next() {
                Found::Frame(_, body) => bodies.push(body.to_vec()),
                end => return (bodies, end),
            }
        }
    }

    fn bodies() -> impl Strategy<Value = Vec<Vec<u8>>> {
        prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 1..12)
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(bodies in bodies()) {
            let file = file(&bodies);
            prop_assert_eq!(read(&file), (bodies, Found::End));
        }

        /// A writer was killed: everything before is there.
        #[test]
        fn a_cut_file_is_torn_at_its_last_frame(bodies in bodies(), cut in any::<prop::sample::Index>()) {
            let whole = file(&bodies);
            let cut = FILE_HEADER + cut.index(whole.len() - FILE_HEADER + 1);
            let (kept, end) = read(&whole[..cut]);
            prop_assert!(bodies.starts_with(&kept));
            let lost = cut - file(&kept).len();
            prop_assert_eq!(end, if lost == 0 { Found::End } else { Found::Torn(lost as u64) });
            prop_assert!(kept.len() == bodies.len() || file(&bodies[..=kept.len()]).len() > cut);
        }

        /// Power was lost: zeros, or what was there before, stand where the last frames should.
        #[test]
        fn rubbish_at_the_end_is_torn(bodies in bodies(), rubbish in prop::collection::vec(any::<u8>(), 1..64), zero: bool) {
            let mut bytes = file(&bodies);
            let rubbish = if zero { vec![0; rubbish.len()] } else { rubbish };
            bytes.extend_from_slice(&rubbish);
            prop_assert_eq!(read(&bytes), (bodies, Found::Torn(rubbish.len() as u64)));
        }

        /// Every single flipped bit is found; before the last frame it is never taken for a torn end.
        #[test]
        fn a_flipped_bit_is_found(bodies in bodies(), at in any::<prop::sample::Index>(), bit in 0..8_u32) {
            let mut bytes = file(&bodies);
            let at = FILE_HEADER + at.index(bytes.len() - FILE_HEADER);
            bytes[at] ^= 1 << bit;
            let last = file(&bodies[..bodies.len() - 1]).len();
            let (kept, end) = read(&bytes);
            prop_assert!(bodies.starts_with(&kept) && kept.len() < bodies.len());
            match end {
                Found::Torn(_) => prop_assert!(at >= last, "what follows would be forgotten"),
                Found::Damaged { offset, expected, found } => {
                    prop_assert!(at < last);
                    prop_assert!(offset as usize <= at && (expected != found || expected == 0));
                }
                other => prop_assert!(false, "{:?}", other),
            }
        }

        #[test]
        fn rubbish_is_no_panic(rubbish in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&rubbish);
        }
    }
}
