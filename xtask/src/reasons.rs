//! `cargo xtask reasons`: every reason key of the sources has its row in `docs/errors.md`, and every row its key.
//!
//! *What it reads.* The Rust sources of `crates/*/src` and `bindings/python/src` and the Python package, without tests:
//! no file or folder called `tests`, no item under `#[cfg(test)]`. Of the document, the tables whose first column is
//! called `key`.
//!
//! *What counts as raised.* A whole string literal of the form `word.some_words`
//! - in the body of a function called `reason`, which is how `Classify` is implemented;
//! - as the first literal argument of a call that makes an error of its arguments: [`MAKERS`];
//! - as the keyword argument `reason=` of a Python call.
//!
//! Any other literal of that form is an error too, unless it is a key that is raised elsewhere or is named in [`OTHER`]:
//! so a new way to make errors does not go unseen. Keys that are put together at run time are not found; there are none.

mod tokens;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use self::tokens::{Kind, Language, Token, tokens};

const DOCUMENT: &str = "docs/errors.md";
const SOURCES: [&str; 3] = ["crates", "bindings/python/src", "bindings/python/python"];

/// Calls that make an error: the type or module before `::`, empty for any, and the function.
const MAKERS: [(&str, &str); 9] = [
    ("Failure", "new"),
    ("ApiError", "new"),
    ("", "denied"),
    ("", "invalid"),
    ("", "not_found"),
    ("", "unsupported"),
    // Python.
    ("", "fail"),
    ("", "from_failure"),
    ("", "StageFailure"),
];

/// No key ends in one of these: they are the endings of file names.
const ENDINGS: [&str; 6] = ["css", "html", "json", "log", "py", "so"];

/// What looks like a key and is none: names of other files, modules, fields of messages, timers.
const OTHER: [&str; 45] = [
    "apart.toml",
    "attempt.renewal",
    "attempt.stop",
    "cancel.failure",
    "cancel.token",
    "handover.from",
    "handover.payload",
    "hello.holding",
    "hello.incarnation",
    "hello.stage",
    "index.journal",
    "input.stage",
    "job.cancel",
    "journal.redb",
    "keeper.lock",
    "keeper.secret",
    "keeper.sock",
    "member.group",
    "memory.current",
    "memory.limit_in_bytes",
    "memory.max",
    "memory.stat",
    "mooncake.engine",
    "mooncake.store",
    "offer.answer",
    "offer.token",
    "params.toml",
    "refused.failure",
    "refused.token",
    "server.lock",
    "stage.retry",
    "stagewire.errors",
    "stagewire.toml",
    "stagewire.worker",
    "store.addr",
    "store.id",
    "store.lock",
    "together.toml",
    "token.job",
    "worker.away",
    "worker.drain",
    "worker.resume",
    "worker.token",
    "yield.failure",
    "yield.token",
];

/// Fails with everything that is missing on either side.
pub(crate) fn run(root: &Path) -> Result<()> {
    let mut found = Found::default();
    for folder in SOURCES {
        for file in files(&root.join(folder))? {
            let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
            let name = file.strip_prefix(root).unwrap_or(&file).display().to_string();
            found.read(&name, &text, Language::of(&file));
        }
    }
    ensure!(
        !found.raised.is_empty(),
        "no source raises a reason: was {SOURCES:?} moved?"
    );
    let document = root.join(DOCUMENT);
    let text = fs::read_to_string(&document).with_context(|| format!("cannot read {}", document.display()))?;
    let problems = found.problems(&rows(&text), &OTHER);
    ensure!(
        problems.is_empty(),
        "{} problems with reason keys:\n  {}",
        problems.len(),
        problems.join("\n  ")
    );
    Ok(())
}

/// Sources under a folder that are no tests, in order.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.file_stem().is_some_and(|stem| stem == "tests") {
            continue;
        }
        if path.is_dir() {
            found.extend(files(&path)?);
        } else if path.extension().is_some_and(|ext| ext == "rs" || ext == "py") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Keys and the places where they stand, as `file:line`.
type Places = BTreeMap<String, String>;

/// What the sources say. Of several places the first is kept.
#[derive(Debug, Default)]
struct Found {
    raised: Places,
    /// Literals that look like keys, wherever they stand.
    mentioned: Places,
}

