//! Frames on their way out of a socket.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::{fmt, io};

use bytes::{Buf, Bytes};
use serde::Serialize;
use tokio::io::AsyncWrite;
use tokio::sync::Notify;

use crate::wire;

/// Frames, and bytes of them, that may wait for one socket before who sends has to wait as well.
const QUEUE: usize = 256;
const QUEUE_BYTES: usize = 4 << 20;

/// Writes frames, in order. What the socket takes at once is written by whoever sends it, without a task in between; the
/// rest is up to [`Outbox::run`].
///
/// How many frames wait is bounded as long as everybody waits for [`Outbox::room`] before sending, but for the few that
/// end what was sent before.
pub(crate) struct Outbox {
    waiting: Mutex<Waiting>,
    /// Something waits, or there is room again.
    changed: Notify,
}

struct Waiting {
    socket: Box<dyn AsyncWrite + Send + Unpin>,
    frames: VecDeque<(Ticket, Bytes)>,
    /// Of `frames`.
    nbytes: usize,
    /// Whether the socket has a part of the first frame already.
    begun: bool,
    next: u64,
    /// Who writes waits for the socket, which knows one waker: nobody else may try meanwhile.
    blocked: bool,
    /// Nobody writes any more.
    over: bool,
}

/// A frame that had to wait when it was sent. Later ones are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket(u64);

impl Waiting {
    fn is_full(&self) -> bool {
        self.frames.len() >= QUEUE || self.nbytes >= QUEUE_BYTES
    }
}

impl Outbox {
    pub(crate) fn new(socket: Box<dyn AsyncWrite + Send + Unpin>) -> Self {
        let waiting = Waiting {
            socket,
            frames: VecDeque::new(),
            nbytes: 0,
            begun: false,
            next: 0,
            blocked: false,
            over: false,
        };
        Self {
            waiting: Mutex::new(waiting),
            changed: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frames that wait.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.lock().frames.len()
    }

    /// Sends a message, however many wait; `Some` where it has to wait as well. Once nobody writes any more, it goes nowhere.
    pub(crate) fn send<T: Serialize>(&self, message: &T) -> Option<Ticket> {
        let Some(mut frame) = wire::frame(message) else {
            tracing::error!("a message is too long to be sent");
            return None;
        };
        let mut waiting = self.lock();
        if waiting.over {
            return None;
        }
        let whole = frame.len();
        // Where frames wait, who writes them is waiting for the socket. An error is met again by who writes.
        let mut now = Context::from_waker(Waker::noop());
        while waiting.frames.is_empty()
            && !waiting.blocked
            && !frame.is_empty()
            && let Poll::Ready(Ok(written @ 1..)) = Pin::new(&mut waiting.socket).poll_write(&mut now, &frame)
        {
            frame.advance(written);
        }
        if frame.is_empty() {
            return None;
        }
        waiting.begun |= frame.len() < whole;
        waiting.nbytes += frame.len();
        let ticket = Ticket(waiting.next);
        waiting.next += 1;
        waiting.frames.push_back((ticket, frame));
        drop(waiting);
        self.changed.notify_waiters();
        Some(ticket)
    }

    /// Takes a frame back that waits. Returns whether nothing of it was sent, nor will be.
    pub(crate) fn withdraw(&self, ticket: Ticket) -> bool {
        let mut waiting = self.lock();
        let Ok(index) = waiting.frames.binary_search_by_key(&ticket, |(ticket, _)| *ticket) else {
            return waiting.over;
        };
        if index == 0 && waiting.begun {
            return false;
        }
        if let Some((_, frame)) = waiting.frames.remove(index) {
            waiting.nbytes -= frame.len();
        }
        drop(waiting);
        self.changed.notify_waiters();
        true
    }

    /// Waits until not too many frames wait: with a reader that stands still, for as long as that does.
    ///
    /// # Cancel safety
    /// Safe.
    pub(crate) async fn room(&self) {
        loop {
            let changed = self.changed.notified();
            {
                let waiting = self.lock();
                if waiting.over || !waiting.is_full() {
                    return;
                }
            }
            changed.await;
        }
    }

    /// Writes what has to wait, until the socket fails. Who sends is told when this ends or is dropped.
    pub(crate) async fn run(&self) -> io::Error {
        let _over = Over(self);
        loop {
            let changed = self.changed.notified();
            let waits = !self.lock().frames.is_empty();
            if !waits {
                changed.await;
                continue;
            }
            if let Err(error) = std::future::poll_fn(|context| self.poll_write(context)).await {
                return error;
            }
        }
    }

    /// Everything that waits.
    fn poll_write(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut waiting = self.lock();
        let Waiting {
            socket,
            frames,
            nbytes,
            begun,
            blocked,
            ..
        } = &mut *waiting;
        while let Some((_, frame)) = frames.front_mut() {
            let written = Pin::new(&mut *socket).poll_write(context, frame);
            *blocked = written.is_pending();
            match ready!(written)? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => {
                    frame.advance(written);
                    *nbytes -= written;
                    *begun = !frame.is_empty();
                }
            }
            if frame.is_empty() {
                frames.pop_front();
                self.changed.notify_waiters();
            }
        }
        // What was waited for may have been taken back.
        *blocked = false;
        Poll::Ready(Ok(()))
    }
}

