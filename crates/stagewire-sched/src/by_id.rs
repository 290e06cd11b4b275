use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use stagewire_core::{Incarnation, JobId};

/// An id that is a UUID.
pub(crate) trait Id: Copy {
    /// Sorts as the id does.
    fn number(self) -> u128;
}

impl Id for JobId {
    fn number(self) -> u128 {
        self.0.as_u128()
    }
}

impl Id for Incarnation {
    fn number(self) -> u128 {
        self.0.as_u128()
    }
}

/// A sorted map whose nodes hold no more than numbers and pointers: looking something up touches little memory, however
/// large what it holds is.
#[derive(Clone)]
pub(crate) struct ById<I, T> {
    map: BTreeMap<u128, Box<T>>,
    id: PhantomData<I>,
}

impl<I: Id, T> ById<I, T> {
    pub(crate) const fn new() -> Self {
        Self {
            map: BTreeMap::new(),
            id: PhantomData,
        }
    }

    pub(crate) fn get(&self, id: &I) -> Option<&T> {
        self.map.get(&id.number()).map(|found| &**found)
    }

    pub(crate) fn get_mut(&mut self, id: &I) -> Option<&mut T> {
        self.map.get_mut(&id.number()).map(|found| &mut **found)
    }

    pub(crate) fn contains_key(&self, id: &I) -> bool {
        self.map.contains_key(&id.number())
    }

    pub(crate) fn insert(&mut self, id: I, value: T) {
        self.map.insert(id.number(), Box::new(value));
    }

    pub(crate) fn remove(&mut self, id: &I) -> Option<T> {
        self.map.remove(&id.number()).map(|found| *found)
    }

    pub(crate) fn values(&self) -> impl DoubleEndedIterator<Item = &T> {
        self.map.values().map(|value| &**value)
    }
}

impl<I, T: fmt::Debug> fmt::Debug for ById<I, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.map.values()).finish()
    }
}
