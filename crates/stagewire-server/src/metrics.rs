//! What Prometheus scrapes: `stagewire_<subsystem>_<what>_<unit>`.

mod scrape;

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::note::{Note, NoteKind};

pub(crate) use scrape::Scrape;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    method: &'static str,
    route: String,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Path {
    from: String,
    mode: String,
    path: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    state: &'static str,
}

/// Counted as things happen. What can be read off the state is in [`Scrape`].
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    commits: Histogram,
    requests: Family<Request, Counter>,
    request_seconds: Histogram,
    handover_bytes: Family<Path, Counter>,
    handover_seconds: Family<Path, Histogram>,
    job_seconds: Family<Ended, Histogram>,
}

/// From 50 µs by factors of 2, 16 times: to 1.6 s.
fn short() -> Histogram {
    Histogram::new(exponential_buckets(50e-6, 2.0, 16))
}

/// From 10 ms by factors of 2, 18 times: to 22 minutes.
fn long() -> Histogram {
    Histogram::new(exponential_buckets(10e-3, 2.0, 18))
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("stagewire");
        let metrics = Self {
            commits: short(),
            requests: Family::default(),
            request_seconds: short(),
            handover_bytes: Family::default(),
            handover_seconds: Family::new_with_constructor(short),
            job_seconds: Family::new_with_constructor(long),
            registry: Registry::default(),
        };
        registry.register(
            "journal_commit_seconds",
            "Time to write and sync one batch",
            metrics.commits.clone(),
        );
        registry.register("http_requests", "Requests answered", metrics.requests.clone());
        registry.register(
            "http_request_seconds",
            "Time from a request to the head of its answer",
            metrics.request_seconds.clone(),
        );
        registry.register(
            "handover_payload_bytes",
            "Bytes of chunks that consumers received",
            metrics.handover_bytes.clone(),
        );
        registry.register(
            "handover_chunk_seconds",
            "Time that consumers waited for the bytes of a visible chunk",
            metrics.handover_seconds.clone(),
        );
        registry.register(
            "job_duration_seconds",
            "Time from submission to the end of a job",
            metrics.job_seconds.clone(),
        );
        Self { registry, ..metrics }
    }

    pub(crate) fn commit(&self, took: Duration) {
        self.commits.observe(took.as_secs_f64());
    }

    pub(crate) fn request(&self, method: &'static str, route: String, status: u16, took: Duration) {
        self.requests.get_or_create(&Request { method, route, status }).inc();
        self.request_seconds.observe(took.as_secs_f64());
    }

    /// A note that is about to be shown.
    pub(crate) fn note(&self, note: &Note) {
        if let NoteKind::Chunk(handover) = &note.kind {
            let path = Path {
                from: handover.from.to_string(),
                mode: handover.mode.to_string(),
                path: label(&handover.path),
            };
            self.handover_bytes.get_or_create(&path).inc_by(handover.nbytes);
            let took = handover.end.since(handover.begin);
            self.handover_seconds.get_or_create(&path).observe(took.as_secs_f64());
        }
    }

    /// A job has ended so long after its submission.
    pub(crate) fn job(&self, state: &'static str, took: Duration) {
        self.job_seconds
            .get_or_create(&Ended { state })
            .observe(took.as_secs_f64());
    }
}

/// Workers name the path; whatever they say, the set of label values stays small.
fn label(path: &str) -> String {
    match path {
        "shm" | "cma" => path.to_owned(),
        _ => "other".to_owned(),
    }
}
