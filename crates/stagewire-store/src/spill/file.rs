//! What is in a spill file.

use std::fmt;
use std::os::fd::OwnedFd;

use rustix::fs::{FallocateFlags, fallocate, fsync};
use rustix::io::{Errno, pread, pwrite};
use stagewire_core::{ByteCount, PayloadId};
use stagewire_transfer::{ExtentMut, Filling};
use twox_hash::xxhash3_128::Hasher;
use uuid::Uuid;

use super::buffer::Buffer;
use super::directory::Directory;
use crate::{Object, SpillFault};

/// Addresses, offsets and lengths of direct I/O are multiples of this; no common device asks for more.
pub(crate) const BLOCK: usize = 4096;

/// Bytes that are hashed and then written, or read and then hashed, while the caches hold them.
const STEP: usize = 2 << 20;

const EXTENSION: &str = ".spill";

/// XXH3, 128 bits, of the bytes of all parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest(pub u128);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Memory that the bytes of a part are read into.
pub(crate) trait Sink: Send + 'static {
    fn bytes_mut(&mut self) -> &mut [u8];
}

impl Sink for Filling {
    fn bytes_mut(&mut self) -> &mut [u8] {
        Self::bytes_mut(self)
    }
}

impl Sink for Option<ExtentMut> {
    fn bytes_mut(&mut self) -> &mut [u8] {
        self.as_deref_mut().unwrap_or_default()
    }
}

/// Why the bytes of a file did not come back.
#[derive(Debug)]
pub(crate) enum ReadError {
    Fault(SpillFault),
    /// They are others than were written.
    Corrupt {
        found: Digest,
    },
}

/// The name of the file of a payload; the generation tells it from earlier files of the same payload.
pub(super) fn name(payload: PayloadId, generation: u64) -> String {
    format!("{}-{generation:016x}{EXTENSION}", payload.0.simple())
}

/// The payload in the name of a spill file.
pub(super) fn parse(name: &str) -> Option<PayloadId> {
    let (payload, generation) = name.strip_suffix(EXTENSION)?.split_once('-')?;
    let digits = |text: &str, len| text.len() == len && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !digits(payload, 32) || !digits(generation, 16) {
        return None;
    }
    Uuid::try_parse(payload).ok().map(PayloadId)
}

/// Length of the file of parts of these sizes.
pub(super) fn length(parts: &[ByteCount]) -> Option<u64> {
    let mut sizes = parts.iter().map(|part| part.0.checked_next_multiple_of(BLOCK as u64));
    sizes.try_fold(0_u64, |sum, size| sum.checked_add(size?))
}

/// Writes all parts of an object to a new file, and has it on the disk. Leaves nothing where that fails.
pub(super) fn write(
    directory: &Directory,
    name: &str,
    object: &dyn Object,
    buffer: &mut Buffer,
    given_up: &dyn Fn() -> bool,
) -> Result<Digest, SpillFault> {
    let failed = |what| move |error| directory.fault(what, name, error);
    let file = directory.create(name).map_err(failed("create"))?;
    let mut write = || {
        let digest = write_parts(&file, object, buffer, given_up).map_err(failed("write"))?;
        fsync(&file).map_err(failed("sync"))?;
        directory.sync().map_err(failed("sync the directory of"))?;
        Ok(digest)
    };
    let written = write();
    if written.is_err() {
        // The first error is the one to tell.
        let _ = directory.remove(name);
    }
    written
}

fn write_parts(
    file: &OwnedFd,
    object: &dyn Object,
    buffer: &mut Buffer,
    given_up: &dyn Fn() -> bool,
) -> Result<Digest, Errno> {
    let parts: Vec<&[u8]> = (0..object.parts()).filter_map(|part| object.part(part)).collect();
    let sizes: Vec<ByteCount> = parts.iter().map(|part| ByteCount(part.len() as u64)).collect();
    let total = length(&sizes).ok_or(Errno::FBIG)?;
    if total > 0 {
        // A full disk is found out before the first byte, where the file system can tell.
        match fallocate(file, FallocateFlags::empty(), 0, total) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            allocated => allocated?,
        }
    }
    let (mut hasher, mut offset) = (Hasher::new(), 0);
    for part in parts {
        let (whole, rest) = part.split_at(part.len() / BLOCK * BLOCK);
        for step in whole.chunks(STEP) {
            if given_up() {
                return Err(Errno::CANCELED);
            }
            hasher.write(step);
            write_all(file, step, &mut offset)?;
        }
        if !rest.is_empty() {
            hasher.write(rest);
            let block = &mut buffer.bytes_mut()[..BLOCK];
            block[..rest.len()].copy_from_slice(rest);
            block[rest.len()..].fill(0);
            write_all(file, block, &mut offset)?;
        }
    }
    Ok(Digest(hasher.finish_128()))
}

