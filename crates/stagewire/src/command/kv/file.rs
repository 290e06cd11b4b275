use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use stagewire_kv::{Component, Engine, Geometry};

use crate::exit::{Exit, Fault};

/// Page tables by component.
type Tables = BTreeMap<String, Vec<i64>>;

/// The geometry of both engines, and perhaps a room.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct File {
    /// Those of a side that lists none of its own.
    #[serde(default, rename = "component")]
    components: Vec<Component>,
    prefill: Geometry,
    decode: Geometry,
    pub(super) room: Option<Room>,
}

/// One room.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Room {
    pub(super) seq_len: Option<u64>,
    pub(super) exact_window: bool,
    pub(super) prefix: BTreeMap<String, u64>,
    pub(super) src_pages: Tables,
    pub(super) dst_pages: Tables,
}

impl File {
    pub(super) fn read(path: &Path) -> Result<Self, Fault> {
        let wrong =
            |problem: &dyn std::fmt::Display| Fault::new(Exit::Usage, format_args!("{}: {problem}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
        toml::from_str(&text).map_err(|error| wrong(&error))
    }

    /// Prefill's and decode's.
    pub(super) fn geometries(&self) -> [Geometry; 2] {
        [&self.prefill, &self.decode].map(|side| {
            let mut side = side.clone();
            if side.components.is_empty() {
                side.components.clone_from(&self.components);
            }
            side
        })
    }
}

impl Room {
    /// With a table for every component. Where the file has none: one run from page 1, no page before the window.
    pub(super) fn complete(mut self, engine: &Engine) -> Result<Self, Fault> {
        let geometry = engine.geometry();
        let seq_len = self
            .seq_len
            .ok_or_else(|| Fault::usage("how long is the prompt? give --seq-len, or seq-len in [room]"))?;
        for component in &geometry.components {
            let needed = component.pages(geometry.page_size, seq_len);
            if needed.end > MOST_PAGES {
                let pages = needed.end;
                return Err(Fault::usage(format_args!(
                    "a prompt of {seq_len} tokens has {pages} pages, more than {MOST_PAGES}"
                )));
            }
            let table = (0..needed.end).map(|page| match page.checked_sub(needed.start) {
                Some(place) => place.cast_signed() + 1,
                None => -1,
            });
            for tables in [&mut self.src_pages, &mut self.dst_pages] {
                tables
                    .entry(component.name.clone())
                    .or_insert_with(|| table.clone().collect());
            }
        }
        Ok(self)
    }
}

/// Most pages of a table that is made up.
const MOST_PAGES: u64 = 1 << 24;
