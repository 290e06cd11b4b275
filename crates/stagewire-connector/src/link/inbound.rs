//! What a holder says, heard by the connection's task, or sooner by who waits for it.
//!
//! An answer that the runtime's poller hears first wakes two threads: the poller's, and then that of who waits. A thread that
//! looks after the socket itself for as long as such wakings take needs neither.

use std::future::poll_fn;
use std::mem;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use futures::StreamExt;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::sched_yield;
use tokio::task::coop::unconstrained;

use super::{Routes, decline};
use crate::begun;
use crate::outbox::Outbox;
use crate::wire::{self, Reader, Reply};

/// How long a thread looks after the socket: about as long as waking it would take.
const BRIEFLY: Duration = Duration::from_micros(50);

/// Answers that are passed on before others of the runtime have a turn.
const AT_ONCE: usize = 256;

/// After how many waits in vain, at most, a thread looks after the socket again: 2 to this power.
const MOST_IN_VAIN: u32 = 8;

pub(super) struct Inbound {
    state: Mutex<State>,
    routes: Arc<Routes>,
    outbox: Arc<Outbox>,
    /// Of a holder on this host, where another processor can make the answer meanwhile.
    socket: Option<OwnedFd>,
    patience: Patience,
}

struct State {
    frames: Reader,
    /// Of the connection's task.
    task: Option<Waker>,
    /// Something came that the task does not know of yet.
    heard: bool,
    over: bool,
}

impl Inbound {
    /// `socket` is the one that `frames` come from.
    pub(super) fn new(frames: Reader, routes: Arc<Routes>, outbox: Arc<Outbox>, socket: Option<OwnedFd>) -> Self {
        let state = State {
            frames,
            task: None,
            heard: false,
            over: false,
        };
        Self {
            state: Mutex::new(state),
            routes,
            outbox,
            socket: socket.filter(|_| available_parallelism().is_ok_and(|cores| cores.get() > 1)),
            patience: Patience::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes on what comes, for the connection's task. Returns whether anything came, here or to who waited for it; if not,
    /// nothing comes any more.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn heard(&self) -> bool {
        poll_fn(|context| {
            let mut state = self.lock();
            if !state.task.as_ref().is_some_and(|task| task.will_wake(context.waker())) {
                state.task = Some(context.waker().clone());
            }
            self.pass_on(&mut state, context);
            if mem::take(&mut state.heard) {
                Poll::Ready(true)
            } else if state.over {
                Poll::Ready(false)
            } else {
                Poll::Pending
            }
        })
        .await
    }

    /// Waits for what this holder is about to answer, and looks after the socket meanwhile: briefly, and only once everybody
    /// else of this task has had a turn, who may have something to ask as well.
    ///
    /// # Cancel safety
    /// That of `waiting`.
    pub(super) async fn attended<T>(&self, waiting: impl Future<Output = T>) -> T {
        let mut waiting = pin!(waiting);
        let mut turns = 0;
        let attending = poll_fn(|context| {
            let polled = waiting.as_mut().poll(context);
            if polled.is_ready() {
                return polled;
            }
            turns += 1;
            match turns {
                1 if self.socket.is_some() && self.patience.lasts() => context.waker().wake_by_ref(),
                1 => turns = 2,
                2 => return self.attend(|| waiting.as_mut().poll(context)),
                _ => turns = 3,
            }
            Poll::Pending
        });
        // It gives way by itself.
        unconstrained(attending).await
    }

    fn attend<T>(&self, mut waiting: impl FnMut() -> Poll<T>) -> Poll<T> {
        let until = Instant::now() + BRIEFLY;
        loop {
            if self.has_come() {
                // What goes on with an answer does so here: a task for it would wake a thread.
                begun::here(|| self.hear());
            }
            let polled = waiting();
            let in_vain = polled.is_pending();
            if !in_vain || Instant::now() >= until {
                self.patience.learn(in_vain);
                return polled;
            }
            // The holder may be waiting for this very processor.
            sched_yield();
        }
    }

    fn has_come(&self) -> bool {
        let now = Timespec::default();
        let looked = |socket| poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&now));
        self.socket
            .as_ref()
            .is_some_and(|socket| !matches!(looked(socket), Ok(0)))
    }

    /// Passes on what has come. The connection's task is still the one that is woken for what comes next.
    fn hear(&self) {
        let mut state = self.lock();
        let Some(task) = state.task.clone() else { return };
        self.pass_on(&mut state, &mut Context::from_waker(&task));
        if state.over {
            task.wake();
        }
    }

    fn pass_on(&self, state: &mut State, context: &mut Context<'_>) {
        for _ in 0..AT_ONCE {
            if state.over {
                return;
            }
            match state.frames.poll_next_unpin(context) {
                Poll::Pending => return,
                Poll::Ready(Some(Ok(frame))) => {
                    state.heard = true;
                    state.over = !self.pass_on_one(&frame);
                }
                Poll::Ready(_) => state.over = true,
            }
        }
        context.waker().wake_by_ref();
    }

    /// Returns whether it is a reply.
    fn pass_on_one(&self, frame: &[u8]) -> bool {
        match wire::decode::<Reply>(frame) {
            Ok(reply) => {
                if let Some(late) = self.routes.hear(reply) {
                    decline(&self.outbox, &late);
                }
                true
            }
            Err(error) => {
                tracing::warn!(%error, "gave up a connection to a holder of payloads");
                false
            }
        }
    }
}

