use proptest::prelude::*;
use stagewire_core::{Classify, ErrorClass, PayloadId};
use stagewire_transfer::{Location, SegmentName};
use tempfile::TempDir;
use uuid::Uuid;

use super::*;

mod failing;

fn id(n: u128) -> PayloadId {
    PayloadId(Uuid::from_u128(n))
}

fn place(n: u64) -> Place {
    Place::Memory(vec![
        Some(Location {
            segment: SegmentName(7),
            offset: n * 4096,
            len: 100,
        }),
        None,
    ])
}

fn file(n: u64) -> Place {
    Place::File {
        name: format!("{n:032x}.spill"),
        digest: u128::from(n),
    }
}

fn entry(n: u64) -> Entry {
    Entry {
        token: None,
        retention: Kept::Cached(n),
        expires_at: Some(n),
        parts: vec![100, 0],
        place: place(n),
        label: vec![n as u8; 20],
    }
}

fn open_in(dir: &TempDir) -> Journal {
    Journal::open(dir.path()).expect("readable").0
}

/// Appends, and shortens where a store would.
fn append(journal: &Journal, record: Record) -> Appended {
    let appended = journal.append(record).expect("written");
    if journal.is_long() {
        assert!(!journal.is_long(), "two are told");
        journal.shorten().expect("written");
    }
    appended
}

fn ids(journal: &Journal) -> Vec<PayloadId> {
    journal.ledger().entries().keys().copied().collect()
}

fn dir() -> TempDir {
    tempfile::tempdir().expect("a directory")
}

#[test]
fn what_was_appended_is_there_again() {
    let dir = dir();
    let journal = open_in(&dir);
    assert_eq!(
        journal.append(Record::Sealed(id(1), entry(1))).expect("written"),
        Appended::Done
    );
    assert_eq!(
        journal.append(Record::Sealed(id(2), entry(2))).expect("written"),
        Appended::Done
    );
    assert_eq!(
        journal.append(Record::Moved(id(1), file(1))).expect("written"),
        Appended::Sync
    );
    assert_eq!(journal.append(Record::Gone(id(2))).expect("written"), Appended::Done);
    assert_eq!(
        journal.append(Record::Gone(id(2))).expect("nothing to write"),
        Appended::Unknown
    );
    assert_eq!(
        journal.append(Record::Moved(id(2), file(2))).expect("nothing to write"),
        Appended::Unknown
    );
    assert_eq!(
        journal
            .append(Record::Sealed(id(1), entry(9)))
            .expect("nothing to write"),
        Appended::Unknown
    );
    journal.sync().expect("synced");
    let ledger = journal.ledger();
    drop(journal);
    let again = open_in(&dir);
    assert_eq!(again.ledger(), ledger);
    assert_eq!(ledger.get(id(1)).expect("there").place, file(1));
    assert_eq!(
        again.append(Record::Gone(id(1))).expect("written"),
        Appended::Sync,
        "a spilled object stays deleted after a loss of power as well"
    );
}

/// Labels hold manifests, which are much longer than all the rest.
#[test]
fn a_long_journal_of_long_records_is_summed_up() {
    let dir = dir();
    let journal = open_in(&dir);
    let path = dir.path().join(NAME);
    let mut longest = 0;
    for n in 1..2000 {
        let sealed = Entry {
            label: vec![7; 2048],
            ..entry(n)
        };
        let _ = append(&journal, Record::Sealed(id(1), sealed));
        let _ = append(&journal, Record::Moved(id(1), file(1)));
        let _ = append(&journal, Record::Gone(id(1)));
        longest = longest.max(std::fs::metadata(&path).expect("there").len());
    }
    assert!(longest < SHORT + 8192, "{longest} bytes");
    assert!(longest > SHORT / 2, "the test makes it long");
}

