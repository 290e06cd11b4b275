#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::future::{join_all, maybe_done, try_join_all};
use futures::stream::FuturesUnordered;
use stagewire_core::Failure;
use stagewire_kv::Pair;
use tokio::sync::watch;
use tokio::time::Instant;

use super::super::incoming::{Incoming, Part, Step};
use super::super::protocol::{Answer, Body};
use super::super::sender::shown;
use super::super::{Phase, RoomId, failure};
use super::leases::Lease;
use super::source::Source;
use super::{Inner, RoomSpec, pull};

/// Pause between two looks whether copies have ended.
const IDLE_PAUSE: Duration = Duration::from_micros(500);
/// Places that are looked at before others have a turn.
const AT_A_TIME: usize = 1024;
/// Longer than any room lasts, and short enough to be added to a time.
const FOR_EVER: Duration = Duration::from_secs(60 * 60 * 24 * 365);
/// Pause after an answer that makes no sense.
const AGAIN: Duration = Duration::from_millis(100);

/// A room whose senders do not know yet how it ended.
struct Counted(Arc<Inner>);

impl Counted {
    fn new(inner: &Arc<Inner>) -> Self {
        inner.running.send_modify(|rooms| *rooms += 1);
        Self(Arc::clone(inner))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.running.send_modify(|rooms| *rooms -= 1);
    }
}

/// A room at decode, shared by its owner and the task that fills it.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) inner: Arc<Inner>,
    pub(super) pair: Arc<Pair>,
    pub(super) spec: RoomSpec,
    until: Instant,
    pub(super) attempt: u64,
    /// By rank of prefill.
    sources: BTreeMap<u32, Arc<Source>>,
    writers: Vec<u32>,
    state: watch::Sender<Incoming>,
    nbytes: AtomicU64,
    pub(super) packed: AtomicU64,
    pulls: Pulls,
    released: watch::Sender<bool>,
}

/// Pulls that have begun and did not end well: copies of theirs may go on.
#[derive(Debug, Default)]
pub(super) struct Pulls(AtomicUsize);

impl Pulls {
    /// Awaits a pull, which counts unless it ends well.
    pub(super) async fn count<T, E>(&self, pull: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        self.0.fetch_add(1, Ordering::Relaxed);
        let pulled = pull.await;
        if pulled.is_ok() {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
        pulled
    }

    fn all_ended_well(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }
}

impl Running {
    pub(super) fn new(
        inner: Arc<Inner>,
        pair: Arc<Pair>,
        spec: RoomSpec,
        attempt: u64,
        sources: BTreeMap<u32, Arc<Source>>,
        incoming: Incoming,
    ) -> Self {
        let writers = pair.writers(inner.me.rank);
        Self {
            until: Instant::now() + spec.deadline.min(FOR_EVER),
            inner,
            pair,
            spec,
            attempt,
            sources,
            writers,
            state: watch::Sender::new(incoming),
            nbytes: AtomicU64::new(0),
            packed: AtomicU64::new(0),
            pulls: Pulls::default(),
            released: watch::Sender::new(false),
        }
    }

    pub(super) fn start(self, lease: Lease) -> ReceiverRoom {
        let running = Arc::new(self);
        let runtime = running.inner.shared.runtime().clone();
        let counted = Counted::new(&running.inner);
        let run = Arc::clone(&running).run(lease);
        runtime.spawn(async move {
            run.await;
            drop(counted);
        });
        ReceiverRoom { running }
    }

    fn phase(&self) -> Phase {
        self.state.borrow().phase()
    }

    /// Time until its deadline; a moment where there is none.
    pub(super) fn left(&self) -> Duration {
        let left = self.until.saturating_duration_since(Instant::now());
        left.max(Duration::from_millis(1))
    }

    fn change(&self, change: impl FnOnce(&mut Incoming)) {
        self.state.send_modify(change);
    }

    /// Ends the room for what happened with one of prefill's ranks.
    fn fail_by(&self, rank: u32, failure: Failure) {
        if self.inner.shared.is_closed() {
            // Nothing can be reached then, and that is why.
            return self.change(|state| state.fail(self.closed()));
        }
        let failure = failure::in_room(self.spec.room.number, failure).with("src_rank", rank);
        self.change(|state| state.fail(failure));
    }

    fn closed(&self) -> Failure {
        let (room, rank) = (self.spec.room.number, self.inner.me.rank);
        failure::closed(format_args!("room {room}: rank {rank} of decode"))
    }

