//! This process as other hosts reach it.

mod accept;
mod dial;
mod hooks;
mod limits;
mod listen;
mod session;
#[cfg(test)]
mod tests;
mod token;
mod ungreeted;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use stagewire_core::{Peer, TransportAddress};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

pub(crate) use accept::accepted;
pub(crate) use dial::{Dial, Lanes, prepare};
pub(crate) use hooks::{Hooks, LaneServer, Placer, StreamServer};
pub use limits::NetworkLimits;
pub(crate) use session::Session;
pub use token::Secret;

use crate::host::stopped;
use crate::link::{Link, Links, Route};
use crate::process::host_id;
use crate::tcp::{self, Service, Tcp};
use crate::wire::{self, Kind, NetworkAddress};
use crate::{ConnectError, ConnectOptions, Host, StartError, TcpOptions, Transport};
use listen::Listening;
use session::Sessions;
use token::Key;

/// How a [`Network`] starts.
#[derive(Debug, Clone)]
pub struct NetworkOptions {
    /// Where it listens; port 0 takes a free one.
    pub bind: SocketAddr,
    /// The address that peers are told, where it is not the one of `bind`.
    pub advertise: Option<IpAddr>,
    /// What peers must know. Required where `bind` is not a loopback address, where anybody could connect.
    pub token: Option<Secret>,
    /// How `tcp` moves bytes.
    pub tcp: TcpOptions,
    /// What peers may have open.
    pub limits: NetworkLimits,
}

impl Default for NetworkOptions {
    /// Loopback only, any port, no token.
    fn default() -> Self {
        Self {
            bind: SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0),
            advertise: None,
            token: None,
            tcp: TcpOptions::default(),
            limits: NetworkLimits::default(),
        }
    }
}

