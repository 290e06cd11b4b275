use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::rehearsal::Disk;

const SCOPE: &str = "pipeline wan";

fn replayed(journal: &Journal) -> Vec<Vec<u8>> {
    let mut batches = Vec::new();
    journal
        .replay(Path::new("test"), |batch| {
            batches.push(batch.to_vec());
            Ok(())
        })
        .unwrap();
    batches
}

#[test]
fn what_was_appended_comes_back_in_order_and_the_epoch_grows() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("a/b");
    let mut journal = Journal::open(&state, SCOPE).unwrap();
    let (deployment, epoch) = (journal.deployment(), journal.epoch());
    assert_eq!(epoch, Epoch(1));
    for batch in [b"one".as_slice(), b"", b"three"] {
        journal.append(batch).unwrap();
    }
    let mode = fs::metadata(state.join("journal.redb")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let error = Journal::open(&state, SCOPE).unwrap_err();
    assert!(matches!(error, JournalError::InUse { .. }), "{error}");
    drop(journal);

    let mut journal = Journal::open(&state, SCOPE).unwrap();
    assert_eq!((journal.deployment(), journal.epoch()), (deployment, Epoch(2)));
    journal.append(b"four").unwrap();
    assert_eq!(replayed(&journal), [b"one".as_slice(), b"", b"three", b"four"]);
}

#[test]
fn a_journal_has_no_name_before_it_is_one_and_is_made_once() {
    let dir = tempfile::tempdir().unwrap();
    let names = || {
        let entries = fs::read_dir(dir.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>()
    };
    let path = dir.path().join("journal.redb");
    // Somebody else was faster.
    let first = Journal::make(dir.path(), &path, SCOPE).unwrap();
    let error = Journal::make(dir.path(), &path, SCOPE).unwrap_err();
    assert!(matches!(error, JournalError::InUse { .. }), "{error}");
    assert_eq!(names(), ["journal.redb"]);
    drop(first);
    // A crash in the middle of making it left something.
    fs::rename(&path, dir.path().join("journal.redb.0123")).unwrap();
    assert_eq!(Journal::open(dir.path(), SCOPE).unwrap().epoch(), Epoch(1));
    assert_eq!(Journal::open(dir.path(), SCOPE).unwrap().epoch(), Epoch(2));
}

#[test]
fn one_batch_can_take_the_place_of_all() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(dir.path(), SCOPE).unwrap();
    for n in 0..50_u8 {
        journal.append(&[n]).unwrap();
    }
    journal.replace(b"sum").unwrap();
    journal.append(b"next").unwrap();
    assert_eq!(journal.batches(), 2);
    drop(journal);
    let journal = Journal::open(dir.path(), SCOPE).unwrap();
    assert_eq!(replayed(&journal), [b"sum".as_slice(), b"next"]);
}

#[test]
fn what_is_not_this_journal_is_refused_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    drop(Journal::open(dir.path(), SCOPE).unwrap());
    let error = Journal::open(dir.path(), "pipeline flux").unwrap_err().to_string();
    assert!(
        error.contains("about pipeline wan") && error.contains("--data-dir"),
        "{error}"
    );

    let path = dir.path().join("journal.redb");
    // Of an older version, and of a newer one.
    for other in [2, 9] {
        let database = Database::create(&path).unwrap();
        let write = database.begin_write().unwrap();
        let format = u64::to_le_bytes(other);
        let mut meta = write.open_table(META).unwrap();
        meta.insert(Meta::Format as u64, format.as_slice()).unwrap();
        drop(meta);
        write.commit().unwrap();
        drop(database);
        let error = Journal::open(dir.path(), SCOPE).unwrap_err();
        assert!(
            matches!(error, JournalError::Version { found, expected: 4, .. } if found == other),
            "{error}"
        );
    }

    for garbage in [b"not a database".repeat(1000), vec![0; 8192], b"redb".to_vec()] {
        fs::write(&path, garbage).unwrap();
        let error = Journal::open(dir.path(), SCOPE).unwrap_err();
        assert!(matches!(error, JournalError::Corrupt { .. }), "{error:?}");
    }
}

#[test]
fn a_damaged_middle_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal.redb");
    let mut journal = Journal::open(dir.path(), SCOPE).unwrap();
    for n in 0..100_u8 {
        journal.append(&[n; 300]).unwrap();
    }
    drop(journal);
    let whole = fs::read(&path).unwrap();
    let places: Vec<usize> = (0..whole.len() - 300)
        .filter(|at| whole[*at..*at + 300] == [50; 300])
        .collect();
    assert!(!places.is_empty());
    let mut bytes = whole;
    for place in places {
        bytes[place + 100] ^= 1;
    }
    fs::write(&path, bytes).unwrap();
    let error = Journal::open(dir.path(), SCOPE)
        .and_then(|journal| journal.replay(&path, |_| Ok(())))
        .unwrap_err();
    assert!(matches!(error, JournalError::Corrupt { .. }), "{error:?}");
}

/// Appends until the disk fails. Returns the numbers of the batches that were acknowledged.
fn append_until_failure(disk: Disk, batches: u32) -> Option<u32> {
    let mut journal = Journal::open_backend(disk, "test".into(), SCOPE).ok()?;
    let first = u32::try_from(replayed(&journal).len()).unwrap();
    for n in first..first + batches {
        let batch = n.to_le_bytes().repeat(1 + n as usize * 40);
        if journal.append(&batch).is_err() {
            return Some(n);
        }
    }
    Some(first + batches)
}

/// What a restart finds must be a prefix of what was appended that holds everything acknowledged.
fn check(bytes: Vec<u8>, acknowledged: u32, when: &str) {
    let journal = Journal::open_backend(Disk::holding(bytes, usize::MAX), "test".into(), SCOPE)
        .unwrap_or_else(|error| panic!("{when}: {error}"));
    let found = replayed(&journal);
    for (n, batch) in found.iter().enumerate() {
        let n = u32::try_from(n).unwrap();
        assert_eq!(*batch, n.to_le_bytes().repeat(1 + n as usize * 40), "{when}: batch {n}");
    }
    let found = u32::try_from(found.len()).unwrap();
    assert!(
        found == acknowledged || found == acknowledged + 1,
        "{when}: {acknowledged} batches were acknowledged, {found} are there"
    );
}

#[test]
fn a_crash_at_any_write_loses_nothing_acknowledged() {
    const BATCHES: u32 = 6;
    // A journal that is there already: losing the disk while it is first made is `Io`, not a loss.
    let disk = Disk::holding(Vec::new(), usize::MAX);
    assert_eq!(append_until_failure(disk.clone(), BATCHES), Some(BATCHES));
    let start = disk.after_kill();
    let mut outcomes = BTreeMap::<u32, usize>::new();
    for fails_after in 0.. {
        let disk = Disk::holding(start.clone(), fails_after);
        let acknowledged = append_until_failure(disk.clone(), BATCHES).unwrap_or(BATCHES);
        *outcomes.entry(acknowledged).or_default() += 1;
        check(
            disk.after_kill(),
            acknowledged,
            &format!("killed after {fails_after} writes"),
        );
        for seed in 0..8 {
            let when = format!("power failure after {fails_after} writes, seed {seed}");
            check(disk.after_power_failure(seed), acknowledged, &when);
        }
        if acknowledged == 2 * BATCHES {
            break;
        }
    }
    assert_eq!(
        outcomes.len() as u32,
        BATCHES + 1,
        "a crash before each batch was tried: {outcomes:?}"
    );
}