    fn writers(&self) -> impl Iterator<Item = (u32, &Arc<Source>)> {
        let all = self.sources.iter();
        all.filter(|(rank, _)| self.writers.contains(rank))
            .map(|(&rank, source)| (rank, source))
    }

    async fn run(self: Arc<Self>, lease: Lease) {
        let mut telling = pin!(maybe_done(self.tell()));
        let mut closed = self.inner.closed.subscribe();
        let ended = {
            let mut states = self.state.subscribe();
            let state = &self.state;
            let troubles = self.writers().map(|(rank, source)| async move {
                let failure = source.trouble().await;
                // What it has confirmed is here for good, whatever becomes of it.
                if state.borrow().step(rank) == Step::Over {
                    std::future::pending::<()>().await;
                }
                (rank, failure)
            });
            let mut troubles: FuturesUnordered<_> = troubles.collect();
            let told = async {
                telling.as_mut().await;
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = told => None,
                _ = join_all(self.writers().map(|(rank, source)| self.read(rank, source))) => None,
                Some((rank, failure)) = troubles.next() => {
                    self.fail_by(rank, failure);
                    None
                }
                () = tokio::time::sleep_until(self.until) => {
                    let rank = format_args!("rank {} of decode", self.inner.me.rank);
                    Some(failure::late(self.spec.room.number, rank, self.spec.deadline, shown(&self.phase())))
                }
                _ = closed.wait_for(|closed| *closed) => Some(self.closed()),
                () = self.inner.shared.closed() => Some(self.closed()),
                _ = states.wait_for(|state| state.phase().is_terminal()) => None,
            }
        };
        if let Some(failure) = ended {
            self.change(|state| state.fail(failure));
        }
        // What was under way was dropped; copies end soon after.
        if !self.pulls.all_ended_well() {
            self.idle(&lease).await;
        }
        drop(lease);
        self.released.send_replace(true);
        if let Phase::Failed(failure) = self.phase() {
            self.leave(&failure).await;
        }
        tokio::select! {
            () = telling => {}
            () = tokio::time::sleep_until(self.until) => {}
            _ = closed.wait_for(|closed| *closed) => {}
        }
    }

    /// Waits until no copy writes into the pages of this room. No other room has them, so each is looked at until it is idle,
    /// and then no more.
    async fn idle(&self, lease: &Lease) {
        for (&component, ids) in lease.pages() {
            for (at, (memory, offset, len)) in (1_usize..).zip(self.inner.buffers.pages(component, ids)) {
                while !self.inner.targets[memory].is_idle_in(offset..offset + len) {
                    tokio::time::sleep(IDLE_PAUSE).await;
                }
                if at.is_multiple_of(AT_A_TIME) {
                    tokio::task::yield_now().await;
                }
            }
        }
    }

    /// Tells the senders that nothing is read any more, and why.
    async fn leave(&self, failure: &Failure) {
        let body = |rank| {
            let state = self.state.borrow();
            Body::Leave {
                room: self.spec.room,
                attempt: self.attempt,
                failure: failure.clone(),
                told: state.is_told() || state.seen(rank).is_some(),
            }
        };
        let limit = self.inner.me.heartbeat.limit();
        let leaving = self.writers().map(|(rank, source)| {
            let body = body(rank);
            async move { source.ask(&body).await }
        });
        // Who does not hear it notices by itself, or cuts this room off.
        let _ = tokio::time::timeout(limit, join_all(leaving)).await;
    }

    /// Tells the senders that nobody needs, but that this rank has to tell, which engine reads the room. They need not know
    /// how it ends.
    async fn tell(&self) {
        let others = self.sources.iter().filter(|(rank, _)| !self.writers.contains(rank));
        let body = &self.question(None);
        let telling = others.map(|(_, source)| async { while let Ok(Answer::Room(None)) = source.ask(body).await {} });
        join_all(telling).await;
    }

    fn question(&self, rank: Option<u32>) -> Body {
        Body::Room {
            room: self.spec.room,
            attempt: self.attempt,
            seen: rank.and_then(|rank| self.state.borrow().seen(rank)),
        }
    }

    /// Reads from one writer until nothing is left to do.
    async fn read(&self, rank: u32, source: &Source) {
        tokio::select! {
            () = self.follow(rank, source) => {}
            () = self.take(rank, source) => {}
        }
    }

