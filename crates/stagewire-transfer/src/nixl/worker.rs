//! The thread that moves bytes.
//!
//! Posting a request blocks its thread: over cross-memory attach UCX copies inside the call. So one thread of its own
//! has the agent, and everybody else hands jobs over. It cuts each job into requests of bounded size, takes turns
//! between jobs, looks after requests in flight with pauses that grow, and sleeps where there is none.

mod job;
mod peer;

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, CString};
use std::fmt;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use tokio::sync::oneshot;

use super::agent::{Agent, NixlError};
pub(super) use job::{Job, Progress};
use job::{Running, Turn};
use peer::Peer;

/// The shortest pause between two looks at requests in flight.
const SHORT_PAUSE: Duration = Duration::from_micros(20);

/// The longest. A look costs some 50 µs, so a transfer that hangs costs a millisecond a second. Where bytes flow, a request
/// is over long before pauses grow so long.
const LONG_PAUSE: Duration = Duration::from_millis(50);

/// A pause is this part of the time that the youngest request is in flight: waiting adds 8 % at most, 4 % on average. As
/// many bytes as arrive meanwhile fit into the sockets.
const PAUSE_SHARE: u32 = 12;

/// Why a job moved not all of its bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Fault {
    /// The peer's metadata, or that of the region, must be loaded first.
    #[error("its metadata is not loaded")]
    NotLoaded,
    #[error("NIXL cannot {what}: {error}")]
    Nixl { what: &'static str, error: NixlError },
    #[error("this host was shut down")]
    Stopped,
}

impl Fault {
    const fn nixl(what: &'static str) -> impl FnOnce(NixlError) -> Self {
        move |error| Self::Nixl { what, error }
    }
}

enum Command<K> {
    /// Takes what a peer said about itself.
    Meet {
        peer: CString,
        meeting: u64,
        metadata: Vec<u8>,
    },
    /// Takes what a peer said about a registration.
    Learn {
        peer: CString,
        number: u64,
        metadata: Vec<u8>,
    },
    Move(Job<K>),
    /// Forgets registrations of a peer, as soon as no request is in flight to it.
    Unlearn {
        peer: CString,
        numbers: Vec<u64>,
        done: oneshot::Sender<()>,
    },
    /// Forgets a peer, as soon as no request is in flight to it.
    Part {
        peer: CString,
        meeting: u64,
    },
    Stop,
}

/// Hands work to the thread. Clones speak to the same one.
pub(super) struct Worker<K> {
    commands: mpsc::Sender<Command<K>>,
}

impl<K: Send + 'static> Worker<K> {
    /// Starts the thread, which takes the agent.
    pub(super) fn start(agent: Agent) -> std::io::Result<Self> {
        let (commands, received) = mpsc::channel();
        thread::Builder::new()
            .name("stagewire-nixl".to_owned())
            .spawn(move || Engine::new(agent).run(&received))?;
        Ok(Self { commands })
    }

    /// What a peer said about itself over a new control connection. What NIXL has loaded of it before goes first.
    pub(super) fn meet(&self, peer: &CStr, meeting: u64, metadata: Vec<u8>) {
        let peer = peer.to_owned();
        self.send(Command::Meet {
            peer,
            meeting,
            metadata,
        });
    }

    /// What a peer said about one of its registrations.
    pub(super) fn learn(&self, peer: &CStr, number: u64, metadata: Vec<u8>) {
        let peer = peer.to_owned();
        self.send(Command::Learn { peer, number, metadata });
    }

    /// Forgets registrations of a peer. Resolves when no request can reach them any more.
    ///
    /// # Cancel safety
    /// A dropped future has asked for it all the same.
    pub(super) async fn unlearn(&self, peer: &CStr, numbers: Vec<u64>) {
        let (done, forgotten) = oneshot::channel();
        let peer = peer.to_owned();
        self.send(Command::Unlearn { peer, numbers, done });
        // An error means that the thread is gone, and the agent with it.
        let _ = forgotten.await;
    }

    /// Forgets a peer whose control connection is over, once nothing is in flight to it.
    pub(super) fn part(&self, peer: &CStr, meeting: u64) {
        let peer = peer.to_owned();
        self.send(Command::Part { peer, meeting });
    }

    /// Moves bytes and gives back what the job held.
    ///
    /// # Cancel safety
    /// When the future is dropped, no more requests of the job are posted. What it holds is dropped once those in flight
    /// are over.
    pub(super) async fn run(&self, job: Job<K>, done: oneshot::Receiver<Result<K, Fault>>) -> Result<K, Fault> {
        self.send(Command::Move(job));
        done.await.unwrap_or(Err(Fault::Stopped))
    }

    fn send(&self, command: Command<K>) {
        // It fails only where the thread has stopped; whoever waits for an answer sees that.
        let _ = self.commands.send(command);
    }
}

