use std::fmt;
use std::process::ExitCode;

use stagewire_core::ErrorClass;

use crate::client::ClientError;

/// What the exit status of every command says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Done = 0,
    Failed = 1,
    Usage = 2,
    NoServer = 3,
    Deadline = 4,
    Interrupted = 130,
}

/// Shown by every `--help`.
pub(crate) const EXIT_HELP: &str = "\
Exit status:
    0  done
    1  the job or the command failed
    2  wrong usage or configuration
    3  no server runs there
    4  the deadline passed
  130  interrupted";

impl Exit {
    /// The status for an error of this class.
    pub(crate) const fn of(class: ErrorClass) -> Self {
        match class {
            ErrorClass::Invalid | ErrorClass::Unauthenticated | ErrorClass::Denied => Self::Usage,
            ErrorClass::Deadline => Self::Deadline,
            _ => Self::Failed,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// An error that ends the command, and the status that it ends with.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) exit: Exit,
    pub(crate) error: anyhow::Error,
}

impl Fault {
    pub(crate) fn new(exit: Exit, message: impl fmt::Display) -> Self {
        Self {
            exit,
            error: anyhow::anyhow!("{message}"),
        }
    }

    pub(crate) fn usage(message: impl fmt::Display) -> Self {
        Self::new(Exit::Usage, message)
    }

    pub(crate) fn failed(message: impl fmt::Display) -> Self {
        Self::new(Exit::Failed, message)
    }

    /// Whether it is that a server does not answer that may be back soon.
    pub(crate) fn is_away(&self) -> bool {
        self.error
            .downcast_ref::<ClientError>()
            .is_some_and(ClientError::is_away)
    }
}

impl<E: Into<anyhow::Error>> From<E> for Fault {
    fn from(error: E) -> Self {
        let error = error.into();
        let exit = error
            .downcast_ref::<ClientError>()
            .map_or(Exit::Failed, ClientError::exit);
        Self { exit, error }
    }
}

/// Says which status an error ends the command with, where 1 is not it.
pub(crate) trait OrExit<T> {
    fn or_exit(self, exit: Exit) -> Result<T, Fault>;
}

impl<T, E: Into<anyhow::Error>> OrExit<T> for Result<T, E> {
    fn or_exit(self, exit: Exit) -> Result<T, Fault> {
        self.map_err(|error| Fault {
            exit,
            error: error.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_every_status() {
        use Exit::{Deadline, Done, Failed, Interrupted, NoServer, Usage};
        for exit in [Done, Failed, Usage, NoServer, Deadline, Interrupted] {
            let number = format!("{:>5}  ", exit as u8);
            assert!(EXIT_HELP.contains(&number), "{exit:?} is missing");
        }
    }
}
