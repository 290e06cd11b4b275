use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use stagewire_core::{Failure, Progress, Timestamp, TransferMode};

/// The body of every refusal.
#[derive(Debug, Deserialize)]
pub(super) struct Refusal {
    pub(super) error: Failure,
}

/// One job. Fields that are not shown are kept, so that `--json` prints what the server said.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) id: String,
    pub(crate) state: String,
    pub(crate) submitted_ns: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failure: Option<Failure>,
    #[serde(default)]
    pub(crate) stages: Vec<JobStage>,
    /// What it waits for.
    #[serde(default)]
    pub(crate) waiting: Vec<Waiting>,
    /// Why its stages were offered to whom.
    #[serde(default)]
    pub(crate) choices: Vec<Choice>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Why a stage was offered to the worker that got it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Choice {
    pub(crate) stage: String,
    pub(crate) because: String,
    /// Of a job that came along in a batch, whose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) along: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) classes: Vec<ChoiceClass>,
    pub(crate) workers: Vec<ChoiceWorker>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// A class with a job that could have started.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ChoiceClass {
    pub(crate) class: String,
    pub(crate) predicted_ns: u64,
    pub(crate) turns: u64,
    pub(crate) owed: bool,
    pub(crate) chosen: bool,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// A worker that could have got it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ChoiceWorker {
    pub(crate) worker: String,
    pub(crate) used: u32,
    pub(crate) slots: u32,
    pub(crate) steps: Option<u32>,
    pub(crate) cost_ns: u64,
    pub(crate) chosen: bool,
}

/// One thing that a job waits for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Waiting {
    pub(crate) stage: Option<String>,
    #[serde(default)]
    pub(crate) cause: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) waited_ns: Option<u64>,
    pub(crate) message: String,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl Waiting {
    /// What else the server says, by name: its class, and the numbers of its cause.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = (&str, String)> {
        self.rest.iter().filter_map(|(name, value)| {
            let value = match value {
                Value::Null => return None,
                Value::String(text) => text.clone(),
                Value::Array(all) if all.is_empty() => return None,
                other => other.to_string(),
            };
            Some((name.as_str(), value))
        })
    }
}

impl Job {
    /// What the stage waits for, as the server explains it.
    pub(crate) fn why(&self, stage: &str) -> Option<&str> {
        let found = self
            .waiting
            .iter()
            .find(|waiting| waiting.stage.as_deref() == Some(stage));
        found.map(|waiting| waiting.message.as_str())
    }

    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.state.as_str(), "succeeded" | "failed" | "cancelled")
    }

    /// Where it stands, on one line.
    pub(crate) fn summary(&self) -> String {
        if let Some(failure) = &self.failure {
            return failure.message.lines().next().unwrap_or_default().to_owned();
        }
        let at_work = self.stages.iter().filter(|stage| stage.state == "running");
        at_work
            .map(|stage| format!("{} {}", stage.name, stage.note()))
            .collect::<Vec<_>>()
            .join(", ")
    }
}

/// One stage of one job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct JobStage {
    pub(crate) name: String,
    pub(crate) state: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    worker: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    progress: Option<Progress>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl JobStage {
    /// What it does or waits for.
    pub(crate) fn note(&self) -> String {
        let worker = self.worker.as_ref().map(|worker| format!("on {worker}"));
        let progress = self.progress.as_ref().filter(|progress| progress.total > 0);
        let progress = progress.map(|progress| format!("{} {}/{}", progress.unit, progress.done, progress.total));
        worker.into_iter().chain(progress).collect::<Vec<_>>().join(", ")
    }
}

/// `GET /v1/jobs`.
#[derive(Debug, Deserialize)]
pub(crate) struct JobList {
    pub(crate) jobs: Vec<Job>,
}

/// `GET /v1/dead-letters`.
#[derive(Debug, Deserialize)]
pub(crate) struct DeadLetters {
    pub(crate) dead_letters: Vec<DeadLetter>,
    pub(crate) next: Option<String>,
}

/// A job that failed for good.
#[derive(Debug, Deserialize)]
pub(crate) struct DeadLetter {
    pub(crate) id: String,
    pub(crate) died_ns: u64,
    pub(crate) cause: String,
    pub(crate) failure: Failure,
    pub(crate) attempts: Vec<EndedAttempt>,
}

/// An attempt that has ended.
#[derive(Debug, Deserialize)]
pub(crate) struct EndedAttempt {
    pub(crate) stage: String,
    pub(crate) worker: String,
    pub(crate) began_ns: u64,
    pub(crate) ended_ns: u64,
    pub(crate) end: String,
    pub(crate) failure: Option<Failure>,
}

/// What happened to a job.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Event {
    pub(crate) at_ns: Timestamp,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) stage: Option<String>,
    pub(crate) worker: Option<String>,
    pub(crate) progress: Option<Progress>,
    pub(crate) position: Option<Position>,
    pub(crate) payload: Option<PayloadNotice>,
    pub(crate) handover: Option<HandoverNotice>,
    pub(crate) failure: Option<Failure>,
}

impl Event {
    /// Whether nothing comes after it.
    pub(crate) fn is_last(&self) -> bool {
        matches!(self.kind.as_str(), "succeeded" | "failed" | "cancelled")
    }
}

