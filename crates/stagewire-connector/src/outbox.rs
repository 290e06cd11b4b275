//! Frames on their way out of a socket.

use std::collections::VecDeque;
use std::io::IoSlice;
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

/// Frames that one call hands to the socket, and frames and bytes that are held back for that at most: the reader of the first
/// ones works while the next ones are made.
const AT_ONCE: usize = 16;
const AT_ONCE_BYTES: usize = 64 << 10;

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
    /// Frames are to go out together.
    held: bool,
    /// Who writes waits for the socket, or is about to. That knows one waker: nobody else may try meanwhile.
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

    /// Whether what waits goes out together with what is sent next.
    fn is_held(&self) -> bool {
        self.held && self.frames.len() < AT_ONCE && self.nbytes < AT_ONCE_BYTES
    }

    /// Writes what the socket takes now. The rest is left to who writes, which meets an error again.
    fn flush(&mut self) {
        // Where the socket is waited for already, this would take that waker's place.
        if !self.blocked {
            let mut now = Context::from_waker(Waker::noop());
            self.blocked = !matches!(self.poll_write(&mut now), Poll::Ready(Ok(())));
        }
    }

    /// Writes everything that waits, many frames with one call.
    fn poll_write(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.frames.is_empty() {
            let mut slices = [IoSlice::new(&[]); AT_ONCE];
            let frames = self.frames.len().min(AT_ONCE);
            for (slice, (_, frame)) in slices.iter_mut().zip(&self.frames) {
                *slice = IoSlice::new(frame);
            }
            let socket = Pin::new(&mut self.socket);
            match ready!(socket.poll_write_vectored(context, &slices[..frames]))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => self.advance(written),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// The socket has taken so many bytes.
    fn advance(&mut self, mut written: usize) {
        self.nbytes -= written;
        while written > 0
            && let Some((_, frame)) = self.frames.front_mut()
        {
            let part = written.min(frame.len());
            frame.advance(part);
            written -= part;
            self.begun = !frame.is_empty();
            if !self.begun {
                self.frames.pop_front();
            }
        }
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
            held: false,
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
        let Some(frame) = wire::frame(message) else {
            tracing::error!("a message is too long to be sent");
            return None;
        };
        let mut waiting = self.lock();
        if waiting.over {
            return None;
        }
        let ticket = Ticket(waiting.next);
        waiting.next += 1;
        waiting.nbytes += frame.len();
        waiting.frames.push_back((ticket, frame));
        if waiting.is_held() {
            return Some(ticket);
        }
        waiting.flush();
        let waits = !waiting.frames.is_empty();
        drop(waiting);
        waits.then(|| {
            self.changed.notify_waiters();
            ticket
        })
    }

    /// What is sent while this is there goes out together, a few frames at a time. Who holds waits for nothing meanwhile but
    /// for [`Outbox::room`].
    pub(crate) fn hold(&self) -> Held<'_> {
        self.lock().held = true;
        Held(self)
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
        let waited = waiting.frames.len();
        let written = waiting.poll_write(context);
        // What was waited for may have been taken back.
        waiting.blocked = written.is_pending();
        let fewer = waiting.frames.len() < waited;
        drop(waiting);
        if fewer {
            self.changed.notify_waiters();
        }
        written
    }
}

/// Ends with a write of what was held.
#[derive(Debug)]
pub(crate) struct Held<'a>(&'a Outbox);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut waiting = self.0.lock();
        waiting.held = false;
        waiting.flush();
        let waits = !waiting.frames.is_empty();
        drop(waiting);
        if waits {
            self.0.changed.notify_waiters();
        }
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
pub(crate) mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use futures::StreamExt;
    use tokio::net::UnixStream;
    use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
    use tokio::task::JoinHandle;
    use tokio_util::codec::FramedRead;

    use super::*;

    /// A socket that counts how often it took something.
    #[derive(Debug)]
    pub(crate) struct Counted {
        pub(crate) socket: OwnedWriteHalf,
        pub(crate) writes: Arc<AtomicUsize>,
    }

    impl Counted {
        fn count(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
            if let Poll::Ready(Ok(1..)) = written {
                self.writes.fetch_add(1, Ordering::SeqCst);
            }
            written
        }
    }

    impl AsyncWrite for Counted {
        fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            let written = Pin::new(&mut self.socket).poll_write(context, bytes);
            self.count(written)
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            slices: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            let written = Pin::new(&mut self.socket).poll_write_vectored(context, slices);
            self.count(written)
        }

        fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.socket).poll_flush(context)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.socket).poll_shutdown(context)
        }
    }

    #[tokio::test]
    async fn what_is_held_goes_out_in_one_write_and_a_few_frames_at_a_time() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (_read, socket) = ours.into_split();
        let writes = Arc::new(AtomicUsize::new(0));
        let written = || writes.load(Ordering::SeqCst);
        let outbox = Outbox::new(Box::new(Counted {
            socket,
            writes: Arc::clone(&writes),
        }));
        let held = outbox.hold();
        for index in 0..5_u32 {
            outbox.send(&index);
        }
        assert_eq!(written(), 0, "it is held");
        drop(held);
        assert_eq!((written(), outbox.waiting()), (1, 0));
        outbox.send(&5_u32);
        assert_eq!((written(), outbox.waiting()), (2, 0), "nothing is held any more");
        // Neither many frames nor many bytes are kept from their reader.
        let held = outbox.hold();
        for index in 6..6 + AT_ONCE as u32 {
            outbox.send(&index);
        }
        assert_eq!((written(), outbox.waiting()), (3, 0));
        outbox.send(&vec![0_u8; AT_ONCE_BYTES]);
        assert_eq!((written(), outbox.waiting()), (4, 0));
        drop(held);
        assert_eq!(written(), 4);
        drop(outbox);
        let mut frames = FramedRead::new(theirs, wire::codec());
        for index in 0..6 + AT_ONCE as u32 {
            let frame = frames.next().await.expect("more").expect("a frame");
            assert_eq!(wire::decode::<u32>(&frame), Ok(index));
        }
    }

    /// The socket is full when frames are held, and when they are let go.
    #[tokio::test]
    async fn what_is_held_comes_in_order_and_in_the_end_where_the_reader_stood_still() {
        let (outbox, running, theirs, _read) = running();
        let mut sent = 0_u32;
        let mut batch = |len: usize| {
            let held = outbox.hold();
            for _ in 0..7 {
                outbox.send(&(sent, vec![0_u8; len]));
                sent += 1;
            }
            drop(held);
            sent
        };
        let mut frames = FramedRead::new(theirs, wire::codec());
        let mut read = 0;
        // Again and again it is read until all has come, so that who writes finds the socket free.
        for round in 0..6 {
            let mut last = 0;
            for _ in 0..8 {
                last = batch([20, 20_000][round % 2]);
                // Who writes may begin to wait for the socket in between.
                tokio::task::yield_now().await;
            }
            while read < last {
                let frame = tokio::time::timeout(Duration::from_secs(20), frames.next()).await;
                let frame = frame.expect("it is written").expect("more").expect("a frame");
                let (index, _): (u32, Vec<u8>) = wire::decode(&frame).expect("as it was sent");
                assert_eq!(index, read);
                read += 1;
            }
        }
        running.abort();
    }

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
