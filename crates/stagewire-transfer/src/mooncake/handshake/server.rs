use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

use super::{Alive, HEAD, HandshakeError, MessageKind, Notification, frame, parse_head, to_json};
use crate::host::stopped;
use crate::network::accepted;

/// Who has not said all of its message after so long is cut off.
const MESSAGE: Duration = Duration::from_secs(5);

/// How long a peer may take to read its answer and close the connection.
const FAREWELL: Duration = Duration::from_secs(5);

/// Connections at a time. Each is served on its own, so that silent ones keep nobody waiting.
const CONNECTIONS: usize = 256;

/// What a handshake port answers.
pub(crate) trait Answerer: Send + Sync + 'static {
    /// The descriptor of this process, as JSON.
    fn descriptor(&self) -> Vec<u8>;

    /// Takes a notification, unless too many wait already.
    fn notified(&self, notification: Notification) -> bool;
}

/// Answers peers until told to stop.
pub(crate) async fn serve(listener: TcpListener, answerer: Arc<dyn Answerer>, mut stop: watch::Receiver<bool>) {
    let permits = Arc::new(Semaphore::new(CONNECTIONS));
    while let Some((stream, from)) = accepted(&listener, &mut stop, "a Mooncake handshake").await {
        let Ok(permit) = permits.clone().try_acquire_owned() else {
            tracing::warn!(%from, "a Mooncake handshake is refused: there are {CONNECTIONS} already");
            continue;
        };
        let (answerer, mut stop) = (answerer.clone(), stop.clone());
        tokio::spawn(async move {
            let _permit = permit;
            let answered = tokio::select! {
                answered = connection(stream, &*answerer) => answered,
                () = stopped(&mut stop) => return,
            };
            if let Err(error) = answered {
                tracing::warn!(%from, %error, "a Mooncake handshake failed");
            }
        });
    }
}

/// Why a peer got no answer.
#[derive(Debug, thiserror::Error)]
enum Unanswered {
    #[error("it sent {0}")]
    Message(#[from] HandshakeError),
    #[error("it did not say its message within {MESSAGE:?}")]
    Silent,
    #[error("it wants a queue pair; this process speaks TCP only")]
    QueuePair,
    #[error("too many notifications wait to be taken by this process")]
    Full,
    #[error("{0}")]
    Io(#[from] io::Error),
}

async fn connection(mut stream: TcpStream, answerer: &dyn Answerer) -> Result<(), Unanswered> {
    let message = timeout(MESSAGE, receive(&mut stream))
        .await
        .map_err(|_| Unanswered::Silent)??;
    let Some((kind, json)) = message else {
        return Ok(());
    };
    let answer = match kind {
        MessageKind::Connection => return Err(Unanswered::QueuePair),
        // What the peer says of itself is not needed.
        MessageKind::Metadata => answerer.descriptor(),
        MessageKind::Notify if answerer.notified(Notification::parse(&json)?) => to_json(&Notification::taken()),
        MessageKind::Notify => return Err(Unanswered::Full),
        MessageKind::Probe => to_json(&Alive::success()),
    };
    let farewell = async {
        stream.write_all(&frame(kind, &answer)?).await?;
        stream.shutdown().await?;
        // The peer closes first, so that no answer is lost with the connection. What else it says does not matter.
        let _ = stream.read(&mut [0]).await?;
        Ok(())
    };
    timeout(FAREWELL, farewell).await.unwrap_or(Ok(()))
}

/// One message; `None` where the peer left without a word.
async fn receive(stream: &mut TcpStream) -> Result<Option<(MessageKind, Vec<u8>)>, Unanswered> {
    let mut head = [0; HEAD];
    if stream.read(&mut head[..1]).await? == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut head[1..]).await?;
    let (kind, len) = parse_head(&head)?;
    // Grows with what really comes.
    let mut json = Vec::new();
    stream.take(len as u64).read_to_end(&mut json).await?;
    if json.len() < len {
        let (found, expected) = (json.len(), len);
        return Err(HandshakeError::Truncated { found, expected }.into());
    }
    Ok(Some((kind, json)))
}
