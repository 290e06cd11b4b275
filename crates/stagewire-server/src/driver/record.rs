//! What stands in a batch of the journal.

use std::path::Path;

use serde::{Deserialize, Serialize};
use stagewire_core::{JobId, Timestamp};
use stagewire_sched::{Event, Sched};

use crate::history::Histories;
use crate::journal::{Journal, JournalError};
use crate::note::Note;

/// Journals hold these by position: new variants go to the end.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Record {
    /// The scheduler's state changed.
    Event(Timestamp, Event),
    /// The history of a job went on.
    Note(JobId, Note),
}

/// What a replay found.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Replayed {
    /// When the last event was decided.
    pub(crate) last: Timestamp,
    /// Number of events.
    pub(crate) events: u64,
}

/// Brings scheduler and histories to where the journal ends.
///
/// # Errors
/// [`JournalError::Corrupt`].
pub(crate) fn replay(
    journal: &Journal,
    path: &Path,
    sched: &mut Sched,
    histories: &Histories,
) -> Result<Replayed, JournalError> {
    let mut replayed = Replayed::default();
    journal.replay(path, |batch| {
        let records: Vec<Record> = postcard::from_bytes(batch).map_err(|error| error.to_string())?;
        for record in records {
            match record {
                Record::Event(at, event) => {
                    sched.apply(at, &event);
                    replayed.events += 1;
                    replayed.last = replayed.last.max(at);
                    if let Event::JobForgotten { job } = event {
                        histories.forget(job);
                    }
                }
                Record::Note(job, note) => histories.of(job).push(note),
            }
        }
        Ok(())
    })?;
    Ok(replayed)
}