#[test]
fn a_long_journal_is_summed_up() {
    let dir = dir();
    let journal = open_in(&dir);
    assert_eq!(
        journal.append(Record::Sealed(id(0), entry(0))).expect("written"),
        Appended::Done
    );
    assert_eq!(
        journal.append(Record::Moved(id(0), file(0))).expect("written"),
        Appended::Sync
    );
    let path = dir.path().join(NAME);
    let mut longest = 0;
    for n in 1..5000 {
        assert_eq!(append(&journal, Record::Sealed(id(1), entry(n))), Appended::Done);
        assert_eq!(append(&journal, Record::Gone(id(1))), Appended::Done);
        longest = longest.max(std::fs::metadata(&path).expect("there").len());
    }
    assert!(longest < SHORT + 4096, "{longest} bytes");
    assert!(longest > SHORT / 2, "the test makes it long");
    drop(journal);
    let journal = open_in(&dir);
    assert_eq!(ids(&journal), [id(0)]);
    journal.shorten().expect("written");
    assert_eq!(
        journal.append(Record::Sealed(id(3), entry(3))).expect("written"),
        Appended::Done
    );
    assert_eq!(ids(&open_in(&dir)), [id(0), id(3)]);
}

#[test]
fn a_torn_end_is_cut_off_and_written_over() {
    let dir = dir();
    let path = dir.path().join(NAME);
    let journal = open_in(&dir);
    for n in 1..4 {
        assert_eq!(
            journal.append(Record::Sealed(id(n.into()), entry(n))).expect("written"),
            Appended::Done
        );
    }
    drop(journal);
    let whole = std::fs::read(&path).expect("there");
    std::fs::write(&path, &whole[..whole.len() - 5]).expect("written");
    let (journal, torn) = Journal::open(dir.path()).expect("readable");
    assert!(torn > 0);
    assert_eq!(ids(&journal), [id(1), id(2)]);
    assert_eq!(
        journal.append(Record::Sealed(id(3), entry(3))).expect("written"),
        Appended::Done
    );
    assert_eq!(std::fs::read(&path).expect("there"), whole);
}

