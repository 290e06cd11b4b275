use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Above this a log is put aside as `NAME.log.1` before the next life of its worker begins.
const ROTATE: u64 = 16 << 20;

/// Longest part of a log that is read for its last lines.
const TAIL: u64 = 64 << 10;

/// What a worker prints, over all its lives.
#[derive(Debug, Clone)]
pub(super) struct WorkerLog {
    path: PathBuf,
    /// Where the present life begins.
    begin: u64,
}

impl WorkerLog {
    /// The log of a worker that already writes to it: its present life is all of it.
    pub(super) fn of_running(path: PathBuf) -> Self {
        Self { path, begin: 0 }
    }

    /// Opens the log for a new life.
    pub(super) fn open(path: PathBuf) -> io::Result<(Self, File)> {
        if path.metadata().is_ok_and(|metadata| metadata.len() > ROTATE) {
            std::fs::rename(&path, path.with_extension("log.1"))?;
        }
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path)?;
        let begin = file.metadata()?.len();
        Ok((Self { path, begin }, file))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The last `count` lines that the present life wrote.
    pub(super) fn tail(&self, count: usize) -> Vec<String> {
        let read = || -> io::Result<Vec<u8>> {
            let mut file = File::open(&self.path)?;
            let len = file.metadata()?.len();
            file.seek(SeekFrom::Start(self.begin.max(len.saturating_sub(TAIL))))?;
            let mut text = Vec::new();
            file.take(TAIL).read_to_end(&mut text)?;
            Ok(text)
        };
        // A log that cannot be read leaves its worker unexplained, no more.
        let text = read().unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let skip = lines.len().saturating_sub(count);
        lines[skip..]
            .iter()
            .map(|line| console::strip_ansi_codes(line).into_owned())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_tail_is_of_the_present_life() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("decode-0.log");
        let (first, mut file) = WorkerLog::open(path.clone()).unwrap();
        writeln!(file, "one\ntwo\n\nthree").unwrap();
        assert_eq!(first.tail(2), ["two", "three"]);
        let (second, mut file) = WorkerLog::open(path).unwrap();
        assert!(second.tail(9).is_empty());
        writeln!(file, "\x1b[31mfour\x1b[0m").unwrap();
        assert_eq!(second.tail(9), ["four"]);
    }

    #[test]
    fn a_long_log_is_put_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("decode-0.log");
        File::create(&path).unwrap().set_len(ROTATE + 1).unwrap();
        let (log, _file) = WorkerLog::open(path.clone()).unwrap();
        assert_eq!((log.begin, path.metadata().unwrap().len()), (0, 0));
        assert!(dir.path().join("decode-0.log.1").exists());
    }
}
