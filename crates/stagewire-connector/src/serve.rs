//! The holder's side of the payload socket.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures::{SinkExt, StreamExt};
use stagewire_core::{Classify, Failure, Handle, Token};
use stagewire_transfer::ProcessWatch;
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};

use crate::Owner;
use crate::live::{Claim, Table};
use crate::wire::{self, End, Greeting, Hello, Me, Refusal, Reply, Request, State};

/// How long who connects may take to say hello.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// Replies that may wait for one connection.
const QUEUE: usize = 256;

/// What a process does with payloads that others put into it.
#[async_trait]
pub(crate) trait PutHandler: std::fmt::Debug + Send + Sync {
    async fn put(&self, request: PutRequest) -> Result<Handle, Failure>;
}

#[derive(Debug)]
pub(crate) struct PutRequest {
    pub(crate) handle: Handle,
    pub(crate) token: Option<Token>,
    pub(crate) owner: Owner,
    /// How much of its life is left.
    pub(crate) expires: Option<Duration>,
    pub(crate) wait: Duration,
}

/// What the socket serves.
#[derive(Debug)]
pub(crate) struct Holder {
    pub(crate) me: Me,
    pub(crate) table: Arc<Table>,
    pub(crate) puts: OnceLock<Arc<dyn PutHandler>>,
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

type Reader = FramedRead<tokio::net::unix::OwnedReadHalf, LengthDelimitedCodec>;
type Writer = FramedWrite<OwnedWriteHalf, LengthDelimitedCodec>;

async fn connection(stream: UnixStream, holder: Arc<Holder>) {
    match stream.peer_cred() {
        Ok(cred) if cred.uid() == holder.me.uid => {}
        cred => {
            tracing::warn!(?cred, "refused a connection of another user to the payload socket");
            return;
        }
    }
    let (read, write) = stream.into_split();
    let mut reader = FramedRead::new(read, wire::codec());
    let mut writer = FramedWrite::new(write, wire::codec());
    match tokio::time::timeout(HELLO_WITHIN, greet(&mut reader, &mut writer, &holder)).await {
        Ok(Some(hello)) => {
            let mut session = Session::new(holder, writer);
            // A child that the consumer left behind may keep its end of the socket open.
            let watch = ProcessWatch::open(hello.process).ok();
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

/// One connection of one consumer process.
struct Session {
    holder: Arc<Holder>,
    replies: mpsc::Sender<Reply>,
    watches: BTreeMap<u32, (Claim, AbortHandle)>,
    /// Everything that runs for this connection; ends with it.
    tasks: JoinSet<()>,
}

impl Session {
    fn new(holder: Arc<Holder>, writer: Writer) -> Self {
        let (replies, queue) = mpsc::channel(QUEUE);
        let mut tasks = JoinSet::new();
        tasks.spawn(write(writer, queue));
        Self {
            holder,
            replies,
            watches: BTreeMap::new(),
            tasks,
        }
    }

    async fn run(&mut self, reader: &mut Reader) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        while let Some(frame) = reader.next().await {
            self.request(wire::decode(&frame?)?).await;
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
            } => match self.holder.table.watch(payload, capability) {
                Ok(claim) => {
                    let report = report(id, claim.live().subscribe(), self.replies.clone());
                    self.watches.insert(id, (claim, self.tasks.spawn(report)));
                }
                Err(refusal) => self.reply(Reply::Refused { id, refusal }).await,
            },
            Request::Finish { id } => {
                if let Some((claim, report)) = self.watches.remove(&id) {
                    report.abort();
                    claim.finish();
                }
                self.reply(Reply::Finished { id }).await;
            }
            Request::Leave { id } => {
                if let Some((_, report)) = self.watches.remove(&id) {
                    report.abort();
                }
            }
            Request::Put {
                id,
                handle,
                token,
                owner,
                expires_ms,
                wait_ms,
            } => {
                let (holder, replies) = (Arc::clone(&self.holder), self.replies.clone());
                self.tasks.spawn(async move {
                    let request = |handle| PutRequest {
                        handle,
                        token,
                        owner,
                        expires: expires_ms.map(Duration::from_millis),
                        wait: Duration::from_millis(wait_ms),
                    };
                    let reply = put(id, &holder, &handle, request).await;
                    // The connection may have ended; its tasks end with it.
                    let _ = replies.send(reply).await;
                });
            }
        }
    }

    async fn reply(&self, reply: Reply) {
        let _ = self.replies.send(reply).await;
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
        Ok(handle) => Reply::Stored {
            id,
            handle: handle.to_bytes(),
        },
        Err(failure) => Reply::Refused {
            id,
            refusal: Refusal::Put(failure),
        },
    }
}

/// Tells a consumer how its payload comes on, until it can only end one way.
async fn report(id: u32, mut states: watch::Receiver<State>, replies: mpsc::Sender<Reply>) {
    loop {
        let state = states.borrow_and_update().clone();
        let last = matches!(state.end, Some(End::Failed(_) | End::Released));
        if replies.send(Reply::State { id, state }).await.is_err() || last || states.changed().await.is_err() {
            return;
        }
    }
}

async fn write(mut writer: Writer, mut queue: mpsc::Receiver<Reply>) {
    while let Some(reply) = queue.recv().await {
        if let Err(error) = writer.send(wire::encode(&reply)).await {
            tracing::debug!(%error, "a consumer went away");
            return;
        }
    }
}
