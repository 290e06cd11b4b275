use std::fmt;

use stagewire_core::Incarnation;

use crate::wire::Challenge;

/// What all processes of a deployment know, and nobody else. Never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Keeps it.
    pub fn new(secret: impl Into<String>) -> Self {
        Self(secret.into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Keeps the hash of this purpose apart from any other use of the same secret.
const CONTEXT: &str = "stagewire data plane: proof of the deployment's token, version 2";

/// Proves and checks that a reader has the token, without sending it.
///
/// The proof is BLAKE3, keyed with the token, of the owner's nonce and the incarnation that the reader expects. So it is
/// good for one connection to one process. It does not hide what follows, nor protect it against change on the way.
#[derive(Clone)]
pub(crate) struct Key([u8; 32]);

impl Key {
    pub(crate) fn new(secret: &Secret) -> Self {
        Self(blake3::derive_key(CONTEXT, secret.0.as_bytes()))
    }

    fn hash(&self, challenge: &Challenge, expects: Incarnation) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&challenge.nonce);
        hasher.update(expects.0.as_bytes());
        hasher.finalize()
    }

    pub(crate) fn prove(&self, challenge: &Challenge, expects: Incarnation) -> [u8; 32] {
        *self.hash(challenge, expects).as_bytes()
    }

    /// Takes the same time for any proof.
    pub(crate) fn accepts(&self, challenge: &Challenge, expects: Incarnation, proof: &[u8; 32]) -> bool {
        // `blake3::Hash` compares in constant time.
        self.hash(challenge, expects) == blake3::Hash::from_bytes(*proof)
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_proof_is_good_for_one_token_one_nonce_and_one_process() {
        let key = Key::new(&Secret::new("a"));
        let (challenge, expects) = (Challenge { nonce: [1; 32] }, Incarnation(Uuid::from_u128(1)));
        let proof = key.prove(&challenge, expects);
        assert!(key.accepts(&challenge, expects, &proof));
        assert!(!key.accepts(&Challenge { nonce: [2; 32] }, expects, &proof));
        assert!(!key.accepts(&challenge, Incarnation(Uuid::from_u128(2)), &proof));
        assert!(!Key::new(&Secret::new("b")).accepts(&challenge, expects, &proof));
        assert!(!format!("{:?}", Secret::new("hidden")).contains("hidden"));
    }
}
