use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use super::Operation;
use crate::TransferError;

/// What goes wrong with one operation.
#[derive(Clone)]
#[non_exhaustive]
pub enum Mishap {
    /// No answer ever comes: the operation ends with its deadline, or with the peer. A mapping has no deadline.
    Drop,
    /// It begins later; its deadline does not.
    Delay(Duration),
    /// It is done twice. The copy of a pull goes to memory that is thrown away.
    Duplicate,
    /// The first bytes of the batch are copied, in the order of its records, then the connection breaks: an error of
    /// class Unavailable, for a push [`TransferError::InDoubt`]. A pin or mapping is granted, then lost.
    Cut {
        /// Bytes that are copied; all, if the batch has no more.
        after: u64,
    },
    /// One bit of this byte of the batch, in the order of its records, arrives changed, and the operation succeeds. The
    /// byte is counted modulo the bytes of the batch. What is mapped is then a private copy. For a pin, a bit of the
    /// region's number in the request.
    Corrupt {
        /// Which byte.
        byte: u64,
    },
    /// It fails with an error of the caller's, and nothing is done. Made by [`Mishap::fail`].
    Fail(FailWith),
}

impl Mishap {
    /// The operation fails with the error that this function makes.
    pub fn fail(error: impl Fn() -> TransferError + Send + Sync + 'static) -> Self {
        Self::Fail(FailWith(Arc::new(error)))
    }
}

/// Makes the error of [`Mishap::Fail`].
#[derive(Clone)]
pub struct FailWith(Arc<dyn Fn() -> TransferError + Send + Sync>);

impl FailWith {
    pub(super) fn error(&self) -> TransferError {
        (self.0)()
    }
}

impl fmt::Debug for FailWith {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.error())
    }
}

impl fmt::Debug for Mishap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drop => f.write_str("Drop"),
            Self::Delay(by) => write!(f, "Delay({by:?})"),
            Self::Duplicate => f.write_str("Duplicate"),
            Self::Cut { after } => write!(f, "Cut {{ after: {after} }}"),
            Self::Corrupt { byte } => write!(f, "Corrupt {{ byte: {byte} }}"),
            Self::Fail(with) => write!(f, "Fail({with:?})"),
        }
    }
}

/// Which operations go wrong, and how. The default lets all of them pass.
///
/// The same plan and the same order of calls give the same mishaps.
///
/// ```
/// use std::num::NonZeroU64;
/// use std::time::Duration;
///
/// use stagewire_transfer::decorate::{FaultPlan, Mishap, Operation};
///
/// // The third pin is late, and of the transfers about every tenth gets lost or arrives changed.
/// let plan = FaultPlan::new()
///     .at(Operation::Pin, 3, Mishap::Delay(Duration::from_millis(20)))
///     .seeded(42, NonZeroU64::new(10).expect("not 0"), vec![Mishap::Drop, Mishap::Corrupt { byte: 0 }]);
/// # let _ = plan;
/// ```
#[derive(Debug, Clone, Default)]
pub struct FaultPlan {
    at: BTreeMap<(Operation, u64), Mishap>,
    seeded: Option<Seeded>,
}

#[derive(Debug, Clone)]
struct Seeded {
    seed: u64,
    one_in: NonZeroU64,
    mishaps: Vec<Mishap>,
}

impl FaultPlan {
    /// Nothing goes wrong.
    pub fn new() -> Self {
        Self::default()
    }

    /// The nth operation of this kind goes wrong, counted from 1. [`Operation::Register`] and [`Operation::Connect`]
    /// never do.
    #[must_use]
    pub fn at(mut self, operation: Operation, nth: u64, mishap: Mishap) -> Self {
        self.at.insert((operation, nth), mishap);
        self
    }

    /// About one in so many pulls and pushes goes wrong, in one of these ways; which and how follows from the seed, the
    /// kind of operation and its number alone. What [`FaultPlan::at`] says goes first.
    #[must_use]
    pub fn seeded(mut self, seed: u64, one_in: NonZeroU64, mishaps: Vec<Mishap>) -> Self {
        self.seeded = Some(Seeded { seed, one_in, mishaps });
        self
    }

    pub(super) fn mishap(&self, operation: Operation, nth: u64) -> Option<&Mishap> {
        if let Some(mishap) = self.at.get(&(operation, nth)) {
            return Some(mishap);
        }
        let Seeded { seed, one_in, mishaps } = self.seeded.as_ref()?;
        let stream = match operation {
            Operation::Pull => 1,
            Operation::Push => 2,
            _ => return None,
        };
        let drawn = mix(mix(seed ^ mix(stream)) ^ nth);
        let hit = drawn.is_multiple_of(one_in.get());
        let which = (drawn / one_in.get()).checked_rem(mishaps.len() as u64)?;
        mishaps.get(usize::try_from(which).ok()?).filter(|_| hit)
    }
}

/// The output function of SplitMix64: spreads consecutive numbers over all.
fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_names_the_same_mishaps_every_time() {
        let plan = |seed| {
            let mishaps = vec![Mishap::Drop, Mishap::Duplicate, Mishap::Cut { after: 3 }];
            FaultPlan::new().seeded(seed, NonZeroU64::new(8).expect("not 0"), mishaps)
        };
        let drawn = |plan: &FaultPlan| -> Vec<String> {
            let transfers = (1..=800).flat_map(|nth| [(Operation::Pull, nth), (Operation::Push, nth)]);
            transfers
                .map(|(operation, nth)| format!("{:?}", plan.mishap(operation, nth)))
                .collect()
        };
        let first = drawn(&plan(1));
        assert_eq!(first, drawn(&plan(1)));
        assert_ne!(first, drawn(&plan(2)));
        let hits = first.iter().filter(|mishap| *mishap != "None").count();
        assert!((120..280).contains(&hits), "{hits} of 1600 with one in 8");
        for kind in ["Drop", "Duplicate", "Cut"] {
            let of_kind = first.iter().filter(|mishap| mishap.contains(kind)).count();
            assert!(of_kind > hits / 5, "{of_kind} of {hits} are {kind}");
        }
        assert!(plan(1).mishap(Operation::Pin, 1).is_none());
    }

    #[test]
    fn what_is_named_goes_before_what_is_drawn() {
        let always = NonZeroU64::new(1).expect("not 0");
        let plan = FaultPlan::new()
            .seeded(0, always, vec![Mishap::Drop])
            .at(Operation::Pull, 2, Mishap::Duplicate);
        assert!(matches!(plan.mishap(Operation::Pull, 1), Some(Mishap::Drop)));
        assert!(matches!(plan.mishap(Operation::Pull, 2), Some(Mishap::Duplicate)));
        let nothing = FaultPlan::new().seeded(0, always, Vec::new());
        assert!(nothing.mishap(Operation::Pull, 1).is_none());
    }
}
