/// The text in lines of at most `width` columns, broken at spaces; a word that is longer has a line of its own.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("never empty");
        let taken = console::measure_text_width(line);
        if taken > 0 && taken + 1 + console::measure_text_width(word) > width {
            lines.push(word.to_owned());
            continue;
        }
        if taken > 0 {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_at_spaces() {
        assert_eq!(wrap("a bc def", 4), ["a bc", "def"]);
        assert_eq!(wrap("a /a/long/path b", 5), ["a", "/a/long/path", "b"]);
        assert_eq!(wrap("", 5), [""]);
    }
}
