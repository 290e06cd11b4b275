//! `cargo xtask layers`: dependencies point down only, and pure crates stay pure.
//!
//! The table below is the layering of `docs/architecture.md`. Development dependencies are free: tests may drive a
//! crate through anything. A new crate of the workspace fails the check until it has a row.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// What a crate of the workspace may depend on.
struct Layer {
    name: &'static str,
    level: u8,
    /// Crates of this workspace that it may name; [`ANY`] for all of a lower level.
    may: &'static [&'static str],
}

const ANY: &[&str] = &["*"];

#[rustfmt::skip]
const LAYERS: [Layer; 12] = [
    Layer { name: "stagewire-core", level: 0, may: &[] },
    Layer { name: "stagewire-kv", level: 1, may: &["stagewire-core"] },
    Layer { name: "stagewire-sched", level: 1, may: &["stagewire-core"] },
    Layer { name: "stagewire-transfer", level: 2, may: &["stagewire-core"] },
    Layer { name: "stagewire-store", level: 2, may: &["stagewire-core", "stagewire-transfer"] },
    Layer { name: "stagewire-sim", level: 2, may: &["stagewire-core", "stagewire-sched"] },
    Layer { name: "stagewire-api", level: 2, may: &["stagewire-core"] },
    Layer { name: "stagewire-connector", level: 3, may: &["stagewire-api", "stagewire-core", "stagewire-kv", "stagewire-store", "stagewire-transfer"] },
    Layer { name: "stagewire-server", level: 3, may: &["stagewire-api", "stagewire-connector", "stagewire-core", "stagewire-sched", "stagewire-store", "stagewire-transfer"] },
    Layer { name: "stagewire", level: 4, may: ANY },
    Layer { name: "stagewire-python", level: 4, may: ANY },
    Layer { name: "xtask", level: 4, may: &[] },
];

/// Crates at or below this level are pure: no runtime, no I/O, no clock, no randomness.
const PURE: u8 = 1;

/// Everything from outside that a pure crate may name. `uuid` is there for the type; ids are made elsewhere.
const PURE_MAY: [&str; 7] = [
    "postcard",
    "serde",
    "serde_json",
    "subtle",
    "thiserror",
    "uuid",
    "xxhash-rust",
];

/// What must not come into a pure crate by any path.
const PURE_NEVER: [&str; 9] = [
    "async-std",
    "hyper",
    "mio",
    "polling",
    "reqwest",
    "rustix",
    "socket2",
    "tokio",
    "tonic",
];

/// Fails with every breach, one a line.
pub(crate) fn run(root: &Path) -> Result<()> {
    let graph = Graph::of(root)?;
    let breaches = breaches(&graph, root);
    ensure!(
        breaches.is_empty(),
        "{} breaches of the layers:\n  {}",
        breaches.len(),
        breaches.join("\n  ")
    );
    Ok(())
}

/// Normal and build dependencies, by name, of every package that the workspace resolves to.
struct Graph {
    members: BTreeSet<String>,
    /// As declared, also those of other platforms and features.
    declared: BTreeMap<String, BTreeSet<String>>,
    /// As resolved.
    resolved: BTreeMap<String, BTreeSet<String>>,
}

impl Graph {
    fn of(root: &Path) -> Result<Self> {
        let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["metadata", "--format-version", "1", "--locked"])
            .current_dir(root)
            .output()
            .context("cannot run cargo metadata")?;
        if !output.status.success() {
            bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
        }
        Self::read(&serde_json::from_slice(&output.stdout)?)
    }

    fn read(metadata: &Value) -> Result<Self> {
        let packages = list(&metadata["packages"]);
        let names: BTreeMap<&str, &str> = packages.iter().map(|p| (text(&p["id"]), text(&p["name"]))).collect();
        let name = |id: &Value| names.get(text(id)).map(|name| (*name).to_owned());
        let members: BTreeSet<String> = list(&metadata["workspace_members"]).iter().filter_map(name).collect();
        ensure!(!members.is_empty(), "cargo metadata names no member of the workspace");
        let mut declared = BTreeMap::new();
        for package in packages {
            let needed = list(&package["dependencies"]).iter().filter(|d| d["kind"] != "dev");
            declared.insert(
                text(&package["name"]).to_owned(),
                needed.map(|d| text(&d["name"]).to_owned()).collect(),
            );
        }
        let mut resolved: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for node in list(&metadata["resolve"]["nodes"]) {
            let Some(from) = name(&node["id"]) else { continue };
            let needed = list(&node["deps"]).iter();
            let needed = needed.filter(|dep| list(&dep["dep_kinds"]).iter().any(|kind| kind["kind"].is_null()));
            // Two versions of one package count as one: together they reach what each of them reaches.
            resolved
                .entry(from)
                .or_default()
                .extend(needed.filter_map(|dep| name(&dep["pkg"])));
        }
        Ok(Self {
            members,
            declared,
            resolved,
        })
    }

    /// Everything that `from` needs at run time, by any path.
    fn reach(&self, from: &str) -> BTreeSet<&str> {
        let mut found = BTreeSet::new();
        let mut todo = vec![from];
        while let Some(next) = todo.pop() {
            for needed in self.resolved.get(next).into_iter().flatten() {
                if found.insert(needed.as_str()) {
                    todo.push(needed);
                }
            }
        }
        found
    }
}

