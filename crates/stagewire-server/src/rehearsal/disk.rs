//! A disk that fails when it is told to, and loses then what it may.

use std::io;
use std::sync::{Arc, Mutex};

use redb::StorageBackend;
use xxhash_rust::xxh3::xxh3_64;

/// Memory that loses its process, or its power, after so many writes.
#[derive(Debug, Clone, Default)]
pub struct Disk(Arc<Mutex<DiskState>>);

#[derive(Debug, Default)]
struct DiskState {
    /// What a read sees: what survives the death of the process.
    cached: Vec<u8>,
    /// What is synced, and the writes since: any part of those survives a power failure.
    synced: Vec<u8>,
    unsynced: Vec<Operation>,
    operations: usize,
    fails_after: usize,
    lies: bool,
}

#[derive(Debug)]
enum Operation {
    Write(u64, Vec<u8>),
    SetLen(u64),
}

impl Operation {
    fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::SetLen(len) => bytes.resize(usize::try_from(*len).unwrap(), 0),
            Self::Write(offset, data) => {
                let offset = usize::try_from(*offset).unwrap();
                if bytes.len() < offset + data.len() {
                    bytes.resize(offset + data.len(), 0);
                }
                bytes[offset..offset + data.len()].copy_from_slice(data);
            }
        }
    }
}

impl Disk {
    /// A disk with this content, on which so many writes, changes of length and syncs succeed.
    pub fn holding(bytes: Vec<u8>, fails_after: usize) -> Self {
        Self(Arc::new(Mutex::new(DiskState {
            cached: bytes.clone(),
            synced: bytes,
            fails_after,
            ..DiskState::default()
        })))
    }

    /// Lets so many more operations pass.
    pub fn fail_after(&self, more: usize) {
        let mut state = self.0.lock().unwrap();
        state.fails_after = state.operations.saturating_add(more);
    }

    /// Says from now on that a sync is done, and syncs nothing: a disk that no journal can live with.
    pub fn lie(&self) {
        self.0.lock().unwrap().lies = true;
    }

    /// Writes, changes of length and syncs so far.
    pub fn operations(&self) -> usize {
        self.0.lock().unwrap().operations
    }

    fn operate(&self, operation: Operation) -> Result<(), io::Error> {
        let mut state = self.0.lock().unwrap();
        state.step()?;
        operation.apply(&mut state.cached);
        state.unsynced.push(operation);
        Ok(())
    }

    /// What is there once the process is gone.
    pub fn after_kill(&self) -> Vec<u8> {
        self.0.lock().unwrap().cached.clone()
    }

    /// The synced bytes and a part of the writes since, the last of them torn.
    pub fn after_power_failure(&self, seed: u64) -> Vec<u8> {
        let state = self.0.lock().unwrap();
        let mut bytes = state.synced.clone();
        let mut random = seed;
        for operation in &state.unsynced {
            random = xxh3_64(&random.to_le_bytes());
            match operation {
                _ if random.is_multiple_of(3) => {}
                Operation::Write(offset, data) if random % 3 == 1 => {
                    // Disks write sectors whole.
                    let kept = (usize::try_from(random >> 8).unwrap() % (data.len() + 1)) / 512 * 512;
                    Operation::Write(*offset, data[..kept].to_vec()).apply(&mut bytes);
                }
                operation => operation.apply(&mut bytes),
            }
        }
        bytes
    }
}

impl DiskState {
    fn step(&mut self) -> Result<(), io::Error> {
        if self.operations >= self.fails_after {
            return Err(io::Error::other("the disk is gone"));
        }
        self.operations += 1;
        Ok(())
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> Result<u64, io::Error> {
        Ok(self.0.lock().unwrap().cached.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), io::Error> {
        let state = self.0.lock().unwrap();
        let offset = usize::try_from(offset).unwrap();
        let from = state.cached.get(offset..offset + out.len());
        out.copy_from_slice(from.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> Result<(), io::Error> {
        self.operate(Operation::SetLen(len))
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), io::Error> {
        self.operate(Operation::Write(offset, data.to_vec()))
    }

    fn sync_data(&self) -> Result<(), io::Error> {
        let mut state = self.0.lock().unwrap();
        state.step()?;
        if !state.lies {
            let DiskState { synced, unsynced, .. } = &mut *state;
            for operation in unsynced.drain(..) {
                operation.apply(synced);
            }
        }
        Ok(())
    }
}
