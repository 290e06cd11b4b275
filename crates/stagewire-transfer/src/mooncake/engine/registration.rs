//! What is registered with an engine: each byte once, counted.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Engine, EngineError, EngineMemory};

/// How long memory waits for what overlaps it to be unregistered. Then the engine says itself what it thinks of it.
const PATIENCE: Duration = Duration::from_secs(5);

/// An engine and the memory registered with it.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) engine: Arc<dyn Engine>,
    /// By first address. Held while the engine is called, so that its books and these agree.
    ranges: Mutex<BTreeMap<u64, Range>>,
    /// First addresses and lengths of what nobody needs any more and somebody is about to unregister.
    leaving: Mutex<Vec<(u64, u64)>>,
    left: Condvar,
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
    /// Of the whole range.
    len: u64,
    is_leaving: bool,
}

impl Member {
    pub(super) fn new(engine: Arc<dyn Engine>) -> Arc<Self> {
        Arc::new(Self {
            engine,
            ranges: Mutex::default(),
            leaving: Mutex::default(),
            left: Condvar::new(),
        })
    }

    /// Has memory registered. What lies inside a range that is registered already shares it; what overlaps one that is
    /// about to be unregistered waits for that.
    pub(super) fn register(self: &Arc<Self>, memory: EngineMemory) -> Result<Registration, EngineError> {
        let EngineMemory { address, len, .. } = memory;
        self.wait_for_leaving(address, len);
        let mut ranges = self.lock();
        let before = ranges.range_mut(..=address).next_back();
        let enclosing =
            before.filter(|(start, range)| address - *start <= range.len && len <= range.len - (address - *start));
        let (start, len) = match enclosing {
            Some((&start, range)) => {
                range.users += 1;
                (start, range.len)
            }
            None => {
                self.engine.register(memory)?;
                ranges.insert(address, Range { len, users: 1 });
                (address, len)
            }
        };
        Ok(Registration {
            member: Some(self.clone()),
            start,
            len,
            is_leaving: false,
        })
    }

    fn wait_for_leaving(&self, address: u64, len: u64) {
        let overlaps =
            |&(start, its): &(u64, u64)| start < address.saturating_add(len) && address < start.saturating_add(its);
        let waited = self
            .left
            .wait_timeout_while(self.leaving(), PATIENCE, |leaving| leaving.iter().any(overlaps));
        drop(waited);
    }

    fn leaving(&self) -> MutexGuard<'_, Vec<(u64, u64)>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Range>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registration {
    /// Says that it will be ended soon, without calling the engine.
    pub(super) fn leaving(&mut self) {
        if let Some(member) = &self.member
            && !std::mem::replace(&mut self.is_leaving, true)
        {
            member.leaving().push((self.start, self.len));
        }
    }

    /// Ends it. False where the engine was to forget the memory and did not.
    pub(super) fn end(mut self) -> bool {
        self.leave()
    }

    fn leave(&mut self) -> bool {
        let Some(member) = self.member.take() else {
            return true;
        };
        let ended = self.leave_engine(&member);
        if self.is_leaving {
            let mut leaving = member.leaving();
            if let Some(at) = leaving.iter().position(|range| *range == (self.start, self.len)) {
                leaving.swap_remove(at);
            }
            drop(leaving);
            member.left.notify_all();
        }
        ended
    }

    fn leave_engine(&self, member: &Member) -> bool {
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

    #[test]
    fn what_overlaps_memory_about_to_be_unregistered_waits_for_it() {
        let fake = Arc::new(Fake::default());
        let member = Member::new(fake.clone());
        let mut old = member.register(memory(100, 100)).expect("registered");
        old.leaving();
        let elsewhere = member.register(memory(200, 100)).expect("it waits for nothing");
        let (started, starts) = std::sync::mpsc::channel();
        let other = member.clone();
        let waiting = std::thread::spawn(move || {
            started.send(()).expect("somebody listens");
            other.register(memory(50, 100)).map(Registration::end)
        });
        starts.recv().expect("started");
        std::thread::sleep(Duration::from_millis(50));
        assert!(old.end());
        assert_eq!(waiting.join().expect("no panic"), Ok(true));
        assert_eq!(
            fake.calls(),
            [
                "register 100+100",
                "register 200+100",
                "unregister 100",
                "register 50+100",
                "unregister 50"
            ]
        );
        drop(elsewhere);
    }
}