impl std::fmt::Debug for Inbound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Inbound")
    }
}

/// Whether to look after the socket once more: less and less often where that was in vain.
#[derive(Debug, Default)]
struct Patience {
    in_vain: AtomicU32,
    pause: AtomicU32,
}

impl Patience {
    fn lasts(&self) -> bool {
        let less = self
            .pause
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |pause| pause.checked_sub(1));
        less.is_err()
    }

    fn learn(&self, in_vain: bool) {
        if !in_vain {
            self.in_vain.store(0, Ordering::Relaxed);
            return;
        }
        let times = self.in_vain.load(Ordering::Relaxed);
        self.pause.store((1 << times) - 1, Ordering::Relaxed);
        self.in_vain.store((times + 1).min(MOST_IN_VAIN), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Write;
    use std::os::unix::net::UnixStream as Peer;

    use stagewire_transfer::unix;
    use tokio::net::UnixStream;
    use tokio::sync::oneshot;
    use tokio::time::timeout;

    use super::super::Route;
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// What a connection hears from the other end of a socket, where each of `ids` is waited for.
    fn inbound(ids: u32) -> (Arc<Inbound>, Vec<oneshot::Receiver<Reply>>, Peer) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (read, write) = unix::split(ours).expect("descriptors");
        let socket = read.descriptor().expect("descriptors");
        let (reader, writer) = wire::framed(read, write);
        let (senders, answers): (BTreeMap<_, _>, Vec<_>) = (0..ids)
            .map(|id| {
                let (sender, answer) = oneshot::channel();
                ((id, Route::Answer(sender)), answer)
            })
            .unzip();
        let outbox = Arc::new(Outbox::new(writer.into_inner()));
        let routes = Arc::new(Routes(Mutex::new(Some(senders))));
        let mut inbound = Inbound::new(reader, routes, outbox, None);
        // Also where there is one processor only.
        inbound.socket = Some(socket);
        let theirs = theirs.into_std().expect("a socket");
        theirs.set_nonblocking(false).expect("a socket");
        (Arc::new(inbound), answers, theirs)
    }

    fn answer(id: u32) -> Vec<u8> {
        wire::frame(&Reply::Finished { id }).expect("it is short").to_vec()
    }

    /// The connection's task, which has begun to wait.
    async fn task(inbound: &Arc<Inbound>) -> tokio::task::JoinHandle<()> {
        let inbound = Arc::clone(inbound);
        let task = tokio::spawn(async move { while inbound.heard().await {} });
        tokio::task::yield_now().await;
        task
    }

    /// On a runtime of one thread, which does not turn to its poller while somebody looks after the socket.
    #[tokio::test]
    async fn who_waits_hears_the_answer_before_the_runtime_does_and_the_end_as_well() {
        let (inbound, answers, mut theirs) = inbound(3);
        let task = task(&inbound).await;
        for (id, waits) in answers.into_iter().enumerate() {
            let mut waits = pin!(waits);
            if id == 2 {
                // Only a part of it, and then nothing any more.
                theirs.write_all(&answer(2)[..3]).expect("room");
                theirs.shutdown(std::net::Shutdown::Both).expect("open");
            } else {
                theirs.write_all(&answer(id as u32)).expect("room");
            }
            let heard = inbound.attend(|| waits.as_mut().poll(&mut Context::from_waker(Waker::noop())));
            match heard {
                Poll::Ready(Ok(reply)) => assert_eq!(reply.id() as usize, id),
                // The routes end with the connection's task, which is told.
                Poll::Pending => assert_eq!(id, 2),
                other => panic!("{other:?}"),
            }
        }
        timeout(PATIENCE, task).await.expect("it is told").expect("no panic");
    }

    /// A holder that stands still is for the deadline of who waits, and for nobody else: others have their turns.
    #[tokio::test]
    async fn a_holder_that_stands_still_is_looked_after_briefly_and_less_and_less() {
        let (inbound, answers, _theirs) = inbound(1);
        let task = task(&inbound).await;
        let attempts = || inbound.patience.in_vain.load(Ordering::Relaxed);
        assert!(inbound.patience.lasts());
        let waits = answers.into_iter().next().expect("one");
        let waited = timeout(Duration::from_millis(1), inbound.attended(waits)).await;
        assert!(waited.is_err(), "nobody answers");
        assert_eq!(attempts(), 1);
        for _ in 0..1000 {
            let mut never = pin!(inbound.attended(std::future::pending::<()>()));
            for _ in 0..3 {
                assert!(futures::poll!(never.as_mut()).is_pending());
            }
        }
        assert_eq!(attempts(), MOST_IN_VAIN);
        task.abort();
    }

    #[test]
    fn patience_comes_back_with_the_first_answer() {
        let patience = Patience::default();
        let mut looked = 0;
        for _ in 0..1000 {
            if patience.lasts() {
                looked += 1;
                patience.learn(true);
            }
        }
        assert!((8..=13).contains(&looked), "{looked}");
        while !patience.lasts() {}
        patience.learn(false);
        assert!(patience.lasts() && patience.lasts());
    }

    /// Answers are passed on once, and all, whoever reads them: those who wait, on other threads, and the connection's task.
    #[tokio::test(flavor = "multi_thread", worker_threads = 3)]
    async fn every_answer_gets_to_who_waits_for_it() {
        const ALL: u32 = 2000;
        let (inbound, answers, mut theirs) = inbound(ALL);
        let task = task(&inbound).await;
        let writer = std::thread::spawn(move || {
            for id in 0..ALL {
                let frame = answer(id);
                let (part, rest) = frame.split_at(id as usize % frame.len());
                theirs.write_all(part).expect("it reads");
                theirs.write_all(rest).expect("it reads");
                if id % 7 == 0 {
                    std::thread::yield_now();
                }
            }
            theirs
        });
        let waiting = answers.into_iter().enumerate().map(|(id, answer)| {
            let inbound = Arc::clone(&inbound);
            tokio::spawn(async move {
                let reply = timeout(PATIENCE, inbound.attended(answer)).await;
                assert_eq!(reply.expect("in time").expect("an answer").id() as usize, id);
            })
        });
        for waiting in waiting.collect::<Vec<_>>() {
            waiting.await.expect("it is answered");
        }
        drop(writer.join().expect("it wrote"));
        timeout(PATIENCE, task)
            .await
            .expect("it hears the end")
            .expect("no panic");
    }
}
