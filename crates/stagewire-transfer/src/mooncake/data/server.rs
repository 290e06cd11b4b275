use std::io;
use std::pin::pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, timeout};

use super::watermark::Watermark;
use super::{Operation, REQUEST, Request, RequestError, STATUS, Status};
use crate::host::stopped;
use crate::mooncake::addresses::{Addresses, Held};
use crate::network::prepare;
use crate::tcp::vectors::{Turns, Vectors};

/// Data connections at a time. Each costs a task and a socket.
const CONNECTIONS: usize = 1024;

/// A peer that takes so long for one step of a request is cut off: the request holds memory.
const STALL: Duration = Duration::from_secs(30);

/// How often a request that moves nothing looks whether its memory may still be used.
const TICK: Duration = Duration::from_millis(250);

/// Bytes of a step: between two looks at whether the memory may still be used.
const STEP: usize = 4 << 20;

/// How long the rest of a refused write is thrown away, so that the peer reads why before it sees the end.
const FAREWELL: Duration = Duration::from_secs(1);

/// Pause after a failed accept, which means that descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves memory to peers until told to stop.
pub(crate) async fn serve(listener: TcpListener, addresses: Arc<Addresses>, mut stop: watch::Receiver<bool>) {
    let permits = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stopped(&mut stop) => return,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a Mooncake data connection could not be accepted");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = permits.clone().try_acquire_owned() else {
            tracing::warn!(%from, "a Mooncake data connection is refused: there are {CONNECTIONS} already");
            continue;
        };
        let (addresses, mut stop) = (addresses.clone(), stop.clone());
        tokio::spawn(async move {
            let _permit = permit;
            let served = tokio::select! {
                served = connection(stream, &addresses) => served,
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
    #[error("it moved next to nothing for {STALL:?}")]
    Stalled,
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Answers one request after the other, until the peer closes the connection.
async fn connection(mut stream: TcpStream, addresses: &Addresses) -> Result<(), Ended> {
    prepare(&stream)?;
    let mut head = [0; REQUEST];
    loop {
        match stream.read_exact(&mut head).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        };
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
        let all = vectors.left();
        unless_over(held, vectors.send(stream, all)).await?;
        vectors.clear();
    }
    Ok(())
}

/// Moves bytes of a request, until its memory was released or nothing has moved for long.
async fn unless_over(held: &Held, moving: impl Future<Output = io::Result<()>>) -> Result<(), Ended> {
    let (mut moving, begun) = (pin!(moving), Instant::now());
    loop {
        match timeout(TICK, &mut moving).await {
            Ok(moved) => return Ok(moved?),
            Err(_) if !held.is_open() => return Err(Ended::Released),
            Err(_) if begun.elapsed() >= STALL => return Err(Ended::Stalled),
            Err(_) => {}
        }
    }
}

/// Receives bytes, and says so once the last one is in place.
async fn take(stream: &TcpStream, held: &Held, len: usize) -> Result<(), Ended> {
    let (mut vectors, mut turns) = (Vectors::default(), Turns::default());
    // SAFETY: `held` keeps the bytes in place; their number was checked. `Writable` memory is written only by peers, which
    // answer for what they do to each other, and read only once nobody holds it.
    unsafe { vectors.push(held.as_ptr(), len) };
    let mut watermark = Watermark::new(stream);
    while vectors.left() > 0 {
        watermark.adapt(vectors.left());
        unless_over(held, vectors.receive(stream, &mut turns)).await?;
        if !held.is_open() {
            return Err(Ended::Released);
        }
    }
    vectors.clear();
    let status = Status::Done.encode();
    // SAFETY: the status outlives the vectors.
    unsafe { vectors.push(NonNull::from(&status).cast(), STATUS) };
    unless_over(held, vectors.send(stream, STATUS)).await
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
