//! The query of a request.

use std::collections::BTreeMap;

use axum::extract::Query;
use axum::http::Uri;

use super::error::ApiError;
use crate::nearest::known;

/// Longest piece of a query that an error repeats, in characters.
const SHOWN: usize = 64;
/// Entries of a page: by default, and at most.
const PAGE: (usize, usize) = (100, 1000);

/// The parameters of a query by name: only these names, and each of them once.
pub(super) fn read(uri: &Uri, names: &[&'static str]) -> Result<BTreeMap<&'static str, String>, ApiError> {
    let pairs = Query::<Vec<(String, String)>>::try_from_uri(uri);
    let Query(pairs) =
        pairs.map_err(|_| wrong("the query must be NAME=VALUE, with & between more of them".to_owned()))?;
    let mut found = BTreeMap::new();
    for (given, value) in pairs {
        let Some(name) = names.iter().find(|name| **name == given) else {
            let hint = known(&given, "the route takes", names.iter().copied());
            return Err(wrong(format!("there is no query parameter {}{hint}", shown(&given))));
        };
        if found.insert(*name, value).is_some() {
            return Err(wrong(format!("query parameter {name:?} is given twice")));
        }
    }
    Ok(found)
}

/// How many a page may have, by its parameter `limit`.
pub(super) fn limit(query: &BTreeMap<&'static str, String>) -> Result<usize, ApiError> {
    match query.get("limit").map(|limit| (limit, limit.parse::<usize>())) {
        None => Ok(PAGE.0),
        Some((_, Ok(limit))) => Ok(limit.clamp(1, PAGE.1)),
        Some((limit, Err(_))) => {
            let limit = shown(limit);
            Err(wrong(format!(
                "\"limit\" is {limit}; it must be a number of 1 to {}",
                PAGE.1
            )))
        }
    }
}

/// A query that the route does not take.
pub(super) fn wrong(message: String) -> ApiError {
    ApiError::invalid("http.query", message)
}

/// What was given, as an error may repeat it.
pub(super) fn shown(text: &str) -> String {
    format!("{:?}", text.chars().take(SHOWN).collect::<String>())
}
