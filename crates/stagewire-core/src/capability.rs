use std::fmt;

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

/// A random 128-bit secret: who presents it may read the memory it was made for.
///
/// Compared in constant time and redacted in `Debug`, so it cannot leak through logs, explain or events.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Capability([u8; 16]);

impl Capability {
    /// Makes a capability from 16 random bytes; this crate has no source of randomness of its own.
    pub const fn from_random(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl PartialEq for Capability {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Capability {}

impl fmt::Debug for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Capability(redacted)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_hides_the_secret() {
        let shown = format!("{:?}", Capability::from_random([0xAB; 16]));
        assert_eq!(shown, "Capability(redacted)");
    }
}
