//! Cuts as strided records, one for each run of pages.

use stagewire_core::Record;

use super::cuts::Cut;
use super::shape::Shape;

/// The records of one buffer of one layer, by destination offset.
pub(super) fn records(shape: &Shape, cuts: &[Cut]) -> Vec<Record> {
    if shape.head_major {
        head_major(shape, cuts)
    } else {
        token_major(shape, cuts)
    }
}

/// Token after token: a row for each token, and consecutive tokens have the same pitch across the pages of a run.
fn token_major(shape: &Shape, cuts: &[Cut]) -> Vec<Record> {
    let (src_token, dst_token) = (shape.src.heads * shape.head, shape.dst.heads * shape.head);
    let slot = |page: u64, token: u64| page * shape.tokens + token;
    let run = |(src_slot, dst_slot, tokens): (u64, u64, u64)| {
        let record = Record {
            src_offset: src_slot * src_token + shape.src.first * shape.head,
            dst_offset: dst_slot * dst_token + shape.dst.first * shape.head,
            width: shape.heads * shape.head,
            rows: tokens,
            src_pitch: src_token,
            dst_pitch: dst_token,
        };
        tidy(record)
    };
    let mut records = Vec::new();
    let mut open: Option<(u64, u64, u64)> = None;
    for cut in cuts {
        let next = (slot(cut.src_page, cut.lo), slot(cut.dst_page, cut.lo), cut.hi - cut.lo);
        match &mut open {
            Some((src, dst, tokens)) if *src + *tokens == next.0 && *dst + *tokens == next.1 => *tokens += next.2,
            _ => records.extend(open.replace(next).map(run)),
        }
    }
    records.extend(open.map(run));
    records
}

/// Head after head: the slice of a whole page is one row, that of a part of a page one row for each head.
fn head_major(shape: &Shape, cuts: &[Cut]) -> Vec<Record> {
    let head = shape.tokens * shape.head;
    let (src_page, dst_page) = (shape.src.heads * head, shape.dst.heads * head);
    let mut records: Vec<Record> = Vec::new();
    let mut run: Option<Record> = None;
    for cut in cuts {
        let src_offset = cut.src_page * src_page + shape.src.first * head + cut.lo * shape.head;
        let dst_offset = cut.dst_page * dst_page + shape.dst.first * head + cut.lo * shape.head;
        if cut.hi - cut.lo < shape.tokens {
            records.extend(run.take().map(tidy));
            records.push(tidy(Record {
                src_offset,
                dst_offset,
                width: (cut.hi - cut.lo) * shape.head,
                rows: shape.heads,
                src_pitch: head,
                dst_pitch: head,
            }));
            continue;
        }
        match &mut run {
            Some(run)
                if src_offset.checked_sub(run.src_offset) == Some(run.rows * src_page)
                    && dst_offset.checked_sub(run.dst_offset) == Some(run.rows * dst_page) =>
            {
                run.rows += 1;
            }
            _ => records.extend(
                run.replace(Record {
                    src_offset,
                    dst_offset,
                    width: shape.heads * head,
                    rows: 1,
                    src_pitch: src_page,
                    dst_pitch: dst_page,
                })
                .map(tidy),
            ),
        }
    }
    records.extend(run.map(tidy));
    records
}

/// Few rows, and a single row has no pitch of its own.
fn tidy(record: Record) -> Record {
    match record.merged() {
        Record { rows: 1, .. } => Record::contiguous(record.src_offset, record.dst_offset, record.nbytes()),
        merged => merged,
    }
}