/// What a host needs once to be reached from other hosts: a listener for TCP, where peers pin regions and, with `tcp`,
/// read and write them.
///
/// Peers prove that they have the token, if one is set, but nothing is encrypted: use it in a network that you trust.
/// Dropping it without [`Network::shutdown`] does the same, without waiting. It ends with its host, too.
pub struct Network {
    host: Arc<Host>,
    local: SocketAddr,
    address: NetworkAddress,
    key: Option<Key>,
    links: Arc<Links>,
    tcp: Arc<Service>,
    listening: Arc<Listening>,
    stop: Arc<watch::Sender<bool>>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

impl Network {
    /// Listens, and serves on the current tokio runtime.
    ///
    /// # Errors
    /// [`StartError`].
    ///
    /// # Cancel safety
    /// Nothing is left behind by a dropped future.
    pub async fn start(host: Arc<Host>, options: NetworkOptions) -> Result<Arc<Self>, StartError> {
        let NetworkOptions {
            bind,
            advertise,
            token,
            tcp,
            limits,
        } = options;
        if token.is_none() && !bind.ip().is_loopback() {
            return Err(StartError::TokenMissing { bind });
        }
        if advertise.is_none() && bind.ip().is_unspecified() {
            return Err(StartError::AdvertiseMissing { bind });
        }
        tcp.check_congestion()?;
        let failed = |what| {
            move |error| StartError::Network {
                what,
                address: bind,
                error,
            }
        };
        let listener = TcpListener::bind(bind).await.map_err(failed("listen at"))?;
        let local = listener.local_addr().map_err(failed("ask for the port of"))?;
        let reached = SocketAddr::new(advertise.unwrap_or(local.ip()), local.port());
        let key = token.as_ref().map(Key::new);
        let address = NetworkAddress {
            host: host_id(),
            sockets: vec![reached],
            extra: Vec::new(),
        };
        let stop = Arc::new(watch::Sender::new(false));
        let shared = host.shared().clone();
        let links = Links::new(shared.process, shared.counters.clone(), stop.subscribe());
        let listening = Arc::new(Listening {
            shared,
            host: address.host.clone(),
            key: key.clone(),
            sessions: Sessions::new(limits),
            lanes: OnceLock::new(),
            streams: OnceLock::new(),
            stop: stop.subscribe(),
        });
        let (mut host_stop, stop_here, accepted) = (host.stopping(), stop.clone(), listening.clone());
        let accepting = tokio::spawn(async move {
            tokio::select! {
                () = listen::accept(listener, accepted) => {}
                () = stopped(&mut host_stop) => drop(stop_here.send_replace(true)),
            }
        });
        Ok(Arc::new(Self {
            host,
            local,
            address,
            key,
            links,
            tcp: Arc::new(Service::new(tcp)),
            listening,
            stop,
            accepting: Mutex::new(Some(accepting)),
        }))
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The host whose memory it serves.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// Peers on any host pull from this host's memory, and push into it where it lets them. Serves data connections from
    /// the first call on.
    pub fn tcp(self: &Arc<Self>) -> Arc<dyn Transport> {
        // Where they are served already, that goes on.
        self.set_lanes(Arc::new(tcp::Server(self.tcp.clone())));
        Arc::new(Tcp::new(self.clone(), self.tcp.clone()))
    }

    /// Has the connections served that peers open with [`Network::open_stream`]: `serve` runs for each until it ends, or the
    /// network does. Each counts as a control connection of [`NetworkLimits`]. False where they are served already.
    pub fn serve_streams<F>(&self, serve: impl Fn(TcpStream) -> F + Send + Sync + 'static) -> bool
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let serve: StreamServer = Box::new(move |stream| Box::pin(serve(stream)));
        self.listening.streams.set(serve).is_ok()
    }

    /// Opens a connection to a peer for a protocol of the program's own, over the port and with the proof of the token that
    /// transports use. A process that dies closes it at once; a host that is lost, after some ten seconds.
    ///
    /// # Errors
    /// [`ConnectError`]; [`ConnectError::NotOffered`] where the peer has no transport that reaches other hosts.
    ///
    /// # Cancel safety
    /// Nothing is left behind by a dropped future.
    pub async fn open_stream(&self, peer: &Peer, options: &ConnectOptions) -> Result<TcpStream, ConnectError> {
        let dial = self.dial(wire::network_address(peer)?);
        let (peer, after) = (peer.incarnation, options.deadline);
        let opened = timeout(after, dial.open_stream(peer, self.host.process())).await;
        opened.unwrap_or(Err(ConnectError::Deadline { peer, after }))
    }

    /// Listens no more and ends the connections: peers see them closed, and their transfers end with an error.
    ///
    /// # Cancel safety
    /// A dropped future has begun the shutdown; it goes on by itself.
    pub async fn shutdown(&self) {
        self.stop();
        let accepting = self.accepting.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(accepting) = accepting {
            // It ends by itself; an error would be its panic, which was reported where it happened.
            let _ = accepting.await;
        }
    }

    fn stop(&self) {
        self.links.close();
        self.stop.send_replace(true);
    }

    /// Lets the owner's half of a transport take part; false where the transport has one already.
    pub(crate) fn set_placer(&self, kind: Kind, placer: Arc<dyn Placer>) -> bool {
        self.host.shared().hooks.set_placer(kind, placer)
    }

    /// Has the data connections that this network accepts served; false where they are already.
    pub(crate) fn set_lanes(&self, lanes: Arc<dyn LaneServer>) -> bool {
        self.listening.lanes.set(lanes).is_ok()
    }

    /// The address of this process as one of its transports, with what else that transport's peers need to know.
    pub(crate) fn address(&self, kind: Kind, extra: &[u8]) -> TransportAddress {
        let address = NetworkAddress {
            extra: extra.to_vec(),
            ..self.address.clone()
        };
        TransportAddress {
            transport: kind.name().to_owned(),
            address: wire::encode_versioned(&address),
        }
    }

    /// The connection to a peer, made if there is none, and what the peer's transport added to its address.
    pub(crate) async fn link(
        &self,
        kind: Kind,
        peer: &Peer,
        options: &ConnectOptions,
    ) -> Result<(Arc<Link>, Vec<u8>), ConnectError> {
        let mut address: NetworkAddress = wire::address_of(kind, peer)?;
        let extra = std::mem::take(&mut address.extra);
        let dial = self.dial(address);
        let route = Route::Tcp(&dial);
        let link = self.links.connect(peer.incarnation, route, options.deadline).await?;
        Ok((link, extra))
    }

    fn dial(&self, to: NetworkAddress) -> Dial {
        Dial {
            sockets: to.sockets,
            peer_host: to.host,
            host: self.address.host.clone(),
            key: self.key.clone(),
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network")
            .field("incarnation", &self.host.incarnation())
            .field("local", &self.local)
            .finish_non_exhaustive()
    }
}
