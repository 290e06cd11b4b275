//! A receiver's room as a state machine: no I/O, no clock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use stagewire_core::{ErrorClass, Failure};
use stagewire_kv::Engine;

use super::outgoing::restarted;
use super::protocol::{Announced, News, Seen};
use super::{Phase, chunk};

/// What a receiver's room knows and still needs.
#[derive(Debug, Clone)]
pub(super) struct Incoming {
    room: u64,
    seq_len: u64,
    /// Prefill.
    engine: Arc<Engine>,
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
    seen: Option<Seen>,
    /// Where the first chunk begins and each of them ends, in tokens. Empty where none is announced.
    bounds: Vec<u64>,
    /// The last of them, as it was announced.
    newest: Option<Announced>,
    /// The page of each logical page, for each component, -1 where none is announced. Pulls keep those that they began with.
    tables: Vec<Arc<Vec<i64>>>,
    /// (chunk, component) that have come, of the first chunk that has not come whole and those after it.
    taken: BTreeSet<(u32, u32)>,
    /// Chunks before this one have come.
    begun: u32,
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
    pub(super) fn new(room: u64, seq_len: u64, engine: Arc<Engine>, writers: BTreeMap<u32, Needs>) -> Self {
        let writer = |needs| Writer {
            needs,
            seen: None,
            bounds: Vec::new(),
            newest: None,
            tables: Vec::new(),
            taken: BTreeSet::new(),
            begun: 0,
            confirmed: false,
        };
        Self {
            room,
            seq_len,
            engine,
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
        self.writers.get(&rank)?.seen
    }

    /// Page tables of the source, as far as they are announced.
    pub(super) fn tables(&self, rank: u32) -> Option<&[Arc<Vec<i64>>]> {
        Some(&self.writers.get(&rank)?.tables)
    }

    /// What goes along: that of the first writer which has any.
    pub(super) fn aux(&self) -> Option<&[u8]> {
        let newest = self.writers.values().filter_map(|writer| writer.newest.as_ref());
        newest.filter_map(|chunk| chunk.aux.as_deref()).next()
    }

    /// Hears of a writer's room. What is known, or does not follow on what is known, changes nothing.
    pub(super) fn heard(&mut self, rank: u32, news: News) {
        let (room, seq_len) = (self.room, self.seq_len);
        let Some(writer) = self.writers.get_mut(&rank) else {
            return;
        };
        if writer.confirmed {
            // Its bytes are here for good, whatever becomes of the room there.
            return;
        }
        let restart = writer.seen.filter(|known| known.generation != news.seen.generation);
        let failure = match restart {
            Some(known) => Some(restarted(room, known.generation, news.seen.generation)),
            None => news.failure.clone(),
        };
        if let Some(failure) = failure {
            self.told(failure);
            return;
        }
        let heard = if news.seq_len == seq_len {
            writer.hear(room, seq_len, &self.engine, news)
        } else {
            let theirs = news.seq_len;
            let problem = format!("the sequence has {theirs} tokens there, and {seq_len} here");
            let failure = Failure::new(ErrorClass::Invalid, "kv.seq_len", problem);
            Err(failure.with("prefill", theirs).with("decode", seq_len))
        };
        if let Err(failure) = heard {
            let message = format!("room {room}, rank {rank} of prefill: {}", failure.message);
            let failure = Failure { message, ..failure };
            self.fail(failure.with("room", room).with("src_rank", rank));
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
        match (writer.part(), writer.seen) {
            (Some(part), _) => Step::Pull(part),
            (None, Some(Seen { generation, .. })) if writer.is_whole() => Step::Confirm { generation },
            _ => Step::Wait,
        }
    }

    /// The part of a [`Step::Pull`], and what else of its chunk is missing: other components, so other bytes.
    pub(super) fn parts(&self, rank: u32) -> Vec<Part> {
        let Some(mut ahead) = self.writers.get(&rank).cloned() else {
            return Vec::new();
        };
        let Some(part) = ahead.part() else {
            return Vec::new();
        };
        ahead.enter_taken(&part);
        let other = ahead.missing(part.chunk);
        std::iter::once(part).chain(other).collect()
    }

    /// All bytes of a part have come.
    pub(super) fn taken(&mut self, rank: u32, part: &Part) {
        if let Some(writer) = self.writers.get_mut(&rank) {
            writer.enter_taken(part);
            writer.go_on();
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
        } else if writers.clone().any(|writer| writer.seen.is_none()) {
            Phase::Bootstrapping
        } else if writers.any(|writer| !writer.bounds.is_empty()) {
            Phase::Transferring
        } else {
            Phase::Waiting
        }
    }
}

impl Writer {
    /// Takes note of what is new. What no right sender says fails the room: a part that nobody announces would never be
    /// missed.
    fn hear(&mut self, room: u64, seq_len: u64, engine: &Engine, news: News) -> Result<(), Failure> {
        let known = self.seen.map_or(0, |seen| seen.chunks);
        let Some(before) = news.seen.chunks.checked_sub(news.chunks.len() as u64) else {
            return Err(malformed("it counts its chunks wrongly"));
        };
        if before > known || news.seen.chunks < known {
            return Ok(());
        }
        if self.tables.is_empty() {
            chunk::check_len(room, engine, seq_len).map_err(|error| malformed(&error.to_string()))?;
            let tables = chunk::empty_tables(engine, seq_len);
            self.tables = tables.into_iter().map(Arc::new).collect();
        }
        let known = usize::try_from(known - before).unwrap_or(usize::MAX);
        for chunk in news.chunks.into_iter().skip(known) {
            self.enter(room, seq_len, engine, chunk)?;
        }
        self.seen = Some(news.seen);
        Ok(())
    }

    fn enter(&mut self, room: u64, seq_len: u64, engine: &Engine, chunk: Announced) -> Result<(), Failure> {
        if self.is_whole() {
            return Err(malformed("it announces a chunk after its last one"));
        }
        let checked = chunk::check(room, engine, seq_len, self.newest.as_ref(), &chunk);
        checked.map_err(|error| malformed(&error.to_string()))?;
        let (begins, ends) = chunk.tokens;
        if self.bounds.is_empty() {
            if let Some((component, prefix)) = self.needs.chunked.iter().find(|(_, prefix)| begins > **prefix) {
                let problem = format!(
                    "the first chunk begins at token {begins}, and of component {component} only {prefix} tokens are here"
                );
                let failure = Failure::new(ErrorClass::Invalid, "kv.missing_tokens", problem);
                return Err(failure.with("begins", begins).with("prefix", prefix));
            }
            self.bounds.push(begins);
        }
        self.bounds.push(ends);
        let components = engine.geometry().components.iter().zip(&chunk.pages);
        for ((component, pages), table) in components
            .zip(&mut self.tables)
            .filter(|((_, pages), _)| !pages.is_empty())
        {
            let logical = chunk::logical(component, engine, seq_len, &chunk);
            let place = usize::try_from(logical.start)
                .ok()
                .zip(usize::try_from(logical.end).ok());
            if let Some(part) = place.and_then(|(lo, hi)| Arc::make_mut(table).get_mut(lo..hi)) {
                part.copy_from_slice(pages);
            }
        }
        self.newest = Some(chunk);
        Ok(())
    }

    /// Whether the last chunk of all is announced.
    fn is_whole(&self) -> bool {
        self.newest.as_ref().is_some_and(|chunk| chunk.last)
    }

    /// What of a chunk has not come: what comes chunk by chunk, then what comes with the last.
    fn missing(&self, chunk: u32) -> Option<Part> {
        let at = chunk as usize;
        let tokens = (*self.bounds.get(at)?, *self.bounds.get(at + 1)?);
        let missing = |component: &u32| !self.taken.contains(&(chunk, *component));
        let part = |components: Vec<u32>, tokens| {
            (!components.is_empty()).then_some(Part {
                chunk,
                components,
                tokens,
            })
        };
        let chunked = self.needs.chunked.keys().copied().filter(missing).collect();
        part(chunked, Some(tokens)).or_else(|| {
            let is_last = self.is_whole() && at + 2 == self.bounds.len();
            let at_last = self.needs.at_last.iter().copied().filter(missing).filter(|_| is_last);
            part(at_last.collect(), None)
        })
    }

    /// What comes next.
    fn part(&self) -> Option<Part> {
        let chunks = u32::try_from(self.bounds.len().saturating_sub(1)).unwrap_or(u32::MAX);
        (self.begun..chunks).find_map(|chunk| self.missing(chunk))
    }

    fn enter_taken(&mut self, part: &Part) {
        let parts = part.components.iter().map(|&component| (part.chunk, component));
        self.taken.extend(parts);
    }

    /// Forgets the parts of chunks that have come whole.
    fn go_on(&mut self) {
        while (self.begun as usize) + 1 < self.bounds.len() && self.missing(self.begun).is_none() {
            self.begun += 1;
        }
        self.taken = self.taken.split_off(&(self.begun, 0));
    }
}

fn malformed(problem: &str) -> Failure {
    Failure::new(ErrorClass::Corrupt, "protocol.malformed", problem)
}

#[cfg(test)]
mod tests;
