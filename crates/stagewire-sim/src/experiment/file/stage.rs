//! Stages as they stand in TOML.

use serde::Deserialize;
use stagewire_core::{ByteCount, StageName, TransferMode};
use stagewire_sched::{StageKind, StageSpec};

use super::{known, number, one, positive, unit, wrong};
use crate::experiment::{Checkpoints, NEVER, SimError, Stage};
use crate::service::Measured;

/// Steps of an attempt, at most.
const MOST_STEPS: u32 = 10_000;
/// Ranks of a group, and attempts of a batch, at most.
const MOST_TOGETHER: u32 = 256;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct StageFile {
    name: String,
    workers: u32,
    #[serde(default = "one")]
    world: u32,
    #[serde(default = "one")]
    max_batch: u32,
    #[serde(default = "unit")]
    batch_cost: f64,
    kind: Option<StageKind>,
    after: Option<Vec<String>>,
    time_s: Option<f64>,
    output_bytes: Option<ByteCount>,
    #[serde(default = "one")]
    chunks: u32,
    #[serde(default)]
    streams: bool,
    mode: Option<TransferMode>,
    max_held: Option<u32>,
    checkpoint_steps: Option<u32>,
    checkpoint_bytes: Option<ByteCount>,
}

pub(super) fn stages(files: &[StageFile], measured: &Measured) -> Result<Vec<Stage>, SimError> {
    let mut stages: Vec<Stage> = Vec::new();
    for file in files {
        let stage = file.stage(&stages, measured)?;
        stages.push(stage);
    }
    Ok(stages)
}

impl StageFile {
    /// The stage, which comes after those.
    fn stage(&self, before: &[Stage], measured: &Measured) -> Result<Stage, SimError> {
        let name = StageName::new(&self.name).map_err(|error| wrong("a stage", &self.name, &error.to_string()))?;
        let known_times = measured.get(&self.name).copied();
        let time = self.time_s.or(known_times.map(|known| known.0));
        let time = time.ok_or_else(|| wrong(&self.key("time-s"), "missing", "given, or measured"))?;
        let kind = self.kind.unwrap_or(if self.name.starts_with("denoise") {
            StageKind::Admission
        } else {
            StageKind::WorkQueue
        });
        let most = |key: &str, count: u32, most: u32| {
            if (1..=most).contains(&count) {
                return Ok(count);
            }
            Err(wrong(&self.key(key), &count.to_string(), &format!("1 to {most}")))
        };
        let (chunks, mode) = (self.chunks.max(1), self.mode.unwrap_or(TransferMode::P2p));
        self.check_together(kind, chunks, mode)?;
        let output = self
            .output_bytes
            .unwrap_or(ByteCount(known_times.map_or(0, |known| known.1)));
        let checkpoints = self.checkpoints(kind, output)?;
        Ok(Stage {
            spec: StageSpec {
                kind,
                no_progress: NEVER,
                checkpoint: checkpoints.is_some(),
                ..StageSpec::new(name)
            },
            after: self.after(before)?,
            workers: most("workers", self.workers, 100_000)?,
            world: most("world", self.world, MOST_TOGETHER)?,
            max_batch: most("max-batch", self.max_batch, MOST_TOGETHER)?,
            batch_cost: number(&self.key("batch-cost"), self.batch_cost, 0.0, 1.0)?,
            max_held: self.max_held,
            time: positive(&self.key("time-s"), time)?,
            output,
            chunks,
            streams: self.streams,
            first: 1.0 / f64::from(chunks),
            mode,
            checkpoints,
        })
    }

    /// Checkpoints are as large as the output, unless the file says otherwise.
    fn checkpoints(&self, kind: StageKind, output: ByteCount) -> Result<Option<Checkpoints>, SimError> {
        let Some(steps) = self.checkpoint_steps else {
            return match self.checkpoint_bytes {
                Some(nbytes) => {
                    let must = "left out without checkpoint-steps";
                    Err(wrong(&self.key("checkpoint-bytes"), &nbytes.0.to_string(), must))
                }
                None => Ok(None),
            };
        };
        let key = self.key("checkpoint-steps");
        if !(2..=MOST_STEPS).contains(&steps) {
            return Err(wrong(&key, &steps.to_string(), &format!("2 to {MOST_STEPS}")));
        }
        if kind != StageKind::Admission || self.streams {
            let must = "left out at a stage of kind work-queue, and where its output streams";
            return Err(wrong(&key, &steps.to_string(), must));
        }
        let nbytes = self.checkpoint_bytes.unwrap_or(output);
        if nbytes.0 == 0 {
            return Err(wrong(&self.key("checkpoint-bytes"), "0", "more than that"));
        }
        Ok(Some(Checkpoints { steps, nbytes }))
    }

    /// What the scheduler does not have: batches of admitted jobs, groups at a work queue. And streams, which have chunks
    /// and go straight to who reads them.
    fn check_together(&self, kind: StageKind, chunks: u32, mode: TransferMode) -> Result<(), SimError> {
        if self.max_batch > 1 && kind != StageKind::WorkQueue {
            let key = self.key("max-batch");
            return Err(wrong(
                &key,
                &self.max_batch.to_string(),
                "1 at a stage of kind admission",
            ));
        }
        if self.world > 1 && kind != StageKind::Admission {
            return Err(wrong(
                &self.key("world"),
                &self.world.to_string(),
                "1 at a stage of kind work-queue",
            ));
        }
        if self.streams && (chunks == 1 || mode == TransferMode::Store) {
            return Err(wrong(
                &self.key("streams"),
                "true",
                "false with 1 chunk or mode store: there is nothing to begin with",
            ));
        }
        Ok(())
    }

    /// Positions of the stages that it reads from: those that it names, else the one before.
    fn after(&self, before: &[Stage]) -> Result<Vec<usize>, SimError> {
        let Some(names) = &self.after else {
            return Ok(before.len().checked_sub(1).into_iter().collect());
        };
        let find = |name: &String| {
            let found = before.iter().position(|stage| stage.spec.name.as_str() == name);
            found.ok_or_else(|| wrong(&self.key("after"), name, &known(before)))
        };
        names.iter().map(find).collect()
    }

    fn key(&self, key: &str) -> String {
        format!("{key} of stage {}", self.name)
    }
}
