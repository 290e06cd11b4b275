//! Every file of the fuzzers' corpus goes through its decoder, also where no fuzzer runs.

use std::fs;
use std::path::{Path, PathBuf};

use stagewire_transfer::fuzzing::{TARGETS, Target};

/// Files of one target at most: a corpus is a sample, not an archive.
const MAX_FILES: usize = 50;

fn corpus(target: &Target) -> PathBuf {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    assert!(
        fuzz.join(format!("fuzz_targets/{}.rs", target.name)).is_file(),
        "{} has no binary to fuzz it with",
        target.name
    );
    fuzz.join("corpus").join(target.name)
}

#[test]
fn the_corpus_upsets_no_decoder() {
    for target in TARGETS {
        let dir = corpus(target);
        let files: Vec<PathBuf> = fs::read_dir(&dir)
            .unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
            .map(|entry| entry.expect("listed").path())
            .collect();
        assert!(
            (1..=MAX_FILES).contains(&files.len()),
            "{} has {} files, allowed are 1 to {MAX_FILES}",
            dir.display(),
            files.len()
        );
        let mut taken_in = 0;
        for file in &files {
            let bytes = fs::read(file).expect("read");
            let ran = std::panic::catch_unwind(|| (target.run)(&bytes));
            taken_in += usize::from(ran.unwrap_or_else(|_| panic!("{} panicked", file.display())));
        }
        assert!(taken_in > 0, "{}: none of {} files decodes", target.name, files.len());
    }
}

/// With `STAGEWIRE_SEEDS=1`, it writes them into the corpus.
#[test]
fn seeds_are_taken_in() {
    for target in TARGETS {
        for (name, bytes) in (target.seeds)() {
            assert!((target.run)(&bytes), "{}: seed {name} does not decode", target.name);
            if std::env::var_os("STAGEWIRE_SEEDS").is_some() {
                let dir = corpus(target);
                fs::create_dir_all(&dir).expect("made");
                fs::write(dir.join(format!("seed-{name}")), &bytes).expect("written");
            }
        }
    }
}