impl Found {
    fn read(&mut self, file: &str, text: &str, language: Language) {
        let tokens = without_tests(&tokens(text, language));
        let place = |token: &Token| format!("{file}:{}", token.line);
        for token in tokens.iter().filter(|token| is_key(token.literal())) {
            self.mentioned
                .entry(token.literal().to_owned())
                .or_insert_with(|| place(token));
        }
        for token in raised(&tokens, language) {
            self.raised
                .entry(token.literal().to_owned())
                .or_insert_with(|| place(token));
        }
    }

    /// What is wrong, one a line.
    fn problems(&self, rows: &[(String, usize)], other: &[&str]) -> Vec<String> {
        let listed: BTreeSet<&str> = rows.iter().map(|(key, _)| key.as_str()).collect();
        let mut problems = Vec::new();
        for (key, place) in &self.raised {
            if !listed.contains(key.as_str()) {
                problems.push(format!(
                    "{key} is raised at {place} and has no row in {DOCUMENT}: add one"
                ));
            }
        }
        let mut seen = BTreeSet::new();
        for (key, line) in rows {
            if !self.raised.contains_key(key) {
                problems.push(format!("{key} at {DOCUMENT}:{line} is raised nowhere: remove its row"));
            }
            if !seen.insert(key) {
                problems.push(format!("{key} at {DOCUMENT}:{line} has a row already: remove one"));
            }
        }
        for (key, place) in &self.mentioned {
            if !self.raised.contains_key(key) && !other.contains(&key.as_str()) {
                problems.push(format!(
                    "{key:?} at {place} looks like a reason key that nothing raises: if it is one, teach \
                     xtask/src/reasons.rs the call that makes the error (MAKERS), else name it in OTHER there"
                ));
            }
        }
        for name in other.iter().filter(|name| !self.mentioned.contains_key(**name)) {
            problems.push(format!(
                "{name:?} stands in no source any more: remove it from OTHER in xtask/src/reasons.rs"
            ));
        }
        problems
    }
}

/// Whether a literal has the form of a key: two parts of lower-case words.
fn is_key(literal: &str) -> bool {
    let words = |text: &str| text.split('_').all(is_word);
    literal
        .split_once('.')
        .is_some_and(|(first, rest)| words(first) && words(rest) && !ENDINGS.contains(&rest))
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase())
}

/// The keys of a document with their lines: first cells of the tables whose first column is called `key`.
fn rows(text: &str) -> Vec<(String, usize)> {
    let mut inside = false;
    let mut rows = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let Some(first) = line.strip_prefix('|').and_then(|rest| rest.split('|').next()) else {
            inside = false;
            continue;
        };
        let first = first.trim();
        inside |= first == "key";
        if inside && let Some(key) = first.strip_prefix('`').and_then(|key| key.strip_suffix('`')) {
            rows.push((key.to_owned(), number + 1));
        }
    }
    rows
}

/// Leaves out the items under `#[cfg(test)]`.
fn without_tests(tokens: &[Token]) -> Vec<Token> {
    const TEST: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut kept = Vec::with_capacity(tokens.len());
    let mut rest = tokens;
    while let Some((first, after)) = rest.split_first() {
        if rest.len() >= TEST.len() && rest.iter().zip(TEST).all(|(token, text)| token.is(text)) {
            let end = rest.iter().position(|token| token.is("{") || token.is(";"));
            let end = end.map_or(rest.len(), |start| start + block(&rest[start..]));
            rest = &rest[end..];
        } else {
            kept.push(first.clone());
            rest = after;
        }
    }
    kept
}

/// Number of tokens from an opening brace to its closing one; 1 where there is none to close.
fn block(tokens: &[Token]) -> usize {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate() {
        depth += usize::from(token.is("{"));
        depth -= usize::from(token.is("}") && depth > 0);
        if depth == 0 {
            return index + 1;
        }
    }
    tokens.len()
}

