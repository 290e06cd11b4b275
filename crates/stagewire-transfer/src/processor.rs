//! What processors of one kind do differently.

/// Whether the processor itself looks ahead only to the end of a page, as those of Intel do. There it pays to work on several
/// pages side by side; others are slower for it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn stops_at_pages() -> bool {
    use std::arch::x86_64::__cpuid;
    use std::sync::LazyLock;
    // Asked once: where the machine is virtual, the answer comes from the host.
    static INTEL: LazyLock<bool> = LazyLock::new(|| {
        let leaf = __cpuid(0);
        [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
    });
    *INTEL
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn stops_at_pages() -> bool {
    false
}

/// Bytes of the third cache that the cores of one complex share, where a processor of AMD says so. It is near to each of them:
/// what two cores copy from there to there is faster than around it. What other processors say is of another kind (a Xeon's
/// is that of the whole socket).
#[cfg(target_arch = "x86_64")]
pub(crate) fn shared_cache() -> Option<u64> {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const LAST_EXTENDED: u32 = 0x8000_0000;
    /// "Cache Topology Information" of AMD's manual, volume 3, E.4.15; Intel has no such leaf.
    const CACHES: u32 = 0x8000_001D;
    if __cpuid(LAST_EXTENDED).eax < CACHES {
        return None;
    }
    // No processor has more than four kinds of caches; one of kind 0 ends the list.
    let caches = (0..8).map(|index| __cpuid_count(CACHES, index));
    caches.take_while(|leaf| leaf.eax & 0x1F != 0).find_map(|leaf| {
        let level = leaf.eax >> 5 & 0x7;
        let field = |value: u32, low: u32, bits: u32| u64::from(value >> low & ((1 << bits) - 1)) + 1;
        let bytes =
            field(leaf.ebx, 22, 10) * field(leaf.ebx, 12, 10) * field(leaf.ebx, 0, 12) * (u64::from(leaf.ecx) + 1);
        (level == 3).then_some(bytes)
    })
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn shared_cache() -> Option<u64> {
    None
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// Beside what Linux says of the same cache.
    #[test]
    #[expect(clippy::print_stderr, reason = "a skip must be visible")]
    fn the_shared_cache_has_the_size_that_the_kernel_knows() {
        let Some(bytes) = shared_cache() else {
            return eprintln!("skipped: the processor does not say how large its third cache is");
        };
        let Ok(size) = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size") else {
            return eprintln!("skipped: the kernel does not say how large the third cache is");
        };
        let kib: u64 = size.trim().trim_end_matches('K').parse().expect("a number of KiB");
        assert_eq!(bytes, kib << 10);
    }
}
