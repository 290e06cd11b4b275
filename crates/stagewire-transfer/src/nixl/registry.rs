//! The owner's side: memory that is registered with NIXL, and who may still reach it.
//!
//! NIXL checks neither generations nor lifetimes: whoever has loaded the metadata of a registration can read and write
//! there after its end, and where that memory is no longer mapped, the owner's process dies of it. So a session that
//! fetched the metadata counts as a holder until it said that it forgot them, or ended for good. Only then is the memory
//! deregistered and given back.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::agent::{Agent, NixlError, Space, Span};
use crate::Memory;

/// All registrations of this process.
pub(super) struct Registry {
    /// `None` only while this is dropped.
    agent: Mutex<Option<Agent>>,
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    registrations: HashMap<u64, Registration>,
    next: u64,
}

struct Registration {
    span: Span,
    metadata: Vec<u8>,
    memory: Memory,
    /// Its region is gone.
    ended: bool,
    /// Pins of each session.
    pins: HashMap<u128, u64>,
    /// Sessions that may have loaded the metadata.
    holders: HashSet<u128>,
}

/// Why memory was not registered.
#[derive(Debug)]
pub(super) enum NotRegistered {
    Nixl(NixlError),
    /// A peer may still write these bytes, by what it knows of an earlier region.
    Quarantined,
}

impl Registry {
    pub(super) fn new(agent: Agent) -> Self {
        Self {
            agent: Mutex::new(Some(agent)),
            books: Mutex::default(),
        }
    }

    /// Registers memory, and gives the number of the registration.
    pub(super) fn register(&self, memory: &Memory, space: Space) -> Result<u64, NotRegistered> {
        let mut span = Span {
            space,
            number: 0,
            address: memory.as_ptr().addr().get() as u64,
            len: memory.len(),
        };
        {
            let mut books = lock(&self.books);
            if books.may_be_written(&span) {
                return Err(NotRegistered::Quarantined);
            }
            books.next += 1;
            span.number = books.next;
        }
        let metadata = self.with_agent(|agent| {
            // SAFETY: the books keep the memory until it is deregistered.
            unsafe { agent.register(&span) }?;
            agent.metadata(Some(&span)).inspect_err(|_| {
                // Nobody knows of it yet. A second error says nothing that the first does not.
                let _ = agent.deregister(&span);
            })
        });
        let registration = Registration {
            span,
            metadata: metadata.map_err(NotRegistered::Nixl)?,
            memory: memory.clone(),
            ended: false,
            pins: HashMap::new(),
            holders: HashSet::new(),
        };
        lock(&self.books).registrations.insert(span.number, registration);
        Ok(span.number)
    }

    /// The region is gone: the memory goes when nobody holds its metadata.
    pub(super) fn end(&self, number: u64) {
        self.change([number], |registration| registration.ended = true);
    }

    /// A session was granted a pin, or let go of one.
    pub(super) fn pinned(&self, session: u128, number: u64) {
        self.change([number], |registration| {
            *registration.pins.entry(session).or_default() += 1;
        });
    }

    pub(super) fn unpinned(&self, session: u128, number: u64) {
        self.change([number], |registration| {
            if let Some(pins) = registration.pins.get_mut(&session) {
                *pins -= 1;
                if *pins == 0 {
                    registration.pins.remove(&session);
                }
            }
        });
    }

    /// What a session needs to reach memory that it has pinned. From now on it is a holder.
    ///
    /// # Errors
    /// What it does wrong.
    pub(super) fn hold(&self, session: u128, number: u64) -> Result<(Span, Vec<u8>), String> {
        let mut books = lock(&self.books);
        let registration = books.registrations.get_mut(&number);
        let pinned = registration.filter(|registration| registration.pins.contains_key(&session));
        let registration = pinned.ok_or_else(|| format!("this session has no pin on registration {number}"))?;
        registration.holders.insert(session);
        Ok((registration.span, registration.metadata.clone()))
    }

    /// Those of the registrations whose region is gone.
    pub(super) fn ended(&self, numbers: &[u64]) -> Vec<u64> {
        let books = lock(&self.books);
        let ended = |number: &u64| books.registrations.get(number).is_none_or(|found| found.ended);
        numbers.iter().copied().filter(ended).collect()
    }

    /// A session has forgotten the metadata of these.
    pub(super) fn forgotten(&self, session: u128, numbers: &[u64]) {
        self.change(numbers.iter().copied(), |registration| {
            registration.holders.remove(&session);
        });
    }

    /// Whether a session may have loaded metadata.
    pub(super) fn is_holder(&self, session: u128) -> bool {
        lock(&self.books)
            .registrations
            .values()
            .any(|registration| registration.holders.contains(&session))
    }

    /// A session is over for good.
    pub(super) fn cut_off(&self, session: u128) {
        self.cut_off_from(session, |_| true);
    }

    /// A session is over for good, except that what it wrote may still arrive.
    pub(super) fn cut_off_from_reading(&self, session: u128) {
        self.cut_off_from(session, |memory| !memory.is_writable());
    }

    fn cut_off_from(&self, session: u128, which: impl Fn(&Memory) -> bool) {
        let numbers: Vec<u64> = lock(&self.books).registrations.keys().copied().collect();
        self.change(numbers, |registration| {
            if which(&registration.memory) {
                registration.pins.remove(&session);
                registration.holders.remove(&session);
            }
        });
    }

    /// Registrations, those included whose region is gone and whose metadata a peer may still have.
    pub(super) fn len(&self) -> u64 {
        lock(&self.books).registrations.len() as u64
    }

    /// Changes registrations, and ends those that nobody has any more.
    fn change(&self, numbers: impl IntoIterator<Item = u64>, mut change: impl FnMut(&mut Registration)) {
        let mut gone = Vec::new();
        {
            let mut books = lock(&self.books);
            for number in numbers {
                let Some(registration) = books.registrations.get_mut(&number) else {
                    continue;
                };
                change(registration);
                if registration.ended && registration.holders.is_empty() {
                    gone.extend(books.registrations.remove(&number));
                }
            }
        }
        // Not under the lock of the books: the owner of memory may do anything when dropped.
        for registration in gone {
            if let Err(error) = self.with_agent(|agent| agent.deregister(&registration.span)) {
                tracing::warn!(%error, "memory is kept for ever, because NIXL does not end its registration");
                mem::forget(registration.memory);
            }
        }
    }

    fn with_agent<T>(&self, call: impl FnOnce(&Agent) -> T) -> T {
        call(lock(&self.agent).as_ref().expect("taken out only when this is dropped"))
    }
}

impl Books {
    /// Whether a peer may write some of these bytes by what it knows of a region that is gone.
    fn may_be_written(&self, span: &Span) -> bool {
        self.registrations.values().any(
            |Registration {
                 span: other,
                 ended,
                 memory,
                 ..
             }| {
                *ended
                    && memory.is_writable()
                    && other.space == span.space
                    && other.address < span.address.saturating_add(span.len)
                    && span.address < other.address.saturating_add(other.len)
            },
        )
    }
}

impl Drop for Registry {
    /// Where a peer may still reach memory, it stays mapped and registered for ever, rather than too short.
    fn drop(&mut self) {
        let books = self.books.get_mut().unwrap_or_else(PoisonError::into_inner);
        let agent = self.agent.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if books
            .registrations
            .values()
            .any(|registration| !registration.holders.is_empty())
        {
            mem::forget(agent);
            mem::forget(mem::take(&mut books.registrations));
        } else {
            // Ends all registrations, before the memory goes.
            drop(agent);
        }
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registry({} registrations)", self.len())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
