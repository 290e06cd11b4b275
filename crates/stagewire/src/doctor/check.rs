use serde::Serialize;
use serde_json::{Map, Value};

/// How one thing stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// There, and as Stagewire wants it.
    Ok,
    /// There, with a limit or at a cost.
    Note,
    /// Not there: what needs it cannot be used.
    Missing,
    /// It could not be found out.
    Unknown,
}

impl State {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Missing => "missing",
            Self::Unknown => "unknown",
        }
    }
}

/// What a probe found out about one thing.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) state: State,
    /// What was found, for people.
    pub(crate) value: String,
    /// Why it is not ok.
    pub(crate) why: Option<String>,
    /// What to do about it.
    #[serde(rename = "do")]
    pub(crate) advice: Option<String>,
    /// What was found, for programs. Quantities are in the unit that the key ends with.
    pub(crate) data: Map<String, Value>,
}

impl Check {
    pub(crate) fn ok(name: &'static str, value: impl Into<String>) -> Self {
        Self {
            name,
            state: State::Ok,
            value: value.into(),
            why: None,
            advice: None,
            data: Map::new(),
        }
    }

    pub(crate) fn note(
        name: &'static str,
        value: impl Into<String>,
        why: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self::ok(name, value).but(State::Note, why, advice)
    }

    pub(crate) fn missing(
        name: &'static str,
        value: impl Into<String>,
        why: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self::ok(name, value).but(State::Missing, why, advice)
    }

    pub(crate) fn unknown(name: &'static str, why: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::ok(name, "cannot be told").but(State::Unknown, why, advice)
    }

    /// The same, standing worse.
    pub(crate) fn but(self, state: State, why: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            state,
            why: Some(why.into()),
            advice: Some(advice.into()),
            ..self
        }
    }

    /// The same with one more datum.
    pub(crate) fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.data.insert(key.to_owned(), value.into());
        self
    }
}
