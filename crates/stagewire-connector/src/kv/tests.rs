//! Both machines of a room against each other, over a network that loses, doubles and reorders what it likes, with pages
//! that are used again as soon as they are released.

mod alone;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use stagewire_core::{DType, ErrorClass, Failure};
use stagewire_kv::{Component, Engine, Geometry};
use uuid::Uuid;

use super::incoming::{Incoming, Needs, Part, Step};
use super::outgoing::{Attempt, Destination, Outgoing};
use super::protocol::{RoomState, Seen};
use super::{ChunkSpec, Phase};

const ROOM: u64 = 7;
const WRITERS: u32 = 2;
const READERS: u32 = 2;
/// Pages of a room, in two chunks.
const PAGES: usize = 4;
/// What nobody needs.
const GARBAGE: u64 = u64::MAX;

/// splitmix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((mixed ^ (mixed >> 31)) % end as u64).expect("below a usize")
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

#[derive(Debug, Clone)]
enum Message {
    Ask {
        writer: u32,
        reader: u32,
        attempt: Attempt,
        seen: Option<Seen>,
    },
    State {
        writer: u32,
        reader: u32,
        attempt: Attempt,
        state: RoomState,
    },
    Confirm {
        writer: u32,
        reader: u32,
        attempt: Attempt,
        generation: u64,
    },
    Confirmed {
        writer: u32,
        reader: u32,
        attempt: Attempt,
        generation: u64,
    },
    Refused {
        reader: u32,
        attempt: Attempt,
        failure: Failure,
    },
    Leave {
        writer: u32,
        reader: u32,
        attempt: Attempt,
        failure: Failure,
        told: bool,
    },
}

/// One rank of prefill: its pages hold (generation, logical page), and it opens the same room again and again.
struct Writer {
    generation: u64,
    rooms: Vec<Outgoing>,
    /// Physical pages, in use by the newest room from `base` on.
    memory: Vec<u64>,
    base: usize,
    sent: usize,
    left: BTreeSet<Attempt>,
}

/// One rank of decode, with one attempt at a time.
struct Reader {
    id: Uuid,
    attempt: u64,
    room: Incoming,
    /// By writer.
    memory: Vec<[u64; PAGES]>,
    /// A pull under way: the part, and how many of its pages were copied.
    pulls: BTreeMap<u32, (Part, usize)>,
    released: bool,
}

struct World {
    dice: Dice,
    engine: Engine,
    destination: Destination,
    writers: Vec<Writer>,
    readers: Vec<Reader>,
    network: Vec<Message>,
    succeeded: usize,
    failed: usize,
}

fn aborted(who: &str) -> Failure {
    Failure::new(ErrorClass::Cancelled, "kv.aborted", who)
}

fn value(generation: u64, logical: usize) -> u64 {
    generation << 8 | logical as u64
}

fn incoming() -> Incoming {
    let needs = Needs {
        chunked: BTreeMap::from([(0, 0)]),
        at_last: BTreeSet::new(),
    };
    Incoming::new(
        ROOM,
        PAGES as u64,
        (0..WRITERS).map(|writer| (writer, needs.clone())).collect(),
    )
}

impl World {
    fn new(seed: u64) -> Self {
        let component = Component::mha("full", 1, 4, [1, 1], DType::U8);
        let engine = Engine::new(Geometry::new(2, 1, vec![component])).expect("sizes");
        let writer = |_| Writer {
            generation: 0,
            rooms: Vec::new(),
            memory: vec![GARBAGE; 1 + 2 * PAGES],
            base: 0,
            sent: 0,
            left: BTreeSet::new(),
        };
        let reader = |id| Reader {
            id: Uuid::from_u128(id),
            attempt: 0,
            room: incoming(),
            memory: vec![[GARBAGE; PAGES]; WRITERS as usize],
            pulls: BTreeMap::new(),
            released: false,
        };
        Self {
            dice: Dice(seed),
            destination: Destination {
                engine: Arc::from([1, 2, 3]),
                readers: Arc::new((0..READERS).collect()),
            },
            engine,
            writers: (0..WRITERS).map(writer).collect(),
            readers: (0..u128::from(READERS)).map(reader).collect(),
            network: Vec::new(),
            succeeded: 0,
            failed: 0,
        }
    }

