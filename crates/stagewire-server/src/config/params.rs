use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Number, Value};
use stagewire_core::{Classify, ErrorClass};
use xxhash_rust::xxh3::xxh3_64;

use crate::inputs::InputName;
use crate::nearest::{did_you_mean, known};

/// Type of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ParamType {
    /// Text of any length that the body limit allows.
    String,
    /// A whole number of 64 bits with sign; `4.0` is not one.
    Integer,
    /// Any finite number.
    Number,
    /// `true` or `false`.
    Boolean,
    /// The name of an input, as the server gave it; or nothing, where the default is nothing.
    Input,
}

impl fmt::Display for ParamType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::String => "a string",
            Self::Integer => "an integer",
            Self::Number => "a number",
            Self::Boolean => "a boolean",
            Self::Input => "the name of an input, such as POST /v1/inputs answers (\"blake3:…\")",
        })
    }
}

/// What a job may give under one name.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ParamSpec {
    /// The type.
    #[serde(rename = "type")]
    pub param_type: ParamType,
    /// What it is for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
    /// Taken where a job does not give it. Without default it must be given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default: Option<Value>,
    /// Lowest value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min: Option<Number>,
    /// Highest value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<Number>,
    /// How long the stages take depends on it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub shape: bool,
}

impl ParamSpec {
    /// Says what is wrong with `value`, if anything.
    pub(super) fn problem(&self, value: &Value) -> Option<String> {
        let wrong_type = || Some(format!("must be {}; got {}", self.param_type, shown(value)));
        match (self.param_type, value) {
            (ParamType::String, Value::String(_)) | (ParamType::Boolean, Value::Bool(_)) => None,
            (ParamType::Input, Value::String(name)) => {
                let none = name.is_empty() && self.default.is_some();
                if none || name.parse::<InputName>().is_ok() {
                    None
                } else {
                    wrong_type()
                }
            }
            (ParamType::Integer, Value::Number(number)) if number.is_i64() => self.out_of_range(number),
            (ParamType::Number, Value::Number(number)) => self.out_of_range(number),
            _ => wrong_type(),
        }
    }

    fn out_of_range(&self, value: &Number) -> Option<String> {
        if self.min.as_ref().is_some_and(|min| less(value, min)) {
            return Some(format!(
                "must be at least {}; got {value}",
                self.min.as_ref().expect("compared above")
            ));
        }
        if self.max.as_ref().is_some_and(|max| less(max, value)) {
            return Some(format!(
                "must be at most {}; got {value}",
                self.max.as_ref().expect("compared above")
            ));
        }
        None
    }
}

/// Compares whole numbers exactly and others as doubles.
pub(super) fn less(a: &Number, b: &Number) -> bool {
    match (a.as_i64(), b.as_i64()) {
        (Some(a), Some(b)) => a < b,
        _ => a.as_f64() < b.as_f64(),
    }
}

/// A value as it may stand in a message: its type, and short ones in full.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => format!("the boolean {value}"),
        Value::Number(value) => format!("the number {value}"),
        Value::String(text) if text.len() <= 40 => format!("the string {text:?}"),
        Value::String(text) => format!("a string of {} bytes", text.len()),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

/// The parameters that jobs of a pipeline may give, by name.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
#[serde(transparent)]
pub struct Params(pub BTreeMap<String, ParamSpec>);

/// What is wrong with the parameters of a job, by parameter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the job's params are not accepted: {}", .problems.iter().map(|(name, problem)| format!("{name} {problem}")).collect::<Vec<_>>().join("; "))]
pub struct ParamsError {
    /// Problem by name of the parameter.
    pub problems: BTreeMap<String, String>,
}

impl Classify for ParamsError {
    fn class(&self) -> ErrorClass {
        ErrorClass::Invalid
    }

    fn reason(&self) -> &'static str {
        "job.params"
    }

    fn details(&self) -> BTreeMap<String, String> {
        self.problems.clone()
    }
}

/// Longest name that a message repeats.
const SHOWN_NAME: usize = 64;
/// Problems after which no more are looked for.
const MOST_PROBLEMS: usize = 32;

impl Params {
    /// Checks what a job gives and adds the defaults. The model itself judges the rest.
    ///
    /// # Errors
    /// [`ParamsError`] with every unknown, missing, wrongly typed and out-of-range parameter, up to some tens of them.
    pub fn check(&self, mut given: Map<String, Value>) -> Result<Map<String, Value>, ParamsError> {
        let mut problems = BTreeMap::new();
        for (name, value) in &given {
            if problems.len() == MOST_PROBLEMS {
                break;
            }
            let problem = match self.0.get(name) {
                Some(spec) => spec.problem(value),
                None => Some(self.unknown(name)),
            };
            if let Some(problem) = problem {
                problems.insert(name.chars().take(SHOWN_NAME).collect(), problem);
            }
        }
        for (name, spec) in &self.0 {
            if given.contains_key(name) {
                continue;
            }
            match &spec.default {
                Some(default) => drop(given.insert(name.clone(), default.clone())),
                None => drop(problems.insert(name.clone(), format!("is missing; it must be {}", spec.param_type))),
            }
        }
        if problems.is_empty() {
            Ok(given)
        } else {
            Err(ParamsError { problems })
        }
    }

