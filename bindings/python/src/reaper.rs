//! Gives memory back to the Python objects that lent it.
//!
//! That needs the GIL, and the last user of the memory may be a thread of the runtime, which must never wait for the
//! GIL: grants are renewed there. So one thread of its own does it.

use std::any::Any;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

use pyo3::Python;

type Loan = Box<dyn Any + Send>;

static REAPER: OnceLock<Sender<Loan>> = OnceLock::new();

/// Drops `loan` soon, with the GIL held; never, where the interpreter is gone.
pub(crate) fn give_back(loan: Loan) {
    let sender = REAPER.get_or_init(|| {
        let (sender, receiver) = channel::<Loan>();
        let reap = move || {
            while let Ok(loan) = receiver.recv() {
                let mut loans = vec![loan];
                loans.extend(receiver.try_iter());
                if Python::try_attach(|_| loans.clear()).is_none() {
                    // The interpreter is shutting down: what it lent must not be touched any more.
                    std::mem::forget(loans);
                }
            }
        };
        // Without the thread the loans are kept: memory stays taken, but valid.
        let _started = std::thread::Builder::new()
            .name("stagewire-reap".to_owned())
            .spawn(reap);
        sender
    });
    if let Err(unsent) = sender.send(loan) {
        std::mem::forget(unsent.0);
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
