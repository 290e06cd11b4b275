use super::root::Root;

/// What `/proc/self/status` says about the rights of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Rights {
    capabilities: Option<u64>,
    seccomp: Option<u32>,
}

/// Numbers of capabilities, from `linux/capability.h`.
pub(super) const CAP_IPC_LOCK: u32 = 14;
pub(super) const CAP_SYS_PTRACE: u32 = 19;

impl Rights {
    pub(super) fn of(root: &Root) -> Self {
        root.text("/proc/self/status")
            .map_or_else(Self::default, |text| Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let field = |name| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        Self {
            capabilities: field("CapEff:").and_then(|digits| u64::from_str_radix(digits, 16).ok()),
            seccomp: field("Seccomp:").and_then(|mode| mode.parse().ok()),
        }
    }

    /// Whether a capability is in effect; `None` where that cannot be told.
    pub(super) fn has(self, capability: u32) -> Option<bool> {
        self.capabilities.map(|bits| bits >> capability & 1 == 1)
    }

    /// Whether a seccomp filter looks at every system call.
    pub(super) fn filtered(self) -> bool {
        self.seccomp == Some(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_read() {
        let rights = Rights::parse("Name:\tx\nCapEff:\t0000000000084000\nSeccomp:\t2\nSeccomp_filters:\t1\n");
        assert_eq!(
            (rights.has(CAP_IPC_LOCK), rights.has(CAP_SYS_PTRACE)),
            (Some(true), Some(true))
        );
        assert_eq!(rights.has(0), Some(false));
        assert!(rights.filtered());
        assert_eq!(Rights::parse("").has(0), None);
    }
}
