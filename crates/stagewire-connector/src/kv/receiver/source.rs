//! A sender as a receiver has it: greeted, and asked again and again.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, Failure, RegionRef};
use stagewire_transfer::{ConnectError, Pinned, TransferError};
use tokio::sync::{Notify, OnceCell, watch};
use tokio::task::AbortHandle;
use tokio::time::MissedTickBehavior;

use super::super::cache::{Buffers, CachePlace};
use super::super::failure;
use super::super::heartbeat::Silence;
use super::super::protocol::{self, Answer, Ask, Body, SenderHandle, Welcome};
use super::{Me, lock};
use crate::connector::Shared;
use crate::consume::{AccessError, pin};
use crate::link::{Link, LinkError};
use crate::wire::{Reply, Request};

/// Pause before a sender is tried again, at first and at most.
const AGAIN: Duration = Duration::from_millis(100);
const AGAIN_AT_MOST: Duration = Duration::from_secs(1);
/// Longest time for a goodbye to be heard.
const BYE: Duration = Duration::from_secs(1);
/// Longest time until a question is asked again: longer than a sender keeps one.
const ASK_AGAIN: Duration = Duration::from_secs(15);

/// One sender.
#[derive(Debug)]
pub(super) struct Source {
    shared: Arc<Shared>,
    me: Arc<Me>,
    handle: SenderHandle,
    status: watch::Sender<Status>,
    /// The last silence that was too long, and how many there were.
    silences: watch::Sender<(u64, Option<Failure>)>,
    silence: Silence,
    /// Why it could not be reached, when that was tried last.
    problem: Mutex<Option<String>>,
    /// It must be greeted anew.
    stale: Notify,
    task: Mutex<Option<AbortHandle>>,
}

#[derive(Debug, Clone)]
enum Status {
    Greeting,
    Up(Arc<Up>),
    /// It refuses this engine, or is gone for good.
    Over(Failure),
}

/// A sender that was greeted.
#[derive(Debug)]
pub(super) struct Up {
    link: Arc<Link>,
    /// How often it wants to hear of this receiver.
    interval: Duration,
    regions: Vec<(RegionRef, OnceCell<Held>)>,
    buffers: Buffers,
}

/// A region that is held in place.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) pinned: Arc<dyn Pinned>,
    /// Rows cost little more than runs of bytes.
    pub(super) strided: bool,
}

impl Source {
    pub(super) fn start(shared: &Arc<Shared>, me: &Arc<Me>, handle: SenderHandle) -> Arc<Self> {
        let source = Arc::new(Self {
            shared: Arc::clone(shared),
            me: Arc::clone(me),
            handle,
            status: watch::Sender::new(Status::Greeting),
            silences: watch::Sender::new((0, None)),
            silence: Silence::default(),
            problem: Mutex::default(),
            stale: Notify::new(),
            task: Mutex::default(),
        });
        let running = Arc::clone(&source);
        let task = shared.runtime().spawn(async move {
            tokio::select! {
                () = running.shared.closed() => running.over(failure::closed("the connector at decode")),
                () = running.listen() => {}
                failure = running.live() => running.over(failure),
            }
        });
        *lock(&source.task) = Some(task.abort_handle());
        source
    }

    /// Ends it, and whatever waits for it. A sender that was greeted is told.
    pub(super) async fn end(&self) {
        if let Some(task) = lock(&self.task).take() {
            task.abort();
        }
        let up = match &*self.status.borrow() {
            Status::Up(up) => Some(Arc::clone(up)),
            _ => None,
        };
        self.over(failure::closed("the receiver at decode"));
        if let Some(up) = up {
            // Where it is not heard, the sender finds silence.
            let _ = tokio::time::timeout(BYE, self.exchange(&up.link, Body::Bye)).await;
        }
    }

    /// Ends it where it cannot be reached, and no room has it: only the map that it is in, and its own task.
    pub(super) fn is_of_use(self: &Arc<Self>) -> bool {
        let used = match *self.status.borrow() {
            Status::Up(_) => true,
            Status::Greeting => Arc::strong_count(self) > 2,
            Status::Over(_) => false,
        };
        if !used && let Some(task) = lock(&self.task).take() {
            task.abort();
        }
        used
    }

    fn over(&self, failure: Failure) {
        self.status.send_if_modified(|status| {
            let ends = !matches!(status, Status::Over(_));
            if ends {
                *status = Status::Over(failure);
            }
            ends
        });
    }

    /// The rank of prefill, and its process, for people.
    pub(super) fn shown(&self) -> String {
        let SenderHandle { rank, peer, .. } = &self.handle;
        format!("rank {rank} of prefill (process {})", peer.process.pid)
    }

