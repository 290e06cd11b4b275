use std::fmt;

use stagewire_core::{ByteCount, PayloadId};

/// What an object in a store is doing with its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ObjectState {
    /// It is being written; nobody can read it.
    Draft,
    /// It is complete and can be read.
    Sealed,
    /// It is deleted, but somebody still reads it (or a copy into it still runs), so that its bytes are not free yet.
    Draining,
}

impl fmt::Display for ObjectState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Draft => "being written",
            Self::Sealed => "sealed",
            Self::Draining => "deleted but still read",
        })
    }
}

/// One object and the bytes that it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holding {
    /// The object.
    pub payload: PayloadId,
    /// Its bytes.
    pub nbytes: ByteCount,
    /// What it is doing with them.
    pub state: ObjectState,
}

/// Number and bytes of the objects in one state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Share {
    /// Objects.
    pub objects: u64,
    /// Their bytes.
    pub nbytes: ByteCount,
}

/// What holds the space of a store.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes that the store may hold.
    pub limit: ByteCount,
    /// Objects being written.
    pub drafts: Share,
    /// Objects that can be read.
    pub sealed: Share,
    /// Deleted objects whose bytes are not free yet.
    pub draining: Share,
    /// The largest holders, largest first, at most [`Usage::LARGEST`].
    pub largest: Vec<Holding>,
}

impl Usage {
    /// Length of [`Usage::largest`].
    pub const LARGEST: usize = 5;

    /// Sums up what `holdings` hold of `limit` bytes.
    pub fn of(limit: ByteCount, holdings: impl IntoIterator<Item = Holding>) -> Self {
        let mut usage = Self {
            limit,
            ..Self::default()
        };
        for holding in holdings {
            let share = match holding.state {
                ObjectState::Draft => &mut usage.drafts,
                ObjectState::Sealed => &mut usage.sealed,
                ObjectState::Draining => &mut usage.draining,
            };
            share.objects += 1;
            share.nbytes += holding.nbytes;
            usage.largest.push(holding);
        }
        usage
            .largest
            .sort_by_key(|holding| (std::cmp::Reverse(holding.nbytes), holding.payload));
        usage.largest.truncate(Self::LARGEST);
        usage
    }

    /// Bytes held, in whatever state.
    pub fn used(&self) -> ByteCount {
        self.drafts.nbytes + self.sealed.nbytes + self.draining.nbytes
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} held", self.used(), self.limit)?;
        let shares = [
            (ObjectState::Sealed, self.sealed),
            (ObjectState::Draft, self.drafts),
            (ObjectState::Draining, self.draining),
        ];
        for (state, share) in shares {
            if share.objects > 0 {
                write!(f, ", {} {state} ({})", share.objects, share.nbytes)?;
            }
        }
        for (rank, holding) in self.largest.iter().enumerate() {
            let lead = if rank == 0 { "; largest: " } else { ", " };
            write!(f, "{lead}{} ({}, {})", holding.payload, holding.nbytes, holding.state)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_says_what_holds_the_space() {
        let holding = |id: u128, nbytes, state| Holding {
            payload: format!("{id:032x}").parse().expect("an id"),
            nbytes: ByteCount(nbytes),
            state,
        };
        let usage = Usage::of(
            ByteCount(8 << 20),
            [
                holding(1, 1 << 20, ObjectState::Draft),
                holding(2, 2 << 20, ObjectState::Sealed),
                holding(3, 4 << 20, ObjectState::Draining),
            ],
        );
        assert_eq!(usage.used(), ByteCount(7 << 20));
        assert_eq!(usage.largest[0].state, ObjectState::Draining);
        let text = usage.to_string();
        assert!(
            text.starts_with("7.0 MiB of 8.0 MiB held, 1 sealed (2.0 MiB), 1 being written"),
            "{text}"
        );
        assert!(
            text.contains("largest: 00000000-0000-0000-0000-000000000003 (4.0 MiB, deleted but still read)"),
            "{text}"
        );
    }
}
