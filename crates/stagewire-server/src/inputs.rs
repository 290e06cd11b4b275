//! Inputs of jobs: pictures, clips and other files that clients send before the jobs that refer to them.
//!
//! An input is named by the digest of its bytes, so that a name says what is meant for ever, and sending the same again
//! costs nothing. It lies in a file of its own under the data directory, where the stages of this host read it. Whatever
//! jobs that have not ended refer to stays; the rest goes after a time, or, oldest first, when room is short. So do dead
//! letters with theirs, where nothing else is left to go.

mod error;
mod name;
mod patience;
mod room;
mod upload;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use stagewire_api::v1;
use stagewire_core::ByteCount;
use tokio::sync::Semaphore;

pub(crate) use error::InputError;
pub(crate) use name::InputName;
pub(crate) use room::LEAST;
use room::charge;

/// Uploads at once.
const UPLOADS: usize = 16;
/// Ends the name of the file that has an input's media type.
const TYPE: &str = ".type";
/// Ends the name of a file that is not complete.
const PART: &str = ".part";

/// Bounds of what is kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InputBounds {
    /// Of one input.
    pub(crate) largest: ByteCount,
    /// Of all of them, uploads that have not ended included.
    pub(crate) total: ByteCount,
    /// How long one stays that no job refers to.
    pub(crate) idle: Duration,
}

/// What is known of an input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InputInfo {
    pub(crate) name: InputName,
    pub(crate) nbytes: u64,
    pub(crate) media_type: String,
}

/// The folder, and what is in it.
#[derive(Debug)]
pub(crate) struct Inputs {
    dir: PathBuf,
    bounds: InputBounds,
    /// The parameters of the pipeline whose values are names of inputs.
    params: BTreeSet<String>,
    state: Mutex<State>,
    /// Taken while a file gets its name or loses it.
    files: Mutex<()>,
    uploads: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct State {
    entries: BTreeMap<InputName, Entry>,
    /// What all entries count for, in bytes.
    held: u64,
    /// Bytes that uploads have room for.
    reserved: u64,
    /// Counts what happens to entries, for their order.
    uses: u64,
}

#[derive(Debug)]
struct Entry {
    nbytes: u64,
    media_type: String,
    /// When it was used last, in the order of all uses.
    used: u64,
    /// Since when nobody is known to need it; `None` while a job does.
    idle: Option<Instant>,
    /// Submissions that are under way and refer to it.
    pins: usize,
}

impl State {
    fn touch(&mut self, name: &InputName) {
        self.uses += 1;
        if let Some(entry) = self.entries.get_mut(name) {
            (entry.used, entry.idle) = (self.uses, Some(Instant::now()));
        }
    }

    fn insert(&mut self, name: InputName, nbytes: u64, media_type: String) {
        self.uses += 1;
        self.held += charge(nbytes);
        let entry = Entry {
            nbytes,
            media_type,
            used: self.uses,
            idle: Some(Instant::now()),
            pins: 0,
        };
        self.entries.insert(name, entry);
    }

    fn remove(&mut self, name: &InputName) {
        let gone = self.entries.remove(name);
        self.held -= gone.map_or(0, |entry| charge(entry.nbytes));
    }

    /// Bytes that are not free.
    const fn taken(&self) -> u64 {
        self.held + self.reserved
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inputs {
    /// Uses `dir`, which is made where it is missing, and sweeps what uploads left that a crash ended. `params` are the
    /// parameters whose values are names of inputs.
    ///
    /// # Errors
    /// Where the folder cannot be made or read, or where there are such parameters and its path cannot be told to workers.
    pub(crate) fn open(dir: &Path, bounds: InputBounds, params: impl IntoIterator<Item = String>) -> io::Result<Self> {
        let params: BTreeSet<String> = params.into_iter().collect();
        if !params.is_empty() && (dir.to_str().is_none() || !dir.is_absolute()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "workers are told the paths of inputs, and so its path must be absolute and UTF-8; choose another one with \
                 \"data-dir\" in [server] or --data-dir",
            ));
        }
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        if let Some(parent) = dir.parent() {
            File::open(parent)?.sync_all()?;
        }
        let inputs = Self {
            dir: dir.to_owned(),
            bounds,
            params,
            state: Mutex::default(),
            files: Mutex::default(),
            uploads: Arc::new(Semaphore::new(UPLOADS)),
        };
        inputs.load()?;
        Ok(inputs)
    }