    /// Asks for the state of the room there, again and again.
    async fn follow(&self, rank: u32, source: &Source) {
        loop {
            match source.ask(&self.question(Some(rank))).await {
                Ok(Answer::Room(Some(news))) => self.change(|room| room.heard(rank, news)),
                Ok(Answer::Refused(failure)) => return self.change(|room| room.told(failure)),
                Ok(_) => tokio::time::sleep(AGAIN).await,
                Err(failure) => return self.fail_by(rank, failure),
            }
        }
    }

    async fn take_part(&self, rank: u32, source: &Source, part: Part, tables: &[Arc<Vec<i64>>]) -> Result<(), Failure> {
        let nbytes = self.pulls.count(pull::pull(self, rank, source, &part, tables)).await?;
        self.nbytes.fetch_add(nbytes, Ordering::Relaxed);
        self.change(|state| state.taken(rank, &part));
        Ok(())
    }

    /// Does what is to be done next, again and again.
    async fn take(&self, rank: u32, source: &Source) {
        let mut states = self.state.subscribe();
        loop {
            let step = match states.wait_for(|state| state.step(rank) != Step::Wait).await {
                Ok(state) => state.step(rank),
                Err(_) => return,
            };
            match step {
                Step::Wait => {}
                Step::Over => return,
                Step::Pull(_) => {
                    let (parts, tables) = {
                        let state = self.state.borrow();
                        let tables = state.tables(rank).map(<[_]>::to_vec).unwrap_or_default();
                        (state.parts(rank), tables)
                    };
                    let pulls = parts
                        .into_iter()
                        .map(|part| self.take_part(rank, source, part, &tables));
                    if let Err(failure) = try_join_all(pulls).await {
                        return self.fail_by(rank, failure);
                    }
                }
                Step::Confirm { generation } => {
                    let body = Body::Confirm {
                        room: self.spec.room,
                        attempt: self.attempt,
                        generation,
                    };
                    match source.ask(&body).await {
                        Ok(Answer::Confirmed) => self.change(|state| state.confirmed(rank, generation)),
                        Ok(Answer::Refused(failure)) => return self.change(|state| state.told(failure)),
                        Err(failure) => return self.fail_by(rank, failure),
                        Ok(_) => {
                            let failure = failure::malformed(source.shown());
                            return self.fail_by(rank, failure);
                        }
                    }
                }
            }
        }
    }
}

/// A room at decode. Dropped before it has ended, it fails.
#[derive(Debug)]
pub struct ReceiverRoom {
    running: Arc<Running>,
}

/// What a room has brought, besides the pages.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Received {
    /// Bytes that were pulled.
    pub nbytes: u64,
    /// Those of them that went through scratch, on either side.
    pub packed: u64,
    /// What went along with the last chunk of the first rank that had something.
    pub aux: Option<Vec<u8>>,
}

impl ReceiverRoom {
    /// Its number and life.
    pub fn id(&self) -> RoomId {
        self.running.spec.room
    }

    /// How far it is.
    pub fn phase(&self) -> Phase {
        self.running.phase()
    }

    /// Bytes that were pulled so far.
    pub fn nbytes(&self) -> u64 {
        self.running.nbytes.load(Ordering::Relaxed)
    }

    /// Waits until everything is here.
    ///
    /// # Errors
    /// Why it failed. Its pages are written no more once [`ReceiverRoom::released`] says so.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn finished(&self) -> Result<Received, Failure> {
        let mut states = self.running.state.subscribe();
        let state = states.wait_for(|state| state.phase().is_terminal()).await;
        let state = state.expect("the room is held");
        match state.phase() {
            Phase::Failed(failure) => Err(failure),
            _ => Ok(Received {
                nbytes: self.nbytes(),
                packed: self.running.packed.load(Ordering::Relaxed),
                aux: state.aux().map(<[u8]>::to_vec),
            }),
        }
    }

    /// Ends it, unless it has ended; prefill is told why.
    pub fn abort(&self, failure: Failure) {
        self.running.change(|state| state.fail(failure));
    }

    /// Waits until its pages may be used for something else: it has ended, and nothing writes to them any more.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn released(&self) {
        let mut released = self.running.released.subscribe();
        let released = released.wait_for(|released| *released).await;
        drop(released.expect("the room is held"));
    }

    /// Whether its pages may be used for something else.
    pub fn is_released(&self) -> bool {
        *self.running.released.borrow()
    }
}

impl Drop for ReceiverRoom {
    fn drop(&mut self) {
        let rank = self.running.inner.me.rank;
        self.abort(failure::dropped(
            self.running.spec.room.number,
            format_args!("rank {rank} of decode"),
        ));
    }
}
