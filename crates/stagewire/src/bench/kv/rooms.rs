//! Whole rooms beside the bare transport: from the announcement of a prompt at prefill to its success at one rank of decode.
//!
//! What a room adds to the pulls of its records: its state crosses processes, the plan is made and proven, prefill confirms,
//! and where the transport moves runs of bytes only, one side packs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use stagewire_connector::Connector;
use stagewire_connector::kv::{CacheMemory, Phase, Receiver, ReceiverOptions, RoomSpec, SenderHandle};
use stagewire_core::Record;
use stagewire_transfer::probe::Room;
use stagewire_transfer::{
    Mooncake, MooncakeOptions, Nixl, NixlLibrary, NixlOptions, Pinned, TransferOptions, Transport,
};

use super::moves::{DEADLINE, Ends, Move, TOKENS, tables};
use super::prefill::{self, Prefill, places};
use super::{Bench, pair};
use crate::bench::contest::Contest;
use crate::bench::paint::paint;
use crate::bench::peers;
use crate::bench::producer::now;
use crate::bench::report::{Case, Goal, Target, Unit};
use crate::bench::transfer::local::pin;
use crate::bench::transfer::nixl::library;
use crate::bench::transfer::owner::Memory;
use crate::exit::Fault;

/// The same as a connector may add to its transport. The tenth is in the reference.
const WITH_A_TENTH: f64 = 1.1;
const ADDED: Target = Target {
    text: "<= 0.3 ms + 10 %",
    goal: Goal::ExcessMs(0.3),
};
/// Packing is worth it.
const PACKED: Target = Target {
    text: "<= 0.5",
    goal: Goal::RatioAtMost(0.5),
};
/// Pause between two looks whether prefill has been reached.
const LOOK: Duration = Duration::from_micros(200);

/// One way to get the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entrant {
    Room,
    /// The records of the plan, over the bare transport.
    Batch,
    /// As many bytes in one piece, over the bare transport.
    Contiguous,
}

/// Both sides of rooms, and the bare transport.
struct Round<'a> {
    moved: &'a Move,
    scattered: bool,
    pinned: Box<dyn Pinned>,
    /// Kept as long.
    _bare: Arc<dyn Transport>,
    destination: Room,
    prefill: &'a mut Prefill,
    handle: SenderHandle,
    receiver: Receiver,
    rooms: u64,
}

impl Bench<'_> {
    /// Rows of all transports.
    pub(super) async fn rooms(&mut self) -> Result<(), Fault> {
        for transport in ["shm", "cma", "tcp", "mooncake", "nixl"] {
            let cases = [([1, 4], "slices of 256 bytes"), ([4, 4], "pages")];
            let named = cases.map(|(tp, what)| (tp, format!("room, {transport}, TP {} to {}, {what}", tp[0], tp[1])));
            let asked: Vec<_> = named.into_iter().filter(|(_, name)| self.wants(name)).collect();
            if asked.is_empty() {
                continue;
            }
            let nixl = match transport {
                "nixl" => peers::python().and_then(|python| library(&python)),
                _ => Ok(PathBuf::new()),
            };
            let nixl = nixl.and_then(|library| {
                let opened = (transport != "nixl").then_some(Ok(()));
                let opened = opened.unwrap_or_else(|| NixlLibrary::open(Some(&library)).map(drop));
                opened.map(|()| library).map_err(|error| error.to_string())
            });
            for (tp, name) in asked {
                let contest = match &nixl {
                    Ok(library) => self.room(transport, library.clone(), tp).await.context(name.clone())?,
                    Err(why) => Err(why.clone()),
                };
                match contest {
                    Ok((contest, nbytes)) => self.added(transport, tp, &name, &contest, nbytes),
                    Err(why) => self.report.skip(name, "time", why),
                }
            }
        }
        Ok(())
    }

    fn added(&mut self, transport: &str, tp: [u32; 2], name: &str, contest: &Contest<Entrant>, nbytes: u64) {
        let packs = ["mooncake", "nixl"].contains(&transport) && tp[0] != tp[1];
        let beside = if packs {
            vec![
                (Entrant::Batch, "the same records", 1.0, Some(PACKED)),
                (Entrant::Contiguous, "one piece", 1.0, None),
            ]
        } else {
            vec![(Entrant::Batch, "1.1 x the same records", WITH_A_TENTH, Some(ADDED))]
        };
        for (reference, shown, times, target) in beside {
            let case = Case {
                name: name.to_owned(),
                metric: "time",
                unit: Unit::Milliseconds,
                reference: format!("{shown}, {:.0} MB", nbytes as f64 / 1e6),
                target,
            };
            let pairs = contest.pairs(Entrant::Room, reference).with_reference_times(times);
            self.report.add(case, &pairs);
        }
    }

    /// The inner error is why the transport does not work here.
    async fn room(
        &self,
        transport: &str,
        library: PathBuf,
        tp: [u32; 2],
    ) -> anyhow::Result<Result<(Contest<Entrant>, u64), String>> {
        let scattered = tp[0] != tp[1];
        let moved = Move::of(tp, scattered)?;
        let (mut ends, dir) = Ends::start().await?;
        let bare = match ends.bare(transport, &library).await? {
            Ok(bare) => bare,
            Err(why) => return Ok(Err(why)),
        };
        let run_dir = dir.path().join("rooms");
        let nixl = (transport == "nixl").then_some(library.as_path());
        let mut prefill = Prefill::spawn(&run_dir, nixl)?;
        let connector = prefill::connector(&run_dir, "decode", transport).await?;
        let in_arena = transport == "shm";
        let memory = if in_arena { Memory::Arena } else { Memory::Borrowed };
        let held = ends.owner.hold(memory, moved.spans[0], &[transport]).await?;
        let room = |len: u64| Room::new(usize::try_from(len)?).context("there is not enough memory");
        let (mut own, mut taken) = (room(moved.spans[0])?, room(moved.spans[1])?);
        paint(own.bytes().context("in use")?, 0);
        let handle = prefill.hold(transport, tp, moved.spans[0]).await?;
        let mut round = Round {
            scattered,
            pinned: pin(bare.clone(), &held).await?,
            _bare: bare,
            destination: room(moved.spans[1])?,
            prefill: &mut prefill,
            handle,
            receiver: receiver(&connector, tp, &mut taken)?,
            rooms: 0,
            moved: &moved,
        };
        let entrants = [Entrant::Room, Entrant::Batch, Entrant::Contiguous];
        // Every byte of a room, first.
        round.once(Entrant::Room).await?;
        drop(std::mem::replace(
            &mut round.receiver,
            receiver(&connector, tp, &mut room(moved.spans[1])?)?,
        ));
        while taken.bytes().is_none() {
            tokio::time::sleep(LOOK).await;
        }
        moved.check(&moved.records, &mut own, &mut taken)?;
        drop((own, taken));
        let contest = Contest::run(&entrants, self.options.pairs, async |entrant| round.once(entrant).await).await?;
        drop(round);
        prefill.end().await?;
        connector.close().await;
        ends.end().await?;
        drop(dir);
        Ok(Ok((contest, moved.nbytes)))
    }
}

