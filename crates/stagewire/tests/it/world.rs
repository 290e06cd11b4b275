use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// A directory for one deployment, and the binary with nothing of the caller's environment that matters.
pub(crate) struct World {
    dir: TempDir,
}

pub(crate) struct Done {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) const PIPELINE: &str = "\
[pipeline]
name = \"tiny\"
module = \"pipeline.py\"

[[stage]]
name = \"encode\"

[[stage]]
name = \"decode\"

[[edge]]
from = \"encode\"
to = \"decode\"
";

impl World {
    pub(crate) fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.path("run")
    }

    /// Writes a file and gives its path.
    pub(crate) fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// A pipeline that can be served.
    pub(crate) fn pipeline(&self) -> PathBuf {
        self.file("pipeline.py", "");
        self.file("stagewire.toml", PIPELINE)
    }

    pub(crate) fn command<S: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stagewire"));
        command.args(args).stdin(Stdio::null()).env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command
            .env("HOME", self.dir.path())
            .env("STAGEWIRE_RUN_DIR", self.run_dir());
        command
    }

    pub(crate) fn run<S: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Done {
        self.done(self.command(args).output().unwrap())
    }

    /// What came out, with the directory's name made the same in every run.
    pub(crate) fn done(&self, output: Output) -> Done {
        let text = |bytes: Vec<u8>| self.steady(&String::from_utf8(bytes).unwrap());
        Done {
            code: output.status.code().unwrap_or(-1),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }

    fn steady(&self, text: &str) -> String {
        text.replace(&self.dir.path().display().to_string(), "DIR")
    }
}

/// What is left in a directory, by name.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
