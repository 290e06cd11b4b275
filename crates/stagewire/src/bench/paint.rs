/// Fills memory with bytes that tell places apart, and rounds.
pub(super) fn paint(bytes: &mut [u8], round: u64) {
    for (index, word) in (1_u64..).zip(bytes.chunks_mut(8)) {
        let value = (index ^ round << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
        word.copy_from_slice(&value[..word.len()]);
    }
}
