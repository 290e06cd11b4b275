//! After whatever has happened.

use super::*;

/// Steps in which every room ends where nobody is in its way. Most need some hundreds.
const STEPS: usize = 10_000;

impl World {
    /// Everything that goes on ends at its deadline, and one more room goes well though messages are still doubled and come
    /// late: no page and no reader of an old room is in its way.
    pub(super) fn settles(mut self, seed: u64) {
        self.lossy = false;
        let late = || Failure::new(ErrorClass::Deadline, "kv.deadline", "it took too long");
        for reader in &mut self.readers {
            reader.room.fail(late());
            reader.pulls.clear();
        }
        for cell in self.writers.iter().flat_map(|writer| writer.rooms.cells()) {
            cell.change(|room| {
                room.fail(late());
                room.cut_off();
            });
        }
        // That no attempt has asked for before.
        self.life += 2;
        for at in 0..self.writers.len() {
            self.opens(at);
            let newest = self.writers[at].opened.last().map(|(cell, _)| cell.id().life);
            assert_eq!(newest, Some(self.life), "seed {seed}: no pages are free");
        }
        for at in 0..self.readers.len() {
            self.begins(at, self.life);
        }
        for _ in 0..STEPS {
            match self.dice.below(8) {
                0 => self.prefill_sends(),
                1 => self.decode_acts(),
                _ => self.network_delivers(),
            }
            self.copies_go_on();
            if self.readers.iter().all(|reader| reader.room.phase() == Phase::Success) {
                return;
            }
        }
        let phases: Vec<Phase> = self.readers.iter().map(|reader| reader.room.phase()).collect();
        panic!("seed {seed}: {phases:?}");
    }
}
