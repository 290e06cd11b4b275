use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use stagewire_api::{RunDir, RunDirError};
use stagewire_core::ProcessRef;

/// What `workers/NAME.json` says, so that the next `up` finds the workers of one that was killed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    schema: u32,
    pub(super) name: String,
    pub(super) process: ProcessRef,
    /// Program and arguments: a worker that was started otherwise is replaced.
    pub(super) command: Vec<String>,
}

const SCHEMA: u32 = 1;

impl Record {
    pub(super) fn new(name: &str, process: ProcessRef, command: Vec<String>) -> Self {
        Self {
            schema: SCHEMA,
            name: name.to_owned(),
            process,
            command,
        }
    }

    pub(super) fn write(&self, run_dir: &RunDir) -> Result<(), RunDirError> {
        let text = serde_json::to_string(self).expect("a record has nothing that JSON cannot hold");
        run_dir.write_private(&format!("workers/{}.json", self.name), text.as_bytes())
    }

    pub(super) fn remove(run_dir: &RunDir, name: &str) {
        // One that is not there is as good.
        let _ = std::fs::remove_file(run_dir.join(format!("workers/{name}.json")));
    }

    /// All records that can be read; what cannot is of no use to anyone and is removed.
    pub(super) fn all(run_dir: &RunDir) -> Vec<Self> {
        let files = std::fs::read_dir(run_dir.join("workers")).into_iter().flatten();
        let paths = files.filter_map(|entry| entry.ok().map(|entry| entry.path()));
        paths.filter_map(Self::read).collect()
    }

    fn read(path: PathBuf) -> Option<Self> {
        let record = std::fs::read(&path)
            .ok()
            .and_then(|text| serde_json::from_slice::<Self>(&text).ok());
        let named = |record: &Self| path.file_stem().is_some_and(|stem| stem == record.name.as_str());
        let record = record.filter(|record| record.schema == SCHEMA && named(record));
        if record.is_none() {
            let _ = std::fs::remove_file(path);
        }
        record
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_found_again_and_rubbish_is_swept() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::locate(Some(&dir.path().join("run")));
        run_dir.create().unwrap();
        let process = ProcessRef { pid: 7, started: 9 };
        let record = Record::new("decode-0", process, vec!["python".to_owned()]);
        record.write(&run_dir).unwrap();
        let rubbish = run_dir.join("workers/encode-0.json");
        std::fs::write(&rubbish, "{").unwrap();
        assert_eq!(Record::all(&run_dir), [record]);
        assert!(!rubbish.exists());
        Record::remove(&run_dir, "decode-0");
        assert!(Record::all(&run_dir).is_empty());
    }
}
