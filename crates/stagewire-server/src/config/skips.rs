use serde_json::{Map, Value};
use stagewire_core::StageName;

/// Which stages a job does not need, by its parameters: `skip-if` of the stages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Skips(pub(super) Vec<(StageName, String)>);

impl Skips {
    /// The stages that a job with these parameters skips. Defaults count as well as what was given.
    pub(crate) fn of(&self, params: &Map<String, Value>) -> Vec<StageName> {
        let skips = |param: &String| match params.get(param) {
            Some(Value::Bool(value)) => *value,
            Some(Value::String(value)) => !value.is_empty(),
            _ => false,
        };
        let skipped = self.0.iter().filter(|(_, param)| skips(param));
        skipped.map(|(stage, _)| stage.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_given_or_true_skips() {
        let stage = StageName::new("encode").unwrap();
        let skips = Skips(vec![(stage.clone(), "embeds".to_owned())]);
        for (value, skipped) in [
            (json!("blake3:00"), true),
            (json!(true), true),
            (json!(""), false),
            (json!(false), false),
        ] {
            let params = Map::from_iter([("embeds".to_owned(), value.clone()), ("other".to_owned(), json!(true))]);
            let expected: Vec<_> = skipped.then(|| stage.clone()).into_iter().collect();
            assert_eq!(skips.of(&params), expected, "{value}");
        }
    }
}