impl<K> Worker<K> {
    /// Takes no more jobs. The thread ends, and the agent with it, when nothing is in flight.
    pub(super) fn stop(&self) {
        let _ = self.commands.send(Command::Stop);
    }
}

impl<K> fmt::Debug for Worker<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Worker")
    }
}

/// What the thread has.
struct Engine<K> {
    agent: Agent,
    peers: HashMap<CString, Peer<K>>,
    jobs: VecDeque<Running<K>>,
    next_number: u64,
    stopping: bool,
}

impl<K> Engine<K> {
    fn new(agent: Agent) -> Self {
        Self {
            agent,
            peers: HashMap::new(),
            jobs: VecDeque::new(),
            next_number: 0,
            stopping: false,
        }
    }

    fn run(mut self, commands: &Receiver<Command<K>>) {
        loop {
            if !self.wait(commands) {
                break;
            }
            while let Ok(command) = commands.try_recv() {
                self.obey(command);
            }
            self.turn();
            self.settle();
        }
    }

    /// Waits for a command, or until it is time to look at requests again. `false` at the end.
    fn wait(&mut self, commands: &Receiver<Command<K>>) -> bool {
        let received = match self.pause() {
            None if self.stopping => return false,
            None => commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(Duration::ZERO) => return true,
            Some(pause) => commands.recv_timeout(pause),
        };
        match received {
            Ok(command) => self.obey(command),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                self.stopping = true;
                // Nobody can wake this thread any more.
                thread::sleep(self.pause().unwrap_or_default());
            }
        }
        true
    }

    /// How long nothing has to be done: `None` until the next command.
    fn pause(&self) -> Option<Duration> {
        let mut shortest: Option<Duration> = None;
        for job in &self.jobs {
            let blocked = self.peers.get(&job.peer).is_some_and(Peer::is_settling);
            let pause = match job.in_flight_for() {
                None if blocked => continue,
                None => Duration::ZERO,
                Some(_) if !blocked && job.has_room() => Duration::ZERO,
                Some(elapsed) => (elapsed / PAUSE_SHARE).clamp(SHORT_PAUSE, LONG_PAUSE),
            };
            shortest = Some(shortest.map_or(pause, |shortest| shortest.min(pause)));
        }
        shortest
    }

    fn obey(&mut self, command: Command<K>) {
        match command {
            Command::Meet {
                peer,
                meeting,
                metadata,
            } => self.peers.entry(peer).or_default().meet(meeting, metadata),
            Command::Learn { peer, number, metadata } => self.peers.entry(peer).or_default().learn(number, metadata),
            Command::Move(job) => self.accept(job),
            Command::Unlearn { peer, numbers, done } => {
                if let Some(peer) = self.peers.get_mut(&peer) {
                    peer.unlearn(&numbers, done);
                }
            }
            Command::Part { peer, meeting } => {
                if let Some(peer) = self.peers.get_mut(&peer) {
                    peer.part(meeting);
                }
            }
            Command::Stop => self.stopping = true,
        }
    }

    fn accept(&mut self, job: Job<K>) {
        let known = self
            .peers
            .get(&job.peer)
            .is_some_and(|peer| peer.knows(job.remote.number));
        let fault = match () {
            () if self.stopping => Fault::Stopped,
            () if !known => Fault::NotLoaded,
            () => {
                self.next_number += 1;
                return self.jobs.push_back(Running::new(job, self.next_number));
            }
        };
        job.fail(fault);
    }

    /// Gives each job its turn once.
    fn turn(&mut self) {
        for _ in 0..self.jobs.len() {
            let Some(mut job) = self.jobs.pop_front() else { return };
            let Some(peer) = self.peers.get_mut(&job.peer) else {
                job.fail(Fault::NotLoaded, &self.agent);
                continue;
            };
            match job.turn(&self.agent, peer) {
                Turn::GoesOn => self.jobs.push_back(job),
                Turn::Done => job.succeed(&self.agent),
                // Bytes may still arrive until the connection is gone.
                Turn::Failed => {
                    job.answer();
                    peer.mourn(job);
                }
            }
        }
    }

    /// Forgets what is to be forgotten and has nothing in flight.
    fn settle(&mut self) {
        let (agent, jobs) = (&self.agent, &self.jobs);
        self.peers.retain(|name, peer| {
            let in_flight = jobs
                .iter()
                .any(|job| job.in_flight_for().is_some() && job.peer == *name);
            if peer.is_settling() && !in_flight {
                peer.settle(name, agent);
            }
            !peer.is_gone()
        });
    }
}
