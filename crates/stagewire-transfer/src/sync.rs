//! The primitives of everything whose interleavings loom explores: those of std, or loom's own under
//! `--cfg stagewire_loom`.
//!
//! A cfg of its own, because tokio changes its whole interface under plain `loom`. What a model does not look into
//! (tokio's `watch`, the pages themselves) stays as it is.

#[cfg(stagewire_loom)]
mod notify;

#[cfg(stagewire_loom)]
pub(crate) use notify::Notify;
#[cfg(not(stagewire_loom))]
pub(crate) use tokio::sync::Notify;

#[cfg(not(stagewire_loom))]
pub(crate) use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};

#[cfg(stagewire_loom)]
pub(crate) use loom::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};

/// Runs a model in every order that loom finds; `LOOM_MAX_PREEMPTIONS` bounds it. What the body spawns with [`spawn`]
/// runs beside it.
#[cfg(all(test, stagewire_loom))]
pub(crate) fn model(body: impl Fn() + Sync + Send + 'static) {
    let body = std::sync::Arc::new(body);
    loom::model(move || {
        let body = body.clone();
        spawn(move || body()).join().expect("the model");
    });
}

/// A thread with more than loom's 32 KiB of stack: making random numbers takes that much without optimisation.
#[cfg(all(test, stagewire_loom))]
pub(crate) fn spawn<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> loom::thread::JoinHandle<T> {
    let thread = loom::thread::Builder::new().stack_size(1 << 16);
    thread.spawn(body).expect("loom spawns threads")
}