fn write_all(file: &OwnedFd, mut bytes: &[u8], offset: &mut u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        let written = match pwrite(file, bytes, *offset) {
            Err(Errno::INTR) => continue,
            Ok(0) => return Err(Errno::IO),
            written => written?,
        };
        bytes = &bytes[written..];
        *offset += written as u64;
    }
    Ok(())
}

/// Reads a file into one sink for each part, and compares the digest. Large pieces go straight to where they belong if
/// that is aligned, and through the buffer otherwise.
pub(super) fn read<S: Sink>(
    directory: &Directory,
    name: &str,
    written: Digest,
    sinks: &mut [S],
    buffer: &mut Buffer,
    given_up: &dyn Fn() -> bool,
) -> Result<(), ReadError> {
    let failed = |what| move |error| ReadError::Fault(directory.fault(what, name, error));
    let file = directory.find(name).map_err(failed("open"))?;
    let (mut hasher, mut offset) = (Hasher::new(), 0_u64);
    'parts: for sink in sinks {
        let part = sink.bytes_mut();
        let next = offset + part.len().next_multiple_of(BLOCK) as u64;
        let whole = match part.as_ptr().addr() % BLOCK {
            0 => part.len() / BLOCK * BLOCK,
            _ if !directory.is_direct() => part.len(),
            _ => 0,
        };
        let (straight, bounced) = part.split_at_mut(whole);
        for step in straight.chunks_mut(STEP) {
            if given_up() {
                return Err(failed("read")(Errno::CANCELED));
            }
            let len = read_all(&file, step, offset).map_err(failed("read"))?;
            hasher.write(&step[..len]);
            if len < step.len() {
                break 'parts;
            }
            offset += len as u64;
        }
        for step in bounced.chunks_mut(buffer.bytes_mut().len()) {
            if given_up() {
                return Err(failed("read")(Errno::CANCELED));
            }
            let blocks = &mut buffer.bytes_mut()[..step.len().next_multiple_of(BLOCK)];
            let len = read_all(&file, blocks, offset).map_err(failed("read"))?.min(step.len());
            hasher.write(&blocks[..len]);
            if len < step.len() {
                break 'parts;
            }
            step.copy_from_slice(&blocks[..len]);
            offset += len as u64;
        }
        offset = next;
    }
    let found = Digest(hasher.finish_128());
    if found == written {
        Ok(())
    } else {
        Err(ReadError::Corrupt { found })
    }
}

/// Reads until the bytes are full or the file ends.
fn read_all(file: &OwnedFd, bytes: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut len = 0;
    while len < bytes.len() {
        match pread(file, &mut bytes[len..], offset + len as u64) {
            Err(Errno::INTR) => {}
            Ok(0) => break,
            // A file that was cut ends within a block, after which nothing can be read directly.
            Ok(more) if more % BLOCK != 0 => return Ok(len + more),
            more => len += more?,
        }
    }
    Ok(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_whose_file_it_is() {
        let payload = PayloadId(Uuid::from_u128(7));
        assert_eq!(parse(&name(payload, 9)), Some(payload));
        assert_eq!(
            name(payload, 9),
            "00000000000000000000000000000007-0000000000000009.spill"
        );
        for other in [
            "lock",
            "x.spill",
            "..-0000000000000009.spill",
            "0000000000000000000000000000007g-0000000000000009.spill",
            "00000000000000000000000000000007-9.spill",
            "00000000000000000000000000000007-0000000000000009",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn parts_begin_at_blocks() {
        let length = |parts: &[u64]| length(&parts.iter().copied().map(ByteCount).collect::<Vec<_>>());
        assert_eq!(length(&[]), Some(0));
        assert_eq!(length(&[0, 1, 4096, 4097]), Some(4 * 4096));
        assert_eq!(length(&[u64::MAX]), None);
        assert_eq!(length(&[1 << 63, 1 << 63]), None);
    }
}
