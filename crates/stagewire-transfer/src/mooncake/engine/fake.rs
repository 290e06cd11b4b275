//! An engine whose transfers end when the test says so. It moves nothing.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Engine, EngineBatch, EngineError, EngineMemory, EngineOperation, EngineSlice, EngineStatus};

#[derive(Debug, Default)]
pub(super) struct Fake {
    registers_local: bool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What every batch is; pending where there is nothing.
    outcome: Option<EngineStatus>,
    refuses: bool,
    submitted: Vec<EngineSlice>,
    flying: HashMap<u64, usize>,
    most: usize,
    next: u64,
    calls: Vec<String>,
}

impl Fake {
    pub(super) fn that_registers_local() -> Self {
        Self {
            registers_local: true,
            ..Self::default()
        }
    }

    /// From now on, every batch is this far.
    pub(super) fn set(&self, outcome: EngineStatus) {
        self.lock().outcome = Some(outcome);
    }

    /// From now on, nothing begins.
    pub(super) fn refuse(&self) {
        self.lock().refuses = true;
    }

    pub(super) fn submitted(&self) -> Vec<EngineSlice> {
        self.lock().submitted.clone()
    }

    pub(super) fn flying(&self) -> usize {
        self.lock().flying.values().sum()
    }

    /// The most slices that were under way at a time.
    pub(super) fn most(&self) -> usize {
        self.lock().most
    }

    /// Registrations and their ends, in order.
    pub(super) fn calls(&self) -> Vec<String> {
        self.lock().calls.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine for Fake {
    fn segment(&self) -> String {
        "fake:1".to_owned()
    }

    fn registers_local(&self) -> bool {
        self.registers_local
    }

    fn register(&self, memory: EngineMemory) -> Result<(), EngineError> {
        let EngineMemory { address, len, .. } = memory;
        self.lock().calls.push(format!("register {address}+{len}"));
        Ok(())
    }

    fn unregister(&self, address: u64) -> Result<(), EngineError> {
        self.lock().calls.push(format!("unregister {address}"));
        Ok(())
    }

    fn submit(
        &self,
        segment: &str,
        _operation: EngineOperation,
        slices: &[EngineSlice],
    ) -> Result<EngineBatch, EngineError> {
        assert_eq!(segment, "peer:1");
        let mut state = self.lock();
        if state.refuses {
            return Err(EngineError {
                call: "submit",
                problem: "it refuses".to_owned(),
            });
        }
        state.next += 1;
        let number = state.next;
        state.submitted.extend_from_slice(slices);
        state.flying.insert(number, slices.len());
        state.most = state.most.max(state.flying.values().sum());
        Ok(EngineBatch(NonZeroU64::new(number).expect("counted from 1")))
    }

    fn status(&self, batch: EngineBatch) -> EngineStatus {
        let mut state = self.lock();
        let outcome = state.outcome.unwrap_or(EngineStatus::Pending);
        assert!(
            state.flying.contains_key(&batch.0.get()),
            "asked about a batch that is over"
        );
        if outcome != EngineStatus::Pending {
            state.flying.remove(&batch.0.get());
        }
        outcome
    }
}