    /// A number for the values of the parameters that the time of the stages depends on, out of all that a job has: what
    /// has the same number is predicted to take as long.
    pub(crate) fn shape(&self, given: &Map<String, Value>) -> u64 {
        let shape = self.0.iter().filter(|(_, spec)| spec.shape);
        let values: Map<String, Value> = shape
            .filter_map(|(name, _)| Some((name.clone(), given.get(name)?.clone())))
            .collect();
        if values.is_empty() {
            return 0;
        }
        xxh3_64(Value::Object(values).to_string().as_bytes())
    }

    /// Names of the parameters that are inputs.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &String> {
        let inputs = self.0.iter().filter(|(_, spec)| spec.param_type == ParamType::Input);
        inputs.map(|(name, _)| name)
    }

    fn unknown(&self, name: &str) -> String {
        let names = || self.0.keys().map(String::as_str);
        let mut hint = did_you_mean(name, names());
        if hint.is_empty() {
            hint = known(name, "it has", names());
        }
        format!("is not a parameter of this pipeline{hint}")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn params() -> Params {
        let spec = |param_type, default: Option<Value>, min: Option<i64>, max: Option<i64>| ParamSpec {
            param_type,
            help: None,
            default,
            min: min.map(Into::into),
            max: max.map(Into::into),
            shape: false,
        };
        Params(BTreeMap::from([
            ("prompt".to_owned(), spec(ParamType::String, None, None, None)),
            (
                "steps".to_owned(),
                spec(ParamType::Integer, Some(json!(4)), Some(1), Some(100)),
            ),
            (
                "scale".to_owned(),
                spec(ParamType::Number, Some(json!(5.0)), Some(0), None),
            ),
            (
                "loop".to_owned(),
                spec(ParamType::Boolean, Some(json!(false)), None, None),
            ),
        ]))
    }

    fn check(given: Value) -> Result<Value, BTreeMap<String, String>> {
        let Value::Object(given) = given else { unreachable!() };
        params().check(given).map(Value::Object).map_err(|error| error.problems)
    }

    #[test]
    fn defaults_are_added_and_given_values_kept() {
        let all = check(json!({"prompt": "a red cat", "scale": 1})).unwrap();
        assert_eq!(
            all,
            json!({"prompt": "a red cat", "steps": 4, "scale": 1, "loop": false})
        );
    }

    #[test]
    fn jobs_of_one_shape_have_the_same_number() {
        let mut params = params();
        params.0.get_mut("steps").unwrap().shape = true;
        let shape = |given: Value| params.shape(&params.check(given.as_object().unwrap().clone()).unwrap());
        let four = shape(json!({"prompt": "a red cat"}));
        assert_eq!(shape(json!({"prompt": "a blue dog", "steps": 4, "scale": 2})), four);
        assert_ne!(shape(json!({"prompt": "a red cat", "steps": 8})), four);
    }

    #[test]
    fn every_problem_is_named() {
        let problems = check(json!({"promt": "x", "steps": 0, "scale": "5", "loop": 1})).unwrap_err();
        assert_eq!(
            problems["promt"],
            "is not a parameter of this pipeline; did you mean \"prompt\"?"
        );
        assert_eq!(problems["prompt"], "is missing; it must be a string");
        assert_eq!(problems["steps"], "must be at least 1; got 0");
        assert_eq!(problems["scale"], "must be a number; got the string \"5\"");
        assert_eq!(problems["loop"], "must be a boolean; got the number 1");
        for (wrong, problem) in [
            (json!(101), "must be at most 100; got 101"),
            (json!(4.0), "must be an integer; got the number 4.0"),
            (
                json!(u64::MAX),
                "must be an integer; got the number 18446744073709551615",
            ),
            (json!(null), "must be an integer; got null"),
        ] {
            let problems = check(json!({"prompt": "x", "steps": wrong})).unwrap_err();
            assert_eq!(problems["steps"], problem);
        }
    }

    #[test]
    fn hostile_names_and_values_stay_short_in_messages() {
        let given = Map::from_iter([
            ("x".repeat(100_000), json!(1)),
            ("steps".to_owned(), json!("y".repeat(100_000))),
        ]);
        let error = params().check(given).unwrap_err();
        assert!(error.to_string().len() < 1000, "{} bytes", error.to_string().len());
        let given = Map::from_iter((0..100_000).map(|n| (format!("x{n}"), json!(1))));
        let error = params().check(given).unwrap_err();
        assert!(error.to_string().len() < 10_000, "{} bytes", error.to_string().len());
    }
}