/// The literals that are reasons of errors which these tokens make.
fn raised(tokens: &[Token], language: Language) -> Vec<&Token> {
    let mut found = Vec::new();
    // One entry for each open bracket: whether a reason is expected among what stands directly in it.
    let mut open: Vec<bool> = Vec::new();
    for (index, token) in tokens.iter().enumerate() {
        let before = |back: usize| index.checked_sub(back).map(|at| &tokens[at]);
        let named = |back: usize, text: &str| before(back).is_some_and(|token| token.is(text));
        if token.is("(") {
            let owned = |owner: &str| owner.is_empty() || (named(2, ":") && named(3, ":") && named(4, owner));
            let maker = |(owner, name): &(&str, &str)| named(1, name) && owned(owner);
            // A definition takes a reason and makes none.
            let defined = named(2, "fn") || named(2, "def");
            open.push(!defined && MAKERS.iter().any(maker));
        } else if token.is("[") || token.is("{") {
            open.push(false);
        } else if token.is(")") || token.is("]") || token.is("}") {
            open.pop();
        } else if token.kind == Kind::Literal {
            let keyword = language == Language::Python && named(1, "=") && named(2, "reason");
            let argument = open.last().is_some_and(|expected| *expected);
            // In Rust the first literal is the reason, whatever its form; in Python the class may come before it.
            let reason = match language {
                Language::Rust => argument,
                Language::Python => is_key(token.literal()) && (keyword || argument),
            };
            if reason {
                found.push(token);
                if let Some(expected) = open.last_mut() {
                    *expected = false;
                }
            }
        }
        if token.is("reason") && named(1, "fn") {
            let start = tokens[index..].iter().position(|token| token.is("{") || token.is(";"));
            let body = start.map_or(&[][..], |start| {
                &tokens[index + start..][..block(&tokens[index + start..])]
            });
            found.extend(body.iter().filter(|token| is_key(token.literal())));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str, language: Language) -> Vec<String> {
        let mut found = Found::default();
        found.read("file", text, language);
        found.raised.into_keys().collect()
    }

    #[test]
    fn rust_reasons_are_found_where_errors_are_made() {
        let text = r##"
            impl Classify for E {
                fn reason(&self) -> &'static str {
                    match self { Self::A { .. } => "a.first", Self::B(source) => source.reason(), _ => "a.second" }
                }
            }
            fn f() {
                let x = Failure::new(ErrorClass::Internal, "b.made", format!("{} of {}", "c.not", 'c'));
                return Err(ApiError::not_found("b.api", r#"a "raw.text" "#)); // Failure::new(x, "c.comment", y)
                invalid(py, "bare", "c.message")
            }
            #[cfg(test)]
            mod tests { fn g() { Failure::new(C, "c.test", "{") } }
            fn invalid(py: P, reason: &str) {}
            #[cfg(test)]
            mod more;
            fn h() { denied("b.last", String::new()) }
        "##;
        assert_eq!(
            keys(text, Language::Rust),
            ["a.first", "a.second", "b.api", "b.last", "b.made", "bare"]
        );
    }

    #[test]
    fn python_reasons_are_found_where_errors_are_made() {
        let text = "
def f(reason: str = 'c.default'):  # reason='c.comment'
    \"\"\"Raises reason=\"c.text\".\"\"\"
    raise Invalid(f'{x} is \"wrong\"', reason=\"a.keyword\", details={'c.name': 'x'})
    publication.fail('internal', 'a.argument', str(error))
    if error.reason in {'c.compared'}: return
";
        assert_eq!(keys(text, Language::Python), ["a.argument", "a.keyword"]);
    }

    #[test]
    fn both_sides_are_checked() {
        let mut found = Found::default();
        let text = r#"fn f() { invalid(py, "a.raised", ""); other("a.lost"); read("a.file") }"#;
        found.read("lib.rs", text, Language::Rust);
        let document = "| key | what |\n| --- | --- |\n| `a.gone` | x |\n| `a.gone` | y |\n\n| `a.cell` | no key |\n";
        let problems = found.problems(&rows(document), &["a.file", "a.stale"]);
        let starts = [
            "a.raised is raised at lib.rs:1 and has no row",
            "a.gone at docs/errors.md:3 is raised nowhere",
            "a.gone at docs/errors.md:4 is raised nowhere",
            "a.gone at docs/errors.md:4 has a row already",
            "\"a.lost\" at lib.rs:1 looks like a reason key",
            "\"a.stale\" stands in no source",
        ];
        assert_eq!(problems.len(), starts.len(), "{problems:#?}");
        for (problem, start) in problems.iter().zip(starts) {
            assert!(problem.starts_with(start), "{problem}");
        }
    }

    #[test]
    fn the_form_of_a_key_is_exact() {
        assert!(is_key("server.run_dir") && is_key("queue.full") && is_key("some_store.full"));
        for other in ["server", "a.b.c", "log.1", "A.b", "a._b", "a.b_", ".a", "a.", "a b.c"] {
            assert!(!is_key(other), "{other}");
        }
    }
}