/// Rank 0 of decode.
fn receiver(connector: &Arc<Connector>, tp: [u32; 2], memory: &mut Room) -> anyhow::Result<Receiver> {
    let target = memory.target().context("in use")?;
    let places = places(target.len());
    let cache = CacheMemory::new([target], places);
    let engine = pair(tp)?.decode().clone();
    Ok(Receiver::new(connector, engine, 0, cache, ReceiverOptions::default())?)
}

impl Ends {
    /// The transport without rooms. The inner error is why it does not work here.
    async fn bare(
        &mut self,
        name: &str,
        library: &std::path::Path,
    ) -> anyhow::Result<Result<Arc<dyn Transport>, String>> {
        match name {
            "mooncake" => {
                self.owner.mooncake().await?;
                let mooncake = Mooncake::start(self.network.clone(), MooncakeOptions::default()).await?;
                Ok(Ok(mooncake))
            }
            "nixl" => {
                if let Err(why) = self.owner.nixl(library.to_owned()).await? {
                    return Ok(Err(why));
                }
                let options = NixlOptions {
                    library: Some(library.to_owned()),
                    ..NixlOptions::default()
                };
                let nixl = Nixl::start(&self.network, options).await;
                Ok(nixl
                    .map(|nixl| nixl as Arc<dyn Transport>)
                    .map_err(|error| error.to_string()))
            }
            _ => Ok(self.transport(name).map_err(|error| error.to_string())),
        }
    }
}

impl Round<'_> {
    async fn once(&mut self, entrant: Entrant) -> anyhow::Result<Duration> {
        let whole = [Record::contiguous(0, 0, self.moved.nbytes)];
        let records: &[Record] = match entrant {
            Entrant::Room => return self.room().await,
            Entrant::Batch => &self.moved.records,
            Entrant::Contiguous => &whole,
        };
        let target = self.destination.target().context("in use")?;
        let options = TransferOptions {
            deadline: Some(DEADLINE),
        };
        let begin = Instant::now();
        self.pinned.pull(records, &target, options).await?;
        Ok(begin.elapsed())
    }

    /// Both sides are in the room before the prompt is announced.
    async fn room(&mut self) -> anyhow::Result<Duration> {
        self.rooms += 1;
        self.prefill.open(self.rooms).await?;
        let pages = tables(self.scattered).dst;
        let spec = RoomSpec::new(self.rooms, [self.handle.clone()], TOKENS);
        let spec = spec.pages("full", pages.clone()).pages("swa", pages).within(DEADLINE);
        let room = self.receiver.room(spec)?;
        while room.phase() == Phase::Bootstrapping {
            tokio::time::sleep(LOOK).await;
        }
        self.prefill.announce(self.scattered).await?;
        let received = room.finished().await;
        let end = now();
        let received = received.map_err(|failure| anyhow!("{failure}"))?;
        ensure!(
            received.nbytes == self.moved.nbytes,
            "{received:?} of {}",
            self.moved.nbytes
        );
        let begin = self.prefill.announced().await?;
        room.released().await;
        drop(room);
        self.prefill.end_room().await?;
        Ok(end.saturating_sub(begin))
    }
}
