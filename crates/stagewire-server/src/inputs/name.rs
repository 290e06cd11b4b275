use std::fmt;
use std::str::FromStr;

/// What names of inputs begin with: the digest that follows.
const SCHEME: &str = "blake3:";
/// Hexadecimal digits of a digest.
const DIGITS: usize = 64;

/// Name of an input, the BLAKE3 digest of its bytes: `blake3:` and 64 hexadecimal digits in lower case.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct InputName(String);

/// The text is no name of an input.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NoName;

impl InputName {
    /// The name of what has this digest.
    pub(super) fn new(digest: blake3::Hash) -> Self {
        Self(digest.to_hex().to_string())
    }

    /// The name of the file with its bytes. Digits alone: nothing that anybody typed gets into a path.
    pub(super) fn file(&self) -> &str {
        &self.0
    }

    /// The name of what is in a file of this name.
    pub(super) fn from_file(file: &str) -> Option<Self> {
        let digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        (file.len() == DIGITS && file.bytes().all(digit)).then(|| Self(file.to_owned()))
    }

    /// Everything in a text that could be meant as a name.
    pub(super) fn all_in(text: &str) -> impl Iterator<Item = Self> {
        let starts = text.match_indices(SCHEME).map(|(at, scheme)| at + scheme.len());
        starts.filter_map(|start| Self::from_file(text.get(start..start + DIGITS)?))
    }
}

impl fmt::Display for InputName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.0)
    }
}

impl FromStr for InputName {
    type Err = NoName;

    fn from_str(text: &str) -> Result<Self, NoName> {
        let digits = text.strip_prefix(SCHEME).ok_or(NoName)?;
        Self::from_file(digits).ok_or(NoName)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_digests_are_names() {
        let name = InputName::new(blake3::hash(b"a cat"));
        assert_eq!(name.to_string().parse(), Ok(name.clone()));
        let digits = name.file();
        for wrong in [
            digits.to_owned(),
            format!("sha256:{digits}"),
            format!("blake3:{}", digits.to_uppercase()),
            format!("blake3:{}", &digits[1..]),
            format!("blake3:{digits}0"),
            format!("blake3:../{}", &digits[3..]),
            format!("blake3:{}\0", &digits[1..]),
            format!("blake3:/{}", &digits[1..]),
            String::new(),
        ] {
            assert_eq!(wrong.parse::<InputName>(), Err(NoName), "{wrong:?}");
        }
        let text = format!("{{\"image\":\"{name}\",\"prompt\":\"blake3:ü {name}\",\"x\":\"blake3:00\"}}");
        assert_eq!(InputName::all_in(&text).collect::<Vec<_>>(), [name.clone(), name]);
    }
}