    /// Counts how long nothing was heard.
    async fn listen(&self) {
        let heartbeat = &self.me.heartbeat;
        let mut ticks = tokio::time::interval(heartbeat.part());
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if self.silence.goes_on(heartbeat) {
                self.silence.heard();
                let problem = lock(&self.problem).clone();
                let failure = failure::silent(self.shown(), heartbeat.limit(), problem.as_deref());
                self.silences.send_modify(|(count, last)| {
                    *count += 1;
                    *last = Some(failure);
                });
            }
        }
    }

    /// Resolves once this sender can do nothing for a room that has it by now.
    pub(super) async fn trouble(&self) -> Failure {
        let (mut silences, mut status) = (self.silences.subscribe(), self.status.subscribe());
        let over = async {
            match &*status.wait_for(|status| matches!(status, Status::Over(_))).await.ok()? {
                Status::Over(failure) => Some(failure.clone()),
                _ => None,
            }
        };
        let silent = async {
            silences.changed().await.ok()?;
            silences.borrow().1.clone()
        };
        let found = tokio::select! {
            failure = over => failure,
            failure = silent => failure,
        };
        found.unwrap_or_else(|| failure::closed(self.shown()))
    }

    /// Greets it and gives it signs of life, again and again, until it is gone for good.
    async fn live(&self) -> Failure {
        let mut pause = AGAIN;
        loop {
            match self.greet().await {
                Ok(Some(up)) => {
                    pause = AGAIN;
                    lock(&self.problem).take();
                    self.status.send_replace(Status::Up(Arc::clone(&up)));
                    if let Err(failure) = self.beat(&up).await {
                        return failure;
                    }
                    self.status.send_replace(Status::Greeting);
                }
                Ok(None) => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(AGAIN_AT_MOST);
                }
                Err(failure) => return failure,
            }
        }
    }

    /// Until it must be greeted anew: it has forgotten this receiver, the connection has ended, or a pin is stale.
    async fn beat(&self, up: &Arc<Up>) -> Result<(), Failure> {
        let pause = self.me.heartbeat.pause(up.interval);
        let beats = async {
            loop {
                match self.exchange(&up.link, Body::Beat).await {
                    Some(Answer::Beat) => tokio::time::sleep(pause).await,
                    Some(Answer::Gone) => return Err(failure::closed(self.shown())),
                    _ => return Ok(()),
                }
            }
        };
        tokio::select! {
            ended = beats => ended,
            () = self.stale.notified() => Ok(()),
            () = up.link.closed() => Ok(()),
        }
    }

    /// `None` where it should be tried again.
    async fn greet(&self) -> Result<Option<Arc<Up>>, Failure> {
        let link = match self.shared.links().to(&self.handle.peer).await {
            Ok(link) => link,
            Err(error) if error.is_lost() => return Err(failure::lost(self.shown(), error.how())),
            Err(error) if is_for_good(&error) => {
                let mut failure = error.to_failure();
                failure.message = format!("{}: {}", self.shown(), failure.message);
                return Err(failure);
            }
            Err(error) => {
                *lock(&self.problem) = Some(error.to_string());
                return Ok(None);
            }
        };
        let hello = Body::Hello {
            rank: self.me.rank,
            engine: self.me.engine.clone(),
        };
        match self.exchange(&link, hello).await {
            Some(Answer::Welcome(welcome)) => match Up::new(&self.handle, link, &welcome) {
                Some(up) => Ok(Some(Arc::new(up))),
                None => Err(failure::lost(self.shown(), "its cache is not what its engine says")),
            },
            Some(Answer::Refused(failure)) => Err(failure),
            Some(Answer::Gone) => Err(failure::closed(self.shown())),
            _ => Ok(None),
        }
    }

    /// One question; `None` where the connection ends first.
    async fn exchange(&self, link: &Arc<Link>, body: Body) -> Option<Answer> {
        let ask = Ask {
            sender: self.handle.sender,
            right: self.handle.right,
            receiver: self.me.id,
            body,
        };
        let body = protocol::encode(&ask);
        link.room().await;
        let reply = link.ask(|id| Request::Kv { id, body }).await?;
        self.silence.heard();
        let Reply::Kv { body, .. } = reply else { return None };
        match protocol::decode(&body) {
            Ok(answer) => Some(answer),
            Err(error) => {
                tracing::warn!(%error, "a sender of caches gave an answer that is none");
                None
            }
        }
    }

    /// The sender, once it is greeted.
    pub(super) async fn up(&self) -> Result<Arc<Up>, Failure> {
        let mut status = self.status.subscribe();
        let ready = status.wait_for(|status| !matches!(status, Status::Greeting)).await;
        match ready.as_deref() {
            Ok(Status::Up(up)) => Ok(Arc::clone(up)),
            Ok(Status::Over(failure)) => Err(failure.clone()),
            _ => Err(failure::closed(self.shown())),
        }
    }

    /// Asks until there is an answer, over as many connections as it takes. Every question can be asked twice.
    ///
    /// # Cancel safety
    /// It may have been heard though the future was dropped.
    pub(super) async fn ask(&self, body: &Body) -> Result<Answer, Failure> {
        loop {
            let up = self.up().await?;
            let answer = tokio::time::timeout(ASK_AGAIN, self.exchange(&up.link, body.clone())).await;
            match answer {
                Ok(Some(Answer::Stranger)) | Ok(None) => {
                    // Whoever keeps the connection notices, too; another answer comes over another connection.
                    self.regreet(&up);
                    let mut status = self.status.subscribe();
                    let same = |status: &Status| matches!(status, Status::Up(now) if Arc::ptr_eq(now, &up));
                    let changed = status.wait_for(|status| !same(status));
                    // It may have changed and come back: then the wait ends by itself.
                    let _ = tokio::time::timeout(AGAIN, changed).await;
                }
                Ok(Some(Answer::Gone)) => return Err(failure::closed(self.shown())),
                Ok(Some(answer)) => return Ok(answer),
                Err(_) => {}
            }
        }
    }

    /// Holds a region of the sender in place.
    pub(super) async fn pin(&self, region: &RegionRef, deadline: Duration) -> Result<Held, Failure> {
        let pinned = pin(&self.handle.peer, region, &self.me.transports, Some(deadline)).await;
        let (pinned, transport) = pinned.map_err(|error| unreachable(error, self))?;
        let strided = transport.abilities().strided;
        Ok(Held { pinned, strided })
    }

    /// Why a pull has failed. What was pinned may be gone with its connection; the next room must not find it then.
    pub(super) fn failed(&self, up: &Arc<Up>, error: TransferError) -> Failure {
        let is_of_this_room_alone = matches!(
            error,
            TransferError::Deadline { .. } | TransferError::Target(_) | TransferError::Record { .. }
        );
        if !is_of_this_room_alone {
            self.regreet(up);
        }
        transfer_failed(error, self)
    }

    /// Has it greeted anew, where it is still the same.
    fn regreet(&self, up: &Arc<Up>) {
        let same = matches!(&*self.status.borrow(), Status::Up(now) if Arc::ptr_eq(now, up));
        if same {
            self.stale.notify_one();
        }
    }
}

