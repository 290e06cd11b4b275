//! The holder's side of the payload protocol.

mod watched;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::{SinkExt, StreamExt};
use stagewire_core::{ByteCount, Capability, Classify, ErrorClass, Failure, Handle, PayloadId, RegionRef, Token};
use stagewire_store::Reservation;
use stagewire_transfer::{ProcessWatch, unix};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::runtime::Handle as Runtime;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use crate::Owner;
use crate::begun::{Begun, EndsOnDrop};
use crate::kv::{Desk, Visit};
use crate::live::{Barred, Claim, Live, Shown, Table};
use crate::outbox::Outbox;
use watched::Watched;

use crate::wire::{self, End, Greeting, Hello, Me, PutBytes, Reader, Refusal, Reply, Request, State, Writer};

/// How long who connects may take to say hello.
const HELLO_WITHIN: Duration = Duration::from_secs(5);

/// What a process does with payloads that others put into it.
#[async_trait]
pub(crate) trait PutHandler: std::fmt::Debug + Send + Sync {
    /// Takes a payload. From the moment on when others may find it, nothing is waited for: a future that is dropped has not
    /// taken it.
    async fn put(&self, request: PutRequest) -> Result<Taken, Failure>;

    /// Whether who is no more than a reader of an orchestrator's payload may end it with this token.
    fn may_end(&self, payload: PayloadId, token: Option<Token>) -> Result<(), Failure>;

    /// Keeps room free for a put.
    async fn reserve(&self, nbytes: ByteCount, wait: Duration) -> Result<Reservation, Failure>;
}

/// What a store has taken.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) handle: Arc<Handle>,
    /// The right with which the put may still be undone.
    pub(crate) undo: Option<Capability>,
}

#[derive(Debug)]
pub(crate) struct PutRequest {
    /// As the producer lets the store pull it.
    pub(crate) handle: Handle,
    /// That of the payload, which it keeps.
    pub(crate) capability: Capability,
    pub(crate) bytes: PutBytes,
    pub(crate) token: Option<Token>,
    pub(crate) owner: Owner,
    /// How much of its life is left.
    pub(crate) expires: Option<Duration>,
    pub(crate) wait: Duration,
    pub(crate) reservation: Option<Reservation>,
}

/// What the socket serves.
#[derive(Debug)]
pub(crate) struct Holder {
    pub(crate) me: Me,
    pub(crate) table: Arc<Table>,
    pub(crate) puts: OnceLock<Arc<dyn PutHandler>>,
    pub(crate) kv: Arc<Desk>,
}

impl Holder {
    /// Ends a payload for another process, which presents its capability. All who read an orchestrator's payload have that:
    /// to end one, it takes a token as well that the store here accepts.
    fn release(&self, payload: PayloadId, capability: Capability, token: Option<Token>) -> Result<(), Refusal> {
        let live = self.table.get(payload);
        if live.is_some_and(|live| live.owner() == Owner::Orchestrator && live.handle().capability == capability) {
            let allowed = match self.puts.get() {
                Some(store) => store.may_end(payload, token),
                None => Err(orchestrators(payload)),
            };
            allowed.map_err(Refusal::Fenced)?;
        }
        self.table.release_by(payload, capability)
    }
}

fn orchestrators(payload: PayloadId) -> Failure {
    let message = format!("payload {payload} is an orchestrator's: its worker ends it when that says so");
    Failure::new(ErrorClass::Denied, "payload.owned", message)
}