    fn step(&mut self) {
        match self.dice.below(12) {
            0 => self.prefill_opens(),
            1 | 2 => self.prefill_sends(),
            3 if self.dice.one_in(6) => self.somebody_aborts(),
            4..=6 => self.decode_acts(),
            7 => self.decode_begins_anew(),
            _ => self.network_delivers(),
        }
        self.copies_go_on();
    }

    /// Opens the room once the one before has ended. Pages that are released are garbage at once.
    fn prefill_opens(&mut self) {
        let at = self.dice.below(self.writers.len());
        let writer = &mut self.writers[at];
        if writer.rooms.last().is_some_and(|room| !room.is_released()) {
            return;
        }
        writer.generation += 1;
        writer.base = 1 + PAGES * self.dice.below(2);
        writer.sent = 0;
        writer.memory.fill(GARBAGE);
        let room = Outgoing::new(ROOM, writer.generation, &self.engine, PAGES as u64);
        writer.rooms.push(room);
    }

    fn prefill_sends(&mut self) {
        let at = self.dice.below(self.writers.len());
        let writer = &mut self.writers[at];
        let Some(room) = writer.rooms.last_mut() else { return };
        let (lo, hi) = (writer.sent, writer.sent + PAGES / 2);
        let pages: Vec<i64> = (lo..hi).map(|page| (writer.base + page) as i64).collect();
        let chunk = ChunkSpec::new(lo as u64..hi as u64).pages("full", pages);
        let chunk = if hi == PAGES { chunk.last() } else { chunk };
        if hi <= PAGES && !room.phase().is_terminal() {
            for page in lo..hi {
                writer.memory[writer.base + page] = value(writer.generation, page);
            }
            room.send(&self.engine, chunk).expect("the next one");
            writer.sent = hi;
        }
    }

    fn somebody_aborts(&mut self) {
        if self.dice.one_in(2) {
            let at = self.dice.below(self.readers.len());
            self.readers[at].room.fail(aborted("decode"));
            return;
        }
        let at = self.dice.below(self.writers.len());
        let cut = self.dice.one_in(2);
        if let Some(room) = self.writers[at].rooms.last_mut() {
            room.fail(aborted("prefill"));
            if cut && matches!(room.phase(), Phase::Failed(_)) {
                room.cut_off();
            }
        }
    }

    fn decode_acts(&mut self) {
        let reader = self.dice.below(self.readers.len());
        let writer = u32::try_from(self.dice.below(self.writers.len())).expect("few");
        let me = &mut self.readers[reader];
        let attempt = (me.id, me.attempt);
        let who = u32::try_from(reader).expect("few");
        if let Phase::Failed(failure) = me.room.phase() {
            // Copies end first.
            if me.pulls.is_empty() {
                me.released = true;
                self.network.push(Message::Leave {
                    writer,
                    reader: who,
                    attempt,
                    failure,
                    told: me.room.is_told(),
                });
            }
            return;
        }
        self.network.push(Message::Ask {
            writer,
            reader: who,
            attempt,
            seen: me.room.seen(writer),
        });
        match me.room.step(writer) {
            Step::Pull(part) => {
                me.pulls.entry(writer).or_insert((part, 0));
            }
            Step::Confirm { generation } => self.network.push(Message::Confirm {
                writer,
                reader: who,
                attempt,
                generation,
            }),
            Step::Wait | Step::Over => {}
        }
    }

    /// Another attempt at the same room, into the same pages, once the one before is released.
    fn decode_begins_anew(&mut self) {
        let at = self.dice.below(self.readers.len());
        let me = &mut self.readers[at];
        match me.room.phase() {
            Phase::Success => self.succeeded += 1,
            Phase::Failed(_) if me.released => self.failed += 1,
            _ => return,
        }
        me.attempt += 1;
        me.room = incoming();
        me.memory.fill([GARBAGE; PAGES]);
        me.released = false;
        assert!(me.pulls.is_empty(), "a copy goes on into pages that were released");
    }

    fn copies_go_on(&mut self) {
        let reader = self.dice.below(self.readers.len());
        let me = &mut self.readers[reader];
        let failed = me.room.phase().is_terminal();
        let Some((&writer, (part, copied))) = me.pulls.iter_mut().next() else {
            return;
        };
        let from = &self.writers[writer as usize];
        let (lo, hi) = part.tokens.expect("chunks only");
        let logical = usize::try_from(lo).expect("few") + *copied;
        let table = me.room.tables(writer).expect("it was heard of");
        let page = usize::try_from(table[0][logical]).expect("announced");
        // One sided: whatever is there now.
        me.memory[writer as usize][logical] = from.memory[page];
        *copied += 1;
        let done = logical as u64 + 1 == hi;
        if done || (failed && self.dice.one_in(2)) {
            let (part, _) = me.pulls.remove(&writer).expect("it is under way");
            if done {
                me.room.taken(writer, &part);
            }
        }
    }

