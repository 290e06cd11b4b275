use serde_json::{Map, Value};

use crate::client::{ParamSpec, Pipeline};
use crate::exit::Fault;

/// The parameters of a job, with the types that the pipeline declares. What the server would refuse is left to it.
pub(super) fn collect(
    prompt: Option<String>,
    given: &[String],
    pipeline: &Pipeline,
) -> Result<Map<String, Value>, Fault> {
    let mut params = Map::new();
    if let Some(prompt) = prompt {
        params.insert("prompt".to_owned(), Value::String(prompt));
    }
    for param in given {
        let Some((name, text)) = param.split_once('=') else {
            return Err(Fault::usage(format!(
                "--param {param:?} must be NAME=VALUE, such as steps=8"
            )));
        };
        let value = typed(name, text, pipeline.params.get(name))?;
        if params.insert(name.to_owned(), value).is_some() {
            return Err(Fault::usage(format!("the parameter {name:?} is given twice")));
        }
    }
    Ok(params)
}

fn typed(name: &str, text: &str, spec: Option<&ParamSpec>) -> Result<Value, Fault> {
    let declared = spec.map_or("string", |spec| spec.kind.as_str());
    let value = match declared {
        "integer" => text.parse::<i64>().ok().map(Value::from),
        "number" => text
            .parse::<f64>()
            .ok()
            .and_then(serde_json::Number::from_f64)
            .map(Value::from),
        "boolean" => text.parse::<bool>().ok().map(Value::from),
        _ => Some(Value::String(text.to_owned())),
    };
    value.ok_or_else(|| {
        Fault::usage(format!(
            "--param {name}={text}: {name} is {} {declared}",
            article(declared)
        ))
    })
}

fn article(word: &str) -> &'static str {
    if word.starts_with(['a', 'e', 'i', 'o', 'u']) {
        "an"
    } else {
        "a"
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pipeline() -> Pipeline {
        serde_json::from_value(json!({
            "name": "wan", "ready": true, "stages": [], "workers": [],
            "params": {
                "prompt": {"type": "string"}, "steps": {"type": "integer"},
                "scale": {"type": "number"}, "tiled": {"type": "boolean"},
            },
        }))
        .unwrap()
    }

    #[test]
    fn values_get_the_declared_types() {
        let given = ["steps=8", "scale=2", "tiled=true", "other=9"].map(str::to_owned);
        let params = collect(Some("1".to_owned()), &given, &pipeline()).unwrap();
        assert_eq!(
            Value::Object(params),
            json!({"prompt": "1", "steps": 8, "scale": 2.0, "tiled": true, "other": "9"})
        );
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let refused = |given: &[&str]| {
            let given: Vec<String> = given.iter().map(|text| (*text).to_owned()).collect();
            collect(Some("x".to_owned()), &given, &pipeline())
                .unwrap_err()
                .error
                .to_string()
        };
        assert_eq!(refused(&["steps=many"]), "--param steps=many: steps is an integer");
        assert_eq!(refused(&["tiled=yes"]), "--param tiled=yes: tiled is a boolean");
        assert_eq!(
            refused(&["steps"]),
            "--param \"steps\" must be NAME=VALUE, such as steps=8"
        );
        assert_eq!(refused(&["prompt=y"]), "the parameter \"prompt\" is given twice");
    }
}
