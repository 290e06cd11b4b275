use std::sync::{Mutex, PoisonError};

use stagewire_core::{Chunking, Record, TensorSpec};
use stagewire_transfer::{Arena, ArenaError, Borrowed, Extent, ExtentWriter};

/// A tensor whose bytes are copied into the arena, each chunk right before it is shown.
#[derive(Debug)]
pub(super) struct Staged {
    extent: Extent,
    spec: TensorSpec,
    chunking: Option<Chunking>,
    copy: Mutex<Copy>,
}

#[derive(Debug)]
struct Copy {
    /// Both go once every chunk was copied.
    open: Option<(Borrowed, ExtentWriter)>,
    done: Vec<bool>,
}

impl Staged {
    pub(super) fn new(
        arena: &Arena,
        source: Borrowed,
        spec: &TensorSpec,
        chunking: Option<Chunking>,
    ) -> Result<Self, ArenaError> {
        let (extent, writer) = arena.allocate(source.len() as u64)?.open();
        let chunks = chunking.map_or(1, |chunking| chunking.count());
        Ok(Self {
            extent,
            spec: spec.clone(),
            chunking,
            copy: Mutex::new(Copy {
                open: Some((source, writer)),
                done: vec![false; chunks as usize],
            }),
        })
    }

    pub(super) fn extent(&self) -> Extent {
        self.extent.clone()
    }

    /// Copies chunk `index`, once. Returns the bytes copied.
    pub(super) fn copy(&self, index: u32) -> u64 {
        let record = match self.chunking {
            None => Record::contiguous(0, 0, self.spec.nbytes().0),
            Some(chunking) => match chunking.slice(&self.spec, index) {
                Ok(slice) => slice.run.record(),
                // The manifest was checked, so there is no such chunk.
                Err(_) => return 0,
            },
        };
        let mut copy = self.copy.lock().unwrap_or_else(PoisonError::into_inner);
        let Copy { open, done } = &mut *copy;
        let (Some((source, writer)), Some(done @ false)) = (open.as_mut(), done.get_mut(index as usize)) else {
            return 0;
        };
        writer
            .copy(&[record], source)
            .expect("source and extent both have the tensor's size, and the record stays inside it");
        *done = true;
        let complete = copy.done.iter().all(|done| *done);
        let source = copy.open.take_if(|_| complete);
        // Its owner may be a Python object, whose end must not be waited for with the lock held.
        drop(copy);
        drop(source);
        record.nbytes()
    }
}
