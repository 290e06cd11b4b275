//! `Worker` and `Task`: attempts of one stage, for a Python function to run.
//!
//! Grants are renewed by the worker's own tasks on the runtime; nothing here needs Python's help for that.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use stagewire_connector::ConsumeOptions;
use stagewire_connector::worker::{self, Output, TaskError, WorkerOptions};
use stagewire_core::{ByteCount, Classify, ErrorClass, Failure, Member, PayloadKind, Progress, SchemaError, StageName};

use crate::connector::{seconds, stats};
use crate::consumer::Consumer;
use crate::error::{invalid, raise, raise_from};
use crate::handle::Handle;
use crate::payload::{self, Entries};
use crate::pending::Pending;
use crate::runtime::wait;

/// Reasons with which a worker ends as it was told to.
const IN_ORDER: [&str; 2] = ["worker.drained", "worker.closed"];

/// A process that runs attempts of one stage.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct Worker {
    inner: Arc<worker::Worker>,
}

#[pymethods]
impl Worker {
    #[staticmethod]
    #[pyo3(signature = (*, run_dir, pipeline, stage, name, slots, max_batch, member=None, numa=None, rail=None, arena_bytes, attach_within))]
    #[expect(clippy::too_many_arguments, reason = "named by the caller, one for each option")]
    fn attach(
        py: Python<'_>,
        run_dir: std::path::PathBuf,
        pipeline: String,
        stage: &str,
        name: String,
        slots: u32,
        max_batch: u32,
        member: Option<(String, u32, u32)>,
        numa: Option<u32>,
        rail: Option<u32>,
        arena_bytes: u64,
        attach_within: f64,
    ) -> PyResult<Self> {
        let stage = StageName::new(stage).map_err(|error| invalid(py, "stage.name", error.to_string()))?;
        let member = member.map(|(group, rank, world)| {
            let group = StageName::new(&group).map_err(|error| invalid(py, "worker.options", error.to_string()))?;
            PyResult::Ok(Member { group, rank, world })
        });
        let options = WorkerOptions {
            pipeline,
            name,
            slots,
            max_batch,
            member: member.transpose()?,
            numa,
            rail,
            arena_limit: ByteCount(arena_bytes),
            attach_within: seconds(py, Some(attach_within))?.unwrap_or_default(),
            ..WorkerOptions::new(run_dir, stage)
        };
        let inner = wait(py, worker::Worker::attach(options))?.map_err(|error| raise_from(py, &error))?;
        Ok(Self { inner })
    }

    /// Waits for the next granted attempts, which are to run together; `None` once the worker was drained.
    fn next_batch(&self, py: Python<'_>) -> PyResult<Option<Vec<Task>>> {
        if let Some(batch) = wait(py, self.inner.next_batch())? {
            return Ok(Some(batch.into_iter().map(|inner| Task { inner }).collect()));
        }
        match self.inner.over() {
            Some(failure) if !IN_ORDER.contains(&failure.reason.as_str()) => Err(raise(py, &failure)),
            _ => Ok(None),
        }
    }

    fn drain(&self) {
        self.inner.drain();
    }

    #[getter]
    fn busy(&self) -> usize {
        self.inner.busy()
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats(py, self.inner.connector())
    }

    /// Waits until nobody needs a payload of this worker any more, at most `within` seconds, and closes.
    fn leave(&self, py: Python<'_>, within: f64) -> PyResult<()> {
        let within = seconds(py, Some(within))?.unwrap_or(Duration::ZERO);
        wait(py, self.inner.leave(within))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        wait(py, self.inner.close())
    }
}

/// A granted attempt. Dropping it before it has ended fails it.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct Task {
    inner: worker::Task,
}

#[pymethods]
impl Task {
    #[getter]
    fn job_id(&self) -> String {
        self.inner.job().to_string()
    }

    #[getter]
    fn attempt(&self) -> u32 {
        self.inner.token().attempt.0
    }

    #[getter]
    fn stage(&self) -> &str {
        self.inner.stage().as_str()
    }

    #[getter]
    fn params(&self) -> &str {
        self.inner.params()
    }

    /// The parameters that are inputs of the job, and their files on this host.
    #[getter]
    fn files(&self) -> Vec<(&str, Option<&OsStr>)> {
        let files = self.inner.files().iter();
        files
            .map(|file| (file.param.as_str(), file.path.as_deref().map(Path::as_os_str)))
            .collect()
    }

    /// Which rank of its group this is, and how many there are; 0 and 1 for a worker on its own.
    #[getter]
    fn rank(&self) -> (u32, u32) {
        self.inner.member().map_or((0, 1), |member| (member.rank, member.world))
    }

    /// Whether this is the last stage: its output is the job's result.
    #[getter]
    fn last(&self) -> bool {
        !self.inner.plan().publish
    }

    #[getter]
    fn inputs(&self) -> Vec<(String, Handle)> {
        let inputs = self.inner.inputs().iter();
        inputs
            .map(|input| (input.stage.to_string(), Handle::new(input.handle.clone())))
            .collect()
    }

    /// Whether the state of the function can be saved.
    #[getter]
    fn takes_checkpoints(&self) -> bool {
        self.inner.takes_checkpoints()
    }

