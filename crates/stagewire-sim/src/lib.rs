//! A cluster simulator over the very scheduler that serves.
//!
//! *What it is.* Discrete events over [`stagewire_sched::Sched`]: a seed decides everything, times are integer nanoseconds.
//! Its integration tests are the fault harness of the orchestrator.
//!
//! *What it is not.* No I/O and no clock: what it reads and writes is text, and time is what the [`Agenda`] says.

mod agenda;
mod random;

pub use agenda::{Agenda, Appointment};
pub use random::Random;