    fn load(&self) -> io::Result<()> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.dir)? {
            let entry = entry?;
            let file = entry.file_name();
            let file = file.to_string_lossy();
            if let Some(name) = InputName::from_file(&file) {
                match std::fs::read_to_string(self.type_path(&name)) {
                    Ok(media_type) => found.push((entry.metadata()?, name, media_type)),
                    // It never got as far as being acknowledged.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => std::fs::remove_file(entry.path())?,
                    Err(error) => return Err(error),
                }
            } else if file.ends_with(PART) || self.is_orphan(&file) {
                std::fs::remove_file(entry.path())?;
            }
        }
        found.sort_by_key(|(metadata, ..)| metadata.modified().ok());
        let mut state = lock(&self.state);
        for (metadata, name, media_type) in found {
            state.insert(name, metadata.len(), media_type);
        }
        Ok(())
    }

    /// Whether this is the media type of an input that is not there.
    fn is_orphan(&self, file: &str) -> bool {
        let name = file.strip_suffix(TYPE).and_then(InputName::from_file);
        name.is_some_and(|name| !self.path(&name).exists())
    }

    /// Where the bytes of an input are.
    fn path(&self, name: &InputName) -> PathBuf {
        self.dir.join(name.file())
    }

    fn type_path(&self, name: &InputName) -> PathBuf {
        self.dir.join(format!("{}{TYPE}", name.file()))
    }

    /// What is known of the input of this name.
    ///
    /// # Errors
    /// [`InputError::Unknown`], also for what is no name.
    pub(crate) fn find(&self, name: &str) -> Result<InputInfo, InputError> {
        let unknown = || InputError::unknown(name);
        let name: InputName = name.parse().map_err(|_| unknown())?;
        let state = lock(&self.state);
        let entry = state.entries.get(&name).ok_or_else(unknown)?;
        Ok(InputInfo {
            nbytes: entry.nbytes,
            media_type: entry.media_type.clone(),
            name,
        })
    }

    /// The same, and the file.
    ///
    /// # Errors
    /// [`InputError::Unknown`], [`InputError::Store`].
    pub(crate) async fn open_file(&self, name: &str) -> Result<(InputInfo, tokio::fs::File), InputError> {
        let info = self.find(name)?;
        match tokio::fs::File::open(self.path(&info.name)).await {
            Ok(file) => Ok((info, file)),
            // It was dropped in between.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(InputError::unknown(name)),
            Err(source) => Err(InputError::store("read", source)),
        }
    }

    /// Keeps the inputs that a submission refers to, until the returned value is dropped.
    ///
    /// # Errors
    /// [`InputError::UnknownParam`] where one is not there; none is kept then.
    pub(crate) fn pin(self: &Arc<Self>, params: &Map<String, Value>) -> Result<Pins, InputError> {
        let mut pins = Pins {
            inputs: Arc::clone(self),
            names: Vec::new(),
        };
        for (param, name) in self.named(params) {
            let mut state = lock(&self.state);
            let parsed: Option<InputName> = name.parse().ok();
            let entry = parsed.as_ref().and_then(|name| state.entries.get_mut(name));
            match (parsed, entry) {
                (Some(parsed), Some(entry)) => {
                    entry.pins += 1;
                    state.touch(&parsed);
                    pins.names.push(parsed);
                }
                _ => return Err(InputError::unknown_param(param, name)),
            }
        }
        Ok(pins)
    }

    /// The files of the parameters of a job that are inputs: parameter and path, which is empty where none is given.
    pub(crate) fn files(&self, params: &str) -> Vec<v1::InputFile> {
        if self.params.is_empty() {
            return Vec::new();
        }
        let params: Map<String, Value> = serde_json::from_str(params).unwrap_or_default();
        let path = |name: &str| {
            let name: Option<InputName> = name.parse().ok();
            self.path(&name?).into_os_string().into_string().ok()
        };
        let given = self.params.iter().filter_map(|param| {
            let name = params.get(param)?.as_str()?;
            Some(v1::InputFile {
                param: param.clone(),
                path: path(name).unwrap_or_default(),
            })
        });
        given.collect()
    }

    /// The names that a job gives for parameters that are inputs.
    fn named<'a>(&'a self, params: &'a Map<String, Value>) -> impl Iterator<Item = (&'a str, &'a str)> {
        let given = self.params.iter();
        given
            .filter_map(|param| Some((param.as_str(), params.get(param)?.as_str()?)))
            .filter(|(_, name)| !name.is_empty())
    }

    /// Number of inputs, what they count for in bytes, and how much that may be.
    pub(crate) fn usage(&self) -> (usize, u64, u64) {
        let state = lock(&self.state);
        (state.entries.len(), state.held, self.bounds.total.0)
    }
}

/// Inputs that stay while this exists.
#[derive(Debug)]
pub(crate) struct Pins {
    inputs: Arc<Inputs>,
    names: Vec<InputName>,
}

impl Drop for Pins {
    fn drop(&mut self) {
        let mut state = lock(&self.inputs.state);
        for name in &self.names {
            if let Some(entry) = state.entries.get_mut(name) {
                entry.pins -= 1;
            }
            // A look at the jobs that began before does not see this one.
            state.touch(name);
        }
    }
}

#[cfg(test)]
mod tests;
