//! Finds the Python that runs the workers.

use std::env;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::exit::Fault;

/// A Python interpreter, and why it is the one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Python {
    pub(crate) program: PathBuf,
    found: Found,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Found {
    Option,
    Active,
    Project,
    Path,
}

impl fmt::Display for Python {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.found {
            Found::Option => "from --python",
            Found::Active => "of the active virtual environment",
            Found::Project => "of the project's virtual environment",
            Found::Path => "from PATH, as no virtual environment was found",
        };
        write!(f, "{} ({why})", self.program.display())
    }
}

impl Python {
    /// The interpreter for a pipeline: the one given, else of the active virtual environment, else of a `.venv` beside
    /// the pipeline or above it, else `python3`. It must be able to import the package.
    pub(crate) fn find(given: Option<&Path>, pipeline: &Path) -> Result<Self, Fault> {
        let python = Self::choose(given, pipeline);
        python.check()?;
        Ok(python)
    }

    /// The same, whatever it can do.
    pub(crate) fn choose(given: Option<&Path>, pipeline: &Path) -> Self {
        let active = env::var_os("VIRTUAL_ENV");
        Self::choose_from(given, active.as_deref(), pipeline)
    }

    fn choose_from(given: Option<&Path>, active: Option<&OsStr>, pipeline: &Path) -> Self {
        if let Some(program) = given {
            return Self {
                program: program.to_owned(),
                found: Found::Option,
            };
        }
        let interpreter = |environment: &Path| Some(environment.join("bin/python")).filter(|program| program.exists());
        if let Some(program) = active
            .filter(|dir| !dir.is_empty())
            .and_then(|dir| interpreter(Path::new(dir)))
        {
            return Self {
                program,
                found: Found::Active,
            };
        }
        let file = std::path::absolute(pipeline).unwrap_or_else(|_| pipeline.to_owned());
        match file.ancestors().skip(1).find_map(|dir| interpreter(&dir.join(".venv"))) {
            Some(program) => Self {
                program,
                found: Found::Project,
            },
            None => Self {
                program: "python3".into(),
                found: Found::Path,
            },
        }
    }

    /// That it runs, and has the package with its extension module.
    fn check(&self) -> Result<(), Fault> {
        let tried = Command::new(&self.program)
            .args(["-c", "import stagewire, stagewire.worker"])
            .stdin(Stdio::null())
            .output();
        let output = match tried {
            Ok(output) if output.status.success() => return Ok(()),
            Ok(output) => output,
            Err(error) => return Err(Fault::usage(format!("cannot run Python {self}: {error}"))),
        };
        let text = String::from_utf8_lossy(&output.stderr);
        let reason = text
            .lines()
            .rev()
            .find(|line| !line.trim().is_empty())
            .unwrap_or("no reason given");
        Err(Fault::usage(format!(
            "Python {self} cannot import the package stagewire: {reason}\n  \
             In Stagewire's own folder `make setup` builds it into .venv; elsewhere install the package into that Python, \
             or name another one with --python."
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(dir: &Path) -> PathBuf {
        let program = dir.join("bin/python");
        std::fs::create_dir_all(program.parent().unwrap()).unwrap();
        std::fs::write(&program, "").unwrap();
        program
    }

    #[test]
    fn the_nearest_reason_wins() {
        let dir = tempfile::tempdir().unwrap();
        let pipeline = dir.path().join("examples/wan/stagewire.toml");
        std::fs::create_dir_all(pipeline.parent().unwrap()).unwrap();
        let choose = |given, active| Python::choose_from(given, active, &pipeline);

        let above = environment(&dir.path().join(".venv"));
        assert_eq!(
            (choose(None, None).program, choose(None, None).found),
            (above, Found::Project)
        );
        let beside = environment(&dir.path().join("examples/wan/.venv"));
        assert_eq!(choose(None, None).program, beside);
        let active = environment(&dir.path().join("active"));
        let active_dir = dir.path().join("active");
        assert_eq!(choose(None, Some(active_dir.as_os_str())).program, active);
        assert_eq!(choose(None, Some(OsStr::new("/nowhere"))).program, beside);
        let given = choose(Some(Path::new("/usr/bin/python3")), Some(OsStr::new("/nowhere")));
        assert_eq!(
            (given.program.as_path(), given.found),
            (Path::new("/usr/bin/python3"), Found::Option)
        );
    }

    #[test]
    fn a_python_that_does_not_run_is_named() {
        let fault = Python::find(Some(Path::new("/nowhere/python")), Path::new("p.toml")).unwrap_err();
        let text = fault.error.to_string();
        assert!(
            text.starts_with("cannot run Python /nowhere/python (from --python): "),
            "{text}"
        );
    }
}
