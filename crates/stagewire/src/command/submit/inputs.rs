//! Files that a job is given: they go to the server before it.

use std::path::Path;

use anyhow::Context;
use serde_json::{Map, Value};

use super::patiently;
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
            *value = patiently(|| upload(client, Path::new(file)))
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

/// Sends a file from its beginning; its name says whether the server has it already.
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::args::ServerArgs;

    /// Reads a request until it has its end.
    async fn request(stream: &mut TcpStream, end: &str) {
        let mut seen = Vec::new();
        while !seen.ends_with(end.as_bytes()) {
            assert!(stream.read_buf(&mut seen).await.unwrap() > 0, "the request breaks off");
        }
    }

    async fn reply(stream: &mut TcpStream, status: &str, body: &Value) {
        let body = body.to_string();
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    }

    /// A server that breaks off, one that stops, and the next one, which is there.
    #[tokio::test]
    async fn a_file_is_sent_again_from_its_beginning_when_the_server_is_back() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cat.png");
        std::fs::write(&file, "a whole cat").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = ServerArgs {
            url: Some(format!("http://{}", listener.local_addr().unwrap())),
            token_file: None,
            json: false,
        };
        let client = Client::new(None, &server).unwrap();
        let serve = async {
            let (mut first, _) = listener.accept().await.unwrap();
            request(&mut first, "a whole cat").await;
            drop(first);
            let (mut second, _) = listener.accept().await.unwrap();
            request(&mut second, "a whole cat").await;
            let stopping = json!({"class": "unavailable", "reason": "server.stopping", "message": "", "details": {}});
            reply(&mut second, "503 Service Unavailable", &json!({"error": stopping})).await;
            let (mut third, _) = listener.accept().await.unwrap();
            request(&mut third, "a whole cat").await;
            let input = json!({"name": "blake3:0", "nbytes": 11, "media_type": "image/png", "url": "/v1/inputs/0"});
            reply(&mut third, "201 Created", &input).await;
        };
        let pipeline = json!({
            "name": "wan", "ready": true, "stages": [], "workers": [], "params": {"image": {"type": "input"}},
        });
        let pipeline: Pipeline = serde_json::from_value(pipeline).unwrap();
        let params = json!({"image": file}).as_object().unwrap().clone();
        let both = async { tokio::join!(send(&client, params, &pipeline), serve) };
        let (sent, ()) = tokio::time::timeout(Duration::from_secs(30), both)
            .await
            .expect("three tries");
        assert_eq!(sent.unwrap(), json!({"image": "blake3:0"}));
    }
}