/// Whether the same comes of it whenever it is tried again: of another user, version or token.
fn is_for_good(error: &LinkError) -> bool {
    let transient = matches!(
        error.class(),
        ErrorClass::Unavailable | ErrorClass::Deadline | ErrorClass::Exhausted
    );
    !transient
}

impl Up {
    /// `None` where what it says does not go with its engine.
    fn new(handle: &SenderHandle, link: Arc<Link>, welcome: &Welcome) -> Option<Self> {
        let engine = handle.engine().ok()?;
        let lens: Vec<u64> = welcome.regions.iter().map(|region| region.len).collect();
        let place = |&(memory, offset, nbytes): &(u32, u64, u64)| CachePlace {
            memory: memory as usize,
            offset,
            nbytes,
        };
        let places: Vec<CachePlace> = welcome.places.iter().map(place).collect();
        let buffers = Buffers::new(&engine, handle.rank, &lens, &places).ok()?;
        let regions = welcome.regions.iter().cloned();
        Some(Self {
            link,
            interval: Duration::from_millis(welcome.interval_ms),
            regions: regions.map(|region| (region, OnceCell::new())).collect(),
            buffers,
        })
    }

    pub(super) fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// A region of the sender, held in place from the first time on.
    pub(super) async fn region(&self, source: &Source, index: usize, deadline: Duration) -> Result<&Held, Failure> {
        let (region, held) = &self.regions[index];
        held.get_or_try_init(|| source.pin(region, deadline)).await
    }
}

fn unreachable(error: AccessError, source: &Source) -> Failure {
    match error {
        AccessError::NoTransport(transport) => Failure::new(
            ErrorClass::Unsupported,
            "transfer.unsupported",
            format!(
                "the cache of {} is registered with {transport}, which is not there here",
                source.shown()
            ),
        ),
        AccessError::Connect(error @ (ConnectError::Gone { .. } | ConnectError::Incarnation { .. })) => {
            failure::lost(source.shown(), error)
        }
        AccessError::Connect(error) => error.to_failure(),
        AccessError::Transfer(error) => transfer_failed(error, source),
    }
}

fn transfer_failed(error: TransferError, source: &Source) -> Failure {
    match error {
        TransferError::PeerLost { .. } => failure::lost(source.shown(), error),
        error => error.to_failure(),
    }
}
