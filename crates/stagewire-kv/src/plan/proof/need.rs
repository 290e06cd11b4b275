//! Which tokens of which pages must move, token by token.

use std::ops::Range;

use super::held::Held;
use crate::{Kind, PlanRequest};

/// Tokens of one page that must move.
#[derive(Debug, Clone)]
pub(super) struct Page {
    pub(super) src: u64,
    pub(super) dst: u64,
    /// Counted in the page.
    pub(super) tokens: Range<u64>,
}

/// The pages that must move, by destination page.
///
/// A token is needed where it is in the window and past the prefix, and it moves with the chunk that has it. Of whole
/// pages, the last token says both: needed is what follows a needed token, and the chunk that has a page's last token
/// completes the page.
pub(super) fn pages(request: &PlanRequest<'_>, held: &Held<'_>) -> Result<Vec<Page>, String> {
    let component = held.component;
    let name = component.name.as_str();
    let [src, dst] = [&request.src_pages, &request.dst_pages].map(|tables| tables.get(name).copied().unwrap_or(&[]));
    let prefix = request.prefix.get(name).copied().unwrap_or(0);
    let (lo, hi) = request.tokens.unwrap_or((0, request.seq_len));
    let in_window = |token: u64| {
        component
            .window
            .is_none_or(|window| token.saturating_add(window) >= request.seq_len)
    };
    let is_needed = |token: u64| in_window(token) && token >= prefix;
    let moves = |token: u64| is_needed(token) && (lo..hi).contains(&token);
    // The one state is that of all tokens.
    let state = component.kind == Kind::Mamba;
    let size = if state { request.seq_len.max(1) } else { held.tokens };
    let mut pages = Vec::new();
    let mut kept = Vec::new();
    for logical in 0..request.seq_len.div_ceil(size) {
        let tokens = logical * size..(logical * size).saturating_add(size).min(request.seq_len);
        let last = tokens.end - 1;
        let whole = 0..held.tokens;
        let inside = if state || !request.exact_window {
            moves(last).then_some(whole)
        } else if !is_needed(last) || tokens.end <= lo || tokens.start >= hi {
            None
        } else {
            let (first, end) = (tokens.clone().find(|&t| moves(t)), tokens.clone().rfind(|&t| moves(t)));
            first
                .zip(end)
                .map(|(first, end)| first - tokens.start..end + 1 - tokens.start)
        };
        let entry = |table: &[i64]| {
            let id = usize::try_from(logical).ok().and_then(|place| table.get(place));
            id.and_then(|&id| u64::try_from(id).ok()).filter(|&id| id > 0)
        };
        match inside {
            Some(inside) => pages.push(Page {
                src: entry(src).ok_or_else(|| format!("logical page {logical} has no page at prefill"))?,
                dst: entry(dst).ok_or_else(|| format!("logical page {logical} has no page at decode"))?,
                tokens: inside,
            }),
            None if in_window(last) => kept.extend(entry(dst)),
            None => {}
        }
    }
    if !pages.is_sorted_by_key(|page| page.dst) {
        pages.sort_unstable_by_key(|page| page.dst);
    }
    if let Some(two) = pages.windows(2).find(|two| two[0].dst == two[1].dst) {
        return Err(format!("page {} at decode is needed twice", two[0].dst));
    }
    let written = |page: &u64| pages.binary_search_by_key(page, |page| page.dst).is_ok();
    match kept.into_iter().find(written) {
        Some(page) => Err(format!("page {page} at decode is needed as it is")),
        None => Ok(pages),
    }
}
