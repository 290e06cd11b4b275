//! The OpenAPI document against what the server really answers: every answer that a test gets goes through here.

use std::sync::LazyLock;

use reqwest::StatusCode;
use serde_json::Value;

use crate::site::Site;

static DOCUMENT: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../src/http/openapi.json")).unwrap());

/// Holds an answer to the document, where that has the route and the method.
///
/// # Panics
/// Where the status is not documented, or the body is not as documented.
pub(crate) fn check(method: &str, path: &str, status: StatusCode, body: &Value) {
    let Some(operation) = operation(path).and_then(|methods| methods.get(method.to_ascii_lowercase())) else {
        return;
    };
    let place = format!("{method} {path}: {}", status.as_u16());
    let response = operation["responses"].get(status.as_str());
    let response = resolve(response.unwrap_or_else(|| panic!("{place} is not documented: {body}")));
    let Some(schema) = response.pointer("/content/application~1json/schema") else {
        return;
    };
    // The one status with two meanings: not ready yet, and stopping.
    if path == "/readyz" && body.get("error").is_some() {
        return;
    }
    if let Err(problem) = validate(schema, body) {
        panic!("{place} is not as documented: {problem} in {body}");
    }
}

/// The operations of the route that a path is of.
fn operation(path: &str) -> Option<&'static Value> {
    let path = path.split('?').next().unwrap_or_default();
    let matches = |route: &str| {
        let (route, path) = (route.split('/'), path.split('/'));
        route.clone().count() == path.clone().count()
            && route
                .zip(path)
                .all(|(route, path)| route == path || route.starts_with('{'))
    };
    let paths = DOCUMENT["paths"].as_object().unwrap();
    paths
        .iter()
        .find(|(route, _)| matches(route))
        .map(|(_, methods)| methods)
}

fn resolve(value: &'static Value) -> &'static Value {
    match value.get("$ref").and_then(Value::as_str) {
        Some(target) => DOCUMENT.pointer(target.trim_start_matches('#')).unwrap(),
        None => value,
    }
}

/// The parts of JSON Schema that the document uses; members that it does not name are a problem, too.
fn validate(schema: &'static Value, value: &Value) -> Result<(), String> {
    let schema = resolve(schema);
    if let Some(choices) = schema["oneOf"].as_array() {
        let fitting = choices.iter().filter(|choice| validate(choice, value).is_ok()).count();
        return if fitting == 1 {
            Ok(())
        } else {
            Err(format!("{value} is {fitting} of {choices:?}"))
        };
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one.as_str()],
        Value::Array(several) => several.iter().filter_map(Value::as_str).collect(),
        _ => return Ok(()),
    };
    if !types.iter().any(|name| is(name, value)) {
        return Err(format!("{value} is no {}", types.join(" or ")));
    }
    if let Some(allowed) = schema["enum"].as_array()
        && !allowed.contains(value)
        && !value.is_null()
    {
        return Err(format!("{value} is none of {allowed:?}"));
    }
    match value {
        Value::Array(items) => {
            for item in items {
                validate(&schema["items"], item)?;
            }
        }
        Value::Object(members) => {
            let Some(known) = schema["properties"].as_object() else {
                let each = schema.get("additionalProperties");
                return members
                    .values()
                    .try_for_each(|member| each.map_or(Ok(()), |each| validate(each, member)));
            };
            for required in schema["required"].as_array().into_iter().flatten() {
                let required = required.as_str().unwrap();
                if !members.contains_key(required) {
                    return Err(format!("{required} is missing"));
                }
            }
            for (name, member) in members {
                match known.get(name) {
                    Some(schema) => validate(schema, member).map_err(|problem| format!("{name}: {problem}"))?,
                    None => return Err(format!("{name} is not documented")),
                }
            }
        }
        _ => {}
    }
    Ok(())
}

fn is(name: &str, value: &Value) -> bool {
    match name {
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "null" => value.is_null(),
        other => panic!("the document has a type {other}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_tells_its_api() {
    let site = Site::new();
    let api = site.start().await;
    let (status, told) = api.get("/v1/openapi.json").await;
    assert_eq!((status, &told["openapi"]), (StatusCode::OK, &"3.1.0".into()));
    assert_eq!(told["info"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(told["paths"], DOCUMENT["paths"]);
    api.stop().await;
}

#[test]
fn what_is_not_documented_is_found() {
    let check = |status: u16, body: Value| {
        let status = StatusCode::from_u16(status).unwrap();
        std::panic::catch_unwind(|| check("GET", "/v1/jobs?limit=1", status, &body)).is_ok()
    };
    assert!(check(200, serde_json::json!({"jobs": [], "next": null})));
    assert!(!check(200, serde_json::json!({"jobs": []})));
    assert!(!check(200, serde_json::json!({"jobs": [], "next": 7})));
    assert!(!check(200, serde_json::json!({"jobs": [{}], "next": null})));
    assert!(!check(200, serde_json::json!({"jobs": [], "next": null, "more": 1})));
    assert!(!check(418, serde_json::json!({})));

    let waiting = DOCUMENT.pointer("/components/schemas/Waiting").unwrap();
    let good = serde_json::json!({"class": "batch", "cause": "slot", "message": "", "waited_ns": 1, "declined": null});
    let with = |name: &str, value: Value| {
        let mut waits = good.clone();
        waits[name] = value;
        validate(waiting, &waits).is_ok()
    };
    assert!(with("paused", 1.into()) && with("dropped_in_ns", 7.into()));
    assert!(!with("paused", "1".into()) && !with("held_up", 1.into()));
    assert!(!with("cause", "boredom".into()) && !with("declined", serde_json::json!({"class": "invalid"})));
    for name in ["class", "cause", "message", "waited_ns"] {
        let mut waits = good.clone();
        waits.as_object_mut().unwrap().remove(name);
        assert!(validate(waiting, &waits).is_err(), "{name} is missing");
    }
}