    /// The checkpoint to go on from, and how far it is: done, total and unit.
    #[getter]
    fn resume(&self) -> Option<(Handle, (u64, u64, String))> {
        self.inner.resume().map(|checkpoint| {
            let Progress { done, total, unit } = checkpoint.progress.clone();
            (Handle::new(checkpoint.handle.clone()), (done, total, unit))
        })
    }

    #[pyo3(signature = (*, private=false))]
    fn consume_checkpoint(&self, py: Python<'_>, private: bool) -> PyResult<Consumer> {
        let options = ConsumeOptions {
            private,
            ..ConsumeOptions::default()
        };
        let consumer = self.inner.consume_checkpoint(options);
        Ok(Consumer::new(consumer.map_err(|error| raise_from(py, &error))?))
    }

    #[getter]
    fn yield_requested(&self) -> bool {
        self.inner.asked_to_yield().is_stopped()
    }

    /// Saves a state, which must not change any more; returns once that is under way.
    fn checkpoint(
        &self,
        py: Python<'_>,
        entries: Entries<'_>,
        metadata: String,
        done: u64,
        total: u64,
        unit: String,
    ) -> PyResult<Pending> {
        let state = output(py, PayloadKind::Checkpoint, entries, metadata)?;
        let saving = wait(py, self.inner.checkpoint(state, Progress { done, total, unit }))?;
        let saving = saving.map_err(|error| self.not_ended(py, &error))?;
        let saved = async move { saving.saved().await };
        Pending::spawn(py, saved, |py, saved| match saved {
            Ok(()) => Ok(py.None()),
            Err(error) => Err(raise_from(py, &*error)),
        })
    }

    /// Ends the attempt so that the next one goes on from this state, or without one from the last checkpoint.
    #[pyo3(name = "yield_", signature = (entries, metadata, done, total, unit))]
    fn yield_with(
        &self,
        py: Python<'_>,
        entries: Option<Entries<'_>>,
        metadata: String,
        done: u64,
        total: u64,
        unit: String,
    ) -> PyResult<()> {
        let state = entries.map(|entries| output(py, PayloadKind::Checkpoint, entries, metadata));
        let yielded = wait(
            py,
            self.inner
                .yield_with(state.transpose()?, Progress { done, total, unit }),
        )?;
        yielded.map_err(|error| self.not_ended(py, &error))
    }

    #[pyo3(signature = (stage, *, private=false))]
    fn consume(&self, py: Python<'_>, stage: &str, private: bool) -> PyResult<Consumer> {
        let stage = StageName::new(stage).map_err(|error| invalid(py, "stage.name", error.to_string()))?;
        let options = ConsumeOptions {
            private,
            ..ConsumeOptions::default()
        };
        let consumer = self
            .inner
            .consume(Some(&stage), options)
            .map_err(|error| raise_from(py, &error))?;
        Ok(Consumer::new(consumer))
    }

    fn progress(&self, py: Python<'_>, done: u64, total: u64, unit: String) -> PyResult<()> {
        let reported = self.inner.progress(Progress { done, total, unit });
        reported.map_err(|error| raise(py, &stopped(error.to_failure())))
    }

    #[getter]
    fn cancelled(&self) -> bool {
        self.inner.stop().is_stopped()
    }

    /// Publishes the output and ends the attempt well; returns once the server has accepted it.
    fn complete(&self, py: Python<'_>, kind: &str, entries: Entries<'_>, metadata: String) -> PyResult<()> {
        let kind: Result<_, SchemaError> = kind.parse();
        let output = output(py, kind.map_err(|error| raise_from(py, &error))?, entries, metadata)?;
        let ended = wait(py, self.inner.complete(output))?;
        ended.map_err(|error| self.not_ended(py, &error))
    }

    /// Ends the attempt well on a rank above 0, which hands nothing over; returns once rank 0 has completed.
    fn follow(&self, py: Python<'_>) -> PyResult<()> {
        let ended = wait(py, self.inner.follow())?;
        ended.map_err(|error| self.not_ended(py, &error))
    }

    /// Ends the attempt with a failure, or, where it was told to stop, says that it has. Does nothing to one that has
    /// ended.
    fn fail(
        &self,
        error_class: &str,
        reason: &str,
        message: String,
        details: std::collections::BTreeMap<String, String>,
    ) {
        let class = ErrorClass::from_name(error_class).unwrap_or(ErrorClass::Internal);
        self.inner.fail(Failure {
            details,
            ..Failure::new(class, reason, message)
        });
    }
}

fn output(py: Python<'_>, kind: PayloadKind, entries: Entries<'_>, metadata: String) -> PyResult<Output> {
    let (entries, tensors) = payload::lend_all(py, entries, None)?;
    Ok(Output {
        kind,
        entries,
        metadata,
        tensors,
    })
}

impl Task {
    /// Why the attempt did not end well.
    fn not_ended(&self, py: Python<'_>, error: &TaskError) -> PyErr {
        let failure = error.to_failure();
        let must_stop = self.inner.stop().is_stopped() || failure.class == ErrorClass::Fenced;
        raise(py, &if must_stop { stopped(failure) } else { failure })
    }
}

/// The failure of an attempt that must stop, as the one class that stage functions know for that.
pub(crate) fn stopped(failure: Failure) -> Failure {
    Failure {
        class: ErrorClass::Cancelled,
        ..failure
    }
}
