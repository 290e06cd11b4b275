use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::buffers::Buffers;
use crate::{Component, GeometryError, Incompatible};

/// Version of the handshake: what `to_bytes` begins with.
const VERSION: u16 = 1;

/// Most tensor-parallel ranks of an engine.
const MAX_TP: u32 = 4096;

/// Most pipeline stages of an engine.
const MAX_PP: u32 = 256;

/// What an engine says of itself, unchecked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Geometry {
    /// Ranks that share the heads: the attention's tensor-parallel size, data-parallel attention divided out.
    pub tp_size: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// Pipeline stages. Stage `s` holds the `s`-th equal part of each component's layers.
    #[serde(default = "one")]
    pub pp_size: u32,
    /// Context-parallel ranks.
    #[serde(default = "one")]
    pub cp_size: u32,
    /// The pools, in an order that both sides share.
    #[serde(default)]
    pub components: Vec<Component>,
    /// Pages of each pool, by component; they bound page ids where given.
    #[serde(default)]
    pub num_pages: BTreeMap<String, u64>,
}

fn one() -> u32 {
    1
}

impl Geometry {
    /// One pipeline stage, pools of unknown size.
    pub fn new(tp_size: u32, page_size: u32, components: Vec<Component>) -> Self {
        Self {
            tp_size,
            page_size,
            pp_size: 1,
            cp_size: 1,
            components,
            num_pages: BTreeMap::new(),
        }
    }
}

/// An engine whose geometry makes sense on its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Engine(Geometry);

impl Engine {
    /// Checks a geometry.
    ///
    /// # Errors
    /// [`GeometryError`]: a size of 0, two components of one name, a page of more bytes than there are addresses.
    pub fn new(geometry: Geometry) -> Result<Self, GeometryError> {
        let size = |field, value: u32, most: u32| {
            let fits = (1..=most).contains(&value);
            fits.then_some(()).ok_or(GeometryError::Size { field, value, most })
        };
        size("tp_size", geometry.tp_size, MAX_TP)?;
        size("page_size", geometry.page_size, 1 << 20)?;
        size("pp_size", geometry.pp_size, MAX_PP)?;
        size("cp_size", geometry.cp_size, MAX_TP)?;
        if geometry.components.is_empty() {
            return Err(GeometryError::NoComponents);
        }
        let mut names = BTreeSet::new();
        for component in &geometry.components {
            component.check()?;
            if !names.insert(component.name.as_str()) {
                return Err(GeometryError::SameName {
                    component: component.name.clone(),
                });
            }
            if Buffers::whole(component, geometry.page_size).is_none() {
                return Err(GeometryError::TooLarge {
                    component: component.name.clone(),
                });
            }
        }
        if let Some(name) = geometry.num_pages.keys().find(|name| !names.contains(name.as_str())) {
            return Err(GeometryError::UnknownPool {
                component: name.clone(),
                known: names.into_iter().collect::<Vec<_>>().join(", "),
            });
        }
        Ok(Self(geometry))
    }

    /// What it is made of.
    pub fn geometry(&self) -> &Geometry {
        &self.0
    }

    /// The form that goes to the other side: the version, then the geometry.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        let body = postcard::to_stdvec(&self.0).expect("plain data always serialises");
        bytes.extend(body);
        bytes
    }

    /// What the other side sent.
    ///
    /// # Errors
    /// [`Incompatible::Version`] where it speaks another version, [`Incompatible::Hello`] where the bytes are no
    /// geometry or one that makes no sense.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Incompatible> {
        let hello = |problem: String| Incompatible::Hello {
            problem,
            len: bytes.len(),
        };
        let Some((version, body)) = bytes.split_first_chunk::<2>() else {
            return Err(hello("it has no version".to_owned()));
        };
        let theirs = u16::from_le_bytes(*version);
        if theirs != VERSION {
            return Err(Incompatible::Version { ours: VERSION, theirs });
        }
        let (geometry, rest): (Geometry, _) =
            postcard::take_from_bytes(body).map_err(|error| hello(error.to_string()))?;
        if !rest.is_empty() {
            return Err(hello(format!("{} bytes follow it", rest.len())));
        }
        Self::new(geometry).map_err(|error| hello(error.to_string()))
    }

    /// Pages of the pool of this component, where that is known.
    pub(crate) fn pool(&self, component: &str) -> Option<u64> {
        self.0.num_pages.get(component).copied()
    }
}
