//! Workers of the toy pipeline, in this process: real sessions, real payloads, toy models.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use stagewire_connector::worker::{Output, Task, TaskError, Worker, WorkerOptions};
use stagewire_connector::{ConsumeOptions, Owner, PublishSpec};
use stagewire_core::{
    ByteCount, Classify, DType, Entry, EntryValue, ErrorClass, Failure, Manifest, PayloadKind, Progress, StageName,
    TensorSpec,
};
use stagewire_transfer::Borrowed;
use tokio::task::JoinHandle;

use crate::site::PATIENCE;

/// Latents are `[1, 2, 6, 100]` bytes: 3 chunks along the third dimension.
const SHAPE: [u64; 4] = [1, 2, 6, 100];
const BYTES: usize = 1200;

/// One worker for each stage.
pub(crate) struct Workers {
    workers: Vec<(Arc<Worker>, JoinHandle<()>)>,
}

pub(crate) fn stage(name: &str) -> StageName {
    StageName::new(name).unwrap()
}

impl Workers {
    pub(crate) async fn attach(run_dir: &Path) -> Self {
        Self::with_slots(run_dir, 1).await
    }

    pub(crate) async fn with_slots(run_dir: &Path, slots: u32) -> Self {
        let mut all = Self { workers: Vec::new() };
        for name in ["encode", "denoise", "decode"] {
            all.add(run_dir, name, &format!("{name}-0"), slots).await;
        }
        all
    }

    pub(crate) const fn none() -> Self {
        Self { workers: Vec::new() }
    }

    /// One more worker of a stage.
    pub(crate) async fn add(&mut self, run_dir: &Path, of: &str, name: &str, slots: u32) {
        let mut options = WorkerOptions::new(run_dir, stage(of));
        options.arena_limit = ByteCount(16 << 20);
        options.slots = slots;
        options.name = name.to_owned();
        let worker = Worker::attach(options).await.unwrap();
        let tasks = Arc::clone(&worker);
        let running = tokio::spawn(async move {
            while let Some(task) = tasks.next_task().await {
                tokio::spawn(run(Arc::clone(&tasks), task));
            }
        });
        self.workers.push((worker, running));
    }

    pub(crate) fn worker(&self, name: &str) -> &Arc<Worker> {
        let position = ["encode", "denoise", "decode"].iter().position(|stage| *stage == name);
        &self.workers[position.unwrap()].0
    }

    pub(crate) async fn close(self) {
        for (worker, running) in self.workers {
            worker.close().await;
            running.abort();
        }
    }

    /// Payloads that the workers hold.
    pub(crate) fn live(&self) -> usize {
        self.workers
            .iter()
            .map(|(worker, _)| worker.connector().live().len())
            .sum()
    }
}

fn latents(prompt: &str, steps: u64) -> Vec<u8> {
    let salt = u8::try_from(steps).unwrap_or(0);
    prompt
        .bytes()
        .cycle()
        .take(BYTES)
        .zip(0_u32..)
        .map(|(byte, at)| byte ^ salt ^ (at % 251) as u8)
        .collect()
}

/// The video that the pipeline makes of a prompt: the latents, chunk by chunk, as the decoder receives them.
pub(crate) fn video(prompt: &str, steps: u64) -> Vec<u8> {
    let latents = latents(prompt, steps);
    let mut video = Vec::new();
    for chunk in 0..3 {
        for row in 0..2 {
            let start = row * 600 + chunk * 200;
            video.extend_from_slice(&latents[start..start + 200]);
        }
    }
    video
}

async fn run(worker: Arc<Worker>, task: Task) {
    let result = match task.stage().as_str() {
        "encode" => encode(&task).await,
        "denoise" => denoise(&worker, &task).await,
        _ => decode(&task).await,
    };
    if let Err(failure) = result {
        task.fail(failure);
    }
}

fn failure(error: impl std::fmt::Display) -> Failure {
    Failure::new(ErrorClass::Internal, "stage.raised", error.to_string())
}

fn params(task: &Task) -> (String, u64) {
    let params: Value = serde_json::from_str(task.params()).unwrap();
    (
        params["prompt"].as_str().unwrap().to_owned(),
        params["steps"].as_u64().unwrap(),
    )
}

fn tensor(kind: PayloadKind, name: &str, shape: &[u64], bytes: Vec<u8>) -> Output {
    let spec = TensorSpec::new(DType::U8, shape).unwrap();
    Output::tensor(kind, name, spec, Borrowed::from(bytes))
}

