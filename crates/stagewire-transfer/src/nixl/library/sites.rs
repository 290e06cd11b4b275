//! Where Python keeps packages.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Directories of Python packages: of the interpreter that runs this process, where one does, of the active environment,
/// then of the `python3` that a shell would start.
pub(super) fn site_packages() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let command = fs::read("/proc/self/cmdline").unwrap_or_default();
    let command = command.split(|byte| *byte == 0).next().unwrap_or_default();
    let mut prefixes: Vec<PathBuf> = Vec::new();
    // As it was called, because in an environment that is a link to the interpreter, and then as what it is.
    prefixes.extend(interpreter(Path::new(OsStr::from_bytes(command)), &path));
    let mut found: Vec<PathBuf> = sites_below(&prefixes);
    // A process may have renamed itself, or have Python inside.
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    found.extend(mapped_sites(&maps));
    let executable = fs::read_link("/proc/self/exe").ok();
    let mut prefixes: Vec<PathBuf> = executable
        .and_then(|executable| interpreter(&executable, &path))
        .into_iter()
        .collect();
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env::var_os);
    prefixes.extend(active.map(PathBuf::from));
    prefixes.extend(on_path(OsStr::new("python3"), &path).as_deref().and_then(prefix));
    found.extend(sites_below(&prefixes));
    let mut seen = BTreeSet::new();
    found.retain(|site| seen.insert(site.clone()));
    found
}

/// What a Python interpreter, by the name it was called, has its packages below. `None` for other programs.
fn interpreter(called: &Path, path: &OsStr) -> Option<PathBuf> {
    if !begins_with(called, "python") {
        return None;
    }
    if called.parent() == Some(Path::new("")) {
        prefix(&on_path(called.as_os_str(), path)?)
    } else {
        prefix(called)
    }
}

/// `PREFIX/bin/python` without the last two parts; links are left as they are.
fn prefix(executable: &Path) -> Option<PathBuf> {
    executable.parent()?.parent().map(Path::to_owned)
}

/// The program that a shell would start under this name.
fn on_path(name: &OsStr, path: &OsStr) -> Option<PathBuf> {
    env::split_paths(path)
        .map(|directory| directory.join(name))
        .find(|file| file.exists())
}

fn sites_below(prefixes: &[PathBuf]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for lib in prefixes.iter().map(|prefix| prefix.join("lib")) {
        let Ok(entries) = fs::read_dir(&lib) else { continue };
        let mut versions: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        versions.sort();
        for version in versions.into_iter().filter(|path| begins_with(path, "python3")) {
            let sites = ["site-packages", "dist-packages"].map(|packages| version.join(packages));
            found.extend(sites.into_iter().filter(|site| site.is_dir()));
        }
    }
    found
}

fn begins_with(path: &Path, begin: &str) -> bool {
    let name = path.file_name().and_then(OsStr::to_str);
    name.is_some_and(|name| name.starts_with(begin))
}

/// Where extension modules that this process has loaded were installed.
fn mapped_sites(maps: &str) -> Vec<PathBuf> {
    let site = |line: &str| {
        let file = Path::new(&line[line.find('/')?..]);
        let is_site = |path: &&Path| path.ends_with("site-packages") || path.ends_with("dist-packages");
        file.ancestors().find(is_site).map(Path::to_owned)
    };
    let mut sites: Vec<PathBuf> = maps.lines().filter_map(site).collect();
    sites.dedup();
    sites
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn an_environment_that_nobody_activated_is_found_by_how_its_interpreter_was_called() {
        let dir = tempfile::tempdir().expect("a directory");
        let (bin, site) = (dir.path().join("bin"), dir.path().join("lib/python3.12/site-packages"));
        fs::create_dir(&bin).expect("created");
        fs::create_dir_all(&site).expect("created");
        let python = bin.join("python");
        symlink("/bin/sh", &python).expect("linked");
        let nothing = OsStr::new("");
        let by_path = interpreter(&python, nothing).expect("an interpreter");
        assert_eq!(sites_below(&[by_path]), std::slice::from_ref(&site));
        let by_name = interpreter(Path::new("python"), bin.as_os_str()).expect("on the path");
        assert_eq!(sites_below(&[by_name]), [site]);
        assert_eq!(interpreter(Path::new("python"), nothing), None);
        assert_eq!(interpreter(Path::new("/usr/bin/stagewire"), nothing), None);
    }

    #[test]
    fn loaded_modules_tell_where_they_were_installed() {
        let maps = "7f00-7f01 r-xp 0000 08:01 1 /venv/lib/python3.12/site-packages/numpy/core/_umath.so\n\
                    7f01-7f02 r--p 0000 08:01 1 /venv/lib/python3.12/site-packages/numpy/core/_umath.so\n\
                    7f02-7f03 rw-p 0000 00:00 0 \n\
                    7f03-7f04 r-xp 0000 08:01 2 /usr/lib/libc.so.6\n\
                    7fff-8000 rw-p 0000 00:00 0 [stack]\n";
        assert_eq!(
            mapped_sites(maps),
            [PathBuf::from("/venv/lib/python3.12/site-packages")]
        );
    }
}
