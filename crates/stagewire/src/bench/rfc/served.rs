//! What became of one job, as the server and the worker of its last stage noted it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use stagewire_core::Timestamp;

use crate::client::Event;

/// A job that has succeeded.
#[derive(Debug, Clone)]
pub(super) struct Served {
    pub(super) submitted: Timestamp,
    /// When its first frames were there.
    pub(super) first: Timestamp,
    pub(super) ended: Timestamp,
    /// By stage.
    pub(super) attempts: BTreeMap<String, Attempt>,
    /// Digest of its frames.
    pub(super) frames: String,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Attempt {
    pub(super) offered: Timestamp,
    pub(super) running: Timestamp,
    pub(super) done: Timestamp,
}

impl Served {
    pub(super) fn of(events: &[Event], info: &Value) -> anyhow::Result<Self> {
        let at = |kind: &str| events.iter().find(|event| event.kind == kind).map(|event| event.at_ns);
        let mut attempts: BTreeMap<String, Attempt> = BTreeMap::new();
        for event in events {
            ensure!(event.kind != "requeued", "an attempt was lost: times say nothing");
            let Some(stage) = &event.stage else { continue };
            let attempt = attempts.entry(stage.clone()).or_default();
            match event.kind.as_str() {
                "offered" => attempt.offered = event.at_ns,
                "running" => attempt.running = event.at_ns,
                "stage_done" => attempt.done = event.at_ns,
                _ => {}
            }
        }
        Ok(Self {
            submitted: at("submitted").context("its submission was not noted")?,
            first: Timestamp(info["first_ns"].as_u64().context("no time of the first frames")?),
            ended: at("succeeded").context("it did not succeed")?,
            attempts,
            frames: info["frames"].as_str().context("no digest of the frames")?.to_owned(),
        })
    }

    pub(super) fn to_first(&self) -> Duration {
        self.first.since(self.submitted)
    }

    pub(super) fn to_result(&self) -> Duration {
        self.ended.since(self.submitted)
    }
}

/// From the first submission to the last end.
pub(super) fn span(served: &[Served]) -> Duration {
    let begin = served.iter().map(|job| job.submitted).min().unwrap_or_default();
    let end = served.iter().map(|job| job.ended).max().unwrap_or_default();
    end.since(begin)
}
