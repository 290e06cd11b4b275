//! Digests of chunks, by which consumers notice a tensor that was changed after it was shown.

use stagewire_transfer::digest;

use crate::ChunkView;

/// One digest of those of every tensor's part of a chunk.
pub(crate) fn combine(digests: impl IntoIterator<Item = u64>) -> u64 {
    let digests: Vec<_> = digests.into_iter().map(u64::to_le_bytes).collect();
    digest(digests.iter().map(<[u8; 8]>::as_slice))
}

/// That of a chunk as a consumer sees it.
pub(crate) fn of_views(views: &[ChunkView]) -> u64 {
    combine(views.iter().map(|view| digest(view.rows())))
}
