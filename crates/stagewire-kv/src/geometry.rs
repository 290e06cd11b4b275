use std::collections::BTreeMap;

use stagewire_core::{Classify, ErrorClass};

/// A geometry that makes no sense, whoever the other side is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum GeometryError {
    #[error("component {component:?}: {field} is {value}; it must be {expected}")]
    Field {
        component: String,
        field: &'static str,
        value: String,
        expected: String,
    },
    #[error("{field} is {value}; it must be 1 to {most}")]
    Size { field: &'static str, value: u32, most: u32 },
    #[error("an engine needs at least one component")]
    NoComponents,
    #[error("two components are called {component:?}; page tables go by name")]
    SameName { component: String },
    #[error("num_pages names {component:?}, which is no component; there are {known}")]
    UnknownPool { component: String, known: String },
    #[error("component {component:?}: a page has more bytes than 64-bit offsets reach")]
    TooLarge { component: String },
}

impl Classify for GeometryError {
    fn class(&self) -> ErrorClass {
        ErrorClass::Invalid
    }

    fn reason(&self) -> &'static str {
        "kv.geometry"
    }

    fn details(&self) -> BTreeMap<String, String> {
        let pairs = match self {
            Self::Field {
                component,
                field,
                value,
                expected,
            } => vec![
                ("component", component.clone()),
                ("field", (*field).to_owned()),
                ("value", value.clone()),
                ("expected", expected.clone()),
            ],
            Self::Size { field, value, most } => vec![
                ("field", (*field).to_owned()),
                ("value", value.to_string()),
                ("most", most.to_string()),
            ],
            Self::NoComponents => vec![],
            Self::UnknownPool { component, known } => {
                vec![("component", component.clone()), ("known", known.clone())]
            }
            Self::SameName { component } | Self::TooLarge { component } => vec![("component", component.clone())],
        };
        pairs
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }
}
