use stagewire_core::{Classify, ErrorClass};

/// Why this process cannot read the memory of others with `process_vm_readv`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cross-memory attach does not work here: {why}")]
pub struct CmaUnavailable {
    why: String,
}

impl CmaUnavailable {
    pub(crate) fn new(why: String) -> Self {
        Self { why }
    }

    /// What forbids it, and what to change.
    pub fn why(&self) -> &str {
        &self.why
    }
}

impl Classify for CmaUnavailable {
    fn class(&self) -> ErrorClass {
        ErrorClass::Unsupported
    }

    fn reason(&self) -> &'static str {
        "cma.unavailable"
    }
}
