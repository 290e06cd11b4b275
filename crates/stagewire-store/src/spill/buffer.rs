use super::BLOCK;

/// Memory at a multiple of [`BLOCK`], for bytes whose own place is not.
#[derive(Debug)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// `len` bytes, a multiple of [`BLOCK`].
    pub(super) fn new(len: usize) -> Self {
        let bytes = vec![0; len + BLOCK];
        let start = bytes.as_ptr().align_offset(BLOCK);
        Self { bytes, start, len }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned() {
        for len in [BLOCK, 17 * BLOCK] {
            let mut buffer = Buffer::new(len);
            let bytes = buffer.bytes_mut();
            assert_eq!((bytes.as_ptr().addr() % BLOCK, bytes.len()), (0, len));
        }
    }
}
