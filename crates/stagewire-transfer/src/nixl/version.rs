use std::fmt;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Which NIXL a process uses.
///
/// NIXL itself does not compare versions: between 1.3 and 1.5 a transfer never ends. The C interface does not tell its
/// version either; that of a wheel stands in the name of the directory `nixl_cu12-1.5.1.dist-info` beside it. Of other
/// builds only the content of the library tells whether two are the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NixlVersion {
    release: Option<String>,
    build: u64,
}

impl NixlVersion {
    /// The version of the NIXL whose C interface and core are these files.
    pub(super) fn of(capi: &Path, core: Option<&Path>) -> Self {
        let bytes = core
            .and_then(|core| fs::read(core).ok())
            .or_else(|| fs::read(capi).ok());
        Self {
            release: wheel(capi),
            build: xxhash_rust::xxh3::xxh3_64(&bytes.unwrap_or_default()),
        }
    }

    /// The release, such as `1.5.1`, where it is known.
    pub fn release(&self) -> Option<&str> {
        self.release.as_deref()
    }

    /// Whether agents of the two understand each other: the same major and minor release, or the same build.
    pub(super) fn fits(&self, other: &Self) -> bool {
        match (&self.release, &other.release) {
            (Some(one), Some(two)) => minor(one) == minor(two),
            _ => self.build == other.build,
        }
    }
}

impl fmt::Display for NixlVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.release {
            Some(release) => f.write_str(release),
            None => write!(f, "of unknown release (build {:016x})", self.build),
        }
    }
}

/// Major and minor number.
fn minor(release: &str) -> Option<(&str, &str)> {
    let mut numbers = release.split('.');
    Some((numbers.next()?, numbers.next()?))
}

/// The version of the wheel that a library belongs to: `.nixl_cu12.mesonpy.libs` lies beside `nixl_cu12-1.5.1.dist-info`.
fn wheel(capi: &Path) -> Option<String> {
    let libs = capi.parent()?;
    let name = libs.file_name()?.to_str()?.strip_prefix('.')?;
    let package = name.strip_suffix(".mesonpy.libs")?;
    let entries = fs::read_dir(libs.parent()?).ok()?;
    entries.flatten().find_map(|entry| {
        let name = entry.file_name();
        let version = name.to_str()?.strip_prefix(package)?.strip_prefix('-')?;
        Some(version.strip_suffix(".dist-info")?.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(release: Option<&str>, build: u64) -> NixlVersion {
        NixlVersion {
            release: release.map(str::to_owned),
            build,
        }
    }

    #[test]
    fn releases_fit_within_a_minor_version_and_unknown_ones_by_their_build() {
        assert!(version(Some("1.5.1"), 1).fits(&version(Some("1.5.0"), 2)));
        assert!(!version(Some("1.5.1"), 1).fits(&version(Some("1.3.2"), 1)));
        assert!(!version(Some("1.5.1"), 1).fits(&version(Some("2.5.1"), 1)));
        assert!(version(None, 7).fits(&version(Some("1.5.1"), 7)));
        assert!(!version(None, 7).fits(&version(None, 8)));
        assert_eq!(
            version(None, 7).to_string(),
            "of unknown release (build 0000000000000007)"
        );
    }

    #[test]
    fn the_version_of_a_wheel_is_that_of_its_directory() {
        let site = tempfile::tempdir().expect("a directory");
        let libs = site.path().join(".nixl_cu12.mesonpy.libs");
        for directory in [
            &libs,
            &site.path().join("nixl_cu12-1.5.1.dist-info"),
            &site.path().join("numpy-2.0.dist-info"),
        ] {
            fs::create_dir(directory).expect("made");
        }
        assert_eq!(wheel(&libs.join("libnixl_capi.so")).as_deref(), Some("1.5.1"));
        assert_eq!(wheel(Path::new("/usr/lib/libnixl_capi.so")), None);
    }
}
