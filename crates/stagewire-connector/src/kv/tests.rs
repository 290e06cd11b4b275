//! Both machines of a room against each other, over a network that loses, doubles and reorders what it likes, with pages
//! that are used again as soon as they are released.

mod alone;
mod settles;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use stagewire_core::{DType, ErrorClass, Failure};
use stagewire_kv::{Component, Engine, Geometry};
use uuid::Uuid;

use super::incoming::{Incoming, Needs, Part, Step};
use super::outgoing::{Attempt, Destination, Outgoing, restarted, superseded};
use super::protocol::{self, News, Seen};
use super::sender::room::Cell;
use super::sender::rooms::{Found, Rooms};
use super::{ChunkSpec, Phase, RoomId};

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
        room: RoomId,
        attempt: Attempt,
        seen: Option<Seen>,
    },
    News {
        writer: u32,
        reader: u32,
        attempt: Attempt,
        news: News,
    },
    Confirm {
        writer: u32,
        reader: u32,
        room: RoomId,
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
        room: RoomId,
        attempt: Attempt,
        failure: Failure,
        told: bool,
    },
}

/// One rank of prefill: its pages hold (life, logical page), and it opens the same number again and again.
struct Writer {
    rooms: Rooms,
    /// Those that were opened, with the first physical page of each. Two may have pages.
    opened: Vec<(Arc<Cell>, usize)>,
    memory: Vec<u64>,
    /// Pages of the newest that are announced.
    sent: usize,
    left: BTreeSet<Attempt>,
}

/// One rank of decode, with one attempt at a time.
struct Reader {
    id: Uuid,
    attempt: u64,
    life: u64,
    room: Incoming,
    /// By writer.
    memory: Vec<[u64; PAGES]>,
    /// A pull under way: the part, and how many of its pages were copied.
    pulls: BTreeMap<u32, (Part, usize)>,
    released: bool,
}

struct World {
    dice: Dice,
    engine: Arc<Engine>,
    destination: Destination,
    /// That prefill has begun last, at one rank at least.
    life: u64,
    writers: Vec<Writer>,
    readers: Vec<Reader>,
    network: Vec<Message>,
    /// Whether messages are lost.
    lossy: bool,
    ended: Ended,
}

/// Attempts, by how they ended.
#[derive(Debug, Default)]
struct Ended {
    succeeded: usize,
    failed: usize,
    superseded: usize,
    lost: usize,
}

fn aborted(who: &str) -> Failure {
    Failure::new(ErrorClass::Cancelled, "kv.aborted", who)
}

fn value(life: u64, logical: usize) -> u64 {
    life << 8 | logical as u64
}

fn engine() -> Arc<Engine> {
    let component = Component::mha("full", 1, 4, [1, 1], DType::U8);
    Arc::new(Engine::new(Geometry::new(2, 1, vec![component])).expect("sizes"))
}

fn incoming(engine: &Arc<Engine>) -> Incoming {
    let needs = Needs {
        chunked: BTreeMap::from([(0, 0)]),
        at_last: BTreeSet::new(),
    };
    let writers = (0..WRITERS).map(|writer| (writer, needs.clone()));
    Incoming::new(ROOM, PAGES as u64, Arc::clone(engine), writers.collect())
}

impl World {
    fn new(seed: u64) -> Self {
        let engine = engine();
        let writer = |_| Writer {
            rooms: Rooms::default(),
            opened: Vec::new(),
            memory: vec![GARBAGE; 1 + 2 * PAGES],
            sent: 0,
            left: BTreeSet::new(),
        };
        let reader = |id| Reader {
            id: Uuid::from_u128(id),
            attempt: 0,
            life: 0,
            room: incoming(&engine),
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
            life: 0,
            writers: (0..WRITERS).map(writer).collect(),
            readers: (0..u128::from(READERS)).map(reader).collect(),
            engine,
            network: Vec::new(),
            lossy: true,
            ended: Ended::default(),
        }
    }

    fn step(&mut self) {
        match self.dice.below(12) {
            0 => self.prefill_opens(),
            1 | 2 => self.prefill_sends(),
            3 if self.dice.one_in(6) => self.somebody_aborts(),
            3 if self.dice.one_in(12) => self.prefill_takes_a_reader_for_dead(),
            4..=6 => self.decode_acts(),
            7 => self.decode_begins_anew(),
            _ => self.network_delivers(),
        }
        self.copies_go_on();
    }

