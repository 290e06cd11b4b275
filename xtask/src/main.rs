//! Chores of the repository: `cargo xtask layers`, `cargo xtask reasons`, `cargo xtask guarantees`,
//! `cargo xtask proto [--check]`.

mod guarantees;
mod layers;
#[cfg(feature = "proto")]
mod proto;
mod reasons;

use std::path::PathBuf;

use anyhow::{Result, bail};

fn main() -> Result<()> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["layers"] => layers::run(&root),
        ["guarantees"] => guarantees::run(&root),
        ["reasons"] => reasons::run(&root),
        #[cfg(feature = "proto")]
        ["proto"] => proto::run(&root, false),
        #[cfg(feature = "proto")]
        ["proto", "--check"] => proto::run(&root, true),
        #[cfg(not(feature = "proto"))]
        ["proto", ..] => bail!("{}: run `cargo run -p xtask --features proto -- proto`", root.display()),
        _ => bail!("usage: cargo xtask layers | reasons | guarantees | proto [--check]"),
    }
}
