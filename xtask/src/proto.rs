//! `cargo xtask proto`: generates `crates/stagewire-api/src/v1.rs` from the protobuf file, with a compiler in Rust.
//!
//! The result is committed, so that building Stagewire needs no protobuf compiler.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

const PROTO: &str = "stagewire/v1/orchestrator.proto";

/// Writes the generated code, or with `check` fails where the committed code is not what would be written.
pub(crate) fn run(root: &Path, check: bool) -> Result<()> {
    let api = root.join("crates/stagewire-api");
    let descriptors = protox::compile([PROTO], [api.join("proto")]).context("cannot compile the protobuf file")?;
    let out = root.join("target/proto");
    fs::create_dir_all(&out)?;
    tonic_prost_build::configure()
        .out_dir(&out)
        .btree_map(".")
        .skip_debug([".stagewire.v1.Payload", ".stagewire.v1.Welcome"])
        .build_transport(true)
        .compile_fds(descriptors)
        .context("cannot generate code")?;
    // The repository is formatted as a whole, generated code included.
    let file = out.join("stagewire.v1.rs");
    let formatted = Command::new("rustfmt")
        .args(["--edition", "2024", "--config-path"])
        .arg(root.join("rustfmt.toml"))
        .arg(&file)
        .status()
        .context("cannot run rustfmt")?;
    ensure!(formatted.success(), "rustfmt does not take {}", file.display());
    let generated = fs::read_to_string(file)?;
    let target = api.join("src/v1.rs");
    if !check {
        fs::write(&target, generated).with_context(|| format!("cannot write {}", target.display()))?;
    } else if fs::read_to_string(&target).ok().as_deref() != Some(generated.as_str()) {
        bail!(
            "{} is not what {PROTO} gives; run `cargo xtask proto`",
            target.display()
        );
    }
    Ok(())
}
