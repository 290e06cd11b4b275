//! Finds NIXL's C interface and loads it, once for the process.

mod sites;

use std::env;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use libloading::os::unix;

use super::symbols::Symbols;
use super::version::NixlVersion;
use crate::NixlUnavailable;

const CAPI: &str = "libnixl_capi.so";

/// What the C interface itself loads.
const CORE: &str = "libnixl.so";

/// Names the library's file, before any search.
const VARIABLE: &str = "NIXL_CAPI_LIB";

/// NIXL, loaded into this process, where it stays for as long as the process lives.
pub struct NixlLibrary {
    symbols: Symbols,
    path: PathBuf,
    version: NixlVersion,
}

static LOADED: Mutex<Option<Arc<NixlLibrary>>> = Mutex::new(None);

impl NixlLibrary {
    /// Loads NIXL: the file named here, else the first found of `$NIXL_CAPI_LIB`, beside a `libnixl.so` that this process
    /// has loaded already, in the wheels `nixl-cu12` and `nixl-cu13` of the Python that runs this process, then of the active
    /// environments, and wherever the system's linker looks.
    ///
    /// # Errors
    /// [`NixlUnavailable`]. The process goes on without NIXL.
    pub fn open(path: Option<&Path>) -> Result<Arc<Self>, NixlUnavailable> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = &*loaded {
            return match path {
                Some(path) if !is_same(path, &library.path) => Err(NixlUnavailable::Mixed {
                    path: path.to_owned(),
                    loaded: library.path.clone(),
                }),
                _ => Ok(library.clone()),
            };
        }
        let candidates = path.map_or_else(candidates, |path| vec![path.to_owned()]);
        let library = Arc::new(load_first(candidates)?);
        *loaded = Some(library.clone());
        Ok(library)
    }

    /// The file of the C interface.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Which NIXL it is.
    pub fn version(&self) -> &NixlVersion {
        &self.version
    }

    pub(super) fn symbols(&self) -> &Symbols {
        &self.symbols
    }
}

impl fmt::Debug for NixlLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlLibrary")
            .field("path", &self.path)
            .field("version", &self.version)
            .finish()
    }
}

fn is_same(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    real(one) == real(other)
}

fn load_first(candidates: Vec<PathBuf>) -> Result<NixlLibrary, NixlUnavailable> {
    let mut searched = Vec::new();
    for path in candidates {
        // A bare name is for the linker to look up.
        if path.parent().is_none_or(|parent| parent == Path::new("")) {
            match load(&path) {
                Err(NixlUnavailable::Load { .. }) => searched.push(path.display().to_string()),
                outcome => return outcome,
            }
        } else if path.exists() {
            return load(&path);
        } else {
            searched.push(path.display().to_string());
        }
    }
    Err(NixlUnavailable::NotFound { searched })
}

fn load(path: &Path) -> Result<NixlLibrary, NixlUnavailable> {
    if let (Some(directory), Some(core)) = (path.parent().filter(|parent| parent.is_dir()), mapped(CORE))
        && !is_same(&directory.join(CORE), &core)
    {
        return Err(NixlUnavailable::Mixed {
            path: path.to_owned(),
            loaded: core,
        });
    }
    // SAFETY: loading runs the initialisers of NIXL and of what it is linked with, which prepare global variables.
    let library = unsafe { unix::Library::open(Some(path), unix::RTLD_NOW | unix::RTLD_LOCAL) };
    let library = library.map_err(|error| NixlUnavailable::Load {
        path: path.to_owned(),
        problem: error.to_string(),
    })?;
    let library = std::mem::ManuallyDrop::new(libloading::Library::from(library));
    // SAFETY: it is named as NIXL's C interface, and never closed.
    let symbols = unsafe { Symbols::load(&library) }.map_err(|symbol| NixlUnavailable::Symbol {
        path: path.to_owned(),
        symbol,
    })?;
    let path = match path.parent() {
        Some(directory) if directory.is_dir() => path.to_owned(),
        _ => mapped(CAPI).unwrap_or_else(|| path.to_owned()),
    };
    let version = NixlVersion::of(&path, mapped(CORE).as_deref());
    Ok(NixlLibrary { symbols, path, version })
}

/// The file with this name (and any suffix of a version) that is mapped into this process.
fn mapped(name: &str) -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let file = maps.lines().find_map(|line| {
        let path = &line[line.find('/')?..];
        let rest = path.rsplit('/').next()?.strip_prefix(name)?;
        (rest.is_empty() || rest.starts_with('.')).then_some(path)
    });
    file.map(PathBuf::from)
}

/// Where the library may be, in the order of preference.
fn candidates() -> Vec<PathBuf> {
    if let Some(path) = env::var_os(VARIABLE) {
        return vec![path.into()];
    }
    let beside = mapped(CORE).and_then(|core| Some(core.parent()?.join(CAPI)));
    let mut candidates: Vec<PathBuf> = beside.into_iter().collect();
    for site in sites::site_packages() {
        for wheel in [".nixl_cu12.mesonpy.libs", ".nixl_cu13.mesonpy.libs"] {
            candidates.push(site.join(wheel).join(CAPI));
        }
    }
    candidates.extend([format!("{CAPI}.0").into(), CAPI.into()]);
    candidates
}
