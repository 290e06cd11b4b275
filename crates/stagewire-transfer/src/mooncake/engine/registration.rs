//! What is registered with an engine: each byte once, counted.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Engine, EngineError, EngineMemory};

/// An engine and the memory registered with it.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) engine: Arc<dyn Engine>,
    /// By first address. Held while the engine is called, so that its books and these agree.
    ranges: Mutex<BTreeMap<u64, Range>>,
}

#[derive(Debug)]
struct Range {
    len: u64,
    users: usize,
}

/// One use of registered memory. Dropped, it may call the engine.
#[derive(Debug)]
pub(super) struct Registration {
    /// Taken when it ends.
    member: Option<Arc<Member>>,
    start: u64,
}

impl Member {
    pub(super) fn new(engine: Arc<dyn Engine>) -> Arc<Self> {
        Arc::new(Self {
            engine,
            ranges: Mutex::default(),
        })
    }

    /// Has memory registered. What lies inside a range that is registered already shares it.
    pub(super) fn register(self: &Arc<Self>, memory: EngineMemory) -> Result<Registration, EngineError> {
        let EngineMemory { address, len, .. } = memory;
        let mut ranges = self.lock();
        let before = ranges.range_mut(..=address).next_back();
        let enclosing =
            before.filter(|(start, range)| address - *start <= range.len && len <= range.len - (address - *start));
        let start = match enclosing {
            Some((&start, range)) => {
                range.users += 1;
                start
            }
            None => {
                self.engine.register(memory)?;
                ranges.insert(address, Range { len, users: 1 });
                address
            }
        };
        Ok(Registration {
            member: Some(self.clone()),
            start,
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Range>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registration {
    /// Ends it. False where the engine was to forget the memory and did not.
    pub(super) fn end(mut self) -> bool {
        self.leave()
    }

    fn leave(&mut self) -> bool {
        let Some(member) = self.member.take() else {
            return true;
        };
        let mut ranges = member.lock();
        let Some(range) = ranges.get_mut(&self.start) else {
            return true;
        };
        range.users -= 1;
        if range.users > 0 {
            return true;
        }
        let ended = member.engine.unregister(self.start);
        if let Err(error) = &ended {
            tracing::warn!(%error, address = self.start, "an engine does not let go of memory");
        }
        ranges.remove(&self.start);
        ended.is_ok()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::Device;

    use super::super::fake::Fake;
    use super::*;

    fn memory(address: u64, len: u64) -> EngineMemory {
        EngineMemory {
            address,
            len,
            device: Device::Cpu,
        }
    }

    #[test]
    fn each_byte_is_registered_once() {
        let fake = Arc::new(Fake::default());
        let member = Member::new(fake.clone());
        let whole = member.register(memory(100, 100)).expect("registered");
        let inside = member.register(memory(150, 50)).expect("shared");
        let beyond = member.register(memory(200, 1)).expect("registered");
        assert_eq!(fake.calls(), ["register 100+100", "register 200+1"]);
        assert!(whole.end());
        assert_eq!(fake.calls().len(), 2, "unregistered while part of it is in use");
        drop(inside);
        drop(beyond);
        assert_eq!(fake.calls()[2..], ["unregister 100", "unregister 200"]);
        drop(member.register(memory(150, 100)).expect("registered anew"));
        assert_eq!(fake.calls()[4..], ["register 150+100", "unregister 150"]);
    }
}
