//! The pools: what each stage and each of its workers has, does and holds.

use std::collections::BTreeSet;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use stagewire_core::{Incarnation, Timestamp};

use super::error::ApiError;
use super::{App, Shared, pipeline};
use crate::snapshot::{Snapshot, StageSnapshot, WorkerSnapshot};

pub(super) async fn show(State(app): Shared) -> Result<Json<Value>, ApiError> {
    let snapshot = pipeline::snapshot(&app).await?;
    Ok(Json(json!({
        "at_ns": snapshot.at,
        "paused": snapshot.paused,
        "bytes": snapshot.bytes.map(|bytes| json!({
            "advertised": bytes.advertised,
            "free": bytes.free,
            "reserved": bytes.reserved,
            "held": bytes.held,
            "over": bytes.over,
        })),
        "stages": snapshot.stages.iter().map(|pool| stage(&app, snapshot.at, pool)).collect::<Vec<_>>(),
    })))
}

fn stage(app: &App, now: Timestamp, stage: &StageSnapshot) -> Value {
    json!({
        "name": stage.name,
        "kind": stage.kind,
        "waiting": stage.queued.values().sum::<u64>(),
        "slots": stage.slots(),
        "held": stage.held,
        "max_held": stage.max_held,
        "payloads": stage.payloads,
        "payload_bytes": stage.payload_bytes,
        "workers": stage.workers.iter().map(|known| worker(app, now, known)).collect::<Vec<_>>(),
    })
}

fn worker(app: &App, now: Timestamp, worker: &WorkerSnapshot) -> Value {
    let mut json = json!({
        "incarnation": worker.incarnation,
        "name": worker.name,
        "pid": app.workers.process(worker.incarnation).map(|process| process.pid),
        "state": worker.state(),
        "slots": worker.slots,
        "payloads": worker.payloads,
        "payload_bytes": worker.payload_bytes,
    });
    if let Some(by) = worker.drain_by {
        json["fenced_in_s"] = json!(by.since(now).as_secs_f64());
    }
    json
}

/// Of some workers what the pools show.
pub(super) fn of(app: &App, snapshot: &Snapshot, wanted: &BTreeSet<Incarnation>) -> Vec<Value> {
    let mut found = Vec::new();
    for stage in &snapshot.stages {
        for known in stage.workers.iter().filter(|known| wanted.contains(&known.incarnation)) {
            let mut json = worker(app, snapshot.at, known);
            json["stage"] = json!(stage.name);
            found.push(json);
        }
    }
    found
}
