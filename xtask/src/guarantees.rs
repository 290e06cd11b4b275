//! `cargo xtask guarantees`: every test that `docs/guarantees.md` names exists, and no promise is without one.
//!
//! A test is named as `path/of/file::function`. It exists where the file has a function of this name that is a test: in
//! Rust after an attribute `#[test]` or one that ends so, in a `proptest!`, or in the list of `for_each_transport!`; in
//! Python by its name.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

const DOCUMENT: &str = "docs/guarantees.md";

pub(crate) fn run(root: &Path) -> Result<()> {
    let text = fs::read_to_string(root.join(DOCUMENT)).with_context(|| format!("cannot read {DOCUMENT}"))?;
    let (mut problems, mut named) = (Vec::new(), 0);
    for row in rows(&text) {
        let tests: Vec<&str> = row.tests.split('`').skip(1).step_by(2).collect();
        if tests.is_empty() {
            problems.push(format!("no test is named for {:?}", row.promise));
        }
        for test in tests {
            named += 1;
            if let Some(problem) = missing(root, test) {
                problems.push(format!("`{test}` of {:?}: {problem}", row.promise));
            }
        }
    }
    ensure!(named > 0, "{DOCUMENT} names no test");
    ensure!(problems.is_empty(), "{DOCUMENT}:\n{}", problems.join("\n"));
    Ok(())
}

struct Row<'a> {
    promise: &'a str,
    tests: &'a str,
}

/// The rows of all tables of two columns, without their heads.
fn rows(text: &str) -> impl Iterator<Item = Row<'_>> {
    let cells = text
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "));
    cells
        .filter(|(promise, _)| !promise.starts_with("---") && *promise != "promise")
        .map(|(promise, tests)| Row { promise, tests })
}

/// Why there is no such test.
fn missing(root: &Path, test: &str) -> Option<String> {
    let Some((file, function)) = test.split_once("::") else {
        return Some("it is not file::function".to_owned());
    };
    let Ok(source) = fs::read_to_string(root.join(file)) else {
        return Some(format!("there is no file {file}"));
    };
    let found = if file.ends_with(".py") {
        function.starts_with("test_") && source.contains(&format!("def {function}("))
    } else {
        is_rust_test(&source, function)
    };
    (!found).then(|| format!("{file} has no test of that name"))
}

/// Whether one of the attributes right above the function makes it a test, or a list makes several of it.
fn is_rust_test(source: &str, function: &str) -> bool {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let listed = lines.iter().skip_while(|line| **line != "for_each_transport! {");
    let mut listed = listed.take_while(|line| **line != "}");
    if listed.any(|line| line.split_once(": ").is_some_and(|(name, _)| name == function)) {
        return true;
    }
    let heads = [format!("fn {function}("), format!("async fn {function}(")];
    let at = lines
        .iter()
        .position(|line| heads.iter().any(|head| line.starts_with(head.as_str())));
    at.is_some_and(|at| {
        let above = lines[..at]
            .iter()
            .rev()
            .take_while(|line| line.starts_with("#[") || line.starts_with("//"));
        above
            .into_iter()
            .any(|line| line.starts_with("#[test") || line.starts_with("#[tokio::test"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_told_from_other_functions() {
        let source =
            "#[test]\n#[ignore]\nfn one() {}\nfn helper() {}\n#[tokio::test(flavor = \"x\")]\nasync fn two() {}\n";
        assert!(is_rust_test(source, "one") && is_rust_test(source, "two"));
        let listed = "for_each_transport! {\n    one: shm tcp;\n}\nasync fn one(end: End) {}\nasync fn two() {}\n";
        assert!(is_rust_test(listed, "one") && !is_rust_test(listed, "two"));
        assert!(!is_rust_test(source, "helper") && !is_rust_test(source, "on"));
    }

    #[test]
    fn rows_are_read_without_heads() {
        let text = "| promise | tests |\n| --- | --- |\n| it holds | `a.rs::b` |\ntext\n";
        let read: Vec<_> = rows(text).map(|row| (row.promise, row.tests)).collect();
        assert_eq!(read, [("it holds", "`a.rs::b`")]);
    }
}
