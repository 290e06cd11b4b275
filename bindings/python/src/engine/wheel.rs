//! The engine object of Mooncake's wheel, `mooncake.engine.TransferEngine`, as an [`Engine`].
//!
//! Every call needs the GIL, which the wheel itself releases while it works. Of its calls that begin a transfer, this uses
//! `batch_transfer_async_read` and `batch_transfer_async_write`, with one part each: `transfer_check_status`, the only one
//! that tells how far a transfer is without spinning, looks at the first part alone. It returns 1 for done, -1 for failed,
//! and then forgets the batch, which must not be asked about again; 0 for pending, and -2 for late, which is pending too.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use stagewire_core::Device;
use stagewire_transfer::{Engine, EngineBatch, EngineError, EngineMemory, EngineOperation, EngineSlice, EngineStatus};

use crate::reaper::Lent;

pub(super) struct WheelEngine {
    object: Lent<Py<PyAny>>,
    segment: String,
    registers_local: bool,
    batches: Mutex<HashMap<u64, Batch>>,
    next: AtomicU64,
}

/// Transfers of the wheel that are one batch to the transport.
#[derive(Default)]
struct Batch {
    /// Number of the slice, id of its transfer.
    pending: VecDeque<(usize, u64)>,
    failed: Option<usize>,
}

/// Makes another engine with the Python function `make`, which returns it and its name.
pub(super) fn rebuild(make: &Py<PyAny>, registers_local: bool) -> Result<Arc<dyn Engine>, EngineError> {
    attached("rebuild", |py| {
        let (engine, segment): (Bound<'_, PyAny>, String) = make.bind(py).call0()?.extract()?;
        let engine: Arc<dyn Engine> = Arc::new(WheelEngine::new(engine, segment, registers_local));
        Ok(engine)
    })
}

impl WheelEngine {
    pub(super) fn new(object: Bound<'_, PyAny>, segment: String, registers_local: bool) -> Self {
        Self {
            object: Lent::new(object.unbind()),
            segment,
            registers_local,
            batches: Mutex::default(),
            next: AtomicU64::new(1),
        }
    }

    fn batches(&self) -> MutexGuard<'_, HashMap<u64, Batch>> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine for WheelEngine {
    fn segment(&self) -> String {
        self.segment.clone()
    }

    fn registers_local(&self) -> bool {
        self.registers_local
    }

    fn register(&self, memory: EngineMemory) -> Result<(), EngineError> {
        let call = "register_memory";
        let location = match memory.device {
            Device::Cpu => "*".to_owned(),
            device => device.to_string(),
        };
        let returned = attached(call, |py| {
            let object = self.object.get().bind(py);
            object
                .call_method1(intern!(py, "register_memory"), (memory.address, memory.len, location))?
                .extract()
        })?;
        well(call, returned)
    }

    fn unregister(&self, address: u64) -> Result<(), EngineError> {
        let call = "unregister_memory";
        let returned = attached(call, |py| {
            self.object
                .get()
                .bind(py)
                .call_method1(intern!(py, "unregister_memory"), (address,))?
                .extract()
        })?;
        well(call, returned)
    }

    fn submit(
        &self,
        segment: &str,
        operation: EngineOperation,
        slices: &[EngineSlice],
    ) -> Result<EngineBatch, EngineError> {
        let call = match operation {
            EngineOperation::Read => "batch_transfer_async_read",
            EngineOperation::Write => "batch_transfer_async_write",
        };
        let mut batch = Batch::default();
        let submitted = attached(call, |py| {
            let method = self.object.get().bind(py).getattr(call)?;
            for (index, slice) in slices.iter().enumerate() {
                let id: u64 = method
                    .call1((segment, [slice.local], [slice.remote], [slice.len]))?
                    .extract()?;
                if id == 0 {
                    return Ok(Err(index));
                }
                batch.pending.push_back((index, id));
            }
            Ok(Ok(()))
        });
        let problem = match submitted {
            Ok(Ok(())) => None,
            Ok(Err(index)) => {
                batch.failed = Some(index);
                Some(EngineError {
                    call,
                    problem: format!("it returned 0 for segment {segment}: the engine does not reach it"),
                })
            }
            Err(error) => {
                batch.failed = Some(batch.pending.len());
                Some(error)
            }
        };
        // Where something was begun, it has to end before the batch is over.
        if let Some(error) = problem.filter(|_| batch.pending.is_empty()) {
            return Err(error);
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.batches().insert(number, batch);
        Ok(EngineBatch(NonZeroU64::new(number).expect("counted from 1")))
    }

    fn status(&self, batch: EngineBatch) -> EngineStatus {
        let number = batch.0.get();
        let Some(mut state) = self.batches().remove(&number) else {
            unreachable!("a batch is not asked about once it is over");
        };
        // Without an interpreter, or after an exception, nothing is known: then it is still under way.
        let _ = attached("transfer_check_status", |py| {
            let method = self
                .object
                .get()
                .bind(py)
                .getattr(intern!(py, "transfer_check_status"))?;
            while let Some(&(index, id)) = state.pending.front() {
                match method.call1((id,))?.extract::<i64>()? {
                    1 => {}
                    -1 => {
                        state.failed.get_or_insert(index);
                    }
                    _ => break,
                }
                state.pending.pop_front();
            }
            Ok(())
        });
        match (state.pending.is_empty(), state.failed) {
            (true, None) => EngineStatus::Done,
            (true, Some(slice)) => EngineStatus::Failed { slice },
            (false, _) => {
                self.batches().insert(number, state);
                EngineStatus::Pending
            }
        }
    }
}

/// Runs with the GIL, unless the interpreter is gone.
fn attached<T>(call: &'static str, run: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T, EngineError> {
    let outcome = Python::try_attach(|py| run(py).map_err(|error| error.to_string()));
    let outcome = outcome.unwrap_or_else(|| Err("the Python interpreter is shutting down".to_owned()));
    outcome.map_err(|problem| EngineError { call, problem })
}

/// What the wheel returns where all is well is 0.
fn well(call: &'static str, returned: i64) -> Result<(), EngineError> {
    let meaning = match returned {
        0 => return Ok(()),
        -1 => "invalid argument",
        -2 => "too many requests",
        -3 => "address not registered",
        -6 => "device not found",
        -7 => "the memory shares bytes with memory that is registered",
        _ => "see error.h of Mooncake",
    };
    Err(EngineError {
        call,
        problem: format!("it returned {returned} ({meaning})"),
    })
}

impl fmt::Debug for WheelEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WheelEngine")
            .field("segment", &self.segment)
            .field("batches", &self.batches().len())
            .finish_non_exhaustive()
    }
}
