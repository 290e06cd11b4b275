use std::fmt;

/// How the metadata of an agent begin: with its name, in the format of the NIXL that is loaded here.
///
/// NIXL takes metadata in under whatever name they carry, and says only then which it was: by then they are among what it
/// knows of that other agent. So the name is compared first.
#[derive(Debug, Clone)]
pub(super) struct Heading {
    before: Vec<u8>,
    name_len: usize,
}

impl Heading {
    /// Learnt from the metadata of an agent of this process. `None` where they do not carry its name.
    pub(super) fn of(metadata: &[u8], name: &str) -> Option<Self> {
        let at = metadata
            .windows(name.len())
            .position(|window| window == name.as_bytes())?;
        Some(Self {
            before: metadata[..at].to_vec(),
            name_len: name.len(),
        })
    }

    /// Checks that metadata are those of the agent with this name. Names of another length than that of this process's
    /// agent never fit: the length, too, stands before the name.
    pub(super) fn check(&self, metadata: &[u8], name: &str) -> Result<(), OfAnother> {
        let found = metadata.strip_prefix(&*self.before).unwrap_or_default();
        let found = &found[..found.len().min(self.name_len)];
        if found == name.as_bytes() {
            return Ok(());
        }
        Err(OfAnother {
            found: String::from_utf8_lossy(found).into_owned(),
            expected: name.to_owned(),
        })
    }
}

/// Metadata carry another name than that of the agent that sent them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OfAnother {
    found: String,
    expected: String,
}

impl fmt::Display for OfAnother {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { found, expected } = self;
        write!(
            f,
            "its metadata are those of the agent {found:?} instead of {expected:?}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Metadata as NIXL 1.5 writes them.
    fn metadata(name: &str) -> Vec<u8> {
        let mut bytes = b"nixlSerDes|Agent".to_vec();
        bytes.extend_from_slice(&(name.len() as u64).to_le_bytes());
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend_from_slice(b"|Conns\x08\0\0\0\0\0\0\0");
        bytes
    }

    #[test]
    fn metadata_go_by_the_name_that_they_carry() {
        let heading = Heading::of(&metadata("agent-1"), "agent-1").expect("its own name");
        assert_eq!(heading.check(&metadata("agent-2"), "agent-2"), Ok(()));
        for (carried, expected) in [
            ("agent-3", "agent-2"),
            ("agent-22", "agent-2"),
            ("agent-2", "agent-22"),
            ("", "agent-2"),
        ] {
            let refused = heading.check(&metadata(carried), expected).expect_err("of another");
            assert!(refused.to_string().contains(&format!("{expected:?}")), "{refused}");
        }
        for malformed in [&b""[..], b"agent-2", b"nixlSerDes|Agent", &metadata("agent-2")[..20]] {
            heading.check(malformed, "agent-2").expect_err("not its name");
        }
        assert!(Heading::of(b"nixlSerDes|", "agent-1").is_none());
    }
}
