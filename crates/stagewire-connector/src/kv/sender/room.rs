use std::sync::{Arc, Weak};
use std::time::Duration;

use stagewire_core::Failure;
use tokio::sync::watch;

use super::super::outgoing::{Attempt, Destination, Outgoing};
use super::super::{ChunkSpec, KvError, Phase, RoomId, failure};
use super::Inner;

/// A room of a sender, shared by its owner and those who read it.
#[derive(Debug)]
pub(in crate::kv) struct Cell {
    id: RoomId,
    state: watch::Sender<Outgoing>,
}

impl Cell {
    pub(in crate::kv) fn new(id: RoomId, outgoing: Outgoing) -> Self {
        Self {
            id,
            state: watch::Sender::new(outgoing),
        }
    }

    pub(in crate::kv) fn id(&self) -> RoomId {
        self.id
    }

    /// Its number.
    pub(in crate::kv) fn number(&self) -> u64 {
        self.id.number
    }

    pub(in crate::kv) fn change<T>(&self, change: impl FnOnce(&mut Outgoing) -> T) -> T {
        let mut result = None;
        self.state.send_modify(|room| result = Some(change(room)));
        result.expect("it was changed")
    }

    pub(in crate::kv) fn subscribe(&self) -> watch::Receiver<Outgoing> {
        self.state.subscribe()
    }

    pub(in crate::kv) fn phase(&self) -> Phase {
        self.state.borrow().phase()
    }

    pub(in crate::kv) fn is_released(&self) -> bool {
        self.state.borrow().is_released()
    }

    pub(in crate::kv) async fn released(&self) {
        let mut states = self.subscribe();
        let released = states.wait_for(Outgoing::is_released).await;
        drop(released.expect("it is held"));
    }

    pub(in crate::kv) fn is_read_by(&self, attempt: Attempt) -> bool {
        self.state.borrow().is_read_by(attempt)
    }

    pub(in crate::kv) fn bind(&self, rank: u32, attempt: Attempt, destination: &Destination) -> bool {
        let mut bound = false;
        self.state.send_if_modified(|room| {
            let known = room.is_read_by(attempt);
            bound = room.bind(rank, attempt, destination);
            bound && !known
        });
        bound
    }
}

/// Ends a room at its deadline, and cuts off who does not let go after that.
pub(in crate::kv) async fn keep(inner: Weak<Inner>, rank: u32, cell: Arc<Cell>, deadline: Duration) {
    let mut states = cell.subscribe();
    let terminal = states.wait_for(|room| room.phase().is_terminal());
    if tokio::time::timeout(deadline, terminal).await.is_err() {
        let phase = shown(&cell.phase());
        let late = failure::late(cell.number(), format_args!("rank {rank} of prefill"), deadline, phase);
        cell.change(|room| room.fail(late));
    }
    let cut_off = inner.upgrade().map_or(Duration::ZERO, |inner| inner.options.cut_off);
    let released = states.wait_for(Outgoing::is_released);
    if tokio::time::timeout(cut_off, released).await.is_err() {
        cell.change(Outgoing::cut_off);
        // Copies that this process itself makes end by themselves.
        let _ = states.wait_for(Outgoing::is_released).await;
    }
    cell.change(Outgoing::forget_pages);
    if let Some(inner) = inner.upgrade() {
        inner.ended(&cell);
    }
}

/// What a room was doing, for people.
pub(in crate::kv) fn shown(phase: &Phase) -> &'static str {
    match phase {
        Phase::Bootstrapping => "waiting for the other side",
        Phase::Waiting => "waiting for the first chunk",
        Phase::Transferring => "transferring",
        Phase::Success => "successful",
        Phase::Failed(_) => "failed",
    }
}

/// A room at prefill. Dropped before it has ended, it fails.
#[derive(Debug)]
pub struct SenderRoom {
    inner: Arc<Inner>,
    cell: Arc<Cell>,
}

impl SenderRoom {
    pub(in crate::kv) fn new(inner: Arc<Inner>, cell: Arc<Cell>) -> Self {
        Self { inner, cell }
    }

    /// Its number and life.
    pub fn id(&self) -> RoomId {
        self.cell.id
    }

    /// Announces a chunk, whose bytes must not change until the room is released.
    ///
    /// # Errors
    /// [`KvError::Chunk`] where it is not the next one, or has other pages than it should; the room goes on.
    /// [`KvError::Ended`], [`KvError::Component`], [`KvError::Aux`].
    pub fn send(&self, chunk: ChunkSpec) -> Result<(), KvError> {
        let engine = &self.inner.engine;
        self.cell.change(|room| room.send(engine, chunk))
    }

    /// How far it is.
    pub fn phase(&self) -> Phase {
        self.cell.phase()
    }

    /// Waits until every reader has everything.
    ///
    /// # Errors
    /// Why it failed.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn finished(&self) -> Result<(), Failure> {
        let mut states = self.cell.subscribe();
        let ended = states.wait_for(|room| room.phase().is_terminal()).await;
        match ended.expect("the room is held").phase() {
            Phase::Failed(failure) => Err(failure),
            _ => Ok(()),
        }
    }

    /// Ends it, unless it has ended; the readers are told why.
    pub fn abort(&self, failure: Failure) {
        self.cell.change(|room| room.fail(failure));
    }

    /// Waits until its pages may be used again: it has ended, and every reader has everything, has let go, has died or was
    /// cut off.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn released(&self) {
        self.cell.released().await;
    }

    /// Whether its pages may be used again.
    pub fn is_released(&self) -> bool {
        self.cell.is_released()
    }
}

impl Drop for SenderRoom {
    fn drop(&mut self) {
        let rank = self.inner.rank;
        self.abort(failure::dropped(
            self.cell.number(),
            format_args!("rank {rank} of prefill"),
        ));
    }
}
