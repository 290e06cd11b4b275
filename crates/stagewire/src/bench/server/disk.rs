use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;

/// A page of a journal.
const PAGE: [u8; 4096] = [0x5a; 4096];
/// The file has room for so many, so that syncing it need not allocate.
const PAGES: usize = 64;

/// The disk that the journal is on, by itself.
pub(super) struct Disk {
    file: File,
    page: usize,
}

impl Disk {
    pub(super) fn beside(data_dir: &Path) -> anyhow::Result<Self> {
        let mut file = File::create(data_dir.join("syncs")).context("cannot write beside the journal")?;
        for _ in 0..PAGES {
            file.write_all(&PAGE)?;
        }
        file.sync_all()?;
        Ok(Self { file, page: 0 })
    }

    /// How long each of so many writes of a page took until it was safe.
    pub(super) fn syncs(&mut self, count: usize) -> anyhow::Result<Vec<Duration>> {
        (0..count)
            .map(|_| {
                self.page = (self.page + 1) % PAGES;
                let begin = Instant::now();
                self.file.seek(SeekFrom::Start((self.page * PAGE.len()) as u64))?;
                self.file.write_all(&PAGE)?;
                self.file.sync_data()?;
                Ok(begin.elapsed())
            })
            .collect()
    }
}
