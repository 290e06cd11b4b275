//! A receiver's room as a state machine: no I/O, no clock.

use std::collections::{BTreeMap, BTreeSet};

use stagewire_core::{ErrorClass, Failure};

use super::Phase;
use super::outgoing::restarted;
use super::protocol::{RoomState, Seen};

/// What a receiver's room knows and still needs.
#[derive(Debug, Clone)]
pub(super) struct Incoming {
    room: u64,
    seq_len: u64,
    writers: BTreeMap<u32, Writer>,
    failure: Option<Failure>,
    /// Prefill said so.
    told: bool,
}

/// What comes from one of prefill's ranks.
#[derive(Debug, Clone, Default)]
pub(super) struct Needs {
    /// Components that come chunk by chunk, with the tokens of each that are here already.
    pub(super) chunked: BTreeMap<u32, u64>,
    /// Components that come with the last chunk.
    pub(super) at_last: BTreeSet<u32>,
}

#[derive(Debug, Clone)]
struct Writer {
    needs: Needs,
    state: Option<RoomState>,
    /// (chunk, component) that have come.
    taken: BTreeSet<(u32, u32)>,
    confirmed: bool,
}

/// What a receiver does next with one writer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing, until it is told more.
    Wait,
    Pull(Part),
    /// All of it has come: ask whether it counts.
    Confirm {
        generation: u64,
    },
    /// Nothing any more.
    Over,
}

/// Components of one chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) chunk: u32,
    pub(super) components: Vec<u32>,
    /// `None` where they come once for the whole sequence.
    pub(super) tokens: Option<(u64, u64)>,
}

impl Incoming {
    pub(super) fn new(room: u64, seq_len: u64, writers: BTreeMap<u32, Needs>) -> Self {
        let writer = |needs| Writer {
            needs,
            state: None,
            taken: BTreeSet::new(),
            confirmed: false,
        };
        Self {
            room,
            seq_len,
            writers: writers.into_iter().map(|(rank, needs)| (rank, writer(needs))).collect(),
            failure: None,
            told: false,
        }
    }

    /// Whether it was prefill that ended it.
    pub(super) fn is_told(&self) -> bool {
        self.told
    }

    /// Ends the room, unless it has ended, as prefill says.
    pub(super) fn told(&mut self, failure: Failure) {
        self.told |= !self.phase().is_terminal();
        self.fail(failure);
    }

    /// What was seen of a writer's room.
    pub(super) fn seen(&self, rank: u32) -> Option<Seen> {
        Some(self.writers.get(&rank)?.state.as_ref()?.seen)
    }

    /// Page tables of the source.
    pub(super) fn tables(&self, rank: u32) -> Option<&[Vec<i64>]> {
        Some(&self.writers.get(&rank)?.state.as_ref()?.tables)
    }

    /// What goes along: that of the first writer which has any.
    pub(super) fn aux(&self) -> Option<&[u8]> {
        let states = self.writers.values().filter_map(|writer| writer.state.as_ref());
        states.filter_map(|state| state.aux.as_deref()).next()
    }