    fn network_delivers(&mut self) {
        if self.network.is_empty() {
            return;
        }
        let at = self.dice.below(self.network.len());
        let message = match self.dice.below(8) {
            0 => {
                self.network.swap_remove(at);
                return;
            }
            1 => self.network[at].clone(),
            _ => self.network.swap_remove(at),
        };
        match message {
            Message::Ask {
                writer,
                reader,
                attempt,
                seen,
            } => {
                let from = &mut self.writers[writer as usize];
                if from.left.contains(&attempt) {
                    return;
                }
                let read = from.rooms.iter().position(|room| room.is_read_by(attempt));
                let newest = from.rooms.len().checked_sub(1);
                let Some(room) = read.or(newest) else { return };
                let room = &mut from.rooms[room];
                if room.bind(reader, attempt, &self.destination) && room.is_news(seen) {
                    let state = room.state();
                    self.network.push(Message::State {
                        writer,
                        reader,
                        attempt,
                        state,
                    });
                }
            }
            Message::State {
                writer,
                reader,
                attempt,
                state,
            } => {
                let me = &mut self.readers[reader as usize];
                if attempt == (me.id, me.attempt) {
                    me.room.heard(writer, state);
                }
            }
            Message::Confirm {
                writer,
                reader,
                attempt,
                generation,
            } => {
                let mut rooms = self.writers[writer as usize].rooms.iter_mut();
                let Some(room) = rooms.find(|room| room.is_read_by(attempt)) else {
                    return;
                };
                self.network.push(match room.confirm(attempt, generation) {
                    Ok(()) => Message::Confirmed {
                        writer,
                        reader,
                        attempt,
                        generation,
                    },
                    Err(failure) => Message::Refused {
                        reader,
                        attempt,
                        failure,
                    },
                });
            }
            Message::Confirmed {
                writer,
                reader,
                attempt,
                generation,
            } => {
                let me = &mut self.readers[reader as usize];
                if attempt == (me.id, me.attempt) {
                    me.room.confirmed(writer, generation);
                    self.check(reader as usize);
                }
            }
            Message::Refused {
                reader,
                attempt,
                failure,
            } => {
                let me = &mut self.readers[reader as usize];
                if attempt == (me.id, me.attempt) {
                    me.room.told(failure);
                }
            }
            Message::Leave {
                writer,
                reader,
                attempt,
                failure,
                told,
            } => {
                let from = &mut self.writers[writer as usize];
                let first = from.left.insert(attempt);
                let read = from.rooms.iter().position(|room| room.is_read_by(attempt));
                let newest = from.rooms.len().checked_sub(1);
                if let Some(room) = read.or(newest) {
                    if first && !told {
                        from.rooms[room].bind(reader, attempt, &self.destination);
                    }
                    from.rooms[room].leave(attempt, failure);
                }
            }
        }
    }

    /// A room that has succeeded holds, of each writer, all pages of one and the same room.
    fn check(&self, reader: usize) {
        let me = &self.readers[reader];
        if me.room.phase() != Phase::Success {
            return;
        }
        for (writer, pages) in (0..).zip(&me.memory) {
            let generation = me.room.seen(writer).expect("heard of").generation;
            for (logical, &found) in pages.iter().enumerate() {
                let wanted = value(generation, logical);
                assert_eq!(
                    found, wanted,
                    "page {logical} of writer {writer}, generation {generation}"
                );
            }
        }
    }
}

/// Ten thousand with `make soak`, a fifth of that otherwise, which takes two seconds.
#[test]
fn no_interleaving_of_aborts_and_reused_pages_takes_a_wrong_byte() {
    let full = std::env::var_os("STAGEWIRE_SOAK").is_some();
    let (mut succeeded, mut failed) = (0, 0);
    for seed in 0..if full { 10_000 } else { 2_000 } {
        let mut world = World::new(seed);
        for _ in 0..800 {
            world.step();
        }
        succeeded += world.succeeded;
        failed += world.failed;
    }
    assert!(
        succeeded > 100 && failed > 100,
        "{succeeded} succeeded, {failed} failed"
    );
}
