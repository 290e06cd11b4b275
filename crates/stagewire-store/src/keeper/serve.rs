//! The keeper's own process.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::net::{SocketFlags, accept_with};
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit, setsid};
use stagewire_transfer::{SegmentName, close_on_exec, this_process};

use super::message::{MAX_SEGMENTS, Reply, Request, VERSION};
use super::secret::Secret;
use super::{KeeperError, KeeperOptions, LOCK, SOCKET, socket};

/// Set in a keeper that has no descriptor of another process.
pub(super) const ALONE: &str = "STAGEWIRE_KEEPER_ALONE";

/// Keeps memory until it is told to stop, or nobody has come for it in time. Blocks; uses one thread.
///
/// It leaves the session of its parent, so that signals for that one's group do not reach it.
///
/// # Errors
/// [`KeeperError::Another`] where the directory has a keeper; [`KeeperError::Io`], [`KeeperError::Insecure`].
pub fn run(options: &KeeperOptions) -> Result<(), KeeperError> {
    let dir = options.dir.as_path();
    let failed = |what| {
        move |source| KeeperError::Io {
            what,
            dir: dir.to_owned(),
            source,
        }
    };
    if std::env::var_os(ALONE).is_none() {
        return Err(failed("start again")(let_go_of_descriptors()));
    }
    // It fails where this is the first process of a group, which is then no group of others.
    let _ = setsid();
    let _lock = lock(dir)?;
    let secret = Secret::read(dir)?.ok_or_else(|| failed("find keeper.secret")(io::ErrorKind::NotFound.into()))?;
    raise_files();
    let listener = socket::listen_in(dir).map_err(failed("listen at keeper.sock"))?;
    let keeper = Keeper {
        secret,
        listener,
        segments: BTreeMap::new(),
        owner: None,
    };
    let result = keeper.serve(options.linger).map_err(failed("serve keeper.sock"));
    let _ = std::fs::remove_file(dir.join(SOCKET));
    result
}

/// Begins this program anew, without the descriptors that it inherited: whoever waits for the end of a pipe or a lock of
/// the store's process must not wait for the keeper's. Returns where that fails.
fn let_go_of_descriptors() -> io::Error {
    if let Err(error) = close_on_exec() {
        return error;
    }
    let mut again = Command::new("/proc/self/exe");
    let mut args = std::env::args_os();
    // A Python that is part of an environment knows that by this name only.
    if let Some(name) = args.next() {
        again.arg0(name);
    }
    again.args(args).env(ALONE, "1").exec()
}

/// The lock of the directory, for as long as the file is open.
fn lock(dir: &Path) -> Result<File, KeeperError> {
    let failed = |source| KeeperError::Io {
        what: "lock keeper.lock",
        dir: dir.to_owned(),
        source,
    };
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).mode(0o600);
    let file = file.open(dir.join(LOCK)).map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(KeeperError::Another { dir: dir.to_owned() }),
        locked => locked.map(|()| file).map_err(|error| failed(error.into())),
    }
}

/// As many open files as the system lets this process have.
fn raise_files() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let _ = setrlimit(Resource::Nofile, raised);
}

struct Keeper {
    secret: Secret,
    listener: OwnedFd,
    segments: BTreeMap<SegmentName, (u64, OwnedFd)>,
    owner: Option<OwnedFd>,
}

impl Keeper {
    fn serve(mut self, linger: Duration) -> io::Result<()> {
        let mut left = Instant::now();
        loop {
            let timeout = match &self.owner {
                Some(_) => None,
                None => match linger.checked_sub(left.elapsed()) {
                    None => return Ok(()),
                    Some(rest) => Some(rest),
                },
            };
            let (connecting, asking) = self.wait(timeout)?;
            if asking {
                match self.answer() {
                    Ok(true) => {}
                    Ok(false) => return Ok(()),
                    // It is gone, or says what no owner says.
                    Err(_) => {
                        self.owner = None;
                        left = Instant::now();
                    }
                }
            }
            if connecting {
                // Out of descriptors, or somebody who may not: the next one may be the owner.
                if let Ok(Some(owner)) = self.accept() {
                    // There is one owner at a time: the data directory has a lock. The one before has died.
                    self.owner = Some(owner);
                }
            }
        }
    }

    /// Whether somebody connects, and whether the owner says something, or is gone.
    fn wait(&self, timeout: Option<Duration>) -> io::Result<(bool, bool)> {
        let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(self.owner.as_ref().map(|owner| PollFd::new(owner, PollFlags::IN)));
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            // Rounded up: the last wait must not be none.
            tv_nsec: i64::from(timeout.subsec_nanos().max(1_000_000)),
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = |fd: Option<&PollFd<'_>>| fd.is_some_and(|fd| !fd.revents().is_empty());
        Ok((ready(fds.first()), ready(fds.get(1))))
    }

    /// Lets an owner in.
    fn accept(&self) -> io::Result<Option<OwnedFd>> {
        let connection = accept_with(&self.listener, SocketFlags::CLOEXEC)?;
        socket::bound(&connection)?;
        let uid = socket::peer(&connection)?;
        let refused = |problem: &str| -> io::Result<Option<OwnedFd>> {
            let problem = problem.to_owned();
            socket::send(&connection, &Reply::Refused { problem }, None)?;
            Ok(None)
        };
        if uid != geteuid().as_raw() {
            return refused("it serves another user");
        }
        match socket::receive(&connection)? {
            Some((
                Request::Hello {
                    version: VERSION,
                    secret,
                },
                _,
            )) if secret.is(&self.secret) => {
                let process = this_process()?;
                socket::send(&connection, &Reply::Welcome { process }, None)?;
                Ok(Some(connection))
            }
            Some((Request::Hello { version: VERSION, .. }, _)) => refused("the secret is another one"),
            Some((Request::Hello { version, .. }, _)) => {
                refused(&format!("it speaks version {VERSION}, not {version}"))
            }
            _ => refused("it was not greeted"),
        }
    }

    /// Does what the owner asks; false where it is to stop.
    fn answer(&mut self) -> io::Result<bool> {
        let owner = self.owner.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let Some((request, descriptor)) = socket::receive::<Request>(owner)? else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let reply = match (request, descriptor) {
            (Request::Keep { .. }, _) if self.segments.len() >= MAX_SEGMENTS => Reply::Refused {
                problem: format!("it keeps {MAX_SEGMENTS} segments, and takes no more"),
            },
            (Request::Keep { name, len }, Some(descriptor)) => {
                self.segments.insert(name, (len, descriptor));
                Reply::Done
            }
            (Request::Drop { name }, _) => {
                self.segments.remove(&name);
                Reply::Done
            }
            (Request::Fetch, _) => {
                for (name, (len, descriptor)) in &self.segments {
                    let (name, len) = (*name, *len);
                    socket::send(owner, &Reply::Segment { name, len }, Some(descriptor.as_fd()))?;
                }
                Reply::Done
            }
            (Request::Stop, _) => {
                // Who does not wait for the answer is heard as well.
                let _ = socket::send(owner, &Reply::Done, None);
                return Ok(false);
            }
            (Request::Keep { .. } | Request::Hello { .. }, _) => Reply::Refused {
                problem: "that makes no sense here".to_owned(),
            },
        };
        socket::send(owner, &reply, None)?;
        Ok(true)
    }
}