fn breaches(graph: &Graph, root: &Path) -> Vec<String> {
    let mut breaches = Vec::new();
    let layer = |name: &str| LAYERS.iter().find(|layer| layer.name == name);
    for member in &graph.members {
        let Some(row) = layer(member) else {
            breaches.push(format!(
                "{member} has no row in xtask/src/layers.rs: say on which level it stands"
            ));
            continue;
        };
        let declared = &graph.declared[member];
        for needed in declared.iter().filter(|name| graph.members.contains(*name)) {
            let allowed = if row.may == ANY {
                layer(needed).is_some_and(|needed| needed.level < row.level)
            } else {
                row.may.contains(&needed.as_str())
            };
            if !allowed {
                breaches.push(format!("{member} (level {}) may not depend on {needed}", row.level));
            }
        }
        if row.level > PURE {
            continue;
        }
        for outside in declared.iter().filter(|name| !graph.members.contains(*name)) {
            if !PURE_MAY.contains(&outside.as_str()) {
                breaches.push(format!("{member} is pure: it may not depend on {outside}"));
            }
        }
        for reached in graph.reach(member) {
            if PURE_NEVER.contains(&reached) {
                breaches.push(format!(
                    "{member} is pure, yet {reached} comes in through its dependencies"
                ));
            }
        }
        let clippy = root.join("crates").join(member).join("clippy.toml");
        if !clippy.is_file() {
            breaches.push(format!(
                "{member} is pure, so it needs {} to forbid clocks and I/O",
                clippy.display()
            ));
        }
    }
    breaches
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(edges: &[(&str, &[&str])]) -> Graph {
        let edges: BTreeMap<String, BTreeSet<String>> = edges
            .iter()
            .map(|(from, to)| ((*from).to_owned(), to.iter().map(|name| (*name).to_owned()).collect()))
            .collect();
        let members = edges
            .keys()
            .filter(|name| name.starts_with("stagewire"))
            .cloned()
            .collect();
        Graph {
            members,
            declared: edges.clone(),
            resolved: edges,
        }
    }

    #[test]
    fn a_dependency_that_points_up_is_named() {
        let graph = graph(&[
            ("stagewire-transfer", &["stagewire-server"]),
            ("stagewire-server", &["stagewire-transfer"]),
        ]);
        let found = breaches(&graph, Path::new("/nowhere"));
        assert_eq!(
            found,
            ["stagewire-transfer (level 2) may not depend on stagewire-server"]
        );
    }

    #[test]
    fn a_pure_crate_may_not_reach_a_runtime_through_a_friend() {
        let graph = graph(&[
            ("stagewire-core", &["serde"]),
            ("serde", &["friend"]),
            ("friend", &["tokio"]),
        ]);
        let found = breaches(&graph, Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap());
        assert_eq!(
            found,
            ["stagewire-core is pure, yet tokio comes in through its dependencies"]
        );
    }

    #[test]
    fn a_pure_crate_names_only_what_is_listed() {
        let graph = graph(&[("stagewire-core", &["rand"])]);
        let found = breaches(&graph, Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap());
        assert_eq!(found, ["stagewire-core is pure: it may not depend on rand"]);
    }

    #[test]
    fn a_crate_without_a_row_is_refused() {
        let graph = graph(&[("stagewire-extra", &[])]);
        assert!(breaches(&graph, Path::new("/nowhere"))[0].contains("has no row"));
    }

    #[test]
    fn development_dependencies_are_free() {
        let metadata = serde_json::json!({
            "packages": [
                {"id": "a", "name": "stagewire-core", "dependencies": [{"name": "stagewire-server", "kind": "dev"}]},
                {"id": "b", "name": "stagewire-server", "dependencies": []},
            ],
            "workspace_members": ["a", "b"],
            "resolve": {"nodes": [{"id": "a", "deps": [{"pkg": "b", "dep_kinds": [{"kind": "dev"}]}]}]},
        });
        let graph = Graph::read(&metadata).unwrap();
        assert!(graph.declared["stagewire-core"].is_empty());
        assert!(graph.reach("stagewire-core").is_empty());
    }
}
