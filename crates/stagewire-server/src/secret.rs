//! Tokens that are compared and never shown.

use std::fmt;

use subtle::ConstantTimeEq;

/// A bearer token. `Debug` hides it.
#[derive(Clone)]
pub(crate) struct Secret(String);

/// What somebody showed for a [`Secret`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shown {
    Right,
    Wrong,
    Nothing,
}

impl Secret {
    pub(crate) const fn new(token: String) -> Self {
        Self(token)
    }

    /// Judges the value of an `authorization` header, in a time that does not depend on where it differs.
    pub(crate) fn judge(&self, authorization: Option<&[u8]>) -> Shown {
        match authorization.and_then(|value| value.strip_prefix(b"Bearer ")) {
            None => Shown::Nothing,
            Some(token) if token.ct_eq(self.0.as_bytes()).into() => Shown::Right,
            Some(_) => Shown::Wrong,
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(redacted)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_itself_is_right() {
        let secret = Secret::new("0123456789abcdef".to_owned());
        assert_eq!(secret.judge(Some(b"Bearer 0123456789abcdef")), Shown::Right);
        for wrong in [
            "Bearer ",
            "Bearer 0123456789abcde",
            "Bearer 0123456789abcdef0",
            "Bearer 0123456789abcdeg",
        ] {
            assert_eq!(secret.judge(Some(wrong.as_bytes())), Shown::Wrong, "{wrong:?}");
        }
        for nothing in [None, Some("0123456789abcdef"), Some("Basic 0123456789abcdef")] {
            assert_eq!(secret.judge(nothing.map(str::as_bytes)), Shown::Nothing);
        }
        assert_eq!(format!("{secret:?}"), "Secret(redacted)");
    }
}
