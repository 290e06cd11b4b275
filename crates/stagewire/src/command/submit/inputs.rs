//! Files that a job is given: they go to the server before it.

use std::path::Path;

use anyhow::Context;
use serde_json::{Map, Value};

use crate::client::{Client, Pipeline};
use crate::exit::Fault;

/// What the server's names of inputs begin with; anything else is a file.
const SCHEME: &str = "blake3:";

/// Sends the files of a job, and gives its parameters with their names.
pub(super) async fn send(client: &Client, mut params: Map<String, Value>, pipeline: &Pipeline) -> Result<Value, Fault> {
    for (name, value) in &mut params {
        let is_input = pipeline.params.get(name).is_some_and(|spec| spec.kind == "input");
        let file = value
            .as_str()
            .filter(|text| !text.is_empty() && !text.starts_with(SCHEME));
        if is_input && let Some(file) = file {
            *value = upload(client, Path::new(file))
                .await
                .map_err(|mut fault| {
                    fault.error = fault.error.context(format!("--param {name}={file}"));
                    fault
                })?
                .into();
        }
    }
    Ok(Value::Object(params))
}

async fn upload(client: &Client, path: &Path) -> Result<String, Fault> {
    let open = async {
        let file = tokio::fs::File::open(path).await?;
        let metadata = file.metadata().await?;
        anyhow::ensure!(metadata.is_file(), "it is no file");
        anyhow::Ok((file, metadata.len()))
    };
    let opened = open.await.context("cannot read the file");
    let (file, nbytes) = opened.map_err(|error| Fault::usage(format!("{error:#}")))?;
    Ok(client.upload(file, nbytes, media_type(path)).await?.name)
}

/// By the end of its name, for those who look at it at the server: stages look into the file itself.
fn media_type(path: &Path) -> &'static str {
    let end = path.extension().and_then(|end| end.to_str()).unwrap_or_default();
    match end.to_ascii_lowercase().as_str() {
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "webp" => "image/webp",
        "gif" => "image/gif",
        "mp4" => "video/mp4",
        "webm" => "video/webm",
        "mov" => "video/quicktime",
        "wav" => "audio/wav",
        "mp3" => "audio/mpeg",
        _ => "application/octet-stream",
    }
}
