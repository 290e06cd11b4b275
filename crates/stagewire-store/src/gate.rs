use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use stagewire_core::{Classify, ErrorClass, JobId, Token};

/// A write or delete by an attempt that may not act (any more).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum Fenced {
    #[error("attempt {token} was superseded or never granted; stop it")]
    Stale { token: Token },
    #[error("this store takes writes only from granted attempts; the call carries no token")]
    NoToken,
    #[error("attempt {token} may not touch a payload of job {owner}")]
    Foreign { token: Token, owner: JobId },
}

impl Classify for Fenced {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NoToken => ErrorClass::Unauthenticated,
            Self::Stale { .. } | Self::Foreign { .. } => ErrorClass::Fenced,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::NoToken => "token.missing",
            Self::Stale { .. } => "token.stale",
            Self::Foreign { .. } => "token.foreign",
        }
    }
}

/// Decides which attempts may write into a store and delete from it.
///
/// An *open* gate lets everybody pass: there is no orchestrator. A *closed* gate lets exactly those tokens pass that
/// the orchestrator granted and has not revoked.
#[derive(Debug)]
pub struct TokenGate {
    /// `None` is an open gate.
    granted: Option<Mutex<BTreeSet<Token>>>,
}

impl TokenGate {
    /// A gate that lets everybody pass.
    pub const fn open() -> Self {
        Self { granted: None }
    }

    /// A gate that lets nobody pass until [`TokenGate::grant`].
    pub const fn closed() -> Self {
        Self {
            granted: Some(Mutex::new(BTreeSet::new())),
        }
    }

    /// Lets this attempt pass. Nothing to do at an open gate.
    pub fn grant(&self, token: Token) {
        if let Some(granted) = &self.granted {
            granted.lock().unwrap_or_else(PoisonError::into_inner).insert(token);
        }
    }

    /// Lets this attempt pass no more: it has ended or was superseded. Nothing to do at an open gate.
    pub fn revoke(&self, token: Token) {
        if let Some(granted) = &self.granted {
            granted.lock().unwrap_or_else(PoisonError::into_inner).remove(&token);
        }
    }

    /// Whether the bearer of `token` may pass.
    ///
    /// # Errors
    /// [`Fenced::Stale`] and [`Fenced::NoToken`], at a closed gate only.
    pub fn check(&self, token: Option<Token>) -> Result<(), Fenced> {
        let Some(granted) = &self.granted else { return Ok(()) };
        let token = token.ok_or(Fenced::NoToken)?;
        if granted.lock().unwrap_or_else(PoisonError::into_inner).contains(&token) {
            Ok(())
        } else {
            Err(Fenced::Stale { token })
        }
    }
}

/// A payload of one job is not for the attempts of another.
pub(crate) fn same_job(owner: Option<Token>, token: Option<Token>) -> Result<(), Fenced> {
    match (owner, token) {
        (Some(owner), Some(token)) if owner.job != token.job => Err(Fenced::Foreign {
            token,
            owner: owner.job,
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::{Attempt, Epoch};

    use super::*;

    fn token(job: u128, attempt: u32) -> Token {
        Token {
            epoch: Epoch(1),
            job: format!("{job:032x}").parse().expect("an id"),
            attempt: Attempt(attempt),
        }
    }

    #[test]
    fn an_open_gate_lets_everybody_pass() {
        let gate = TokenGate::open();
        assert_eq!(gate.check(None), Ok(()));
        assert_eq!(gate.check(Some(token(1, 1))), Ok(()));
    }

    #[test]
    fn a_closed_gate_lets_granted_attempts_pass_until_they_are_revoked() {
        let gate = TokenGate::closed();
        assert_eq!(gate.check(None), Err(Fenced::NoToken));
        assert_eq!(gate.check(Some(token(1, 1))), Err(Fenced::Stale { token: token(1, 1) }));
        gate.grant(token(1, 1));
        gate.grant(token(1, 2));
        gate.revoke(token(1, 1));
        assert_eq!(gate.check(Some(token(1, 1))), Err(Fenced::Stale { token: token(1, 1) }));
        assert_eq!(
            gate.check(Some(token(1, 2))),
            Ok(()),
            "another stage of the same job goes on"
        );
    }

    #[test]
    fn attempts_keep_to_their_own_job() {
        assert!(same_job(Some(token(1, 1)), Some(token(1, 9))).is_ok());
        assert!(same_job(Some(token(1, 1)), Some(token(2, 1))).is_err());
        assert!(same_job(None, Some(token(2, 1))).is_ok());
    }
}