impl fmt::Debug for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox")
            .field("waiting", &self.lock().frames.len())
            .finish()
    }
}

struct Over<'a>(&'a Outbox);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        let mut waiting = self.0.lock();
        waiting.over = true;
        waiting.frames.clear();
        waiting.nbytes = 0;
        drop(waiting);
        self.0.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use futures::StreamExt;
    use tokio::net::UnixStream;
    use tokio::net::unix::OwnedReadHalf;
    use tokio::task::JoinHandle;
    use tokio_util::codec::FramedRead;

    use super::*;

    /// An outbox that is written from, and the other end of its socket.
    fn running() -> (Arc<Outbox>, JoinHandle<io::Error>, UnixStream, OwnedReadHalf) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (read, write) = ours.into_split();
        let outbox = Arc::new(Outbox::new(Box::new(write)));
        let running = tokio::spawn({
            let outbox = Arc::clone(&outbox);
            async move { outbox.run().await }
        });
        (outbox, running, theirs, read)
    }

    #[tokio::test]
    async fn frames_come_in_order_also_those_that_had_to_wait() {
        let (outbox, running, theirs, _read) = running();
        // Far more than the socket takes while nobody reads.
        for index in 0..200_u32 {
            outbox.send(&vec![index as u8; 20_000]);
        }
        assert!(!outbox.lock().frames.is_empty());
        let mut frames = FramedRead::new(theirs, wire::codec());
        for index in 0..200_u32 {
            let frame = frames.next().await.expect("more").expect("a frame");
            let bytes: Vec<u8> = wire::decode(&frame).expect("as it was sent");
            assert!(bytes == vec![index as u8; 20_000], "{index}");
        }
        for _ in 0..QUEUE {
            outbox.send(&vec![0_u8; 20_000]);
        }
        drop(frames);
        running.await.expect("no panic");
        // Nobody waits for ever for a reader that is gone.
        outbox.room().await;
        outbox.send(&"x");
        assert!(outbox.lock().frames.is_empty());
    }

    #[tokio::test]
    async fn who_is_not_read_from_has_room_for_so_much_and_takes_back_what_was_not_sent() {
        let (outbox, running, theirs, _read) = running();
        let has_room = || futures::FutureExt::now_or_never(outbox.room()).is_some();
        for len in [100, 60_000] {
            let mut sent: Vec<Option<Ticket>> = Vec::new();
            while has_room() {
                sent.push(outbox.send(&vec![sent.len() as u8; len]));
                assert!(sent.len() < 10_000, "it takes ever more");
            }
            assert!(outbox.lock().nbytes <= QUEUE_BYTES + 2 * len);
            let waiting: Vec<Ticket> = sent.iter().flatten().copied().collect();
            // But for the one that the socket has a part of.
            let back = waiting.iter().filter(|ticket| outbox.withdraw(**ticket)).count();
            assert!((waiting.len() - 1..=waiting.len()).contains(&back), "{back}");
            assert!(has_room() && outbox.lock().frames.len() <= 1);
            assert!(waiting.iter().skip(1).all(|ticket| !outbox.withdraw(*ticket)), "twice");
        }
        // What is read is whole, the one that was begun included. Who writes still waits for the socket, though all that it
        // had to write was taken back: it is woken for what comes then.
        outbox.send(&b"last".to_vec());
        let mut frames = FramedRead::new(theirs, wire::codec());
        loop {
            let frame = tokio::time::timeout(Duration::from_secs(20), frames.next()).await;
            let frame = frame.expect("it is woken").expect("more").expect("a frame");
            let bytes: Vec<u8> = wire::decode(&frame).expect("as it was sent");
            if bytes == b"last" {
                break;
            }
            assert!(bytes.iter().all(|byte| *byte == bytes[0]));
        }
        running.abort();
    }
}
