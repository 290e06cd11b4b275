use std::ptr;

/// Copies with the widest stores of the processor that go around the caches; plain where it has none.
///
/// # Safety
/// As [`ptr::copy_nonoverlapping`].
pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        let head = dst.align_offset(64).min(len);
        let body = (len - head) / 64;
        let tail = head + body * 64;
        // SAFETY: head, body and tail lie one after the other inside both ranges, the body is aligned in `dst`, and the
        // processor has the instructions.
        unsafe {
            if is_x86_feature_detected!("avx512f") {
                ptr::copy_nonoverlapping(src, dst, head);
                wide(src.add(head), dst.add(head), body);
                ptr::copy_nonoverlapping(src.add(tail), dst.add(tail), len - tail);
                return;
            }
            if is_x86_feature_detected!("avx") {
                ptr::copy_nonoverlapping(src, dst, head);
                narrow(src.add(head), dst.add(head), body);
                ptr::copy_nonoverlapping(src.add(tail), dst.add(tail), len - tail);
                return;
            }
        }
    }
    // SAFETY: the caller's contract.
    unsafe { ptr::copy_nonoverlapping(src, dst, len) };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn wide(src: *const u8, dst: *mut u8, lines: usize) {
    use std::arch::x86_64::{__m512i, _mm_sfence, _mm512_loadu_si512, _mm512_stream_si512};
    for line in 0..lines {
        // SAFETY: the caller's ranges hold that many lines of 64 bytes, and `dst` is a multiple of 64.
        unsafe {
            let bytes = _mm512_loadu_si512(src.add(line * 64).cast::<__m512i>());
            _mm512_stream_si512(dst.add(line * 64).cast::<__m512i>(), bytes);
        }
    }
    _mm_sfence();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn narrow(src: *const u8, dst: *mut u8, lines: usize) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    for half in 0..lines * 2 {
        // SAFETY: as in `wide`; each line is two halves.
        unsafe {
            let bytes = _mm256_loadu_si256(src.add(half * 32).cast::<__m256i>());
            _mm256_stream_si256(dst.add(half * 32).cast::<__m256i>(), bytes);
        }
    }
    _mm_sfence();
}