    /// Hears of a writer's room. What is older than what is known, or known, changes nothing.
    pub(super) fn heard(&mut self, rank: u32, state: RoomState) {
        let (room, seq_len) = (self.room, self.seq_len);
        let Some(writer) = self.writers.get_mut(&rank) else {
            return;
        };
        let here = |failure: Failure| {
            let message = format!("room {room}, rank {rank} of prefill: {}", failure.message);
            let failure = Failure { message, ..failure };
            failure.with("room", room).with("src_rank", rank)
        };
        let failure = match &writer.state {
            Some(known) if known.seen.generation != state.seen.generation => {
                // Confirmed bytes are here for good, whatever becomes of the room there.
                (!writer.confirmed).then(|| restarted(room, known.seen.generation, state.seen.generation))
            }
            Some(known) if state.seen.version <= known.seen.version => return,
            _ => state.failure.clone().filter(|_| !writer.confirmed),
        };
        if let Some(failure) = failure {
            self.told(failure);
            return;
        }
        if writer.confirmed {
            return;
        }
        let begins = state.bounds.first().copied();
        let missing = writer.needs.chunked.iter().find(|(_, prefix)| begins > Some(**prefix));
        let failure = if state.seq_len != seq_len {
            let theirs = state.seq_len;
            let problem = format!("the sequence has {theirs} tokens there, and {seq_len} here");
            let failure = Failure::new(ErrorClass::Invalid, "kv.seq_len", problem);
            Some(here(failure).with("prefill", theirs).with("decode", seq_len))
        } else if let (Some((component, prefix)), Some(begins)) = (missing, begins) {
            let problem = format!(
                "the first chunk begins at token {begins}, and of component {component} only {prefix} tokens are here"
            );
            let failure = Failure::new(ErrorClass::Invalid, "kv.missing_tokens", problem);
            Some(here(failure).with("begins", begins).with("prefix", prefix))
        } else {
            let problem = flaw(&state, writer.state.as_ref());
            problem.map(|problem| here(Failure::new(ErrorClass::Corrupt, "protocol.malformed", problem)))
        };
        match failure {
            Some(failure) => self.fail(failure),
            None => writer.state = Some(state),
        }
    }

    /// What to do next with a writer.
    pub(super) fn step(&self, rank: u32) -> Step {
        let Some(writer) = self.writers.get(&rank) else {
            return Step::Over;
        };
        if self.failure.is_some() || writer.confirmed {
            return Step::Over;
        }
        let Some(state) = &writer.state else {
            return Step::Wait;
        };
        for (chunk, tokens) in (0..).zip(state.chunks()) {
            let missing = |components: &mut dyn Iterator<Item = u32>| -> Vec<u32> {
                components
                    .filter(|&component| !writer.taken.contains(&(chunk, component)))
                    .collect()
            };
            let components = missing(&mut writer.needs.chunked.keys().copied());
            if !components.is_empty() {
                let tokens = Some(tokens);
                return Step::Pull(Part {
                    chunk,
                    components,
                    tokens,
                });
            }
            if state.last && chunk as usize + 2 == state.bounds.len() {
                let components = missing(&mut writer.needs.at_last.iter().copied());
                if !components.is_empty() {
                    return Step::Pull(Part {
                        chunk,
                        components,
                        tokens: None,
                    });
                }
            }
        }
        if state.last {
            let generation = state.seen.generation;
            Step::Confirm { generation }
        } else {
            Step::Wait
        }
    }

    /// All bytes of a part have come.
    pub(super) fn taken(&mut self, rank: u32, part: &Part) {
        if let Some(writer) = self.writers.get_mut(&rank) {
            let parts = part.components.iter().map(|&component| (part.chunk, component));
            writer.taken.extend(parts);
        }
    }

    /// The writer says that its pages were kept until after the last byte had come. An answer to a question that another
    /// room of this number had asked is none.
    pub(super) fn confirmed(&mut self, rank: u32, generation: u64) {
        if self.step(rank) == (Step::Confirm { generation })
            && let Some(writer) = self.writers.get_mut(&rank)
        {
            writer.confirmed = true;
        }
    }

    /// Ends the room, unless it has ended.
    pub(super) fn fail(&mut self, failure: Failure) {
        if !self.phase().is_terminal() {
            self.failure = Some(failure);
        }
    }

    pub(super) fn phase(&self) -> Phase {
        if let Some(failure) = &self.failure {
            return Phase::Failed(failure.clone());
        }
        let mut writers = self.writers.values();
        if writers.clone().all(|writer| writer.confirmed) {
            Phase::Success
        } else if writers.clone().any(|writer| writer.state.is_none()) {
            Phase::Bootstrapping
        } else if writers.any(|writer| writer.state.as_ref().is_some_and(|state| !state.bounds.is_empty())) {
            Phase::Transferring
        } else {
            Phase::Waiting
        }
    }
}

