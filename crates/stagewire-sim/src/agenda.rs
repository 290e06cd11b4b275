use std::collections::BTreeMap;

use stagewire_core::Timestamp;

/// What will happen, in order of time; of what happens at the same time, what was put in first comes first.
#[derive(Debug, Clone)]
pub struct Agenda<T> {
    entries: BTreeMap<(Timestamp, u64), T>,
    sequence: u64,
}

impl<T> Default for Agenda<T> {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
            sequence: 0,
        }
    }
}

impl<T> Agenda<T> {
    /// Puts something in. Returns what takes it out again.
    pub fn put(&mut self, at: Timestamp, entry: T) -> Appointment {
        let key = (at, self.sequence);
        self.sequence += 1;
        self.entries.insert(key, entry);
        Appointment(key)
    }

    /// Takes out what will not happen. `None` where it has.
    pub fn cancel(&mut self, appointment: Appointment) -> Option<T> {
        self.entries.remove(&appointment.0)
    }

    /// Takes the next thing, with its time.
    pub fn pop(&mut self) -> Option<(Timestamp, T)> {
        let ((at, _), entry) = self.entries.pop_first()?;
        Some((at, entry))
    }
}

/// One entry of an [`Agenda`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Appointment((Timestamp, u64));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_orders_and_then_the_order_of_entry() {
        let mut agenda = Agenda::default();
        let late = agenda.put(Timestamp(9), "late");
        agenda.put(Timestamp(5), "first");
        agenda.put(Timestamp(5), "second");
        assert_eq!(agenda.cancel(late), Some("late"));
        assert_eq!(agenda.cancel(late), None);
        assert_eq!(agenda.pop(), Some((Timestamp(5), "first")));
        assert_eq!(agenda.pop(), Some((Timestamp(5), "second")));
        assert_eq!(agenda.pop(), None);
    }
}
