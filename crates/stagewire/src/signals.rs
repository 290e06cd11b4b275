use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

/// What somebody wants of a command that runs until it is asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    /// Ctrl-C.
    Interrupt,
    /// SIGTERM, or the terminal was closed, or whoever started the command is gone.
    Terminate,
}

/// The signals that ask to stop. From `listen` on none of them ends the process by itself.
#[derive(Debug)]
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    /// Standard input ends, where that counts.
    input: Option<oneshot::Receiver<()>>,
}

impl Signals {
    pub(crate) fn listen() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            input: None,
        })
    }

    /// From now on the end of standard input asks to stop, too.
    pub(crate) fn heed_input(&mut self) {
        let (ended, input) = oneshot::channel();
        self.input = Some(input);
        // A read of the terminal or a pipe cannot be given up: the thread ends with the process.
        std::thread::spawn(move || {
            // However it ends, nobody is there any more.
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            let _ = ended.send(());
        });
    }

    /// The next wish.
    ///
    /// # Cancel safety
    /// No signal is lost.
    pub(crate) async fn next(&mut self) -> Wish {
        tokio::select! {
            _ = self.interrupt.recv() => Wish::Interrupt,
            _ = self.terminate.recv() => Wish::Terminate,
            _ = self.hangup.recv() => Wish::Terminate,
            () = ended(&mut self.input) => Wish::Terminate,
        }
    }
}

/// Once, and never where there is nothing that ends.
async fn ended(input: &mut Option<oneshot::Receiver<()>>) {
    match input {
        Some(ending) => {
            // A thread that is gone has nothing to read.
            let _ = ending.await;
            *input = None;
        }
        None => std::future::pending().await,
    }
}