/// What no right sender says of a room. A part that nobody announces would never be missed.
fn flaw(state: &RoomState, known: Option<&RoomState>) -> Option<&'static str> {
    let bounds = &state.bounds;
    // Only the last chunk may have no tokens.
    let begun = if state.last {
        bounds.len().saturating_sub(1)
    } else {
        bounds.len()
    };
    if bounds.len() == 1 || !bounds.is_sorted() || !bounds[..begun].is_sorted_by(|lo, hi| lo < hi) {
        return Some("its chunks do not go on");
    }
    if bounds.last() > Some(&state.seq_len) {
        return Some("its chunks go past the sequence");
    }
    if state.last && bounds.last() != Some(&state.seq_len) {
        return Some("its last chunk does not end where the sequence does");
    }
    match known {
        Some(known) if !goes_on(known, state) => Some("it takes back what it has announced"),
        _ => None,
    }
}

/// Whether a later state has all chunks and pages of an earlier one.
fn goes_on(known: &RoomState, state: &RoomState) -> bool {
    let same = |(known, page): (&i64, &i64)| *known == -1 || known == page;
    let keeps =
        |(known, table): (&Vec<i64>, &Vec<i64>)| known.len() == table.len() && known.iter().zip(table).all(same);
    state.bounds.starts_with(&known.bounds)
        && (!known.last || state.last && state.bounds.len() == known.bounds.len())
        && known.tables.len() == state.tables.len()
        && known.tables.iter().zip(&state.tables).all(keeps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(version: u64, bounds: &[u64], last: bool, pages: [i64; 3]) -> RoomState {
        RoomState {
            seen: Seen { generation: 1, version },
            seq_len: 6,
            bounds: bounds.to_vec(),
            last,
            tables: vec![pages.to_vec()],
            aux: None,
            failure: None,
        }
    }

    /// A sender whose state is wrong fails the room, and never lets it succeed with less than everything.
    #[test]
    fn states_that_no_sender_has_fail_the_room() {
        let first = || state(1, &[0, 2], false, [5, -1, -1]);
        let whole = [5, 6, 7];
        let wrong = [
            (None, state(1, &[], true, whole)),
            (None, state(1, &[0], false, whole)),
            (None, state(1, &[0], true, whole)),
            (None, state(1, &[0, 4], true, whole)),
            (None, state(1, &[0, 8], false, whole)),
            (None, state(1, &[0, 8, 6], true, whole)),
            (None, state(1, &[0, 4, 2, 6], true, whole)),
            (None, state(1, &[0, 2, 2], false, whole)),
            (Some(first()), state(2, &[0, 2, 2, 6], true, whole)),
            (Some(first()), state(2, &[0, 3, 6], true, whole)),
            (Some(first()), state(2, &[], false, [-1; 3])),
            (Some(first()), state(2, &[0, 2, 6], true, [6, 6, 7])),
            (Some(first()), state(2, &[0, 2, 6], true, [-1, 6, 7])),
            (
                Some(first()),
                RoomState {
                    tables: vec![],
                    ..state(2, &[0, 2, 6], true, whole)
                },
            ),
            (Some(state(1, &[0, 6], true, whole)), state(2, &[0, 6], false, whole)),
            (Some(state(1, &[0, 6], true, whole)), state(2, &[0, 6, 6], true, whole)),
        ];
        let room = || {
            let chunked = BTreeMap::from([(0, 0)]);
            let at_last = BTreeSet::new();
            Incoming::new(7, 6, BTreeMap::from([(0, Needs { chunked, at_last })]))
        };
        for (known, state) in wrong {
            let mut room = room();
            let shown = format!("{:?} after {known:?}", state.bounds);
            if let Some(known) = known {
                room.heard(0, known);
                assert!(!room.phase().is_terminal(), "{shown}");
            }
            room.heard(0, state);
            assert!(
                matches!(room.phase(), Phase::Failed(failure) if failure.reason == "protocol.malformed"),
                "{shown}"
            );
            assert_eq!(room.step(0), Step::Over, "{shown}");
        }
        for right in [&[0, 2, 6][..], &[0, 2, 6, 6]] {
            let mut room = room();
            room.heard(0, first());
            room.heard(0, state(2, right, true, whole));
            assert!(matches!(room.step(0), Step::Pull(_)), "{right:?}");
        }
    }
}
