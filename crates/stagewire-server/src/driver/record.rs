//! What stands in a batch of the journal.

use std::path::Path;

use serde::{Deserialize, Serialize};
use stagewire_core::{JobId, Timestamp};
use stagewire_sched::{Event, Limits, Sched, Snapshot, Topology};

use crate::history::Histories;
use crate::journal::{Journal, JournalError};
use crate::note::Note;

/// Batches above which the start of a server sums them up in one.
pub(crate) const LONG: u64 = 1024;

/// Journals hold these by position: new variants go to the end.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Record {
    /// The scheduler's state changed.
    Event(Timestamp, Event),
    /// The history of a job went on.
    Note(JobId, Note),
    /// Everything that the scheduler remembers; the notes that follow are all that there were.
    Snapshot(Timestamp, Snapshot),
}

/// What a journal holds.
#[derive(Debug)]
pub(crate) struct Replayed {
    pub(crate) sched: Sched,
    pub(crate) histories: Histories,
    /// When the last event was decided.
    pub(crate) last: Timestamp,
    /// Number of events.
    pub(crate) events: u64,
}

/// Reads a journal, and sums it up where it has more batches than `long`.
///
/// # Errors
/// [`JournalError::Corrupt`]; [`JournalError::Write`] where the sum cannot be written.
pub(crate) fn replay(
    journal: &mut Journal,
    path: &Path,
    topology: &Topology,
    limits: Limits,
    long: u64,
) -> Result<Replayed, JournalError> {
    let replayed = read(journal, path, topology, limits)?;
    if journal.batches() > long {
        journal.replace(&replayed.sum())?;
    }
    Ok(replayed)
}

fn read(journal: &Journal, path: &Path, topology: &Topology, limits: Limits) -> Result<Replayed, JournalError> {
    let mut replayed = Replayed {
        sched: Sched::new(topology.clone(), limits),
        histories: Histories::default(),
        last: Timestamp::default(),
        events: 0,
    };
    journal.replay(path, |batch| {
        let records: Vec<Record> = postcard::from_bytes(batch).map_err(|error| error.to_string())?;
        for record in records {
            match record {
                Record::Event(at, event) => {
                    replayed.sched.apply(at, &event);
                    replayed.events += 1;
                    replayed.last = replayed.last.max(at);
                    if let Event::JobForgotten { job } = event {
                        replayed.histories.forget(job);
                    }
                }
                Record::Note(job, note) => replayed.histories.of(job).push(note),
                Record::Snapshot(at, snapshot) => {
                    let restored = Sched::restore(topology.clone(), limits, snapshot);
                    replayed.sched = restored.map_err(|error| error.to_string())?;
                    replayed.histories = Histories::default();
                    replayed.last = replayed.last.max(at);
                }
            }
        }
        Ok(())
    })?;
    Ok(replayed)
}

impl Replayed {
    fn sum(&self) -> Vec<u8> {
        let mut records = vec![Record::Snapshot(self.last, self.sched.snapshot())];
        for job in self.sched.jobs().map(|job| job.id()) {
            let notes = self
                .histories
                .get(job)
                .map(|history| history.notes())
                .unwrap_or_default();
            records.extend(notes.iter().map(|note| Record::Note(job, Note::clone(note))));
        }
        encode(&records)
    }
}

pub(super) fn encode(records: &[Record]) -> Vec<u8> {
    postcard::to_stdvec(records).expect("records have nothing that postcard cannot encode")
}

#[cfg(test)]
mod tests {
    use stagewire_core::{Epoch, StageName};
    use stagewire_sched::{Input, StageSpec};
    use uuid::Uuid;

    use super::*;
    use crate::note::{NoteId, NoteKind};

    #[test]
    fn a_sum_says_the_same_as_what_it_sums_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.redb");
        let stage = StageSpec::new(StageName::new("paint").unwrap());
        let topology = Topology::new(vec![stage], vec![]).unwrap();
        let mut sched = Sched::new(topology.clone(), Limits::default());
        let mut journal = Journal::open(dir.path(), "test").unwrap();
        let mut drive = |journal: &mut Journal, n: u64, input: Input, notes: Vec<Record>| {
            let mut records = notes;
            for event in sched.decide(Timestamp(n), input).unwrap().events {
                sched.apply(Timestamp(n), &event);
                records.push(Record::Event(Timestamp(n), event));
            }
            journal.append(&encode(&records)).unwrap();
            sched.snapshot()
        };
        let restarted = || Input::Restarted {
            epoch: Epoch(1),
            stored: Default::default(),
        };
        let mut snapshot = drive(&mut journal, 1, restarted(), vec![]);
        for n in 2..=20 {
            let job = JobId(Uuid::from_u128(n.into()));
            let note = Note {
                id: NoteId {
                    epoch: Epoch(1),
                    seq: n,
                },
                at: Timestamp(n),
                stage: None,
                attempt: None,
                worker: None,
                kind: NoteKind::Submitted,
            };
            let params = "{}".into();
            let input = Input::Submit {
                job,
                params,
                key: None,
                urgency: stagewire_sched::Urgency::default(),
            };
            snapshot = drive(&mut journal, n, input, vec![Record::Note(job, note)]);
        }
        let long = read(&journal, &path, &topology, Limits::default()).unwrap();
        journal.replace(&long.sum()).unwrap();
        assert_eq!((long.sched.snapshot(), long.last), (snapshot.clone(), Timestamp(20)));
        assert_eq!(journal.batches(), 1);
        let short = read(&journal, &path, &topology, Limits::default()).unwrap();
        assert_eq!((short.sched.snapshot(), short.last), (snapshot, long.last));
        for job in short.sched.jobs().map(|job| job.id()) {
            assert_eq!(short.histories.of(job).notes(), long.histories.of(job).notes());
        }
    }
}
