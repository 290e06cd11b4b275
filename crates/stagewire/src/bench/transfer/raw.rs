//! The stream that transports are compared with: one TCP connection, written in pieces of 1 MiB.

use std::hint::black_box;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use twox_hash::XxHash3_64;

use super::owner::Bytes;

const WRITE: usize = 1 << 20;

/// Bytes that are hashed at a time, as many as in a frame of `tcp`.
const HASHED: usize = 256 << 10;

/// Sends the first bytes of what it offers to whoever asks.
#[derive(Debug)]
pub(super) struct Server {
    address: SocketAddr,
    offered: Arc<Offered>,
}

type Offered = Mutex<Option<Bytes>>;

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bytes({})", self.as_slice().len())
    }
}

impl Server {
    pub(super) fn start() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let offered = Arc::new(Offered::default());
        let theirs = offered.clone();
        thread::Builder::new().name("raw".to_owned()).spawn(move || {
            for stream in listener.incoming().flatten() {
                let offered = theirs.clone();
                thread::spawn(move || {
                    // It ends when the reader closes the stream.
                    let _ = send(stream, &offered);
                });
            }
        })?;
        Ok(Self { address, offered })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn offer(&self, bytes: Option<Bytes>) {
        *self.offered.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
    }
}

fn send(mut stream: TcpStream, offered: &Offered) -> io::Result<()> {
    let (mut tuned, mut wanted) = ([0], [0; 9]);
    stream.read_exact(&mut tuned)?;
    prepare(&stream, tuned != [0])?;
    loop {
        stream.read_exact(&mut wanted)?;
        let bytes = offered.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let bytes = bytes.ok_or_else(|| io::Error::other("nothing is offered"))?;
        let [hashed, len @ ..] = wanted;
        let len = usize::try_from(u64::from_le_bytes(len)).map_err(io::Error::other)?;
        let bytes = bytes.as_slice().get(..len).unwrap_or_default();
        for piece in bytes.chunks(if hashed == 0 { WRITE } else { HASHED }) {
            if hashed != 0 {
                black_box(XxHash3_64::oneshot(piece));
            }
            stream.write_all(piece)?;
        }
    }
}

/// The best that plain settings give on loopback: no delay, and where it is tuned, a congestion control that does not pace,
/// if the system allows to choose it.
fn prepare(stream: &TcpStream, tuned: bool) -> io::Result<()> {
    stream.set_nodelay(true)?;
    if tuned {
        // Refused where the module is not loaded or not allowed: then the system's choice stays.
        let _ = sockopt::set_tcp_congestion(stream, "reno");
    }
    Ok(())
}

/// The system's own choice of a congestion control, by its name.
pub(super) fn default_congestion() -> String {
    let name = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
    name.map_or_else(|_| "untuned".to_owned(), |name| name.trim().to_owned())
}

/// The reader's end.
#[derive(Debug)]
pub(super) struct Client {
    stream: TcpStream,
}

impl Client {
    pub(super) fn connect(address: SocketAddr) -> io::Result<Self> {
        Self::open(address, true)
    }

    /// With the congestion control that the system chooses, at both ends.
    pub(super) fn untuned(address: SocketAddr) -> io::Result<Self> {
        Self::open(address, false)
    }

    fn open(address: SocketAddr, tuned: bool) -> io::Result<Self> {
        let mut stream = TcpStream::connect(address)?;
        prepare(&stream, tuned)?;
        stream.write_all(&[u8::from(tuned)])?;
        Ok(Self { stream })
    }

    /// Asks for the first bytes of what is offered and reads all of them.
    pub(super) fn read(&mut self, into: &mut [u8]) -> io::Result<Duration> {
        let begin = Instant::now();
        self.ask(into.len(), false)?;
        self.stream.read_exact(into)?;
        Ok(begin.elapsed())
    }

    /// As [`Client::read`], and both ends hash every piece, which is the least that digests cost where one thread at each
    /// end does all.
    pub(super) fn read_hashed(&mut self, into: &mut [u8]) -> io::Result<Duration> {
        let begin = Instant::now();
        self.ask(into.len(), true)?;
        for piece in into.chunks_mut(HASHED) {
            self.stream.read_exact(piece)?;
            black_box(XxHash3_64::oneshot(piece));
        }
        Ok(begin.elapsed())
    }

    fn ask(&mut self, len: usize, hashed: bool) -> io::Result<()> {
        let mut wanted = [u8::from(hashed); 9];
        wanted[1..].copy_from_slice(&(len as u64).to_le_bytes());
        self.stream.write_all(&wanted)
    }
}
