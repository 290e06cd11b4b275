use serde::{Deserialize, Serialize};

/// Where a worker is, as far as that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Place {
    /// A number that stands for the host: workers of one host have the same, others another one.
    pub host: Option<u64>,
    /// The NUMA node of the host.
    pub numa: Option<u32>,
    /// The rail of the network: between hosts, workers on one rail are closer than others.
    pub rail: Option<u32>,
}

impl Place {
    /// Steps between places that have nothing in common.
    pub const MOST_STEPS: u32 = 3;

    /// How far apart two places are: 0 steps on one NUMA node, 1 on one host, 2 on one rail, 3 otherwise. Where no NUMA
    /// node is known, a host counts as one. `None` where a host is not known.
    pub fn steps(self, other: Self) -> Option<u32> {
        let one = |a: Option<u32>, b: Option<u32>| a.zip(b).map(|(a, b)| a == b);
        if self.host? == other.host? {
            Some(u32::from(one(self.numa, other.numa) == Some(false)))
        } else if one(self.rail, other.rail) == Some(true) {
            Some(2)
        } else {
            Some(Self::MOST_STEPS)
        }
    }
}
