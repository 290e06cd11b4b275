//! The consumer's side of the payload protocol: one connection per holder, shared by everything that reads from it.

mod connect;
mod error;
mod inbound;
mod watching;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stagewire_core::{Handle, Incarnation, Peer};
use stagewire_transfer::{Network, ProcessWatch};
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

pub use error::LinkError;
pub(crate) use watching::{Heard, Watching};

use crate::live::Shown;
use crate::outbox::{Outbox, Ticket};
use crate::wire::{Me, Reply, Request, State};
use connect::Opened;
use inbound::Inbound;

/// How soon some timer fires after an answer: earlier than any deadline.
const NEAR: Duration = Duration::from_millis(50);

/// How long a holder may take to answer a hello.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// Connections to holders, by incarnation.
#[derive(Debug)]
pub(crate) struct Links {
    me: Me,
    network: Arc<Network>,
    slots: Mutex<BTreeMap<Incarnation, Arc<Slot>>>,
}

/// Who connects to a holder holds the lock, so that there is one connection.
type Slot = tokio::sync::Mutex<Option<Arc<Link>>>;

impl Links {
    pub(crate) fn new(me: Me, network: Arc<Network>) -> Self {
        Self {
            me,
            network,
            slots: Mutex::default(),
        }
    }

    /// The connection to `peer`, made where there is none, once it has room for a request: with a peer that stands still,
    /// that is for the caller's deadline to bound.
    pub(crate) async fn to(&self, peer: &Peer) -> Result<Arc<Link>, LinkError> {
        // Together with those who try before.
        let connected = tokio::time::timeout(CONNECT_WITHIN, self.connected(peer)).await;
        let link = connected.unwrap_or_else(|_| {
            Err(LinkError::Silent {
                pid: peer.process.pid,
                at: connect::at(peer, &self.network),
                waited: CONNECT_WITHIN,
            })
        })?;
        link.room().await;
        Ok(link)
    }

    async fn connected(&self, peer: &Peer) -> Result<Arc<Link>, LinkError> {
        let slot = Arc::clone(lock(&self.slots).entry(peer.incarnation).or_default());
        let mut link = slot.lock().await;
        if let Some(link) = link.as_ref().filter(|link| link.is_open()) {
            return Ok(Arc::clone(link));
        }
        *link = None;
        let result = Link::connect(self.me, peer, &self.network).await;
        link.clone_from(&result.as_ref().ok().cloned());
        drop(link);
        drop(slot);
        self.forget_closed();
        result
    }

    /// Ends every connection but those that are being made: who makes one is told to stop as well.
    pub(crate) fn close(&self) {
        for slot in std::mem::take(&mut *lock(&self.slots)).into_values() {
            if let Ok(mut link) = slot.try_lock()
                && let Some(link) = link.take()
            {
                link.close();
            }
        }
    }

    /// Whether there is a connection to this incarnation.
    pub(crate) fn has(&self, incarnation: Incarnation) -> bool {
        let slot = lock(&self.slots).get(&incarnation).cloned();
        slot.is_some_and(|slot| is_open(&slot))
    }

    /// Whether there is a connection to this incarnation, whose process runs, for all that the kernel says.
    pub(crate) fn sees_alive(&self, incarnation: Incarnation) -> bool {
        let slot = lock(&self.slots).get(&incarnation).cloned();
        let alive = |link: &Arc<Link>| link.is_open() && link.watch.as_ref().is_some_and(|watch| watch.is_alive());
        slot.is_some_and(|slot| slot.try_lock().is_ok_and(|link| link.as_ref().is_some_and(alive)))
    }

    /// Number of connections that are up.
    pub(crate) fn open(&self) -> u64 {
        let slots = lock(&self.slots);
        slots.values().filter(|slot| is_open(slot)).count() as u64
    }

    /// Forgets the holders that are gone, so that a long life among short-lived peers does not add up.
    fn forget_closed(&self) {
        lock(&self.slots).retain(|_, slot| {
            Arc::strong_count(slot) > 1
                || slot
                    .try_lock()
                    .map_or(true, |link| link.as_ref().is_some_and(|link| link.is_open()))
        });
    }
}

