use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The directory that `/proc`, `/sys` and `/dev` lie in: `/`, or what a test made.
#[derive(Debug, Clone)]
pub(crate) struct Root(PathBuf);

/// What is there, `None` where nothing is, or why it cannot be read.
pub(crate) type Found<T> = Result<Option<T>, String>;

impl Root {
    /// This machine.
    pub(crate) fn host() -> Self {
        Self("/".into())
    }

    #[cfg(test)]
    pub(crate) fn at(dir: &Path) -> Self {
        Self(dir.to_owned())
    }

    /// Where an absolute path really lies.
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    pub(crate) fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).exists()
    }

    /// A file, without white space at its ends.
    pub(crate) fn read(&self, path: &str) -> Found<String> {
        let text = fs::read(self.path(path)).map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
        present(text, path)
    }

    /// A file where the reason for its absence does not matter.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        self.read(path).ok().flatten()
    }

    /// The names in a directory, sorted.
    pub(crate) fn names(&self, path: &str) -> Found<Vec<String>> {
        let names = fs::read_dir(self.path(path)).and_then(|entries| {
            let name = |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
            let mut names = entries.map(name).collect::<io::Result<Vec<_>>>()?;
            names.sort();
            Ok(names)
        });
        present(names, path)
    }
}

fn present<T>(read: io::Result<T>, path: &str) -> Found<T> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("{path} cannot be read: {error}")),
    }
}

/// A machine of files, for tests.
#[cfg(test)]
pub(crate) struct Fixture {
    dir: tempfile::TempDir,
}

#[cfg(test)]
impl Fixture {
    pub(crate) fn new(files: &[(&str, &str)]) -> Self {
        let fixture = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        for (path, text) in files {
            fixture.write(path, text);
        }
        fixture
    }

    pub(crate) fn root(&self) -> Root {
        Root::at(self.dir.path())
    }

    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.root().path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn directory(&self, path: &str) {
        fs::create_dir_all(self.root().path(path)).unwrap();
    }

    /// Puts something there that no reader can read as what it should be, whoever the reader is: root reads all files.
    pub(crate) fn refuse_file(&self, path: &str) {
        self.directory(path);
    }

    /// The same for a directory.
    pub(crate) fn refuse_directory(&self, path: &str) {
        self.write(path, "");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_absent_is_told_from_what_cannot_be_read() {
        let fixture = Fixture::new(&[("/proc/there", " 7\n")]);
        fixture.refuse_file("/proc/refused");
        fixture.refuse_directory("/sys/refused");
        let root = fixture.root();
        assert_eq!(root.read("/proc/there"), Ok(Some("7".to_owned())));
        assert_eq!(root.read("/proc/absent"), Ok(None));
        let why = root.read("/proc/refused").unwrap_err();
        assert!(why.starts_with("/proc/refused cannot be read: "), "{why}");
        assert_eq!(root.names("/proc").unwrap().unwrap(), ["refused", "there"]);
        assert_eq!(root.names("/dev"), Ok(None));
        assert!(root.names("/sys/refused").is_err());
    }
}
