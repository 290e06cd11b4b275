//! Caches handed over from prefill to decode.

mod leaving;
mod lives;
mod odd;
mod packing;
mod pages;
mod peers;
mod redundant;
mod rooms;
mod second;
mod sides;
mod soak;

use std::time::Duration;

use tokio::time::Instant;

use crate::PATIENCE;

async fn until(condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < PATIENCE, "it does not come about");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("in time")
}