    /// A rank opens the room of the newest life, or begins the next life, whatever the other ranks and decode are at. Pages
    /// that are released are garbage at once.
    fn prefill_opens(&mut self) {
        let at = self.dice.below(self.writers.len());
        let writer = &mut self.writers[at];
        let newest = writer.opened.last().map(|(cell, _)| cell.id().life);
        let over = writer.opened.last().is_none_or(|(cell, _)| cell.phase().is_terminal());
        if newest == Some(self.life) && (over || self.dice.one_in(40)) {
            self.life += 1;
        }
        if newest != Some(self.life) {
            self.opens(at);
        }
    }

    fn opens(&mut self, at: usize) {
        let writer = &mut self.writers[at];
        writer.opened.retain(|(cell, _)| !cell.is_released());
        let Some(base) = [1, 1 + PAGES]
            .into_iter()
            .find(|base| writer.opened.iter().all(|(_, taken)| taken != base))
        else {
            return;
        };
        writer.memory[base..base + PAGES].fill(GARBAGE);
        writer.sent = 0;
        // Generations differ, and nothing else.
        let room = Outgoing::new(ROOM, 1000 + self.life, PAGES as u64);
        let opened = writer.rooms.open(RoomId::of_life(ROOM, self.life), room);
        writer.opened.push((opened.expect("a later life"), base));
    }

    fn prefill_sends(&mut self) {
        let at = self.dice.below(self.writers.len());
        let writer = &mut self.writers[at];
        let Some((cell, base)) = writer.opened.last() else {
            return;
        };
        let (lo, hi) = (writer.sent, writer.sent + PAGES / 2);
        let pages: Vec<i64> = (lo..hi).map(|page| (base + page) as i64).collect();
        let chunk = ChunkSpec::new(lo as u64..hi as u64).pages("full", pages);
        let chunk = if hi == PAGES { chunk.last() } else { chunk };
        if hi <= PAGES && !cell.phase().is_terminal() {
            for page in lo..hi {
                writer.memory[base + page] = value(cell.id().life, page);
            }
            cell.change(|room| room.send(&self.engine, chunk))
                .expect("the next one");
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
        if let Some((cell, _)) = self.writers[at].opened.last() {
            cell.change(|room| room.fail(aborted("prefill")));
            if cut && matches!(cell.phase(), Phase::Failed(_)) {
                cell.change(Outgoing::cut_off);
            }
        }
    }

    /// It goes on as if nothing was, and has to greet anew.
    fn prefill_takes_a_reader_for_dead(&mut self) {
        let receiver = self.readers[self.dice.below(self.readers.len())].id;
        let at = self.dice.below(self.writers.len());
        let writer = &mut self.writers[at];
        let failure = Failure::new(ErrorClass::Unavailable, "kv.silent", "it says nothing");
        for cell in writer.rooms.cells() {
            cell.change(|room| room.lose(receiver, &failure));
        }
        writer.left.retain(|attempt| attempt.0 != receiver);
    }

    fn decode_acts(&mut self) {
        let reader = self.dice.below(self.readers.len());
        let writer = u32::try_from(self.dice.below(self.writers.len())).expect("few");
        let me = &mut self.readers[reader];
        let (attempt, room) = ((me.id, me.attempt), RoomId::of_life(ROOM, me.life));
        let who = u32::try_from(reader).expect("few");
        if let Phase::Failed(failure) = me.room.phase() {
            // Copies end first.
            if me.pulls.is_empty() {
                me.released = true;
                self.network.push(Message::Leave {
                    writer,
                    reader: who,
                    room,
                    attempt,
                    failure,
                    told: me.room.is_told() || me.room.seen(writer).is_some(),
                });
            }
            return;
        }
        self.network.push(Message::Ask {
            writer,
            reader: who,
            room,
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
                room,
                attempt,
                generation,
            }),
            Step::Wait | Step::Over => {}
        }
    }