/// Accepts connections until dropped.
pub(crate) async fn serve(listener: UnixListener, holder: Arc<Holder>) {
    let mut connections = JoinSet::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                connections.spawn(connection(stream, Arc::clone(&holder)));
            }
            // Out of file descriptors, most likely; those who connect have deadlines of their own.
            Err(error) => {
                tracing::warn!(%error, "the payload socket could not accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn connection(stream: UnixStream, holder: Arc<Holder>) {
    match stream.peer_cred() {
        Ok(cred) if cred.uid() == holder.me.uid => {}
        cred => {
            tracing::warn!(?cred, "refused a connection of another user to the payload socket");
            return;
        }
    }
    let (read, write) = match unix::split(stream) {
        Ok(halves) => halves,
        Err(error) => {
            tracing::warn!(%error, "could not serve a connection to the payload socket");
            return;
        }
    };
    let (reader, writer) = wire::framed(read, write);
    talk(reader, writer, holder, |hello| ProcessWatch::open(hello.process).ok()).await;
}

/// Serves who connects from another host. Its end closes the connection.
pub(crate) async fn serve_stream(stream: TcpStream, holder: Arc<Holder>) {
    let (read, write) = stream.into_split();
    let (reader, writer) = wire::framed(read, write);
    talk(reader, writer, holder, |_| None).await;
}

async fn talk(
    mut reader: Reader,
    mut writer: Writer,
    holder: Arc<Holder>,
    watch: impl FnOnce(&Hello) -> Option<ProcessWatch>,
) {
    match tokio::time::timeout(HELLO_WITHIN, greet(&mut reader, &mut writer, &holder)).await {
        Ok(Some(hello)) => {
            let mut session = Session::new(holder, writer);
            // A child that the consumer left behind may keep its end of the socket open.
            let watch = watch(&hello);
            let died = async {
                match &watch {
                    Some(watch) => watch.died().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                result = session.run(&mut reader) => if let Err(error) = result {
                    tracing::debug!(from = %hello.from, %error, "a connection to the payload socket ended");
                },
                () = died => {}
            }
        }
        Ok(None) => {}
        Err(_) => tracing::debug!("a connection to the payload socket never said hello"),
    }
}

/// Exchanges greetings; `None` where this connection is not for us.
async fn greet(reader: &mut Reader, writer: &mut Writer, holder: &Holder) -> Option<Hello> {
    let frame = reader.next().await?.ok()?;
    let (hello, greeting) = match Hello::decode(&frame) {
        Ok(Ok(hello)) if hello.to == holder.me.incarnation => (Some(hello), Greeting::Welcome),
        Ok(Ok(_)) => (None, Greeting::Incarnation(holder.me.incarnation)),
        Ok(Err(_)) => (None, Greeting::Version(wire::VERSION)),
        Err(error) => {
            tracing::warn!(%error, "refused a connection to the payload socket");
            return None;
        }
    };
    writer.send(wire::encode(&greeting)).await.ok()?;
    hello
}

/// Where the answers to one consumer process go.
#[derive(Debug, Clone)]
struct Replies(Arc<Outbox>);

impl Replies {
    async fn send(&self, reply: &Reply) {
        self.0.room().await;
        self.0.send(reply);
    }

    fn send_now(&self, reply: &Reply) {
        self.0.send(reply);
    }
}

/// One connection of one consumer process.
struct Session {
    holder: Arc<Holder>,
    replies: Replies,
    /// What else is told to each who follows a payload ends with it.
    watches: BTreeMap<u32, (Watched, Option<EndsOnDrop>)>,
    /// Puts that are not answered yet.
    puts: BTreeMap<u32, EndsOnDrop>,
    /// Reservations, and questions about caches, that are not answered yet.
    asked: BTreeMap<u32, AbortHandle>,
    /// Room that is kept for a put, whether that was tried or not; `None` where it is still waited for.
    reserved: Arc<Mutex<BTreeMap<u32, Option<Reservation>>>>,
    kv: Arc<Visit>,
    /// Everything that runs for this connection; ends with it.
    tasks: JoinSet<()>,
}

impl Session {
    fn new(holder: Arc<Holder>, writer: Writer) -> Self {
        let replies = Replies(Arc::new(Outbox::new(writer.into_inner())));
        let mut tasks = JoinSet::new();
        let outbox = Arc::clone(&replies.0);
        tasks.spawn(async move {
            let error = outbox.run().await;
            tracing::debug!(%error, "a consumer went away");
        });
        let kv = Arc::new(Visit::new(Arc::clone(&holder.kv)));
        Self {
            holder,
            replies,
            kv,
            watches: BTreeMap::new(),
            puts: BTreeMap::new(),
            asked: BTreeMap::new(),
            reserved: Arc::default(),
            tasks,
        }
    }

    async fn run(&mut self, reader: &mut Reader) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let replies = Arc::clone(&self.replies.0);
        let mut held = None;
        while let Some(frame) = reader.next().await {
            // Who does not read what it is answered is not read from either.
            replies.room().await;
            // What has come together is answered together.
            let more = wire::begins_with_frame(reader.read_buffer());
            if more && held.is_none() {
                held = Some(replies.hold());
            }
            self.request(wire::decode(&frame?)?).await;
            if !more {
                held = None;
            }
            while self.tasks.try_join_next().is_some() {}
        }
        Ok(())
    }

    async fn request(&mut self, request: Request) {
        match request {
            Request::Watch {
                id,
                payload,
                capability,
                moved,
                copies,
            } => {
                let watched = Watched::default();
                let (table, replies) = (Arc::clone(&self.holder.table), self.replies.clone());
                let admitted = watched.admit(table.watch(payload, capability));
                let again = move || table.watch(payload, capability);
                let watcher = Watcher { id, moved, copies };
                // The first answer, where it needs not be waited for, goes out at once, and no thread is woken for the rest
                // before there is any.
                let watching = watch(watcher, admitted, again, watched.clone(), replies);
                let goes_on = Begun::new(&Runtime::current(), watching).map(EndsOnDrop);
                self.watches.insert(id, (watched, goes_on));
            }
            Request::Finish { id } => {
                let finished = match self.watches.get(&id) {
                    Some((watched, _)) => watched.finish(),
                    None => Some(Ok(())),
                };
                if let Some(finished) = finished {
                    // What the payload was brought back for is over: the watch would keep it in memory.
                    self.watches.remove(&id);
                    self.reply(reply_to_end(id, finished)).await;
                }
            }
            Request::Leave { id } => {
                if let Some((watched, _)) = self.watches.remove(&id) {
                    watched.leave();
                }
                self.puts.remove(&id);
                if let Some(task) = self.asked.remove(&id) {
                    task.abort();
                }
                let reservation = lock(&self.reserved).remove(&id);
                drop(reservation);
            }
            Request::Release {
                id,
                payload,
                capability,
                token,
            } => {
                let reply = match self.holder.release(payload, capability, token) {
                    Ok(()) => Reply::Finished { id },
                    Err(refusal) => Reply::Refused { id, refusal },
                };
                self.reply(reply).await;
            }
            Request::Reserve { id, nbytes, wait_ms } => {
                let (holder, replies) = (Arc::clone(&self.holder), self.replies.clone());
                let reserved = Arc::clone(&self.reserved);
                let wait = Duration::from_millis(wait_ms);
                lock(&reserved).insert(id, None);
                let task = self.tasks.spawn(async move {
                    let reply = match reserve(&holder, ByteCount(nbytes), wait).await {
                        Ok(reservation) => {
                            // Unless who asked has left: nobody would give it back.
                            if let Some(place) = lock(&reserved).get_mut(&id) {
                                *place = Some(reservation);
                            }
                            Reply::Reserved { id }
                        }
                        Err(refusal) => {
                            lock(&reserved).remove(&id);
                            Reply::Refused { id, refusal }
                        }
                    };
                    replies.send(&reply).await;
                });
                self.asked.insert(id, task);
            }
            Request::Put {
                id,
                handle,
                bytes,
                right,
                token,
                owner,
                expires_ms,
                wait_ms,
                reserved,
            } => {
                let (holder, replies) = (Arc::clone(&self.holder), self.replies.clone());
                let reservation = reserved.and_then(|id| lock(&self.reserved).get(&id).cloned().flatten());
                let putting = async move {
                    let request = |handle: Handle| PutRequest {
                        capability: handle.capability,
                        handle: Handle {
                            capability: right,
                            ..handle
                        },
                        bytes,
                        token,
                        owner,
                        expires: expires_ms.map(Duration::from_millis),
                        wait: Duration::from_millis(wait_ms),
                        reservation,
                    };
                    let reply = put(id, &holder, &handle, request).await;
                    // At once: who is told to leave it has either not taken it, or answered.
                    replies.send_now(&reply);
                };
                // One that needs not wait needs no task either.
                if let Some(goes_on) = Begun::new(&Runtime::current(), putting) {
                    self.puts.insert(id, EndsOnDrop(goes_on));
                }
            }
            Request::Kv { id, body } => {
                let (visit, replies) = (Arc::clone(&self.kv), self.replies.clone());
                let task = self.tasks.spawn(async move {
                    match visit.answer(&body).await {
                        Ok(body) => replies.send(&Reply::Kv { id, body }).await,
                        Err(error) => tracing::warn!(%error, "who receives caches asked what is no question"),
                    }
                });
                self.asked.insert(id, task);
            }
            Request::Undo { payload, right } => self.holder.table.undo(payload, right),
        }
        self.puts.retain(|_, put| !put.0.is_over());
        self.asked.retain(|_, task| !task.is_finished());
    }

    async fn reply(&self, reply: Reply) {
        self.replies.send(&reply).await;
    }
}

async fn put(id: u32, holder: &Holder, handle: &[u8], request: impl FnOnce(Handle) -> PutRequest) -> Reply {
    let Some(handler) = holder.puts.get() else {
        let refusal = Refusal::NoStore;
        return Reply::Refused { id, refusal };
    };
    let stored = match Handle::from_bytes(handle) {
        Ok(handle) => handler.put(request(handle)).await,
        Err(error) => Err(error.to_failure()),
    };
    match stored {
        Ok(Taken { handle, undo }) => Reply::Stored {
            id,
            handle: handle.to_bytes(),
            undo,
        },
        Err(failure) => Reply::Refused {
            id,
            refusal: Refusal::Put(failure),
        },
    }
}

async fn reserve(holder: &Holder, nbytes: ByteCount, wait: Duration) -> Result<Reservation, Refusal> {
    let handler = holder.puts.get().ok_or(Refusal::NoStore)?;
    handler.reserve(nbytes, wait).await.map_err(Refusal::Put)
}

/// The answer to a consumer that has every byte.
fn reply_to_end(id: u32, finished: Result<(), Refusal>) -> Reply {
    match finished {
        Ok(()) => Reply::Finished { id },
        Err(refusal) => Reply::Refused { id, refusal },
    }
}

/// What a consumer asked for.
struct Watcher {
    id: u32,
    moved: bool,
    copies: bool,
}

/// Serves one consumer that was let in, or will be once the payload has stopped moving.
async fn watch(
    Watcher { id, moved, copies }: Watcher,
    mut admitted: Result<Arc<Live>, Barred>,
    again: impl Fn() -> Result<Claim, Barred>,
    watched: Watched,
    replies: Replies,
) {
    let live = loop {
        match admitted {
            Ok(live) => break live,
            Err(Barred::Moving(live)) => live.not_moving().await,
            Err(Barred::Refused(refusal)) => {
                watched.refuse(refusal.clone());
                replies.send(&Reply::Refused { id, refusal }).await;
                return;
            }
        }
        admitted = watched.admit(again());
    };
    if let Some(finished) = watched.finished() {
        replies.send(&reply_to_end(id, finished)).await;
        return;
    }
    // Held as long as this consumer is there: what it reads stays in memory.
    let brought = match live.bring().await {
        Ok(brought) => brought,
        Err(failure) => {
            let refusal = Refusal::Failed(failure);
            watched.refuse(refusal.clone());
            replies.send(&Reply::Refused { id, refusal }).await;
            return;
        }
    };
    let regions = moved.then(|| live.handle().regions.clone());
    let states = live.subscribe();
    let whole = brought
        .as_ref()
        .filter(|_| copies && live.handle().manifest.nbytes().0 <= wire::SENT_ALONG);
    let bytes = whole.map(|brought| brought.bytes(live.handle())).unwrap_or_default();
    drop(live);
    report(id, states, regions, bytes, &replies).await;
}

/// Tells a consumer how its payload comes on, until it can only end one way. `regions` are told where the state says
/// nothing else, `bytes` with the first state.
async fn report(
    id: u32,
    mut states: watch::Receiver<Shown>,
    regions: Option<Vec<RegionRef>>,
    mut bytes: Vec<u8>,
    replies: &Replies,
) {
    let mut told = 0;
    loop {
        let shown = states.borrow_and_update().clone();
        let (complete, digests) = shown.complete.stretches_since(&mut told);
        let state = State {
            complete,
            digests,
            end: shown.end,
            stored: shown.stored,
            regions: shown.regions.or_else(|| regions.clone()),
        };
        let last = matches!(state.end, Some(End::Failed(_) | End::Released));
        let bytes = std::mem::take(&mut bytes);
        replies.send(&Reply::State { id, state, bytes }).await;
        if last || states.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
