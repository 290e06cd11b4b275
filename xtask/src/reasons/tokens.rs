//! Cuts Rust and Python into words, literals and marks: as much of either language as finding reason keys takes.

use std::path::Path;

/// Which language a source is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Language {
    Rust,
    Python,
}

impl Language {
    pub(super) fn of(path: &Path) -> Self {
        match path.extension() {
            Some(ext) if ext == "py" => Self::Python,
            _ => Self::Rust,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A name or a number.
    Word,
    /// A string, as it is written between its quotes.
    Literal,
    /// One character of punctuation.
    Mark,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) kind: Kind,
    text: String,
    pub(super) line: usize,
}

impl Token {
    /// Whether it is this word or mark.
    pub(super) fn is(&self, text: &str) -> bool {
        self.kind != Kind::Literal && self.text == text
    }

    /// The text of a string; empty for everything else.
    pub(super) fn literal(&self) -> &str {
        if self.kind == Kind::Literal { &self.text } else { "" }
    }
}

/// All tokens without comments. Docstrings are literals.
pub(super) fn tokens(text: &str, language: Language) -> Vec<Token> {
    let mut found: Vec<Token> = Vec::new();
    let (mut rest, mut line) = (text, 1);
    while let Some(first) = rest.chars().next() {
        let (len, kind, inner) = match first {
            _ if first.is_whitespace() => (first.len_utf8(), None, 0..0),
            '/' if language == Language::Rust && rest.starts_with("//") => (to_end_of_line(rest), None, 0..0),
            '/' if language == Language::Rust && rest.starts_with("/*") => (comment(rest), None, 0..0),
            '#' if language == Language::Python => (to_end_of_line(rest), None, 0..0),
            '\'' if language == Language::Rust => (character(rest), None, 0..0),
            '"' | '\'' => {
                let (len, quotes) = quoted(rest, language);
                (len, Some(Kind::Literal), quotes..len.saturating_sub(quotes))
            }
            'r' | 'b' | 'c' if language == Language::Rust && raw(rest).is_some() => {
                let (len, before, after) = raw(rest).unwrap_or_default();
                (len, Some(Kind::Literal), before..len.saturating_sub(after))
            }
            _ if first == '_' || first.is_alphanumeric() => {
                let len = rest
                    .find(|c: char| c != '_' && !c.is_alphanumeric())
                    .unwrap_or(rest.len());
                (len, Some(Kind::Word), 0..len)
            }
            _ => (first.len_utf8(), Some(Kind::Mark), 0..first.len_utf8()),
        };
        let (taken, after) = rest.split_at(len);
        if let Some(kind) = kind {
            let text = taken.get(inner).unwrap_or_default().to_owned();
            found.push(Token { kind, text, line });
        }
        line += taken.matches('\n').count();
        rest = after;
    }
    found
}

fn to_end_of_line(text: &str) -> usize {
    text.find('\n').unwrap_or(text.len())
}

/// Length of a block comment, which may hold others.
fn comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        let rest = &text[at..];
        if rest.starts_with("/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest.starts_with("*/") {
            (depth, at) = (depth - 1, at + 2);
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

/// Length of a character literal, or of the quote of a lifetime.
fn character(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), Some((at, escaped))) => {
            let at = at + escaped.len_utf8();
            text[at..].find('\'').map_or(text.len(), |end| at + end + 1)
        }
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 1,
    }
}

/// Length of a string with escapes, and number of its quotes on either side.
fn quoted(text: &str, language: Language) -> (usize, usize) {
    let quote = &text[..1];
    let triple = quote.repeat(3);
    let quotes = if language == Language::Python && text.starts_with(&triple) {
        triple.as_str()
    } else {
        quote
    };
    let mut at = quotes.len();
    while at < text.len() {
        let rest = &text[at..];
        if rest.starts_with(quotes) {
            return (at + quotes.len(), quotes.len());
        }
        let escaped = rest.strip_prefix('\\').and_then(|rest| rest.chars().next());
        at += escaped.map_or_else(
            || rest.chars().next().map_or(1, char::len_utf8),
            |escaped| 1 + escaped.len_utf8(),
        );
    }
    (text.len(), quotes.len())
}

/// Lengths of a raw string of Rust, of what stands before its text, and of what stands behind it.
fn raw(text: &str) -> Option<(usize, usize, usize)> {
    let rest = text.strip_prefix(['b', 'c']).unwrap_or(text).strip_prefix('r')?;
    let hashes = rest.len() - rest.trim_start_matches('#').len();
    rest[hashes..].strip_prefix('"')?;
    let before = text.len() - rest.len() + hashes + 1;
    let end = format!("\"{}", "#".repeat(hashes));
    let len = text[before..].find(&end)? + before + end.len();
    Some((len, before, end.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str, language: Language) -> Vec<(String, usize)> {
        let tokens = tokens(text, language).into_iter();
        tokens.map(|token| (token.text, token.line)).collect()
    }

    #[test]
    fn rust_is_cut() {
        let text = "/* \"a\" /* */ */ f(\"b\\\"c\", r#\"d\"e\"#, 'x', '\"', '\\'', &'a str) // \"no\"\ng";
        let found: Vec<_> = shown(text, Language::Rust).into_iter().map(|(text, _)| text).collect();
        let expected = [
            "f", "(", "b\\\"c", ",", "d\"e", ",", ",", ",", ",", "&", "a", "str", ")", "g",
        ];
        assert_eq!(found, expected);
        assert_eq!(shown(text, Language::Rust).last(), Some(&("g".to_owned(), 2)));
    }

    #[test]
    fn python_is_cut() {
        let text = "x = f'a' # 'no'\n\"\"\"b\n'c'\"\"\"\ny('d')";
        let found = shown(text, Language::Python);
        let words: Vec<_> = found.iter().map(|(text, line)| (text.as_str(), *line)).collect();
        let expected = [
            ("x", 1),
            ("=", 1),
            ("f", 1),
            ("a", 1),
            ("b\n'c'", 2),
            ("y", 4),
            ("(", 4),
            ("d", 4),
            (")", 4),
        ];
        assert_eq!(words, expected);
    }
}
