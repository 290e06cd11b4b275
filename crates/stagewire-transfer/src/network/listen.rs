//! The owner's side: who may connect over TCP, and for what.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;

use super::accept::accepted;
use super::dial::prepare;
use super::hooks::{LaneServer, StreamServer};
use super::session::{Caller, Known, Lane, Sessions};
use super::token::Key;
use super::ungreeted::{Candidate, Ungreeted};
use crate::host::{Connection, Shared, stopped};
use crate::process::ProcessWatch;
use crate::wire::{self, Challenge, Channel, Hello, MAX_FRAME, Role, Stream, Welcome};

/// Who has not said so long after connecting who it is, is cut off.
const GREETING: Duration = Duration::from_secs(5);

/// What the tasks of one listener use together.
pub(super) struct Listening {
    pub(super) shared: Arc<Shared>,
    pub(super) host: String,
    pub(super) key: Option<Key>,
    pub(super) sessions: Arc<Sessions>,
    /// Whoever serves data connections, once somebody does.
    pub(super) lanes: OnceLock<Arc<dyn LaneServer>>,
    /// Whoever serves connections of another protocol, once somebody does.
    pub(super) streams: OnceLock<StreamServer>,
    pub(super) stop: watch::Receiver<bool>,
}

/// Accepts connections until the network or its host stops.
pub(super) async fn accept(listener: TcpListener, listening: Arc<Listening>) {
    let ungreeted = Arc::new(Ungreeted::default());
    let mut stop = listening.stop.clone();
    while let Some((socket, from)) = accepted(&listener, &mut stop, "a peer").await {
        let listening = listening.clone();
        ungreeted.admit(|candidate| async move {
            let serve = timeout(GREETING, listening.greet(socket, candidate));
            match serve.await {
                Ok(Ok(())) => {}
                Ok(Err(problem)) => tracing::warn!(%from, %problem, "a data connection was refused"),
                Err(_) => tracing::warn!(%from, "a data connection said nothing for {GREETING:?}"),
            }
        });
    }
}

/// A peer that may come in.
enum Guest {
    Reader(Option<ProcessWatch>, Known),
    Stream(Option<ProcessWatch>, Known),
    Lane(Lane),
}

impl Listening {
    /// Agrees with a peer who it is, and begins to serve it.
    async fn greet(self: &Arc<Self>, socket: TcpStream, candidate: Candidate) -> Result<(), String> {
        prepare(&socket).map_err(|error| error.to_string())?;
        let stream = Stream::new(socket);
        let challenge = Challenge { nonce: rand::random() };
        send(&stream, &wire::encode_versioned(&challenge)).await?;
        let mut buffer = [0; MAX_FRAME];
        let received = stream.receive(&mut buffer).await;
        let Some(len) = received.map_err(|error| error.to_string())? else {
            // Somebody looked whether this process lives.
            return Ok(());
        };
        let guest = match self.judge(&challenge, &buffer[..len]) {
            Ok(guest) => guest,
            Err(refused) => {
                send(&stream, &wire::encode_versioned(&refused)).await?;
                return Err(format!("{refused:?}"));
            }
        };
        let session = match &guest {
            Guest::Reader(_, known) | Guest::Stream(_, known) => known.session(),
            Guest::Lane(lane) => lane.session(),
        };
        let welcome = Welcome::Open {
            process: self.shared.process,
            canary: (0, 0),
            session: session.id(),
        };
        send(&stream, &wire::encode_versioned(&welcome)).await?;
        if !candidate.greeted() {
            return Ok(());
        }
        let listening = self.clone();
        match guest {
            Guest::Reader(reader, known) => {
                stream.greeted().map_err(|error| error.to_string())?;
                tokio::spawn(listening.serve_reader(stream, reader, known));
            }
            Guest::Stream(peer, known) => {
                stream.greeted().map_err(|error| error.to_string())?;
                let socket = stream.into_socket().map_err(|error| error.to_string())?;
                tokio::spawn(listening.serve_stream(socket, peer, known));
            }
            Guest::Lane(lane) => {
                let socket = stream.into_socket().map_err(|error| error.to_string())?;
                tokio::spawn(listening.serve_lane(socket, lane));
            }
        }
        Ok(())
    }

    fn judge(&self, challenge: &Challenge, hello: &[u8]) -> Result<Guest, Welcome> {
        let refused = |problem: String| Welcome::Refused { problem };
        let hello: Hello = wire::decode_versioned(hello).map_err(|error| refused(format!("it received {error}")))?;
        let token = |problem: &str| {
            let problem = problem.to_owned();
            Err(Welcome::Token { problem })
        };
        match (&self.key, &hello.proof) {
            (None, None) => {}
            (None, Some(_)) => return token("it has none itself"),
            (Some(_), None) => return token("it wants one, and was shown none"),
            (Some(key), Some(proof)) if key.accepts(challenge, hello.expects, proof) => {}
            (Some(_), Some(_)) => return token("it has another one"),
        }
        if hello.expects != self.shared.incarnation {
            return Err(Welcome::Incarnation {
                found: self.shared.incarnation,
            });
        }
        if let Role::Lane { session } = hello.role {
            let session = self.sessions.find(session);
            let session = session.filter(|_| self.lanes.get().is_some());
            let unknown = || refused("it knows no such session, or serves no lanes".to_owned());
            let lane = Lane::of(session.ok_or_else(unknown)?);
            return lane.map(Guest::Lane).map_err(Welcome::Full);
        }
        let Hello {
            host, process, role, ..
        } = hello;
        if role == Role::Stream && self.streams.get().is_none() {
            return Err(refused(
                "it serves no other protocol here; a connector does if its network has a token".to_owned(),
            ));
        }
        let watch = (host == self.host).then(|| ProcessWatch::open(process)).transpose();
        let watch = watch.map_err(|error| refused(error.to_string()))?;
        let known = self.sessions.open(self.shared.table.clone(), Caller { host, process });
        let known = known.map_err(Welcome::Full)?;
        Ok(match role {
            Role::Stream => Guest::Stream(watch, known),
            _ => Guest::Reader(watch, known),
        })
    }

    async fn serve_reader(self: Arc<Self>, stream: Stream, reader: Option<ProcessWatch>, known: Known) {
        let channel = Channel::Tcp(stream);
        let connection = Connection::new(self.shared.clone(), channel, reader, known.session().clone());
        connection.serve(self.stop.clone()).await;
        drop(known);
    }

    async fn serve_stream(self: Arc<Self>, socket: TcpStream, peer: Option<ProcessWatch>, known: Known) {
        let Some(serve) = self.streams.get() else {
            return;
        };
        let mut stop = self.stop.clone();
        let died = async {
            match &peer {
                Some(peer) => peer.died().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = serve(socket) => {}
            () = died => {}
            () = stopped(&mut stop) => {}
        }
        drop(known);
    }

    async fn serve_lane(self: Arc<Self>, socket: TcpStream, lane: Lane) {
        let Some(lanes) = self.lanes.get() else {
            return;
        };
        let (mut stop, session) = (self.stop.clone(), lane.session());
        tokio::select! {
            () = lanes.serve(socket, session.clone()) => {}
            () = session.over() => {}
            () = stopped(&mut stop) => {}
        }
    }
}

async fn send(stream: &Stream, frame: &[u8]) -> Result<(), String> {
    let sent = async {
        stream.post(frame)?;
        stream.flush_all().await
    };
    sent.await.map_err(|error| error.to_string())
}
