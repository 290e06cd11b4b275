//! A disk that fails, and a machine that loses its power, for tests.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What the next operations come to. Each holds until it is taken back.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Faults {
    /// Writes fail after so many bytes.
    pub(crate) write: Option<usize>,
    /// The next write panics, and that alone.
    pub(crate) panic: bool,
    /// What a failed write has left cannot be cut off.
    pub(crate) cut: bool,
    /// Syncs of files fail. As in Linux, what they should have written counts as clean from then on, and is lost with the
    /// power though a later sync succeeds.
    pub(crate) sync: bool,
    /// Syncs of the directory fail.
    pub(crate) sync_dir: bool,
}

/// The disk that a journal is on.
#[derive(Debug, Clone, Default)]
pub(crate) struct Disk(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    faults: Faults,
    /// What is on the disk under the journal's name, whatever happens.
    safe: Arc<Mutex<Synced>>,
    /// The same, once the directory is synced.
    named: Option<Arc<Mutex<Synced>>>,
}

/// Of one file: what is on the disk for certain.
#[derive(Debug, Default)]
struct Synced {
    bytes: Vec<u8>,
    /// Begin of what a failed sync has dropped: no later one writes that.
    dropped: Option<usize>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk {
    pub(crate) fn set(&self, faults: Faults) {
        lock(&self.0).faults = faults;
    }

    pub(super) fn image(&self, file: &File) -> io::Result<Image> {
        let mut bytes = Vec::new();
        let mut reader = file;
        reader.read_to_end(&mut bytes)?;
        reader.rewind()?;
        let synced = Arc::new(Mutex::new(Synced { bytes, dropped: None }));
        let mut state = lock(&self.0);
        if state.named.is_none() && lock(&state.safe).bytes.is_empty() {
            state.safe = Arc::clone(&synced);
        }
        drop(state);
        Ok(Image {
            disk: self.clone(),
            synced,
        })
    }

    pub(super) fn sync_dir(&self) -> io::Result<()> {
        let mut state = lock(&self.0);
        if state.faults.sync_dir {
            return Err(failed());
        }
        if let Some(named) = state.named.take() {
            state.safe = named;
        }
        Ok(())
    }

    /// Takes the power away: the file at `path` has what was synced, and of the rest only the sectors that `kept` says,
    /// the others being zeros. `torn` bytes at the end are missing altogether.
    pub(crate) fn lose_power(&self, path: &Path, torn: usize, mut kept: impl FnMut(usize) -> bool) {
        let state = lock(&self.0);
        let renamed_back = state.named.is_some();
        let safe = lock(&state.safe);
        let mut after = safe.bytes.clone();
        if !renamed_back {
            let now = std::fs::read(path).expect("it is there");
            let fresh = now.len().saturating_sub(after.len());
            after.extend_from_slice(&now[now.len() - fresh..now.len() - torn.min(fresh)]);
            for (at, byte) in after.iter_mut().enumerate().skip(safe.bytes.len()) {
                if !kept(at / 512) {
                    *byte = 0;
                }
            }
        }
        std::fs::write(path, after).expect("it can be written");
    }

    /// What a loss of power leaves at the least.
    pub(crate) fn safe(&self) -> super::Ledger {
        let state = lock(&self.0);
        let safe = lock(&state.safe);
        super::replay(Path::new("safe"), &safe.bytes).expect("whole").0
    }
}

/// One file, as a loss of power would leave it.
pub(super) struct Image {
    disk: Disk,
    synced: Arc<Mutex<Synced>>,
}

impl Image {
    fn faults(&self) -> Faults {
        lock(&self.disk.0).faults
    }

    pub(super) fn before_write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        let panics = std::mem::take(&mut lock(&self.disk.0).faults.panic);
        assert!(!panics, "on purpose");
        match self.faults().write {
            Some(good) => {
                file.write_all_at(&bytes[..good.min(bytes.len())], offset)?;
                Err(failed())
            }
            None => Ok(()),
        }
    }

    pub(super) fn before_cut(&self) -> io::Result<()> {
        if self.faults().cut { Err(failed()) } else { Ok(()) }
    }

    pub(super) fn sync(&self, file: &File) -> io::Result<()> {
        let fails = self.faults().sync;
        let mut bytes = vec![0; usize::try_from(file.metadata()?.len()).expect("a small file")];
        file.read_exact_at(&mut bytes, 0)?;
        let mut synced = lock(&self.synced);
        if fails {
            let begin = synced.bytes.len();
            synced.dropped.get_or_insert(begin);
            return Err(failed());
        }
        if synced.dropped.is_none() {
            synced.bytes = bytes;
        }
        Ok(())
    }

    pub(super) fn named(&self) {
        lock(&self.disk.0).named = Some(Arc::clone(&self.synced));
    }
}

fn failed() -> io::Error {
    io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error())
}
