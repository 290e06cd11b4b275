use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use futures::future::try_join_all;
use stagewire_core::Record;

use super::ask::{self, Local, MAX_RECORDS, Wish};
use super::line::Line;
use super::parts::parts;
use super::pool::{Lane, LanePool, Turn};
use super::send::Base;
use super::{KIND, LaneFault, SHAPE, TcpPinned};
use crate::pull::{host_memory, pull_with};
use crate::target::Claim;
use crate::{Target, TransferError, TransferOptions};

/// Where several lanes share a transfer, a part is at least so large: its request costs a round trip.
const LEAST_PART: u64 = 4 << 20;

impl TcpPinned {
    pub(super) async fn pull_records(
        &self,
        records: &[Record],
        dst: &Target,
        options: &TransferOptions,
    ) -> Result<(), TransferError> {
        host_memory(KIND.name(), dst)?;
        let len = dst.len();
        pull_with(&self.grip, records, dst, options, SHAPE, |plan, claim| async move {
            let base = Base(claim.base());
            // SAFETY: the records were checked for the target. The claim keeps it and reserves their bytes; it is given
            // up after this future, which alone writes.
            let pulled = unsafe {
                self.pull_into(
                    records,
                    plan.bytes(),
                    Local {
                        base,
                        len,
                        changes: false,
                    },
                )
                .await
            };
            finish(self, records, claim, pulled).await
        })
        .await
    }

    /// Pulls over one lane, or over several where it is much.
    ///
    /// # Safety
    /// As [`ask::pull`].
    async unsafe fn pull_into(&self, records: &[Record], bytes: u64, local: Local) -> Result<(), LaneFault> {
        if bytes == 0 {
            return Ok(());
        }
        let options = &self.service.options;
        let lanes = self.lanes();
        let pool = lanes.pool(options.lanes);
        let turn = pool.turn().await;
        let spread = bytes >= options.spread_from(lanes.address().ip()) && options.lanes > 1;
        if !spread && records.len() <= MAX_RECORDS {
            let mut lane = self.lane(pool, &turn).await?;
            // SAFETY: the caller's contract.
            let pulled = unsafe { ask::pull(&mut lane, self.wish(), local, records).await };
            pulled.map_err(LaneFault::Ended)?;
            pool.give_back(lane);
            return Ok(());
        }
        let share = bytes.div_ceil(options.lanes.max(1) as u64).max(LEAST_PART);
        let parts = parts(records, MAX_RECORDS, if spread { share } else { u64::MAX });
        let mut before = 0;
        let behind = |part: Vec<Record>| {
            let behind = before;
            before += part.iter().map(Record::nbytes).sum::<u64>();
            (behind, part)
        };
        let parts = Mutex::new(parts.into_iter().map(behind).collect());
        if !spread {
            // SAFETY: the caller's contract.
            return unsafe { self.pull_parts(pool, turn, &parts, local).await };
        }
        let turns = std::iter::once(turn).chain(std::iter::from_fn(|| pool.try_turn()));
        // SAFETY: the caller's contract; parts are disjoint, and each is taken once.
        let workers = turns.map(|turn| unsafe { self.pull_parts(pool, turn, &parts, local) });
        try_join_all(workers).await.map(drop)
    }

    /// Pulls one part after the other over one lane; each comes with the bytes of the batch before it.
    ///
    /// # Safety
    /// As [`ask::pull`].
    async unsafe fn pull_parts(
        &self,
        pool: &LanePool,
        turn: Turn<'_>,
        parts: &Mutex<VecDeque<(u64, Vec<Record>)>>,
        local: Local,
    ) -> Result<(), LaneFault> {
        let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let wish = self.wish();
        let mut lane = None;
        while let Some((before, part)) = next() {
            if lane.is_none() {
                lane = Some(self.lane(pool, &turn).await?);
            }
            let lane = lane.as_mut().expect("just taken");
            // SAFETY: the caller's contract.
            let pulled = unsafe { ask::pull(lane, wish, local, &part).await };
            pulled.map_err(|error| LaneFault::Ended(error.behind(before)))?;
        }
        if let Some(lane) = lane {
            pool.give_back(lane);
        }
        Ok(())
    }

    pub(super) fn wish(&self) -> Wish {
        Wish {
            pin: self.grip.pin(),
            digest: self.service.options.digest,
        }
    }

    /// A lane that waits, or a new one.
    pub(super) async fn lane(&self, pool: &LanePool, turn: &Turn<'_>) -> Result<Lane, LaneFault> {
        if let Some(lane) = pool.take(turn) {
            return Ok(lane);
        }
        let lanes = self.lanes();
        let stream = lanes.open().await.map_err(LaneFault::Open)?;
        let prepared = self.service.options.prepare(&stream, lanes.address().ip());
        let line = prepared.and_then(|()| Line::new(stream));
        Ok(Lane::new(line.map_err(|error| LaneFault::Ended(error.into()))?))
    }
}

async fn finish(
    pinned: &TcpPinned,
    records: &[Record],
    claim: Claim,
    pulled: Result<(), LaneFault>,
) -> Result<Claim, TransferError> {
    match pulled {
        Ok(()) => Ok(claim),
        Err(fault) => {
            // Nothing writes any more: the bytes are free before it is known what happened.
            drop(claim);
            Err(pinned.fault("pull", records, fault).await)
        }
    }
}
