use crate::Failure;

/// Where a payload is in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PayloadPhase {
    /// Chunks may still become visible.
    Open,
    /// Every chunk is visible.
    Sealed,
    /// The producer gave up; no chunk that was not visible ever will be.
    Failed(Failure),
    /// Nobody needs it; its memory goes when the last pin ends.
    Released,
}

/// The life of a payload: chunks become visible in any order, consumers see them in order.
///
/// ```text
/// Open ──all visible──▶ Sealed ──release──▶ Released
///   └──────fail──────▶ Failed ──release──────▲
/// ```
#[derive(Debug, Clone)]
pub struct PayloadLife {
    phase: PayloadPhase,
    visible: Vec<bool>,
    prefix: u32,
}

impl PayloadLife {
    /// A new payload of `chunks` chunks, none of them visible.
    pub fn new(chunks: u32) -> Self {
        Self {
            phase: PayloadPhase::Open,
            visible: vec![false; chunks as usize],
            prefix: 0,
        }
    }

    /// Where the payload is in its life.
    pub const fn phase(&self) -> &PayloadPhase {
        &self.phase
    }

    /// Number of chunks that consumers may read: the visible ones before the first that is not.
    pub const fn readable(&self) -> u32 {
        self.prefix
    }

    /// Marks chunk `index` as complete. Returns whether it was not before.
    /// Does nothing for a chunk that does not exist, or once the payload is failed or released.
    pub fn ready(&mut self, index: u32) -> bool {
        let Some(visible) = self.visible.get_mut(index as usize) else {
            return false;
        };
        if *visible || self.phase != PayloadPhase::Open {
            return false;
        }
        *visible = true;
        let rest = &self.visible[self.prefix as usize..];
        self.prefix += u32::try_from(rest.iter().take_while(|visible| **visible).count()).unwrap_or(u32::MAX);
        if self.prefix as usize == self.visible.len() {
            self.phase = PayloadPhase::Sealed;
        }
        true
    }

    /// Ends an open payload with the producer's reason. A sealed payload stays sealed.
    pub fn fail(&mut self, failure: Failure) {
        if self.phase == PayloadPhase::Open {
            self.phase = PayloadPhase::Failed(failure);
        }
    }

    /// Ends the payload. Returns whether it was not released before.
    pub fn release(&mut self) -> bool {
        std::mem::replace(&mut self.phase, PayloadPhase::Released) != PayloadPhase::Released
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorClass;

    #[test]
    fn chunks_are_readable_in_order_whatever_order_they_arrive_in() {
        let mut life = PayloadLife::new(3);
        for (index, shown, readable) in [(2, true, 0), (0, true, 1), (0, false, 1), (9, false, 1), (1, true, 3)] {
            assert_eq!((life.ready(index), life.readable()), (shown, readable), "{index}");
        }
        assert_eq!(life.phase(), &PayloadPhase::Sealed);
    }

    #[test]
    fn failure_is_final_and_sealed_payloads_do_not_fail() {
        let failure = Failure::new(ErrorClass::Cancelled, "job.cancelled", "stopped");
        let mut open = PayloadLife::new(2);
        open.ready(0);
        open.fail(failure.clone());
        assert!(!open.ready(1), "a failed payload shows no more chunks");
        assert_eq!(open.readable(), 1);
        let mut sealed = PayloadLife::new(1);
        sealed.ready(0);
        sealed.fail(failure);
        assert_eq!(sealed.phase(), &PayloadPhase::Sealed);
        assert!(sealed.release());
        assert!(!sealed.release());
    }
}
