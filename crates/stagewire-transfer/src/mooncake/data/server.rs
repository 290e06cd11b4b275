use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::{Instant, timeout};

use super::watermark::Watermark;
use super::{Operation, REQUEST, Request, RequestError, STATUS, Status};
use crate::host::stopped;
use crate::mooncake::addresses::{Addresses, Held};
use crate::network::{accepted, prepare};
use crate::tcp::vectors::{Turns, Vectors};

/// Data connections at a time. Each costs a task and a socket. Where there are so many, one more takes the place of the one
/// that has been idle for longest.
const CONNECTIONS: usize = 1024;

/// How long one more connection waits for its place.
const PLACE: Duration = Duration::from_millis(100);

/// A peer that sends and takes nothing for so long in the middle of a request is cut off: it holds memory or a connection.
const STALL: Duration = Duration::from_secs(30);

/// How often a request that moves nothing looks whether its memory may still be used.
const TICK: Duration = Duration::from_millis(250);

/// Bytes of a step: between two looks at whether the memory may still be used.
const STEP: usize = 4 << 20;

/// How long the rest of a refused write is thrown away, so that the peer reads why before it sees the end.
const FAREWELL: Duration = Duration::from_secs(1);

/// Serves memory to peers until told to stop.
pub(crate) async fn serve(listener: TcpListener, addresses: Arc<Addresses>, stop: watch::Receiver<bool>) {
    serve_at_most(CONNECTIONS, listener, addresses, stop).await;
}

async fn serve_at_most(most: usize, listener: TcpListener, addresses: Arc<Addresses>, mut stop: watch::Receiver<bool>) {
    let permits = Arc::new(Semaphore::new(most));
    // Idle connections wait for it, and it wakes them in the order in which they came.
    let crowded = Arc::new(Notify::new());
    while let Some((stream, from)) = accepted(&listener, &mut stop, "a Mooncake data connection").await {
        let permit = match permits.clone().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                crowded.notify_one();
                let Ok(Ok(permit)) = timeout(PLACE, permits.clone().acquire_owned()).await else {
                    tracing::warn!(%from, "a Mooncake data connection is refused: there are {most}, none of them idle");
                    continue;
                };
                permit
            }
        };
        let (addresses, crowded, mut stop) = (addresses.clone(), crowded.clone(), stop.clone());
        let stopping = stop.clone();
        tokio::spawn(async move {
            let _permit = permit;
            let served = tokio::select! {
                served = connection(stream, &addresses, &crowded, &stopping) => served,
                () = stopped(&mut stop) => return,
            };
            if let Err(error) = served {
                tracing::warn!(%from, %error, "a Mooncake data connection is ended");
            }
        });
    }
}

