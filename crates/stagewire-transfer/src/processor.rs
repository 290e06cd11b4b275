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
