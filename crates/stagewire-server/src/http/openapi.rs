//! The API as an OpenAPI document: `openapi.json` beside this file, kept by hand and held to what is true by tests.

use std::sync::LazyLock;

use axum::http::header;
use axum::response::IntoResponse;

static DOCUMENT: LazyLock<String> =
    LazyLock::new(|| include_str!("openapi.json").replace("@VERSION@", env!("CARGO_PKG_VERSION")));

pub(super) async fn show() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT.as_str())
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use serde_json::Value;

    use super::*;

    /// Those of OpenAPI, under the names that axum has for them.
    const METHODS: [&str; 8] = ["get", "put", "post", "delete", "options", "head", "patch", "trace"];

    fn document() -> Value {
        serde_json::from_str(&DOCUMENT).unwrap()
    }

    /// Path and method of every operation, with its statuses.
    fn operations() -> BTreeMap<(String, String), BTreeSet<String>> {
        let mut operations = BTreeMap::new();
        for (path, methods) in document()["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                let statuses = operation["responses"].as_object().unwrap().keys().cloned().collect();
                operations.insert((path.clone(), method.clone()), statuses);
            }
        }
        operations
    }

    #[test]
    fn it_has_every_route_and_no_other() {
        // The router does not tell its routes; its source does.
        let source = include_str!("../http.rs");
        let mut routes = BTreeSet::new();
        for line in source.lines().filter_map(|line| line.trim().strip_prefix(".route(\"")) {
            let (path, handlers) = line.split_once("\", ").unwrap();
            let calls = handlers.split('(').filter_map(|before| {
                let name = before.rsplit(|c: char| !c.is_ascii_alphanumeric() && c != '_').next()?;
                (!name.is_empty()).then_some(name)
            });
            for method in calls {
                assert!(
                    METHODS.contains(&method),
                    "{method} of {path} is no method that is known here"
                );
                routes.insert((path.to_owned(), method.to_owned()));
            }
        }
        assert!(routes.len() > 10, "the source is read: {routes:?}");
        assert_eq!(operations().into_keys().collect::<BTreeSet<_>>(), routes);
        for (path, _) in routes {
            assert_eq!(
                super::super::route(&path.replace(['{', '}'], "")),
                path,
                "its name in metrics"
            );
        }
    }

    #[test]
    fn it_has_every_error_that_the_guide_tells_of() {
        let operations = operations();
        let guide = include_str!("../../../../docs/http.md");
        let mut seen = 0;
        for section in guide.split("\n## ").skip(1) {
            let told: BTreeSet<&str> = section
                .split(|c: char| !c.is_ascii_alphanumeric())
                .filter(|word| word.len() == 3 && matches!(word.as_bytes(), [b'4' | b'5', b'0'..=b'9', b'0'..=b'9']))
                .filter(|status| {
                    let text = |before: &str, after: &str| section.contains(&format!("{before}{status}{after}"));
                    text("| ", " |") || text("", " `")
                })
                .collect();
            let paths = section.split('`').filter_map(|code| {
                let (method, path) = code.split_once(' ')?;
                let path = path.split('?').next()?;
                Some((path.to_owned(), method.to_ascii_lowercase()))
            });
            let known: BTreeSet<&String> = paths
                .filter_map(|operation| operations.get(&operation))
                .flatten()
                .collect();
            for status in told {
                if known.is_empty() {
                    continue;
                }
                seen += 1;
                let section = section.lines().next().unwrap();
                assert!(known.contains(&status.to_owned()), "{status} of {section:?} is missing");
            }
        }
        assert!(seen > 15, "the guide is read: {seen}");
    }

    #[test]
    fn it_has_every_cause_of_waiting_with_its_numbers() {
        let document = document();
        let waiting = &document["components"]["schemas"]["Waiting"]["properties"];
        let causes = waiting["cause"]["enum"].as_array().unwrap();
        let guide = include_str!("../../../../docs/http.md");
        let (_, table) = guide.split_once("| `cause` |").unwrap();
        let (table, _) = table.split_once("\n\n").unwrap();
        let mut told = BTreeSet::new();
        for row in table.lines().skip(2) {
            let cells: Vec<&str> = row.split('|').collect();
            let code = |cell: &str| {
                cell.split('`')
                    .skip(1)
                    .step_by(2)
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            };
            let cause = code(cells[1]).remove(0);
            assert!(causes.contains(&cause.as_str().into()), "{cause}");
            for number in code(cells[3]) {
                assert!(waiting.get(&number).is_some(), "{number} of {cause}");
            }
            told.insert(cause);
        }
        // Beside them there is what a newer scheduler may have.
        assert_eq!(told.len() + 1, causes.len(), "{told:?}");
    }

    #[test]
    fn every_reference_leads_somewhere() {
        fn check(document: &Value, value: &Value) {
            match value {
                Value::Object(members) => {
                    if let Some(target) = members.get("$ref") {
                        let pointer = target.as_str().unwrap().strip_prefix('#').unwrap();
                        assert!(document.pointer(pointer).is_some(), "{target}");
                    }
                    members.values().for_each(|member| check(document, member));
                }
                Value::Array(items) => items.iter().for_each(|item| check(document, item)),
                _ => {}
            }
        }
        let document = document();
        check(&document, &document);
    }
}
