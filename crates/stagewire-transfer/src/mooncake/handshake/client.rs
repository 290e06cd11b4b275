use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{HEAD, HandshakeError, MessageKind, frame, parse_head};

/// Why a peer's handshake port gave no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    #[error("{0}")]
    Message(#[from] HandshakeError),
    #[error("it answers a {asked} message with a {found} message")]
    Kind { asked: &'static str, found: &'static str },
    #[error("it closed the connection without an answer")]
    Closed,
    #[error("it took no connection within {0:?}")]
    NoConnection(Duration),
    #[error(
        "it took the connection but did not answer within {0:?}; an engine answers one connection at a time, \
         and each idle one keeps the others waiting for 5 s"
    )]
    NoAnswer(Duration),
    #[error("{what}: {error}")]
    Io {
        what: &'static str,
        #[source]
        error: io::Error,
    },
}

/// Sends one message to the handshake port `host:port` of a peer, and gives the JSON of its answer.
///
/// # Cancel safety
/// The peer may have got the message; the connection is closed.
pub(crate) async fn ask(
    address: &str,
    kind: MessageKind,
    json: &[u8],
    deadline: Duration,
) -> Result<Vec<u8>, AskError> {
    let message = frame(kind, json)?;
    let io = |what| move |error| AskError::Io { what, error };
    let begun = tokio::time::Instant::now();
    let connected = timeout(deadline, TcpStream::connect(address)).await;
    let mut stream = connected
        .map_err(|_| AskError::NoConnection(deadline))?
        .map_err(io("it cannot be connected to"))?;
    let answer = async {
        stream
            .write_all(&message)
            .await
            .map_err(io("the message cannot be sent"))?;
        let mut head = [0; HEAD];
        let read = stream.read_exact(&mut head).await;
        read.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => AskError::Closed,
            _ => io("its answer cannot be read")(error),
        })?;
        let (found, len) = parse_head(&head)?;
        if found != kind {
            let (asked, found) = (kind.name(), found.name());
            return Err(AskError::Kind { asked, found });
        }
        let mut json = Vec::new();
        let taken = (&mut stream).take(len as u64).read_to_end(&mut json).await;
        taken.map_err(io("its answer cannot be read"))?;
        if json.len() < len {
            let (found, expected) = (json.len(), len);
            return Err(HandshakeError::Truncated { found, expected }.into());
        }
        Ok(json)
    };
    let left = deadline.saturating_sub(begun.elapsed());
    timeout(left, answer).await.unwrap_or(Err(AskError::NoAnswer(deadline)))
}
