//! "Did you mean": the known name that is closest to one that nobody knows.

/// The option closest to `word`, where one is close enough to be what was meant.
pub(crate) fn nearest<'a>(word: &str, options: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |text: &str| text.to_lowercase().replace('_', "-");
    let word = plain(word);
    options
        .into_iter()
        .map(|option| (strsim::jaro_winkler(&word, &plain(option)), option))
        .filter(|(score, _)| *score >= 0.78)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, option)| option)
}

/// `; did you mean "x"?` or nothing, to be put after a message.
pub(crate) fn did_you_mean<'a>(word: &str, options: impl IntoIterator<Item = &'a str>) -> String {
    nearest(word, options).map_or_else(String::new, |option| format!("; did you mean {option:?}?"))
}

/// The same, and all that there is: `; did you mean "x"? It has: x, y`, or `; it has: x, y`.
pub(crate) fn known<'a>(word: &str, it_has: &str, options: impl IntoIterator<Item = &'a str> + Clone) -> String {
    let hint = did_you_mean(word, options.clone());
    let list = options.into_iter().collect::<Vec<_>>().join(", ");
    match it_has.split_at_checked(1) {
        Some((first, rest)) if !hint.is_empty() => format!("{hint} {}{rest}: {list}", first.to_uppercase()),
        _ => format!("; {it_has}: {list}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_was_meant_and_nothing_else() {
        let keys = ["max-held", "max-attempts", "no-progress", "name"];
        assert_eq!(nearest("max-hold", keys), Some("max-held"));
        assert_eq!(nearest("max_attempts", keys), Some("max-attempts"));
        assert_eq!(nearest("noprogress", keys), Some("no-progress"));
        assert_eq!(nearest("colour", keys), None);
        assert_eq!(nearest("", keys), None);
    }

    #[test]
    fn what_there_is_is_named_in_either_case() {
        assert_eq!(
            known("encoder", "it has", ["encode", "decode"]),
            "; did you mean \"encode\"? It has: encode, decode"
        );
        assert_eq!(known("x", "it has", ["encode", "decode"]), "; it has: encode, decode");
    }
}
