//! Unregisters memory on a thread of its own: engines may wait, and memory is given back on threads that must not.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use super::registration::Registration;
use crate::Memory;

/// Where registered memory goes that nobody needs any more. The thread ends with the last of these.
#[derive(Debug, Clone)]
pub(super) struct Janitor(Sender<Registered>);

impl Janitor {
    pub(super) fn start() -> io::Result<Self> {
        let (sender, receiver) = channel();
        thread::Builder::new()
            .name("sw-engine-tidy".to_owned())
            .spawn(move || tidy(&receiver))?;
        Ok(Self(sender))
    }

    /// The owner of registered memory.
    pub(super) fn keep(&self, memory: Memory, registration: Registration) -> Owner {
        Owner {
            registered: Some((registration, memory)),
            janitor: self.clone(),
        }
    }
}

/// In this order: the memory goes after its registration.
type Registered = (Registration, Memory);

fn tidy(receiver: &Receiver<Registered>) {
    for (registration, memory) in receiver {
        if registration.end() {
            drop(memory);
        } else {
            // Peers can still reach it.
            std::mem::forget(memory);
        }
    }
}

/// Keeps memory and its registration; dropped, it hands them to the janitor.
pub(super) struct Owner {
    registered: Option<Registered>,
    janitor: Janitor,
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some((registration, _)) = &mut self.registered {
            registration.leaving();
        }
        if let Some(registered) = self.registered.take()
            && let Err(unsent) = self.janitor.0.send(registered)
        {
            // The thread panicked. Memory that peers can reach is rather kept for ever than given back.
            std::mem::forget(unsent.0);
        }
    }
}
