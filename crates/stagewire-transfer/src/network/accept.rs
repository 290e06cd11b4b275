use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::sleep;

use crate::host::stopped;

/// Pause after a failed accept, which means that descriptors have run out.
const PAUSE: Duration = Duration::from_millis(50);

/// Whoever connects next for `what`, as the log calls it; `None` once the listener is to stop.
pub(crate) async fn accepted(
    listener: &TcpListener,
    stop: &mut watch::Receiver<bool>,
    what: &'static str,
) -> Option<(TcpStream, SocketAddr)> {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stopped(stop) => return None,
        };
        match accepted {
            Ok(accepted) => return Some(accepted),
            Err(error) => {
                tracing::warn!(%error, "{what} could not be accepted");
                sleep(PAUSE).await;
            }
        }
    }
}
