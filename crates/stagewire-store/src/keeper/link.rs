//! An owner's side.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use stagewire_core::{ByteCount, ProcessRef};
use stagewire_transfer::{Inherited, Lent, SegmentName};

use super::message::{Reply, Request, VERSION};
use super::secret::Secret;
use super::{KeeperCommand, KeeperError, socket};

/// How long a keeper may take to start.
const START: Duration = Duration::from_secs(10);
/// Pause between two looks whether it has.
const PAUSE: Duration = Duration::from_millis(2);

/// The connection of a data directory's owner to its keeper. Every call blocks, for microseconds where the keeper runs.
#[derive(Debug)]
pub(crate) struct Link {
    dir: PathBuf,
    socket: Mutex<OwnedFd>,
    /// The keeper.
    process: ProcessRef,
    /// The same, where this process started it.
    child: Mutex<Option<Child>>,
}

impl Link {
    /// Connects to the keeper of `dir`, which is started where there is none. The caller must own the directory's lock.
    pub(crate) fn open(dir: &Path, command: &KeeperCommand) -> Result<Self, KeeperError> {
        let secret = Secret::make(dir)?;
        let begin = Instant::now();
        let mut child: Option<Child> = None;
        loop {
            match Self::connect(dir, &secret) {
                Ok(Some(link)) => {
                    *link.child.lock().unwrap_or_else(PoisonError::into_inner) = child;
                    return Ok(link);
                }
                Ok(None) => {}
                Err(error) => return Err(error),
            }
            // The keeper before may hold the lock for a moment longer, so that a new one gives up.
            let ended = match &mut child {
                None => true,
                Some(child) => !matches!(child.try_wait(), Ok(None)),
            };
            if begin.elapsed() > START {
                return Err(KeeperError::Silent {
                    program: command.program.clone(),
                    dir: dir.to_owned(),
                    waited: START,
                });
            }
            if ended {
                let started = command.command(dir).spawn();
                child = Some(started.map_err(|source| KeeperError::Start {
                    program: command.program.clone(),
                    dir: dir.to_owned(),
                    source,
                })?);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// `None` where no keeper listens.
    fn connect(dir: &Path, secret: &Secret) -> Result<Option<Self>, KeeperError> {
        let failed = |source| KeeperError::Io {
            what: "talk to keeper.sock",
            dir: dir.to_owned(),
            source,
        };
        let socket = match socket::connect_in(dir) {
            Ok(socket) => socket,
            Err(error) if is_absent(&error) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let found = socket::peer(&socket).map_err(failed)?;
        let expected = rustix::process::geteuid().as_raw();
        if found != expected {
            let dir = dir.to_owned();
            return Err(KeeperError::User { dir, found, expected });
        }
        let hello = Request::Hello {
            version: VERSION,
            secret: secret.clone(),
        };
        let nobody = ProcessRef { pid: 0, started: 0 };
        let mut link = Self {
            dir: dir.to_owned(),
            socket: Mutex::new(socket),
            process: nobody,
            child: Mutex::default(),
        };
        match link.call(&hello, None) {
            Ok((Reply::Welcome { process }, _)) => {
                link.process = process;
                Ok(Some(link))
            }
            Ok((reply, _)) => Err(link.refused(reply)),
            // It ended while this process connected.
            Err(KeeperError::Io { source, .. }) if is_absent(&source) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The keeper.
    pub(crate) const fn process(&self) -> ProcessRef {
        self.process
    }

    /// Hands over a segment, which the keeper has when this returns.
    pub(crate) fn keep(&self, segment: Lent<'_>) -> Result<(), KeeperError> {
        let request = Request::Keep {
            name: segment.name,
            len: segment.len.0,
        };
        match self.call(&request, Some(segment.descriptor))? {
            (Reply::Done, _) => Ok(()),
            (reply, _) => Err(self.refused(reply)),
        }
    }

    /// Everything that the keeper has.
    pub(crate) fn fetch(&self) -> Result<Vec<Inherited>, KeeperError> {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        socket::send(&*socket, &Request::Fetch, None).map_err(|error| self.failed(error))?;
        let mut segments = Vec::new();
        loop {
            match socket::receive(&*socket).map_err(|error| self.failed(error))? {
                Some((Reply::Segment { name, len }, Some(descriptor))) => segments.push(Inherited {
                    name,
                    len: ByteCount(len),
                    descriptor,
                }),
                Some((Reply::Done, None)) => return Ok(segments),
                Some((reply, _)) => return Err(self.refused(reply)),
                None => return Err(self.failed(io::ErrorKind::UnexpectedEof.into())),
            }
        }
    }

    /// Lets the keeper drop a segment.
    pub(crate) fn drop_segment(&self, name: SegmentName) -> Result<(), KeeperError> {
        match self.call(&Request::Drop { name }, None)? {
            (Reply::Done, _) => Ok(()),
            (reply, _) => Err(self.refused(reply)),
        }
    }

    /// Ends the keeper, and with it the memory that nobody else has.
    pub(crate) fn stop(&self) -> Result<(), KeeperError> {
        match self.call(&Request::Stop, None)? {
            (Reply::Done, _) => {}
            (reply, _) => return Err(self.refused(reply)),
        }
        if let Some(mut child) = self.child.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // It has said that it ends, and reports nothing by its status.
            let _ = child.wait();
        }
        Ok(())
    }

    /// The same, without waiting. A keeper that does not hear it ends once nobody has come for it.
    pub(crate) fn dismiss(self: &Arc<Self>) {
        // Nothing waits in a socket that nobody uses, so that this goes out at once.
        let told = self.socket.try_lock().map(|socket| tell_to_stop(&socket)).is_ok();
        let child = self.child.lock().unwrap_or_else(PoisonError::into_inner).take();
        if told && child.is_none() {
            return;
        }
        let link = Arc::clone(self);
        let rest = move || {
            if !told {
                tell_to_stop(&link.socket.lock().unwrap_or_else(PoisonError::into_inner));
            }
            drop(link);
            if let Some(mut child) = child {
                let _ = child.wait();
            }
        };
        let started = std::thread::Builder::new()
            .name("stagewire-keeper".to_owned())
            .spawn(rest);
        if let Err(error) = started {
            tracing::debug!(%error, "nobody waits for the end of the keeper");
        }
    }

    fn call(
        &self,
        request: &Request,
        descriptor: Option<std::os::fd::BorrowedFd<'_>>,
    ) -> Result<(Reply, Option<OwnedFd>), KeeperError> {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let exchange = || -> io::Result<_> {
            socket::send(&*socket, request, descriptor)?;
            socket::receive(&*socket)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
        };
        exchange().map_err(|error| self.failed(error))
    }

    fn failed(&self, source: io::Error) -> KeeperError {
        KeeperError::Io {
            what: "talk to the keeper",
            dir: self.dir.clone(),
            source,
        }
    }

    fn refused(&self, reply: Reply) -> KeeperError {
        let problem = match reply {
            Reply::Refused { problem } => problem,
            other => format!("it answered with {other:?}"),
        };
        KeeperError::Refused {
            dir: self.dir.clone(),
            problem,
        }
    }
}

fn tell_to_stop(socket: &OwnedFd) {
    if let Err(error) = socket::send(socket, &Request::Stop, None) {
        tracing::debug!(%error, "the keeper was not told to end");
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof
    )
}

impl Drop for Link {
    fn drop(&mut self) {
        // One that was killed is still there as a zombie.
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = child.as_mut().map(Child::try_wait);
    }
}

#[cfg(test)]
pub(super) mod tests;
