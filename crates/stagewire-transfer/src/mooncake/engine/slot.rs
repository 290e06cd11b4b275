//! The engine that transfers of this side use: replaced when it is stuck.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::registration::Member;
use super::{Engine, EngineError};

/// Makes another engine.
pub type Rebuild = Box<dyn Fn() -> Result<Arc<dyn Engine>, EngineError> + Send + Sync>;

pub(super) struct Slot {
    current: Mutex<Arc<Member>>,
    rebuild: Option<Rebuild>,
}

impl Slot {
    pub(super) fn new(first: Arc<Member>, rebuild: Option<Rebuild>) -> Self {
        Self {
            current: Mutex::new(first),
            rebuild,
        }
    }

    /// The engine to use now.
    pub(super) fn current(&self) -> Arc<Member> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces `stuck`, unless somebody did already. `Ok(false)` where nobody knows how to make another.
    pub(super) fn replace(&self, stuck: &Arc<Member>) -> Result<bool, EngineError> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if !Arc::ptr_eq(&current, stuck) {
            return Ok(true);
        }
        let Some(rebuild) = &self.rebuild else {
            return Ok(false);
        };
        *current = Member::new(rebuild()?);
        Ok(true)
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot")
            .field("current", &self.current())
            .field("rebuild", &self.rebuild.is_some())
            .finish()
    }
}