/// Where a job stands in the queue of a stage.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(crate) struct Position {
    pub(crate) ahead: u64,
    pub(crate) others: u64,
}

/// A payload that came into being.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PayloadNotice {
    pub(crate) nbytes: u64,
    pub(crate) chunks: u32,
    pub(crate) mode: TransferMode,
}

/// One chunk as its consumer received it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct HandoverNotice {
    pub(crate) from: String,
    pub(crate) chunk: u32,
    pub(crate) chunks: u32,
    pub(crate) nbytes: u64,
    pub(crate) mode: TransferMode,
    pub(crate) path: String,
    pub(crate) begin_ns: Timestamp,
    pub(crate) end_ns: Timestamp,
}

/// `GET /v1/jobs/{id}/result`.
#[derive(Debug, Deserialize)]
pub(crate) struct JobResult {
    pub(crate) artefacts: Vec<Artefact>,
}

/// One finished file.
#[derive(Debug, Deserialize)]
pub(crate) struct Artefact {
    pub(crate) name: String,
    /// Path at the server.
    pub(crate) url: String,
}

/// `GET /v1/pipeline`.
#[derive(Debug, Deserialize)]
pub(crate) struct Pipeline {
    pub(crate) name: String,
    pub(crate) ready: bool,
    pub(crate) params: BTreeMap<String, ParamSpec>,
    pub(crate) stages: Vec<Stage>,
    pub(crate) workers: Vec<Worker>,
}

impl Pipeline {
    pub(crate) fn stage_names(&self) -> Vec<String> {
        self.stages.iter().map(|stage| stage.name.clone()).collect()
    }

    /// The workers that can be given work.
    pub(crate) fn ready_workers(&self) -> impl Iterator<Item = &Worker> {
        self.workers.iter().filter(|worker| worker.state == "ready")
    }
}

/// What a job may ask.
#[derive(Debug, Deserialize)]
pub(crate) struct ParamSpec {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) default: Option<Value>,
    pub(crate) help: Option<String>,
}

/// A file that the server keeps for jobs.
#[derive(Debug, Deserialize)]
pub(crate) struct Input {
    pub(crate) name: String,
}

/// One stage of the pipeline.
#[derive(Debug, Deserialize)]
pub(crate) struct Stage {
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) ready: bool,
}

/// One attached worker.
#[derive(Debug, Deserialize)]
pub(crate) struct Worker {
    /// `None` for one that has not been back since the server started.
    pub(crate) name: Option<String>,
    pub(crate) stage: String,
    /// `None` where it runs on another host.
    pub(crate) pid: Option<u32>,
    pub(crate) state: String,
    pub(crate) slots: Slots,
}

/// Slots by what they are used for.
#[derive(Debug, Deserialize)]
pub(crate) struct Slots {
    pub(crate) advertised: u64,
    pub(crate) free: u64,
    pub(crate) running: u64,
}

/// `GET /v1/pools`.
#[derive(Debug, Deserialize)]
pub(crate) struct Pools {
    pub(crate) paused: bool,
    pub(crate) bytes: PoolBytes,
    pub(crate) stages: Vec<Pool>,
}

/// What outputs may take all together, and take.
#[derive(Debug, Deserialize)]
pub(crate) struct PoolBytes {
    pub(crate) advertised: u64,
    pub(crate) reserved: u64,
    pub(crate) held: u64,
}

/// One stage and its workers.
#[derive(Debug, Deserialize)]
pub(crate) struct Pool {
    pub(crate) name: String,
    pub(crate) waiting: u64,
    pub(crate) slots: Slots,
    pub(crate) held: u64,
    pub(crate) max_held: u64,
    pub(crate) payload_bytes: u64,
    pub(crate) workers: Vec<PoolWorker>,
}

/// One worker, and what it holds.
#[derive(Debug, Deserialize)]
pub(crate) struct PoolWorker {
    incarnation: String,
    name: Option<String>,
    state: String,
    fenced_in_s: Option<f64>,
    pub(crate) slots: Slots,
    pub(crate) payloads: u64,
    pub(crate) payload_bytes: u64,
}

impl PoolWorker {
    /// Its name, or its incarnation where it has not been back since the server started.
    pub(crate) fn label(&self) -> String {
        self.name.as_ref().unwrap_or(&self.incarnation).clone()
    }

    /// Its state, and until when that lasts.
    pub(crate) fn standing(&self) -> String {
        match self.fenced_in_s {
            Some(seconds) => format!("{}, {seconds:.0} s left", self.state),
            None => self.state.clone(),
        }
    }
}

/// `GET /v1/stats`.
#[derive(Debug, Deserialize)]
pub(crate) struct Stats {
    /// By state.
    pub(crate) jobs: BTreeMap<String, u64>,
    pub(crate) stages: Vec<StageStats>,
    pub(crate) live_payloads: u64,
    pub(crate) live_payload_bytes: u64,
    pub(crate) store: StoreStats,
}

#[derive(Debug, Deserialize)]
pub(crate) struct StageStats {
    pub(crate) name: String,
    /// Stages of jobs that have not ended, by phase.
    pub(crate) jobs: BTreeMap<String, u64>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct StoreStats {
    pub(crate) bytes: u64,
    pub(crate) limit_bytes: u64,
}
