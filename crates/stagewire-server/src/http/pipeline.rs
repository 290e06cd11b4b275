//! The pipeline and the server: what is served, how it does, whether it is ready.

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use stagewire_sched::{ClassSpec, Flow};

use super::error::ApiError;
use super::{App, Shared};
use crate::metrics::Scrape;
use crate::snapshot::{Snapshot, StageSnapshot, WorkerSnapshot, unready};

pub(super) async fn snapshot(app: &App) -> Result<Snapshot, ApiError> {
    Ok(app.driver.look(Snapshot::take).await?)
}

pub(super) async fn show(State(app): Shared) -> Result<Json<Value>, ApiError> {
    let snapshot = snapshot(&app).await?;
    let edges: Vec<Value> = app
        .topology
        .edges()
        .iter()
        .map(|edge| {
            let mut json = json!({"from": edge.from, "to": edge.to, "mode": edge.mode, "handover": "whole"});
            if let Flow::Stream { chunks, chunk_dim } = edge.flow {
                json["handover"] = json!("stream");
                json["chunks"] = json!(chunks);
                json["chunk_dim"] = json!(chunk_dim);
            }
            json
        })
        .collect();
    Ok(Json(json!({
        "name": app.pipeline.name,
        "deployment": app.deployment,
        "epoch": app.epoch,
        "ready": snapshot.stages.iter().all(StageSnapshot::is_ready),
        "paused": snapshot.paused,
        "params": app.pipeline.params,
        "stages": snapshot.stages.iter().map(stage).collect::<Vec<_>>(),
        "edges": edges,
        "classes": app.topology.classes().iter().map(class).collect::<Vec<_>>(),
        "workers": snapshot.stages.iter().flat_map(|stage| workers(&app, stage)).collect::<Vec<_>>(),
    })))
}

fn class(class: &ClassSpec) -> Value {
    json!({
        "name": class.name,
        "weight": class.weight,
        "queue_deadline_s": class.queue_deadline.map(|deadline| deadline.as_secs_f64()),
    })
}

fn stage(stage: &StageSnapshot) -> Value {
    json!({
        "name": stage.name,
        "kind": stage.kind,
        "max_held": stage.max_held,
        "ready": stage.is_ready(),
    })
}

/// The workers of a stage. `pid` is there for those of this host.
fn workers(app: &App, stage: &StageSnapshot) -> Vec<Value> {
    let worker = |worker: &WorkerSnapshot| {
        json!({
            "incarnation": worker.incarnation,
            "name": worker.name,
            "stage": stage.name,
            "pid": app.workers.process(worker.incarnation).map(|process| process.pid),
            "state": worker.state(),
            "slots": worker.slots,
            "group": worker.member.as_ref().map(|member| {
                json!({"name": member.group, "rank": member.rank, "world": member.world})
            }),
        })
    };
    stage.workers.iter().map(worker).collect()
}

pub(super) async fn stats(State(app): Shared) -> Result<Json<Value>, ApiError> {
    let snapshot = snapshot(&app).await?;
    let stages: Vec<Value> = snapshot
        .stages
        .iter()
        .map(|stage| {
            json!({
                "name": stage.name,
                "jobs": stage.phases,
                "slots": stage.slots(),
                "payloads": stage.payloads,
                "payload_bytes": stage.payload_bytes,
            })
        })
        .collect();
    let connector = app.store.connector().stats();
    let store = app.store.usage();
    let (inputs, input_bytes, input_limit) = app.inputs.usage();
    Ok(Json(json!({
        "at_ns": snapshot.at,
        "epoch": app.epoch,
        "jobs": snapshot.jobs,
        "stages": stages,
        "live_payloads": snapshot.stages.iter().map(|stage| stage.payloads).sum::<u64>(),
        "live_payload_bytes": snapshot.stages.iter().map(|stage| stage.payload_bytes).sum::<u64>(),
        "cache": {
            "payloads": snapshot.cache.payloads,
            "used_bytes": snapshot.cache.used_bytes,
            "idle_bytes": snapshot.cache.idle_bytes,
        },
        "streams": app.workers.count(),
        "store": {
            "payloads": connector.live_payloads,
            "bytes": store.used(),
            "limit_bytes": store.limit,
        },
        "inputs": {
            "count": inputs,
            "bytes": input_bytes,
            "limit_bytes": input_limit,
        },
        "transfer": {
            "regions": connector.host.regions,
            "pins": connector.host.pins_held,
            "segments": connector.host.segments,
            "segment_bytes": connector.host.segment_bytes,
            "connections": connector.host.connections,
        },
    })))
}

/// The server lives.
pub(super) async fn health() -> &'static str {
    "ok\n"
}

/// Every stage has a worker.
pub(super) async fn ready(State(app): Shared) -> Result<Response, ApiError> {
    // Asked often, so that it must not cost more the more jobs there are.
    let missing = app.driver.look(|sched, _| unready(sched)).await?;
    let ready = missing.is_empty();
    let status = if ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    Ok((status, Json(json!({"ready": ready, "stages_without_worker": missing}))).into_response())
}

pub(super) async fn metrics(State(app): Shared) -> Result<Response, ApiError> {
    let scrape = Scrape {
        snapshot: snapshot(&app).await?,
        store: app.store.usage(),
        connector: app.store.connector().stats(),
        streams: app.workers.count(),
        epoch: app.epoch,
    };
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], scrape.encode(&app.metrics)).into_response())
}
