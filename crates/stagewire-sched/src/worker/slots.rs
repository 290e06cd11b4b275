use stagewire_core::Token;

use super::Slot;

/// The slots of a worker that are in use, by the token that uses them. They are few, and come and go with each attempt.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Slots(Vec<(Token, Slot)>);

impl Slots {
    /// What the token uses its slot for.
    pub fn get(&self, token: &Token) -> Option<&Slot> {
        self.find(token).ok().map(|at| &self.0[at].1)
    }

    /// Tokens and what they use their slots for, by token.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&Token, &Slot)> {
        self.0.iter().map(|(token, slot)| (token, slot))
    }

    /// What each is used for.
    pub fn values(&self) -> impl ExactSizeIterator<Item = &Slot> {
        self.0.iter().map(|(_, slot)| slot)
    }

    /// Number of slots in use.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether none is in use.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Uses a slot for the token, or frees it; returns what it was used for before.
    pub(super) fn set(&mut self, token: Token, slot: Option<Slot>) -> Option<Slot> {
        match (self.find(&token), slot) {
            (Ok(at), Some(slot)) => Some(std::mem::replace(&mut self.0[at].1, slot)),
            (Ok(at), None) => Some(self.0.remove(at).1),
            (Err(at), Some(slot)) => {
                self.0.insert(at, (token, slot));
                None
            }
            (Err(_), None) => None,
        }
    }

    fn find(&self, token: &Token) -> Result<usize, usize> {
        self.0.binary_search_by_key(token, |(token, _)| *token)
    }
}
