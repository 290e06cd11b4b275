//! Where a transport takes part in what its owner's side does with control connections.

use std::sync::{Arc, OnceLock};

use futures::future::BoxFuture;
use tokio::net::TcpStream;

use super::session::Session;
use crate::table::Hold;
use crate::wire::{Kind, Place};

/// The owner's half of a transport whose peers reach memory by means of their own: it says where pinned memory is, and
/// answers the other half's messages.
pub(crate) trait Placer: Send + Sync + 'static {
    /// Where the reader finds the region that it has just pinned. A clone of `hold` keeps the region in place even after
    /// the reader let go.
    ///
    /// # Errors
    /// What stands against it; the reader gets it as [`TransferError::Backend`](crate::TransferError::Backend), and the
    /// pin ends.
    fn place(&self, hold: &Arc<Hold>) -> Result<Place, String>;

    /// The reader let go of this pin: its address means nothing from now on.
    fn unpinned(&self, hold: &Arc<Hold>) {
        let _ = hold;
    }

    /// The connection ended with this pin held: its reader died, or nobody knows what it does now.
    fn lost(&self, hold: &Arc<Hold>) {
        self.unpinned(hold);
    }

    /// Answers a message of at most [`MAX_MESSAGE`](crate::wire::MAX_MESSAGE) bytes from the reader of this session.
    ///
    /// # Errors
    /// What stands against it.
    fn asked(&self, session: u128, message: Vec<u8>) -> BoxFuture<'static, Result<Vec<u8>, String>> {
        let _ = (session, message);
        Box::pin(async { Err("it answers no messages".to_owned()) })
    }

    /// The control connection of this session is over, and all its pins were ended.
    fn ended(&self, session: u128) {
        let _ = session;
    }
}

/// Serves the data connections of `tcp`.
pub(crate) trait LaneServer: Send + Sync + 'static {
    /// Serves one lane, which was greeted, until either side ends it. The network stops it when the session is over.
    fn serve(&self, stream: TcpStream, session: Arc<Session>) -> BoxFuture<'static, ()>;
}

/// Serves the connections that peers open for a protocol of the program's own.
pub(crate) type StreamServer = Box<dyn Fn(TcpStream) -> BoxFuture<'static, ()> + Send + Sync>;

/// The hooks of a host, each set at most once.
#[derive(Default)]
pub(crate) struct Hooks {
    placers: [OnceLock<Arc<dyn Placer>>; Kind::COUNT],
}

impl Hooks {
    /// False where there is one already.
    pub(crate) fn set_placer(&self, kind: Kind, placer: Arc<dyn Placer>) -> bool {
        self.placers[kind as usize].set(placer).is_ok()
    }

    pub(crate) fn placer(&self, kind: Kind) -> Option<&Arc<dyn Placer>> {
        self.placers[kind as usize].get()
    }

    pub(crate) fn placers(&self) -> impl Iterator<Item = &Arc<dyn Placer>> {
        self.placers.iter().filter_map(OnceLock::get)
    }
}