/// Whether a connection is up, and not being made.
fn is_open(slot: &Slot) -> bool {
    slot.try_lock()
        .is_ok_and(|link| link.as_ref().is_some_and(|link| link.is_open()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One connection to one holder.
#[derive(Debug)]
pub(crate) struct Link {
    inbound: Arc<Inbound>,
    outbox: Arc<Outbox>,
    routes: Arc<Routes>,
    next: AtomicU32,
    /// Where it is a process of this host.
    watch: Option<Arc<ProcessWatch>>,
    task: AbortHandle,
}

/// Where replies go, by the id of the request. `None` once the connection has ended.
#[derive(Debug)]
struct Routes(Mutex<Option<BTreeMap<u32, Route>>>);

#[derive(Debug)]
enum Route {
    /// Of a payload that is followed.
    Watch(watch::Sender<Heard>),
    /// Of a request with one answer.
    Answer(oneshot::Sender<Reply>),
}

impl Routes {
    /// Passes a reply on. Gives back one that nobody waits for any more.
    fn hear(&self, reply: Reply) -> Option<Reply> {
        let mut routes = lock(&self.0);
        let routes = routes.as_mut()?;
        let id = reply.id();
        if let Some(Route::Watch(heard)) = routes.get(&id) {
            heard.send_modify(|heard| {
                heard.spoken = true;
                match reply {
                    Reply::State { state, bytes, .. } => {
                        let State {
                            complete,
                            digests,
                            end,
                            stored,
                            regions,
                        } = state;
                        heard.shown.complete.extend(&complete, &digests);
                        heard.shown = Shown {
                            complete: Arc::clone(&heard.shown.complete),
                            end,
                            stored,
                            regions,
                        };
                        if !bytes.is_empty() {
                            heard.bytes = Some(bytes.into());
                        }
                    }
                    Reply::Refused { refusal, .. } => heard.refused = Some(refusal),
                    Reply::Finished { .. } => heard.finished = true,
                    Reply::Stored { .. } | Reply::Reserved { .. } | Reply::Kv { .. } => {
                        tracing::warn!("a holder answered to what nobody asked");
                    }
                }
            });
            None
        } else {
            match routes.remove(&id) {
                Some(Route::Answer(answer)) => answer.send(reply).err(),
                _ => Some(reply),
            }
        }
    }
}

/// Ends the routes when the connection's task ends, in whatever way.
struct EndRoutes(Arc<Routes>);

impl Drop for EndRoutes {
    fn drop(&mut self) {
        lock(&self.0.0).take();
    }
}

impl Link {
    async fn connect(me: Me, peer: &Peer, network: &Network) -> Result<Arc<Self>, LinkError> {
        let Opened {
            reader,
            writer,
            socket,
            watch,
        } = connect::open(me, peer, network).await?;
        let routes = Arc::new(Routes(Mutex::new(Some(BTreeMap::new()))));
        let outbox = Arc::new(Outbox::new(writer.into_inner()));
        let watch = watch.map(Arc::new);
        let inbound = Inbound::new(reader, Arc::clone(&routes), Arc::clone(&outbox), socket);
        let inbound = Arc::new(inbound);
        let running = run(
            Arc::clone(&inbound),
            Arc::clone(&outbox),
            watch.clone(),
            EndRoutes(Arc::clone(&routes)),
        );
        let task = tokio::spawn(running).abort_handle();
        Ok(Arc::new(Self {
            inbound,
            outbox,
            routes,
            next: AtomicU32::new(0),
            watch,
            task,
        }))
    }

    pub(crate) fn is_open(&self) -> bool {
        lock(&self.routes.0).is_some()
    }

    fn close(&self) {
        self.task.abort();
    }

    /// Follows a payload. `moved` says that the handle is one of another holder, `copies` that its bytes may be sent along.
    pub(crate) fn watch(self: &Arc<Self>, handle: &Handle, moved: bool, copies: bool) -> Watching {
        let Handle {
            payload, capability, ..
        } = *handle;
        let (sender, heard) = watch::channel(Heard {
            shown: Shown::none_of(handle.manifest.chunks()),
            ..Heard::default()
        });
        let asked = self.request(Route::Watch(sender), |id| Request::Watch {
            id,
            payload,
            capability,
            moved,
            copies,
        });
        Watching::new(asked, heard)
    }

    /// Waits until requests do not pile up here.
    ///
    /// # Cancel safety
    /// Safe.
    pub(crate) async fn room(&self) {
        self.outbox.room().await;
    }

    /// Sends a request that has one answer, now; `None` where the connection ends before that came.
    ///
    /// # Cancel safety
    /// Dropping the future tells the holder that nobody waits any more.
    pub(crate) fn ask(
        self: &Arc<Self>,
        request: impl FnOnce(u32) -> Request,
    ) -> impl Future<Output = Option<Reply>> + Send + 'static {
        let (sender, receiver) = oneshot::channel();
        let asked = self.request(Route::Answer(sender), request);
        let link = Arc::clone(self);
        let answer = Answer { link, receiver };
        async move {
            // Both whole, and not the parts that are used.
            let (mut asked, mut answer) = (asked, answer);
            let answer = (&mut answer.receiver).await.ok();
            asked.leaves = false;
            answer
        }
    }

    /// Waits for what the holder answers as soon as it hears what it is asked.
    ///
    /// # Cancel safety
    /// That of `waiting`.
    pub(crate) async fn attended<T>(&self, waiting: impl Future<Output = T>) -> T {
        self.inbound.attended(waiting).await
    }

    /// Takes back what an answer tells of that came too late.
    pub(crate) fn decline(&self, reply: &Reply) {
        decline(&self.outbox, reply);
    }

    /// Asks for room in a store for a put over this connection.
    pub(crate) async fn reserve(self: &Arc<Self>, nbytes: u64, wait: Duration) -> Result<Reserved, Option<Reply>> {
        let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        let (sender, answer) = oneshot::channel();
        let asked = self.request(Route::Answer(sender), |id| Request::Reserve { id, nbytes, wait_ms });
        match answer.await.ok() {
            Some(Reply::Reserved { .. }) => Ok(Reserved(asked)),
            other => Err(other),
        }
    }

    fn send(&self, request: &Request) {
        self.outbox.send(request);
    }

    /// Waits until the connection has ended: at once where the process at the other end dies.
    ///
    /// # Cancel safety
    /// Safe.
    pub(crate) async fn closed(self: &Arc<Self>) {
        let (sender, ended) = oneshot::channel();
        // Nothing answers to it, so that it goes with the routes.
        let _route = Asked {
            link: Arc::clone(self),
            id: self.route(Route::Answer(sender)),
            waits: None,
            leaves: false,
        };
        let _ = ended.await;
    }

    fn route(&self, route: Route) -> u32 {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        if let Some(routes) = lock(&self.routes.0).as_mut() {
            routes.insert(id, route);
        }
        id
    }

    fn request(self: &Arc<Self>, route: Route, request: impl FnOnce(u32) -> Request) -> Asked {
        let id = self.route(route);
        // Where the connection has ended, the route is dropped, which says so.
        let waits = self.outbox.send(&request(id));
        Asked {
            link: Arc::clone(self),
            id,
            waits,
            leaves: true,
        }
    }
}

/// Where an answer comes. One that came, though nobody waits for it any more, is declined.
struct Answer {
    link: Arc<Link>,
    receiver: oneshot::Receiver<Reply>,
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.receiver.close();
        if let Ok(reply) = self.receiver.try_recv() {
            self.link.decline(&reply);
        }
    }
}

fn decline(outbox: &Outbox, reply: &Reply) {
    if let Reply::Stored {
        handle,
        undo: Some(right),
        ..
    } = reply
        && let Ok(handle) = Handle::from_bytes(handle)
    {
        let (payload, right) = (handle.payload, *right);
        outbox.send(&Request::Undo { payload, right });
    }
}

/// A request that somebody waits for, or room that somebody keeps.
#[derive(Debug)]
struct Asked {
    link: Arc<Link>,
    id: u32,
    /// It may still wait to be sent.
    waits: Option<Ticket>,
    /// The holder is told that nobody waits any more.
    leaves: bool,
}

impl Drop for Asked {
    fn drop(&mut self) {
        if let Some(routes) = lock(&self.link.routes.0).as_mut() {
            routes.remove(&self.id);
        }
        // What the holder never hears of need not be taken back: with one that stands still, that would pile up.
        if self.leaves && !self.waits.is_some_and(|ticket| self.link.outbox.withdraw(ticket)) {
            self.link.send(&Request::Leave { id: self.id });
        }
    }
}

/// Room in the store at the other end, given back on drop unless a put has used it.
#[derive(Debug)]
pub(crate) struct Reserved(Asked);

impl Reserved {
    pub(crate) const fn link(&self) -> &Arc<Link> {
        &self.0.link
    }

    pub(crate) const fn id(&self) -> u32 {
        self.0.id
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

/// Moves frames until the holder or every user of the link is gone. Both ways at once: a side that waited for the other
/// to read before reading itself could wait for ever.
async fn run(inbound: Arc<Inbound>, outbox: Arc<Outbox>, watch: Option<Arc<ProcessWatch>>, _routes: EndRoutes) {
    let died = async {
        match &watch {
            Some(watch) => watch.died().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = died => {}
        () = receive(&inbound) => {}
        error = outbox.run() => tracing::debug!(%error, "a holder of payloads went away"),
    }
}

async fn receive(inbound: &Inbound) {
    // Each who asks sets a timer. Were it the first of all to fire, the thread that waits for the answer would be woken for
    // that alone. So there is an earlier one as long as answers come.
    let mut near = pin!(sleep(NEAR));
    let (mut is_set, mut heard) = (false, false);
    loop {
        let goes_on = tokio::select! {
            biased;
            goes_on = inbound.heard() => goes_on,
            () = &mut near, if is_set => {
                is_set = std::mem::take(&mut heard);
                if is_set {
                    near.as_mut().reset(Instant::now() + NEAR);
                }
                continue;
            }
        };
        if !goes_on {
            return;
        }
        heard = true;
        if !is_set {
            near.as_mut().reset(Instant::now() + NEAR);
            is_set = true;
        }
    }
}

#[cfg(test)]
mod tests;