/// Completes, and tries again where the store died with its server: the next one has another.
async fn complete(task: &Task, output: Output) -> Result<(), Failure> {
    task.open(output).map_err(failure)?;
    loop {
        match task.finish().await {
            Err(error @ TaskError::Put { .. }) if error.class() == ErrorClass::Unavailable => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            ended => return ended.map_err(failure),
        }
    }
}

async fn encode(task: &Task) -> Result<(), Failure> {
    let (prompt, _) = params(task);
    if prompt == "refuse" {
        return Err(Failure::new(
            ErrorClass::Invalid,
            "stage.raised",
            "ValueError: <b>this prompt is refused</b>",
        ));
    }
    for path in task.files().iter().filter_map(|file| file.path.as_ref()) {
        let picture = std::fs::read(path).map_err(failure)?;
        if picture != prompt.as_bytes() {
            return Err(failure(format!(
                "the picture is {} bytes of something else",
                picture.len()
            )));
        }
    }
    let bytes: Vec<u8> = prompt.into_bytes();
    let shape = [bytes.len() as u64];
    complete(task, tensor(PayloadKind::Embedding, "embeds", &shape, bytes)).await
}

/// Steps that are done already.
async fn resumed(task: &Task) -> Result<u64, Failure> {
    if task.resume().is_none() {
        return Ok(0);
    }
    let mut state = task.consume_checkpoint(ConsumeOptions::default()).map_err(failure)?;
    let fetched = state.fetch_all().await.map_err(failure)?;
    Ok(fetched.tensors[0].to_vec()[0].into())
}

/// Puts a state of the attempt into the store, as one that saves it does, and does not come to say so.
async fn save_unsaid(worker: &Worker, task: &Task) -> Result<(), Failure> {
    let state = tensor(PayloadKind::Checkpoint, "done", &[1], vec![1]);
    let manifest = Manifest::new(state.kind, state.entries).map_err(failure)?;
    let spec = PublishSpec::new(task.token().job.to_string(), manifest, Owner::Orchestrator);
    let published = worker.connector().publish(spec, state.tensors).map_err(failure)?;
    let stored = worker
        .connector()
        .store(published.handle(), Some(task.token()), PATIENCE);
    stored.await.map(drop).map_err(failure)
}

async fn denoise(worker: &Worker, task: &Task) -> Result<(), Failure> {
    let (prompt, steps) = params(task);
    let mut input = task.consume(None, ConsumeOptions::default()).map_err(failure)?;
    let fetched = input.fetch_all().await.map_err(failure)?;
    assert_eq!(fetched.tensors[0].to_vec(), prompt.as_bytes());
    drop((fetched, input));
    if prompt == "hold" {
        return Err(task.stop().stopped().await);
    }
    let progress = |done| Progress {
        done,
        total: steps,
        unit: "step".to_owned(),
    };
    let begun = resumed(task).await?;
    if prompt == "unsaid" {
        save_unsaid(worker, task).await?;
    }
    if prompt == "yield" && begun == 0 {
        // Stands still after its first step until it is asked.
        task.progress(progress(1)).map_err(failure)?;
        tokio::select! {
            _ = task.asked_to_yield().stopped() => {}
            failure = task.stop().stopped() => return Err(failure),
        }
        let state = tensor(PayloadKind::Checkpoint, "done", &[1], vec![1]);
        return task.yield_with(Some(state), progress(1)).await.map_err(failure);
    }
    for done in begun + 1..=steps {
        task.progress(progress(done)).map_err(failure)?;
        tokio::task::yield_now().await;
    }
    complete(
        task,
        tensor(PayloadKind::Latent, "latents", &SHAPE, latents(&prompt, steps)),
    )
    .await
}

async fn decode(task: &Task) -> Result<(), Failure> {
    let mut input = task.consume(None, ConsumeOptions::default()).map_err(failure)?;
    let mut video = Vec::new();
    while let Some(chunk) = input.next().await.map_err(failure)? {
        video.extend(chunk.tensors[0].to_vec());
    }
    let entry = |name: &str, len: usize| Entry {
        name: name.to_owned(),
        value: EntryValue::Tensor(TensorSpec::new(DType::U8, [len as u64]).unwrap()),
    };
    let output = Output {
        kind: PayloadKind::Frames,
        entries: vec![entry("video", video.len()), entry("note", 2)],
        metadata: json!({
            "artefacts": [
                {"name": "video.mp4", "media_type": "video/mp4"},
                {"name": "../note.html", "media_type": "text/html"},
            ],
            "info": {"frames": 6},
        })
        .to_string(),
        tensors: vec![Borrowed::from(video).into(), Borrowed::from(b"ok".to_vec()).into()],
    };
    complete(task, output).await
}
