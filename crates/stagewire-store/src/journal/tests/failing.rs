//! Disks that fail, and machines that lose their power.

use std::cell::RefCell;

use super::super::faults::Faults;
use super::*;

fn torn(bytes: usize) -> Faults {
    Faults {
        write: Some(bytes),
        ..Faults::default()
    }
}

fn assert_typed<T: fmt::Debug>(result: Result<T, JournalError>) {
    let error = result.expect_err("the disk fails");
    assert!(matches!(error, JournalError::Io { .. }), "{error}");
    assert_eq!(error.class(), ErrorClass::Unavailable);
}

#[test]
fn a_write_that_fails_leaves_everything_before_it() {
    let whole = frame::HEADER + record::encode(&Record::Sealed(id(2), entry(2))).len();
    for (bytes, cut) in [(0, false), (5, false), (5, true), (whole - 1, true), (whole - 1, false)] {
        for killed in [false, true] {
            let dir = dir();
            let mut journal = open_in(&dir);
            let _ = append(&journal, Record::Sealed(id(1), entry(1)));
            journal.disk.set(Faults { cut, ..torn(bytes) });
            assert_typed(journal.append(Record::Sealed(id(2), entry(2))));
            assert_typed(journal.append(Record::Moved(id(1), file(1))));
            assert_eq!(ids(&journal), [id(1)]);
            if killed {
                drop(journal);
                journal = open_in(&dir);
            } else {
                journal.disk.set(Faults::default());
            }
            assert_eq!(ids(&journal), [id(1)], "{bytes} bytes, cut: {cut}");
            // A shorter record in the same place: nothing of the longer one may follow it.
            let _ = append(&journal, Record::Gone(id(1)));
            let _ = append(&journal, Record::Sealed(id(3), entry(3)));
            let ledger = journal.ledger();
            drop(journal);
            assert_eq!(open_in(&dir).ledger(), ledger);
        }
    }
}

#[test]
fn what_is_gone_is_written_once_it_can_be() {
    let dir = dir();
    let journal = open_in(&dir);
    for n in 1..4 {
        let _ = append(&journal, Record::Sealed(id(n.into()), entry(n)));
    }
    journal.disk.set(torn(7));
    for n in 1..3 {
        assert_typed(journal.append(Record::Gone(id(n))));
    }
    assert_typed(journal.retry());
    assert_typed(journal.shorten());
    assert_eq!(ids(&journal), [id(3)]);
    journal.disk.set(Faults::default());
    journal.retry().expect("written");
    journal.retry().expect("nothing to write");
    drop(journal);
    assert_eq!(ids(&open_in(&dir)), [id(3)]);
}

/// A sync that failed may leave nothing to sync: success of the next one says nothing of what the first had to write.
#[test]
fn a_sync_that_failed_is_made_good_by_another_file() {
    let dir = dir();
    let journal = open_in(&dir);
    let _ = append(&journal, Record::Sealed(id(1), entry(1)));
    let _ = append(&journal, Record::Moved(id(1), file(1)));
    journal.disk.set(Faults {
        sync: true,
        ..Faults::default()
    });
    assert_typed(journal.sync());
    assert_typed(journal.sync());
    assert!(journal.disk.safe().get(id(1)).is_none(), "the test's disk syncs");
    journal.disk.set(Faults::default());
    journal.sync().expect("synced");
    assert_eq!(journal.disk.safe().get(id(1)).expect("safe").place, file(1));
}

#[test]
fn a_file_without_a_safe_name_makes_nothing_safe() {
    let dir = dir();
    let journal = open_in(&dir);
    let _ = append(&journal, Record::Sealed(id(1), entry(1)));
    journal.disk.set(Faults {
        sync_dir: true,
        ..Faults::default()
    });
    assert_typed(journal.shorten());
    let _ = append(&journal, Record::Moved(id(1), file(1)));
    assert_typed(journal.sync());
    journal.disk.set(Faults::default());
    journal.sync().expect("synced");
    assert_eq!(journal.disk.safe().get(id(1)).expect("safe").place, file(1));
}