#[test]
fn a_damaged_middle_is_refused_with_offset_and_checksums() {
    let dir = dir();
    let path = dir.path().join(NAME);
    let journal = open_in(&dir);
    for n in 1..4 {
        assert_eq!(
            journal.append(Record::Sealed(id(n.into()), entry(n))).expect("written"),
            Appended::Done
        );
    }
    drop(journal);
    let mut bytes = std::fs::read(&path).expect("there");
    bytes[frame::FILE_HEADER + frame::HEADER + 3] ^= 1;
    std::fs::write(&path, &bytes).expect("written");
    let error = Journal::open(dir.path()).expect_err("damaged");
    let JournalError::Damaged {
        offset,
        expected,
        found,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(
        (*offset, error.class()),
        (frame::FILE_HEADER as u64, ErrorClass::Corrupt)
    );
    assert_ne!(expected, found);
    assert_eq!(std::fs::read(&path).expect("there"), bytes, "it is left as it is");
}

#[test]
fn what_is_no_journal_is_refused() {
    let dir = dir();
    let path = dir.path().join(NAME);
    std::fs::write(&path, b"[server]\nlisten = \"127.0.0.1:0\"\n").expect("written");
    assert!(matches!(
        Journal::open(dir.path()),
        Err(JournalError::NotAJournal { .. })
    ));
    let mut newer = frame::file_header();
    newer[8] = 9;
    std::fs::write(&path, newer).expect("written");
    assert!(matches!(
        Journal::open(dir.path()),
        Err(JournalError::Version { found: 9, .. })
    ));
    std::fs::write(&path, &frame::file_header()[..7]).expect("written");
    Journal::open(dir.path()).map(drop).expect("killed while it began");
    std::fs::remove_file(&path).expect("there");
    std::os::unix::fs::symlink("/dev/null", &path).expect("a link");
    assert!(Journal::open(dir.path()).is_err(), "followed a link");
}

#[test]
fn records_that_cannot_be_are_refused() {
    let dir = dir();
    let mut bytes = frame::file_header().to_vec();
    frame::encode(&record::encode(&Record::Gone(id(1))), &mut bytes);
    std::fs::write(dir.path().join(NAME), &bytes).expect("written");
    let error = Journal::open(dir.path()).expect_err("gone before it came");
    assert!(matches!(error, JournalError::Senseless { offset: 16, .. }), "{error}");
    bytes.truncate(frame::FILE_HEADER);
    frame::encode(&[200], &mut bytes);
    std::fs::write(dir.path().join(NAME), &bytes).expect("written");
    let error = Journal::open(dir.path()).expect_err("of a newer build");
    assert!(matches!(error, JournalError::Senseless { offset: 16, .. }), "{error}");
}

#[test]
fn syncs_at_the_same_time_are_shared() {
    let dir = dir();
    let journal = open_in(&dir);
    std::thread::scope(|scope| {
        for n in 0..8 {
            let journal = &journal;
            scope.spawn(move || {
                for round in 0..20_u64 {
                    let record = Record::Sealed(id(u128::from(n * 100 + round)), entry(n));
                    assert_eq!(journal.append(record).expect("written"), Appended::Done);
                    journal.sync().expect("synced");
                    assert!(journal.lock_synced().count > 0);
                }
            });
        }
    });
    assert_eq!(journal.lock_synced().count, 160);
    assert_eq!(ids(&open_in(&dir)).len(), 160);
}

#[derive(Debug, Clone)]
enum Step {
    Seal(u8),
    Spill(u8),
    Load(u8),
    Gone(u8),
    Compact,
    Kill(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    let key = 0..6_u8;
    prop_oneof![
        4 => key.clone().prop_map(Step::Seal),
        2 => key.clone().prop_map(Step::Spill),
        1 => key.clone().prop_map(Step::Load),
        3 => key.prop_map(Step::Gone),
        1 => Just(Step::Compact),
        1 => any::<prop::sample::Index>().prop_map(Step::Kill),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Killed in the middle of an append, again and again: what comes back is the state after a whole number of records,
    /// and never older than the last one but the torn.
    #[test]
    fn a_killed_writer_loses_at_most_what_it_was_writing(steps in prop::collection::vec(step(), 1..60)) {
        let dir = dir();
        let path = dir.path().join(NAME);
        let mut journal = open_in(&dir);
        let mut last = journal.ledger();
        for (n, step) in steps.into_iter().enumerate() {
            let before = journal.ledger();
            let start = std::fs::metadata(&path).expect("there").len();
            let record = match step {
                Step::Seal(key) => Record::Sealed(id(key.into()), entry(n as u64)),
                Step::Spill(key) => Record::Moved(id(key.into()), file(n as u64)),
                Step::Load(key) => Record::Moved(id(key.into()), place(n as u64)),
                Step::Gone(key) => Record::Gone(id(key.into())),
                Step::Compact => {
                    journal.shorten().expect("written");
                    continue;
                }
                Step::Kill(cut) => {
                    // Only the last append may be torn.
                    let len = std::fs::metadata(&path).expect("there").len();
                    drop(journal);
                    let record = Record::Sealed(id(99), entry(n as u64));
                    let mut bytes = std::fs::read(&path).expect("there");
                    frame::encode(&record::encode(&record), &mut bytes);
                    bytes.truncate(len as usize + cut.index(bytes.len() - len as usize));
                    std::fs::write(&path, &bytes).expect("written");
                    journal = open_in(&dir);
                    prop_assert_eq!(journal.ledger(), last.clone());
                    continue;
                }
            };
            let unknown = journal.append(record).expect("written") == Appended::Unknown;
            prop_assert_eq!(unknown, journal.ledger() == before && std::fs::metadata(&path).expect("there").len() == start);
            last = journal.ledger();
        }
        drop(journal);
        prop_assert_eq!(open_in(&dir).ledger(), last);
    }
}
