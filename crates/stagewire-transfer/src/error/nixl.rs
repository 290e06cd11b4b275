use std::path::PathBuf;
use std::time::Duration;

use stagewire_core::{Classify, ErrorClass};

/// Why NIXL cannot be used by this process.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum NixlUnavailable {
    #[error(
        "libnixl_capi.so was not found; install the wheel nixl-cu12 (`pip install --no-deps nixl-cu12`), or name the \
         library in NIXL_CAPI_LIB; looked for: {}", searched.join(", ")
    )]
    NotFound { searched: Vec<String> },
    #[error("{} does not load: {problem}", path.display())]
    Load { path: PathBuf, problem: String },
    #[error("{} has no function {symbol}: it is not NIXL's C interface, or one of a version that is too old", path.display())]
    Symbol { path: PathBuf, symbol: &'static str },
    #[error(
        "this process uses {} already and cannot use {} besides: two versions of NIXL in one process corrupt each other",
        loaded.display(), path.display()
    )]
    Mixed { path: PathBuf, loaded: PathBuf },
    #[error("NIXL {version} cannot {what}: {problem}; NIXL_LOG_LEVEL=DEBUG and UCX_LOG_LEVEL=info show more")]
    Agent {
        version: String,
        what: &'static str,
        problem: String,
    },
    #[error("NIXL made no agent within {after:?}; UCX may be looking for devices that do not answer")]
    Late { after: Duration },
    #[error("this network has NIXL already; use the transport that the first start gave")]
    Running,
    #[error("this process is shutting down")]
    ShutDown,
}

impl Classify for NixlUnavailable {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NotFound { .. } | Self::Load { .. } | Self::Symbol { .. } => ErrorClass::Unsupported,
            Self::Mixed { .. } | Self::Running => ErrorClass::Conflict,
            Self::Agent { .. } | Self::ShutDown => ErrorClass::Unavailable,
            Self::Late { .. } => ErrorClass::Deadline,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "nixl.not_found",
            Self::Load { .. } => "nixl.load",
            Self::Symbol { .. } => "nixl.symbol",
            Self::Mixed { .. } => "nixl.mixed",
            Self::Agent { .. } => "nixl.agent",
            Self::Late { .. } => "nixl.late",
            Self::Running => "nixl.running",
            Self::ShutDown => "nixl.shut_down",
        }
    }
}