/// Others append while a long journal is summed up: none of it is lost, and none is said twice.
#[test]
fn a_journal_is_shortened_while_others_append() {
    let dir = dir();
    let journal = open_in(&dir);
    std::thread::scope(|scope| {
        for n in 0..4 {
            let journal = &journal;
            scope.spawn(move || {
                for round in 0..200_u64 {
                    let key = id(u128::from(n * 1000 + round));
                    let _ = journal.append(Record::Sealed(key, entry(n))).expect("written");
                    if round % 3 > 0 {
                        let _ = journal.append(Record::Gone(key)).expect("written");
                    }
                    if round % 50 == n {
                        journal.shorten().expect("written");
                    }
                }
            });
        }
    });
    let ledger = journal.ledger();
    assert_eq!(ledger.entries().len(), 4 * 67);
    drop(journal);
    assert_eq!(open_in(&dir).ledger(), ledger);
}

#[derive(Debug, Clone)]
enum Event {
    Step(Step),
    Sync,
    Fault(Faults),
    Healthy,
}

fn event() -> impl Strategy<Value = Event> {
    // Never a whole record: what failed did not happen.
    let faults = (prop::option::of(0..frame::HEADER), any::<[bool; 3]>());
    prop_oneof![
        12 => step().prop_map(Event::Step),
        4 => Just(Event::Sync),
        1 => faults.prop_map(|(write, [cut, sync, sync_dir])| Event::Fault(Faults { write, panic: false, cut, sync, sync_dir })),
        2 => Just(Event::Healthy),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// The disk fails now and then, and at last the power: sectors of what was not synced are lost, in any order. The
    /// journal says what it said at the last sync that went well, or at a later moment, or is refused.
    #[test]
    fn what_was_synced_survives_a_loss_of_power(
        events in prop::collection::vec(event(), 1..60),
        lost in any::<u64>(),
        cut in 0..600_usize,
    ) {
        let dir = dir();
        let journal = open_in(&dir);
        // What it said after each record.
        let (mut said, mut safe) = (vec![Ledger::default()], 0);
        for (n, event) in events.into_iter().enumerate() {
            let n = n as u64;
            let record = match event {
                Event::Step(Step::Seal(key)) => Record::Sealed(id(key.into()), entry(n)),
                Event::Step(Step::Spill(key)) => Record::Moved(id(key.into()), file(n)),
                Event::Step(Step::Load(key)) => Record::Moved(id(key.into()), place(n)),
                Event::Step(Step::Gone(key)) => Record::Gone(id(key.into())),
                Event::Step(Step::Compact) => {
                    if journal.shorten().is_ok() {
                        safe = said.len() - 1;
                    }
                    continue;
                }
                Event::Step(Step::Kill(_)) => continue,
                Event::Sync => {
                    // What could not be written is not in the file yet.
                    if journal.retry().is_ok() && journal.sync().is_ok() {
                        safe = said.len() - 1;
                    }
                    continue;
                }
                Event::Fault(faults) => {
                    journal.disk.set(faults);
                    continue;
                }
                Event::Healthy => {
                    journal.disk.set(Faults::default());
                    continue;
                }
            };
            let _ = journal.append(record);
            said.push(journal.ledger());
        }
        let disk = journal.disk.clone();
        drop(journal);
        let random = RefCell::new(lost | 1);
        disk.lose_power(&dir.path().join(NAME), cut, |_| {
            let next = random.borrow().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            random.replace(next);
            next >> 62 > 0
        });
        match Journal::open(dir.path()) {
            Ok((journal, _)) => prop_assert!(said[safe..].contains(&journal.ledger()), "older than what was synced"),
            Err(error) => prop_assert!(matches!(error, JournalError::Damaged { .. }), "{}", error),
        }
    }
}
