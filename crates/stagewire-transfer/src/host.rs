//! This process on this host.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use stagewire_core::{ByteCount, Incarnation, ProcessRef};

use crate::{Arena, CmaUnavailable, StartError, Transport};

/// How a [`Host`] starts.
#[derive(Debug, Clone)]
pub struct HostOptions {
    /// Directory for data sockets; made with mode 0700 where it is missing.
    pub dir: PathBuf,
    /// This life of this process. Its first 16 hexadecimal digits name the socket.
    pub incarnation: Incarnation,
    /// Bound of the arena.
    pub arena_limit: ByteCount,
}

/// This process on this host: its arena, its registered regions and the socket where peers pin them.
#[derive(Debug)]
pub struct Host {
    incarnation: Incarnation,
    process: ProcessRef,
    arena: Arena,
}

/// What a host holds now and has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostStats {
    /// Registered regions, those included that were released and wait for their last pin.
    pub regions: u64,
    /// Registrations so far.
    pub registrations: u64,
    /// Pins granted to peers so far.
    pub pins_served: u64,
    /// Pins that peers hold.
    pub pins_held: u64,
    /// Segments of the arena.
    pub segments: u64,
    /// Bytes of address space of these segments.
    pub segment_bytes: u64,
    /// Bytes of the arena in extents.
    pub allocated_bytes: u64,
    /// Bytes of address space of peers' segments that are mapped here.
    pub mapped_bytes: u64,
    /// Connections of peers to this host, and of this host to peers.
    pub connections: u64,
    /// Bytes that pulls of this host copied so far.
    pub copied_bytes: u64,
}

impl Host {
    /// Starts on the current tokio runtime.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start(options: HostOptions) -> Result<Arc<Self>, StartError> {
        let path = options.dir.clone();
        let error = std::io::Error::other("not built yet");
        Err(StartError::Io {
            what: "start at",
            path,
            error,
        })
    }

    /// Which life of this process.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// This process.
    pub fn process(&self) -> ProcessRef {
        self.process
    }

    /// Shared memory of this process.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Peers map or copy out of this host's arena.
    pub fn shm(self: &Arc<Self>) -> Arc<dyn Transport> {
        unreachable!("not built yet")
    }

    /// Peers copy out of any memory of this process.
    ///
    /// # Errors
    /// [`CmaUnavailable`] where the kernel forbids it; found out once.
    pub fn cma(self: &Arc<Self>) -> Result<Arc<dyn Transport>, CmaUnavailable> {
        Err(CmaUnavailable {
            reason: "not built yet".to_owned(),
        })
    }

    /// What it holds and did.
    pub fn stats(&self) -> HostStats {
        HostStats::default()
    }

    /// Removes the socket and ends the connections. Regions that peers have pinned stay until the peers let go.
    pub async fn shutdown(&self) {}
}

/// Removes the sockets of dead processes from a directory, and returns them.
///
/// # Errors
/// Whatever reading the directory says; a directory that does not exist holds none.
pub fn sweep(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let _ = dir;
    Ok(Vec::new())
}
