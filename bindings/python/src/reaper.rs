//! Gives memory back to the Python objects that lent it.
//!
//! That needs the GIL, and the last user of the memory may be a thread of the runtime, which must never wait for the
//! GIL: grants are renewed there. So one thread of its own does it, until the interpreter ends: what comes later is kept,
//! since there is nobody to give it to.

use std::any::Any;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};

use pyo3::prelude::*;

type Loan = Box<dyn Any + Send>;

enum Message {
    Loan(Loan),
    /// Answered once everything before it was given back.
    Last(SyncSender<()>),
}

static REAPER: OnceLock<Sender<Message>> = OnceLock::new();

/// Whether the interpreter is about to end. A thread that asks for the GIL after that may take the process down.
static ENDED: AtomicBool = AtomicBool::new(false);

/// Drops `loan` soon, with the GIL held; never, where the interpreter is gone.
pub(crate) fn give_back(loan: Loan) {
    if ENDED.load(Ordering::Acquire) {
        std::mem::forget(loan);
        return;
    }
    let sender = REAPER.get_or_init(|| {
        let (sender, receiver) = channel::<Message>();
        let reap = move || {
            while let Ok(message) = receiver.recv() {
                let (mut loans, mut last) = (Vec::new(), None);
                for message in std::iter::once(message).chain(receiver.try_iter()) {
                    match message {
                        Message::Loan(loan) => loans.push(loan),
                        Message::Last(answer) => last = Some(answer),
                    }
                }
                if Python::try_attach(|_| loans.clear()).is_none() {
                    // The interpreter is shutting down: what it lent must not be touched any more.
                    std::mem::forget(loans);
                }
                if let Some(answer) = last {
                    // Whoever asked may have stopped waiting.
                    let _ = answer.send(());
                    return receiver.into_iter().for_each(std::mem::forget);
                }
            }
        };
        // Without the thread the loans are kept: memory stays taken, but valid.
        let _started = std::thread::Builder::new()
            .name("stagewire-reap".to_owned())
            .spawn(reap);
        sender
    });
    if let Err(unsent) = sender.send(Message::Loan(loan)) {
        std::mem::forget(unsent.0);
    }
}

/// Gives back what is waiting, and nothing any more after that. Python calls it before it ends.
#[pyfunction]
pub(crate) fn end_reaping(py: Python<'_>) {
    ENDED.store(true, Ordering::Release);
    let Some(reaper) = REAPER.get() else { return };
    let (answer, given_back) = sync_channel(1);
    if reaper.send(Message::Last(answer)).is_ok() {
        // An error means that there is no such thread.
        let _ = py.detach(move || given_back.recv());
    }
}

/// A value that is given back through the reaper when it is dropped.
#[derive(Debug)]
pub(crate) struct Lent<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> Lent<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }

    /// The value. Whatever is done with it may need the GIL.
    pub(crate) fn get(&self) -> &T {
        self.0.as_ref().expect("taken only when dropped")
    }
}

impl<T: Send + 'static> Drop for Lent<T> {
    fn drop(&mut self) {
        if let Some(value) = self.0.take() {
            give_back(Box::new(value));
        }
    }
}
