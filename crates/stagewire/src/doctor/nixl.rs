use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Setting;
use super::check::{Check, State};
use super::pair::{Outcome, hand_over};

const NAME: &str = "nixl";

const INSTALL: &str = "pip install --no-deps nixl-cu12 numpy, or name libnixl_capi.so in NIXL_CAPI_LIB";

/// Whether NIXL is found from the Python of the workers, and moves bytes; else whether the peers' environment has it.
pub(super) async fn try_out(setting: Arc<Setting>) -> Vec<Check> {
    let workers = hand(environment(&setting.python.program).as_deref()).await;
    let beside = match (&workers, &setting.peers) {
        (Err(_), Some(peers)) => hand(Some(peers)).await.ok(),
        _ => None,
    };
    vec![judge(workers, beside)]
}

/// The environment that a Python belongs to: what is above its `bin`.
fn environment(python: &Path) -> Option<PathBuf> {
    let bin = python.parent().filter(|bin| bin.ends_with("bin"))?;
    bin.parent().map(Path::to_owned)
}

/// What carried the bytes, or why nothing did.
async fn hand(environment: Option<&Path>) -> Result<String, String> {
    let outcomes = hand_over(&[NAME], environment)
        .await
        .map_err(|error| format!("{error:#}"))?;
    match outcomes.into_iter().next() {
        Some(Outcome { error: Some(error), .. }) => Err(error),
        Some(Outcome { by, .. }) => Ok(by.unwrap_or_else(|| "NIXL".to_owned())),
        None => Err("the reading process did not try it".to_owned()),
    }
}

fn judge(workers: Result<String, String>, beside: Option<String>) -> Check {
    match (workers, beside) {
        (Ok(by), _) => Check::ok(NAME, format!("{by}: 1.0 MiB pulled, every byte as sent"))
            .with("library", by)
            .with("usable", true),
        (Err(why), Some(beside)) => Check::ok(
            NAME,
            format!("not for workers; the peers' environment has {beside}, which works"),
        )
        .but(
            State::Note,
            why,
            format!("nothing for the benchmarks; for workers {INSTALL}"),
        )
        .with("library", beside)
        .with("usable", false),
        (Err(why), None) => {
            Check::missing(NAME, "does not work", why, format!("nothing, or {INSTALL}")).with("usable", false)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_counts_where_workers_find_it() {
        let found = || Ok("NIXL 1.5.1 of /a.so".to_owned());
        let absent = || Err("libnixl_capi.so was not found".to_owned());
        assert_eq!(judge(found(), None).state, State::Ok);
        let beside = judge(absent(), found().ok());
        assert_eq!((beside.state, &beside.data["usable"]), (State::Note, &false.into()));
        let none = judge(absent(), None);
        assert_eq!(
            (none.state, none.why.as_deref()),
            (State::Missing, Some("libnixl_capi.so was not found"))
        );
    }

    #[test]
    fn environments_have_their_python_in_bin() {
        assert_eq!(environment(Path::new("/a/.venv/bin/python")), Some("/a/.venv".into()));
        assert_eq!(environment(Path::new("python3")), None);
    }
}