    /// Another attempt, into the same pages, once the one before is released: at what prefill has begun last, or at what it
    /// has begun before, or not yet.
    fn decode_begins_anew(&mut self) {
        let at = self.dice.below(self.readers.len());
        let me = &mut self.readers[at];
        match me.room.phase() {
            Phase::Success => self.ended.succeeded += 1,
            Phase::Failed(failure) if me.released => match failure.reason.as_str() {
                "kv.superseded" => self.ended.superseded += 1,
                "kv.silent" => self.ended.lost += 1,
                _ => self.ended.failed += 1,
            },
            _ => return,
        }
        let life = match self.dice.below(8) {
            0 => self.life.saturating_sub(1),
            1 => self.life + 1,
            _ => self.life,
        };
        self.begins(at, life);
    }

    fn begins(&mut self, at: usize, life: u64) {
        let me = &mut self.readers[at];
        me.attempt += 1;
        me.life = life;
        me.room = incoming(&self.engine);
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
            0 if self.lossy => {
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
                room,
                attempt,
                seen,
            } => self.asked(writer, reader, room, attempt, seen),
            Message::News {
                writer,
                reader,
                attempt,
                news,
            } => {
                let me = &mut self.readers[reader as usize];
                if attempt == (me.id, me.attempt) {
                    me.room.heard(writer, news);
                }
            }
            Message::Confirm {
                writer,
                reader,
                room,
                attempt,
                generation,
            } => {
                let Some(cell) = self.writers[writer as usize].rooms.read_by(room, attempt) else {
                    return;
                };
                self.network
                    .push(match cell.change(|room| room.confirm(attempt, generation)) {
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
                room,
                attempt,
                failure,
                told,
            } => {
                let from = &mut self.writers[writer as usize];
                let first = from.left.insert(attempt);
                if let Found::Room(cell) = from.rooms.find(room, attempt) {
                    if first && !told {
                        cell.bind(reader, attempt, &self.destination);
                    }
                    cell.change(|room| room.leave(attempt, failure));
                }
            }
        }
    }

    fn asked(&mut self, writer: u32, reader: u32, room: RoomId, attempt: Attempt, seen: Option<Seen>) {
        let from = &mut self.writers[writer as usize];
        if from.left.contains(&attempt) {
            return;
        }
        let refused = |failure| Message::Refused {
            reader,
            attempt,
            failure,
        };
        let answer = match from.rooms.find(room, attempt) {
            Found::Superseded(newest) => refused(superseded(room, newest)),
            Found::Room(cell) if seen.is_some() && !cell.is_read_by(attempt) => refused(restarted(ROOM, 0, 0)),
            Found::Room(cell) if cell.bind(reader, attempt, &self.destination) => {
                let states = cell.subscribe();
                let state = states.borrow();
                if !state.is_news(seen) {
                    return;
                }
                Message::News {
                    writer,
                    reader,
                    attempt,
                    news: state.news(seen),
                }
            }
            _ => return,
        };
        self.network.push(answer);
    }

    /// A room that has succeeded holds, of each writer, all pages of the life that was asked for.
    fn check(&self, reader: usize) {
        let me = &self.readers[reader];
        if me.room.phase() != Phase::Success {
            return;
        }
        for (writer, pages) in me.memory.iter().enumerate() {
            for (logical, &found) in pages.iter().enumerate() {
                let (life, wanted) = (me.life, value(me.life, logical));
                assert_eq!(found, wanted, "page {logical} of writer {writer}, life {life}");
            }
        }
    }
}

/// Ten thousand with `make soak`, a fifth of that otherwise, which takes some seconds.
#[test]
fn no_interleaving_of_aborts_and_reused_pages_takes_a_wrong_byte() {
    let full = std::env::var_os("STAGEWIRE_SOAK").is_some();
    let mut all = Ended::default();
    for seed in 0..if full { 10_000 } else { 2_000 } {
        let mut world = World::new(seed);
        for _ in 0..800 {
            world.step();
        }
        all.succeeded += world.ended.succeeded;
        all.failed += world.ended.failed;
        all.superseded += world.ended.superseded;
        all.lost += world.ended.lost;
        world.settles(seed);
    }
    let Ended {
        succeeded,
        failed,
        superseded,
        lost,
    } = all;
    assert!(
        [succeeded, failed, superseded, lost].iter().all(|count| *count > 100),
        "{all:?}"
    );
}
