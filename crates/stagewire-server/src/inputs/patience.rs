//! How long an upload may take: whoever sends too slowly keeps a place that others wait for.

use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use stagewire_core::ByteCount;
use tokio::time::{Instant, timeout};

use super::InputError;

/// How long a client may send nothing, and how far it may be behind [`RATE`].
const SILENCE: Duration = Duration::from_secs(30);
/// Least bytes a second.
const RATE: u64 = 64 << 10;

/// How long the client was waited for; what the server's own disk took does not count.
#[derive(Debug, Default)]
pub(super) struct Patience {
    waited: Duration,
}

impl Patience {
    /// The next piece of a body of which `received` bytes have come; `None` at its end.
    ///
    /// # Errors
    /// [`InputError::Stalled`], [`InputError::Slow`], [`InputError::Broken`].
    pub(super) async fn next<E: std::fmt::Display>(
        &mut self,
        body: &mut (impl Stream<Item = Result<Bytes, E>> + Unpin),
        received: u64,
    ) -> Result<Option<Bytes>, InputError> {
        let allowed = SILENCE + Duration::from_secs(received) / u32::try_from(RATE).expect("it is small");
        let left = allowed.saturating_sub(self.waited);
        let received = ByteCount(received);
        let begin = Instant::now();
        let next = timeout(SILENCE.min(left), body.next()).await;
        self.waited += begin.elapsed();
        match next {
            Ok(None) => Ok(None),
            Ok(Some(Ok(piece))) => Ok(Some(piece)),
            Ok(Some(Err(error))) => Err(InputError::Broken {
                received,
                problem: error.to_string(),
            }),
            Err(_) if left >= SILENCE => Err(InputError::Stalled {
                seconds: SILENCE.as_secs(),
                received,
            }),
            Err(_) => Err(InputError::Slow {
                seconds: self.waited.as_secs(),
                received,
                rate: ByteCount(RATE),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// What becomes of a body that comes in pieces of so many bytes, one each so many seconds, and how long that takes.
    async fn sent(pieces: usize, nbytes: usize, every: u64) -> (Result<u64, InputError>, Duration) {
        let begin = Instant::now();
        let mut body = Box::pin(futures::stream::iter(0..pieces).then(|_| async move {
            tokio::time::sleep(Duration::from_secs(every)).await;
            Ok::<_, Infallible>(Bytes::from(vec![7; nbytes]))
        }));
        let (mut patience, mut received) = (Patience::default(), 0);
        let end = loop {
            match patience.next(&mut body, received).await {
                Ok(None) => break Ok(received),
                Ok(Some(piece)) => received += piece.len() as u64,
                Err(error) => break Err(error),
            }
        };
        (end, begin.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_keeps_a_place_by_sending_little() {
        let (end, took) = sent(1, 1, 31).await;
        assert!(matches!(end, Err(InputError::Stalled { seconds: 30, .. })), "{end:?}");
        assert_eq!(took, SILENCE);
        for (nbytes, every) in [(1, 29), (1, 1), (RATE as usize / 2, 1), (RATE as usize, 2)] {
            let (end, took) = sent(100_000, nbytes, every).await;
            let Err(InputError::Slow { received, .. }) = end else {
                panic!("{nbytes} bytes each {every} s: {end:?}")
            };
            let most = SILENCE + Duration::from_secs_f64(received.0 as f64 / RATE as f64);
            assert!(took <= most + Duration::from_millis(2), "{took:?} for {received}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_connection_is_fast_enough() {
        let rate = RATE as usize;
        for (pieces, nbytes, every) in [(4_096, rate, 1), (100, 29 * rate, 29), (29, 1, 1), (1, 5, 29)] {
            let (end, _) = sent(pieces, nbytes, every).await;
            assert_eq!(end.unwrap(), (pieces * nbytes) as u64);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_server_takes_does_not_count() {
        let mut body = futures::stream::iter((0..3).map(|_| Ok::<_, Infallible>(Bytes::from_static(b"x"))));
        let mut patience = Patience::default();
        for received in 0..3 {
            tokio::time::sleep(SILENCE * 10).await;
            assert!(patience.next(&mut body, received).await.unwrap().is_some());
        }
        assert!(patience.next(&mut body, 3).await.unwrap().is_none());
    }
}
