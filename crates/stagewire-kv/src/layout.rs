use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What a component holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Keys and values of attention heads, split over the tensor-parallel ranks.
    #[default]
    Mha,
    /// A latent that every rank holds whole.
    Mla,
    /// Scales of a block-scaled format such as MXFP8. Their layout depends on the page size, so whole pages move only.
    BlockScale,
    /// State of a request instead of its tokens: one page for each request.
    Mamba,
    /// Index of sparse attention, which every rank holds whole.
    Dsa,
}

/// How the bytes of one page of one layer lie. `h` local heads, `p` tokens of a page, `d` elements of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub enum Layout {
    /// `[pages, p, h, d]`: a token after the other. A slice of heads is strided.
    #[default]
    #[serde(rename = "nhd")]
    Nhd,
    /// `[pages, h, p, d]`: a head after the other. A slice of heads of a page is contiguous.
    #[serde(rename = "hnd")]
    Hnd,
    /// `[pages, h, d/x, p, x]` for K and `[pages, h, p/x, d, x]` for V: a token is scattered. Whole pages move only.
    #[serde(rename = "vectorized_5d")]
    Vectorized5d,
    /// One buffer whose pages hold K and V of all layers. Whole pages move only.
    #[serde(rename = "page_major")]
    PageMajor,
}

/// A name that is no kind or no layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` is no {what}; there are {known}")]
pub struct UnknownName {
    /// What was asked for.
    pub name: String,
    /// What it should have been: a kind, a layout.
    pub what: &'static str,
    /// The names that there are.
    pub known: String,
}

impl Kind {
    /// Every kind, in the order of declaration.
    pub const ALL: [Self; 5] = [Self::Mha, Self::Mla, Self::BlockScale, Self::Mamba, Self::Dsa];

    /// The name in Python, TOML and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mha => "mha",
            Self::Mla => "mla",
            Self::BlockScale => "block_scale",
            Self::Mamba => "mamba",
            Self::Dsa => "dsa",
        }
    }

    /// Whether every tensor-parallel rank holds the same bytes.
    pub const fn is_replicated(self) -> bool {
        matches!(self, Self::Mla | Self::Dsa)
    }
}

impl Layout {
    /// Every layout, in the order of declaration.
    pub const ALL: [Self; 4] = [Self::Nhd, Self::Hnd, Self::Vectorized5d, Self::PageMajor];

    /// The name in Python, TOML and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nhd => "nhd",
            Self::Hnd => "hnd",
            Self::Vectorized5d => "vectorized_5d",
            Self::PageMajor => "page_major",
        }
    }

    /// Whether tokens and heads can be cut out of a page.
    pub const fn is_sliceable(self) -> bool {
        matches!(self, Self::Nhd | Self::Hnd)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        named(Self::ALL, Self::name, name, "kind of component")
    }
}

impl FromStr for Layout {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        named(Self::ALL, Self::name, name, "layout")
    }
}

/// The one of this name.
fn named<T: Copy, const N: usize>(
    all: [T; N],
    name_of: fn(T) -> &'static str,
    name: &str,
    what: &'static str,
) -> Result<T, UnknownName> {
    let found = all.into_iter().find(|&one| name_of(one) == name);
    found.ok_or_else(|| UnknownName {
        name: name.to_owned(),
        what,
        known: all.map(name_of).join(", "),
    })
}
