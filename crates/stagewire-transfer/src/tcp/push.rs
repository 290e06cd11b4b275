use std::sync::atomic::{AtomicBool, Ordering};

use stagewire_core::Record;

use super::ask::{self, Local, MAX_RECORDS};
use super::parts::parts;
use super::send::Base;
use super::{KIND, LaneFault, SHAPE, TcpPinned};
use crate::push::{host_memory, push_with};
use crate::{Memory, TransferError, TransferOptions};

impl TcpPinned {
    pub(super) async fn push_records(
        &self,
        records: &[Record],
        src: &Memory,
        options: &TransferOptions,
    ) -> Result<(), TransferError> {
        host_memory(KIND.name(), src)?;
        // True from the moment when the owner may put the bytes in place.
        let asked = &AtomicBool::new(false);
        let pushed = push_with(&self.grip, records, src, options, SHAPE, |plan, spent| async move {
            let _spent = spent;
            if plan.bytes() == 0 {
                return Ok(());
            }
            let outcome = self.push_from(records, src, asked).await;
            match outcome {
                Ok(()) => Ok(()),
                Err(fault) => Err(self.fault("push", records, fault).await),
            }
        });
        pushed.await.map_err(|error| {
            if !asked.load(Ordering::Relaxed) {
                return error;
            }
            let link = self.grip.link();
            TransferError::InDoubt {
                peer: link.peer(),
                pid: link.process().pid,
                region: self.grip.region(),
                bytes: records.iter().map(Record::nbytes).sum(),
                how: error.to_string(),
            }
        })
    }

    async fn push_from(&self, records: &[Record], src: &Memory, asked: &AtomicBool) -> Result<(), LaneFault> {
        let service = &self.service;
        let parts = parts(records, MAX_RECORDS, u64::MAX);
        let pool = self.lanes().pool(service.options.lanes);
        let turn = pool.turn().await;
        let mut lane = self.lane(pool, &turn).await?;
        let local = Local {
            base: Base(src.as_ptr()),
            len: src.len(),
            changes: src.is_writable(),
        };
        // SAFETY: the records were checked for this memory, which the caller of `push` keeps, and which is readable by
        // its own contract.
        let pushed = unsafe { ask::push(&mut lane, &service.pace, self.wish(), local, &parts, asked).await };
        pushed.map_err(LaneFault::Ended)?;
        pool.give_back(lane);
        Ok(())
    }
}
