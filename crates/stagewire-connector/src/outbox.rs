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

/// Frames that may wait for one socket before who replies has to wait as well.
const QUEUE: usize = 256;

/// Writes frames, in order. What the socket takes at once is written by whoever sends it, without a task in between; the
/// rest is up to [`Outbox::run`].
pub(crate) struct Outbox {
    waiting: Mutex<Waiting>,
    /// Something waits, or there is room again.
    changed: Notify,
}

struct Waiting {
    socket: Box<dyn AsyncWrite + Send + Unpin>,
    frames: VecDeque<Bytes>,
    /// Nobody writes any more.
    over: bool,
}

impl Outbox {
    pub(crate) fn new(socket: Box<dyn AsyncWrite + Send + Unpin>) -> Self {
        let waiting = Waiting {
            socket,
            frames: VecDeque::new(),
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

    /// Sends a message, however many wait. Once nobody writes any more, it goes nowhere.
    pub(crate) fn send<T: Serialize>(&self, message: &T) {
        let Some(mut frame) = wire::frame(message) else {
            tracing::error!("a message is too long to be sent");
            return;
        };
        let mut waiting = self.lock();
        if waiting.over {
            return;
        }
        // Where frames wait, who writes them is waiting for the socket. An error is met again by who writes.
        let mut now = Context::from_waker(Waker::noop());
        while waiting.frames.is_empty()
            && !frame.is_empty()
            && let Poll::Ready(Ok(written @ 1..)) = Pin::new(&mut waiting.socket).poll_write(&mut now, &frame)
        {
            frame.advance(written);
        }
        if !frame.is_empty() {
            waiting.frames.push_back(frame);
            drop(waiting);
            self.changed.notify_waiters();
        }
    }

    /// Sends a message once not too many wait.
    pub(crate) async fn send_in_turn<T: Serialize>(&self, message: &T) {
        loop {
            let changed = self.changed.notified();
            {
                let waiting = self.lock();
                if waiting.over || waiting.frames.len() < QUEUE {
                    break;
                }
            }
            changed.await;
        }
        self.send(message);
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
        let Waiting { socket, frames, .. } = &mut *waiting;
        while let Some(frame) = frames.front_mut() {
            match ready!(Pin::new(&mut *socket).poll_write(context, frame))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => frame.advance(written),
            }
            if frame.is_empty() {
                frames.pop_front();
                self.changed.notify_waiters();
            }
        }
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
        drop(waiting);
        self.0.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::StreamExt;
    use tokio::net::UnixStream;
    use tokio_util::codec::FramedRead;

    use super::*;

    #[tokio::test]
    async fn frames_come_in_order_also_those_that_had_to_wait() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (_read, write) = ours.into_split();
        let outbox = Arc::new(Outbox::new(Box::new(write)));
        let running = tokio::spawn({
            let outbox = Arc::clone(&outbox);
            async move { outbox.run().await }
        });
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
        outbox.send_in_turn(&"x").await;
        assert!(outbox.lock().frames.is_empty());
    }
}