/// Why a connection is ended from this side.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("it asks for {0}")]
    Request(#[from] RequestError),
    #[error("it may not {operation:?} {len} bytes at {addr:#x}: nothing is there, or it is read-only")]
    Refused { operation: Operation, addr: u64, len: u64 },
    #[error("the memory that it uses was released")]
    Released,
    #[error("it moved nothing for {STALL:?}")]
    Stalled,
    #[error("it began a request and did not end it within {STALL:?}")]
    HalfSaid,
    #[error("it was idle for longer than any other, and one more needs its place")]
    Crowded,
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Answers one request after the other, until the peer closes the connection.
async fn connection(
    mut stream: TcpStream,
    addresses: &Addresses,
    crowded: &Notify,
    stopping: &watch::Receiver<bool>,
) -> Result<(), Ended> {
    prepare(&stream)?;
    while let Some(head) = next_head(&mut stream, crowded).await? {
        // Whoever stopped this server may have sent the request since, while this task had no reason to wait.
        if *stopping.borrow() {
            return Ok(());
        }
        let request = match Request::decode(&head) {
            Ok(request) => request,
            Err(error) => {
                // Version 1 knows no answer.
                if !matches!(error, RequestError::Version(_)) {
                    refuse(&mut stream).await;
                }
                return Err(error.into());
            }
        };
        let Request { operation, addr, len } = request;
        let Some(held) = addresses.hold(&request) else {
            refuse(&mut stream).await;
            return Err(Ended::Refused { operation, addr, len });
        };
        match operation {
            Operation::Read => give(&stream, &held, len as usize).await?,
            Operation::Write => take(&stream, &held, len as usize).await?,
        }
    }
    Ok(())
}

/// Waits for a request. `None` where the peer closes the connection.
async fn next_head(stream: &mut TcpStream, crowded: &Notify) -> Result<Option<[u8; REQUEST]>, Ended> {
    let mut head = [0; REQUEST];
    let begun = tokio::select! {
        biased;
        read = stream.read(&mut head) => read?,
        () = crowded.notified() => return Err(Ended::Crowded),
    };
    if begun == 0 {
        return Ok(None);
    }
    match timeout(STALL, stream.read_exact(&mut head[begun..])).await {
        Err(_) => Err(Ended::HalfSaid),
        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Ok(read) => read.map(|_| Some(head)).map_err(Ended::Io),
    }
}

/// Sends a status and then the bytes.
async fn give(stream: &TcpStream, held: &Held, len: usize) -> Result<(), Ended> {
    let status = Status::Done.encode();
    let mut vectors = Vectors::default();
    // SAFETY: the status outlives the vectors.
    unsafe { vectors.push(NonNull::from(&status).cast(), STATUS) };
    for at in (0..len).step_by(STEP) {
        if !held.is_open() {
            return Err(Ended::Released);
        }
        // SAFETY: `held` keeps the bytes in place; their number was checked. They are readable, and the kernel does not
        // mind that a peer may write to them meanwhile.
        unsafe { vectors.push(held.as_ptr().add(at), STEP.min(len - at)) };
        send(stream, held, &mut vectors).await?;
        vectors.clear();
    }
    Ok(())
}

/// Sends all there is, until the memory was released or nothing has moved for long.
async fn send(stream: &TcpStream, held: &Held, vectors: &mut Vectors) -> Result<(), Ended> {
    let mut patience = Patience::new(vectors.left());
    loop {
        let all = vectors.left();
        if let Ok(sent) = timeout(TICK, vectors.send(stream, all)).await {
            return Ok(sent?);
        }
        patience.check(held, vectors.left())?;
    }
}

/// Ends a request whose memory was released, or of which nothing has moved for long.
struct Patience {
    left: usize,
    since: Instant,
}

impl Patience {
    fn new(left: usize) -> Self {
        let since = Instant::now();
        Self { left, since }
    }

    /// With so many bytes left to move.
    fn check(&mut self, held: &Held, left: usize) -> Result<(), Ended> {
        if !held.is_open() {
            return Err(Ended::Released);
        }
        if left < self.left {
            *self = Self::new(left);
        } else if self.since.elapsed() >= STALL {
            return Err(Ended::Stalled);
        }
        Ok(())
    }
}

/// Receives bytes, and says so once the last one is in place.
async fn take(stream: &TcpStream, held: &Held, len: usize) -> Result<(), Ended> {
    let (mut vectors, mut turns) = (Vectors::default(), Turns::default());
    // SAFETY: `held` keeps the bytes in place; their number was checked. `Writable` memory is written only by peers, which
    // answer for what they do to each other, and read only once nobody holds it.
    unsafe { vectors.push(held.as_ptr(), len) };
    let (mut watermark, mut patience, mut flows) = (Watermark::new(stream), Patience::new(len), true);
    while vectors.left() > 0 {
        if flows {
            watermark.adapt(vectors.left());
        } else {
            // What is there counts, however little.
            watermark.lower();
        }
        let received = timeout(TICK, vectors.receive(stream, &mut turns)).await;
        flows = received.is_ok();
        received.unwrap_or(Ok(()))?;
        patience.check(held, vectors.left())?;
    }
    vectors.clear();
    let status = Status::Done.encode();
    // SAFETY: the status outlives the vectors.
    unsafe { vectors.push(NonNull::from(&status).cast(), STATUS) };
    send(stream, held, &mut vectors).await
}

/// Says that a request is refused. What the peer sends after it is thrown away for a while: a socket that is closed with
/// bytes unread takes the status back.
async fn refuse(stream: &mut TcpStream) {
    let farewell = async {
        let status = Status::Rejected.encode();
        let mut vectors = Vectors::default();
        // SAFETY: the status outlives the vectors.
        unsafe { vectors.push(NonNull::from(&status).cast(), STATUS) };
        vectors.send(stream, STATUS).await?;
        tokio::io::AsyncWriteExt::shutdown(stream).await?;
        let mut rest = vec![0; 64 << 10];
        while stream.read(&mut rest).await? > 0 {}
        io::Result::Ok(())
    };
    // Whatever becomes of it, the connection is over.
    let _ = timeout(FAREWELL, farewell).await;
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    /// Of an operation that there is not.
    const BAD: [u8; REQUEST] = [0xFF; REQUEST];

    async fn end_of(stream: &mut TcpStream) -> Vec<u8> {
        let mut rest = Vec::new();
        let read = timeout(Duration::from_secs(10), stream.read_to_end(&mut rest));
        read.await.expect("the connection ends").expect("in order");
        rest
    }

    #[tokio::test]
    async fn one_connection_too_many_takes_the_place_of_the_one_idle_for_longest() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let stop = watch::Sender::new(false);
        tokio::spawn(serve_at_most(2, listener, Arc::default(), stop.subscribe()));
        let mut first = TcpStream::connect(address).await.expect("it listens");
        let mut second = TcpStream::connect(address).await.expect("it listens");
        let mut third = TcpStream::connect(address).await.expect("it listens");
        assert!(end_of(&mut first).await.is_empty());
        for stream in [&mut second, &mut third] {
            stream.write_all(&BAD).await.expect("it is still there");
            assert_eq!(end_of(stream).await, Status::Rejected.encode());
        }
    }
}
