//! That finished records move each needed byte once, from the right place, and nothing else.
//!
//! What is needed comes from the cuts and the definition of the layouts ([`Shape::offset`]), page by page, not from the
//! arithmetic that made the records. Destination pages are strictly increasing, so what is needed names no byte twice;
//! records that are the same bytes in the same order write none twice.

use stagewire_core::Record;

use super::cuts::{Cut, Pool};
use super::error::PlanError;
use super::shape::{Ends, Shape};

pub(super) fn prove(
    component: &str,
    shape: &Shape,
    cuts: &[Cut],
    records: &[Record],
    [src_pool, dst_pool]: [Pool; 2],
) -> Result<(), PlanError> {
    let unproven = |problem: String| PlanError::Unproven {
        component: component.to_owned(),
        problem,
    };
    let end = |pool: Pool, page_bytes: u64| pool.0.map_or(u64::MAX, |pages| pages.saturating_mul(page_bytes));
    let src_end = end(src_pool, shape.page_bytes(shape.src));
    let dst_end = end(dst_pool, shape.page_bytes(shape.dst));
    for record in records {
        record
            .check(src_end, dst_end)
            .map_err(|error| unproven(error.to_string()))?;
    }
    if let Some(two) = cuts.windows(2).find(|two| two[0].dst_page >= two[1].dst_page) {
        return Err(unproven(format!(
            "page {} follows page {}",
            two[1].dst_page, two[0].dst_page
        )));
    }
    let mut planned = Bytes::new(records.iter().copied());
    let mut needed = Bytes::new(cuts.iter().map(|cut| block(shape, cut)));
    loop {
        match (planned.here(), needed.here()) {
            (None, None) => return Ok(()),
            (Some(planned), Some(needed)) if planned == needed => {}
            (planned, needed) => return Err(unproven(format!("it moves {planned:?} where {needed:?} is needed"))),
        }
        let (rows, bytes) = planned.common(&needed);
        planned.skip(rows, bytes);
        needed.skip(rows, bytes);
    }
}

/// What is needed of one page.
fn block(shape: &Shape, cut: &Cut) -> Record {
    let tokens = cut.hi - cut.lo;
    let (width, rows, next) = if shape.head_major {
        (tokens * shape.head, shape.heads, (0, 1))
    } else {
        (shape.heads * shape.head, tokens, (1, 0))
    };
    // From one row to the next is as far in every page; in the last there can be, the one after the last row has no offset.
    let pitch = |side: Ends| shape.offset(side, 0, next.0, next.1) - shape.offset(side, 0, 0, 0);
    let record = Record {
        src_offset: shape.offset(shape.src, cut.src_page, cut.lo, shape.src.first),
        dst_offset: shape.offset(shape.dst, cut.dst_page, cut.lo, shape.dst.first),
        width,
        rows,
        src_pitch: pitch(shape.src),
        dst_pitch: pitch(shape.dst),
    };
    record.merged()
}

/// A place in a sequence of records, read byte after byte; rows of the same form are skipped as one.
struct Bytes<I> {
    rest: I,
    record: Option<Record>,
    row: u64,
    column: u64,
}

impl<I: Iterator<Item = Record>> Bytes<I> {
    fn new(mut rest: I) -> Self {
        Self {
            record: rest.next(),
            rest,
            row: 0,
            column: 0,
        }
    }

    /// (Source, destination) of the next byte.
    fn here(&self) -> Option<(u64, u64)> {
        let record = self.record?;
        Some((
            record.src_offset + self.row * record.src_pitch + self.column,
            record.dst_offset + self.row * record.dst_pitch + self.column,
        ))
    }

    /// How far two sequences at the same byte go on alike: whole rows, or bytes of a row.
    fn common<J>(&self, other: &Bytes<J>) -> (u64, u64) {
        let (Some(one), Some(two)) = (self.record, other.record) else {
            return (0, 0);
        };
        let form = |record: Record| (record.width, record.src_pitch, record.dst_pitch);
        if self.column == 0 && other.column == 0 && form(one) == form(two) {
            return ((one.rows - self.row).min(two.rows - other.row), 0);
        }
        (0, (one.width - self.column).min(two.width - other.column))
    }

    fn skip(&mut self, rows: u64, bytes: u64) {
        let Some(record) = self.record else { return };
        self.row += rows;
        self.column += bytes;
        if self.column == record.width {
            self.column = 0;
            self.row += 1;
        }
        if self.row == record.rows {
            self.record = self.rest.next();
            self.row = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::stride;

    fn shape(head_major: bool) -> Shape {
        Shape {
            src: Ends { heads: 4, first: 2 },
            dst: Ends { heads: 2, first: 0 },
            heads: 2,
            tokens: 4,
            head: 8,
            head_major,
        }
    }

    fn cuts() -> Vec<Cut> {
        [(7, 2, 1, 4), (8, 3, 0, 4), (9, 4, 0, 4), (3, 9, 0, 2)]
            .map(|(src_page, dst_page, lo, hi)| Cut {
                src_page,
                dst_page,
                lo,
                hi,
            })
            .to_vec()
    }

    fn proves(shape: &Shape, records: &[Record]) -> bool {
        prove("full", shape, &cuts(), records, [Pool(Some(10)), Pool(Some(10))]).is_ok()
    }

    #[test]
    fn right_records_are_proven_and_any_change_is_found() {
        for head_major in [false, true] {
            let shape = shape(head_major);
            let records = stride::records(&shape, &cuts());
            assert!(proves(&shape, &records));
            assert!(!proves(&shape, &records[1..]));
            assert!(!proves(&shape, &records[..records.len() - 1]));
            for index in 0..records.len() {
                let mut twice = records.clone();
                twice.insert(index, records[index]);
                assert!(!proves(&shape, &twice));
                for field in 0..6 {
                    let mut changed = records.clone();
                    let record = &mut changed[index];
                    let fields = [
                        &mut record.src_offset,
                        &mut record.dst_offset,
                        &mut record.width,
                        &mut record.rows,
                        &mut record.src_pitch,
                        &mut record.dst_pitch,
                    ];
                    // A single row has no pitch.
                    if field >= 4 && records[index].rows == 1 {
                        continue;
                    }
                    *fields.into_iter().nth(field).unwrap() += 1;
                    assert!(!proves(&shape, &changed), "field {field} of {:?}", records[index]);
                }
            }
        }
    }

    #[test]
    fn a_record_past_the_pool_is_found() {
        let shape = shape(false);
        let records = stride::records(&shape, &cuts());
        let found = prove("full", &shape, &cuts(), &records, [Pool(Some(9)), Pool(None)]);
        assert!(matches!(found, Err(PlanError::Unproven { .. })));
    }
}
