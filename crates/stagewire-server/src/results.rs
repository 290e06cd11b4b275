//! From the result payload of a last stage to files that are safe, and only then to a completion.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;
use stagewire_api::v1;
use stagewire_connector::{Connector, ConsumeError, ConsumeOptions};
use stagewire_core::{
    ByteCount, Classify, ErrorClass, Failure, Handle, HandleError, Handover, Incarnation, Manifest, Token,
};
use stagewire_sched::{Input, Phase, ResultInfo};
use tokio::sync::Semaphore;

use crate::artefacts::{ArtefactError, Artefacts, File};
use crate::driver::{DriveError, Driver};
use crate::workers::Workers;

/// How long the bytes of a result may take to come.
const FETCH: Duration = Duration::from_secs(30);
/// Results that are fetched at once. Together with [`LARGEST`] this bounds the memory that they take.
const AT_ONCE: usize = 4;
/// Most bytes that all files of one result may have.
const LARGEST: ByteCount = ByteCount(1 << 30);
/// Media type of a file whose stage names none, or none that is one.
const UNKNOWN_TYPE: &str = "application/octet-stream";
/// Longest name of a file, in characters.
const NAME: usize = 255;

/// What the metadata of a result payload says.
#[derive(Debug, Default, Deserialize)]
struct Metadata {
    /// In the order of the tensors.
    #[serde(default)]
    artefacts: Vec<Description>,
    /// Passed on to those who ask for the result.
    #[serde(default)]
    info: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Description {
    name: String,
    #[serde(default)]
    media_type: String,
}

/// Why a result is not taken.
#[derive(Debug, thiserror::Error)]
enum ResultError {
    #[error("the result of {token} names no payload that can be read")]
    Handle { token: Token, source: HandleError },
    #[error(
        "the metadata of the result of {token} is not {{\"artefacts\": [{{\"name\", \"media_type\"}}], \"info\"}}: {error}"
    )]
    Metadata { token: Token, error: String },
    #[error("the result of {token} describes {described} files and holds {found} tensors")]
    Count {
        token: Token,
        described: usize,
        found: usize,
    },
    #[error(
        "the files of the result of {token} have {} bytes, and the server keeps at most {} of one result; write larger \
         files to a place of their own and return where they are", .nbytes.0, LARGEST.0
    )]
    TooLarge { token: Token, nbytes: ByteCount },
    #[error("cannot fetch the result of {token}")]
    Fetch { token: Token, source: Box<ConsumeError> },
    #[error("cannot keep the result of {token}")]
    Keep { token: Token, source: Box<ArtefactError> },
}

impl Classify for ResultError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Handle { source, .. } => source.class(),
            Self::Metadata { .. } | Self::Count { .. } | Self::TooLarge { .. } => ErrorClass::Invalid,
            Self::Fetch { source, .. } => source.class(),
            Self::Keep { source, .. } => source.class(),
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Handle { source, .. } => source.reason(),
            Self::Metadata { .. } | Self::Count { .. } => "result.malformed",
            Self::TooLarge { .. } => "result.too_large",
            Self::Fetch { source, .. } => source.reason(),
            Self::Keep { source, .. } => source.reason(),
        }
    }
}

/// Fetches results.
#[derive(Debug)]
pub(crate) struct Results {
    connector: Arc<Connector>,
    artefacts: Arc<Artefacts>,
    workers: Arc<Workers>,
    busy: Busy,
    turns: Semaphore,
}

impl Results {
    pub(crate) fn new(connector: Arc<Connector>, artefacts: Arc<Artefacts>, workers: Arc<Workers>) -> Self {
        Self {
            connector,
            artefacts,
            workers,
            busy: Busy::default(),
            turns: Semaphore::new(AT_ONCE),
        }
    }

    /// Takes the result of an attempt: fetches its bytes, keeps them as files, and then completes the attempt.
    pub(crate) async fn take(
        &self,
        driver: &Driver,
        worker: Incarnation,
        token: Token,
        payload: &v1::Payload,
        handovers: Vec<Handover>,
    ) {
        let Some(_busy) = self.busy.begin(token) else { return };
        let input = self.complete(driver, worker, token, payload, handovers).await;
        let files = match &input {
            Input::Completed {
                result: Some(result), ..
            } => result.artefacts.clone(),
            _ => Vec::new(),
        };
        let completed = matches!(input, Input::Completed { .. });
        match driver.decide(input).await {
            // Published to nobody, so that the scheduler does not know of it.
            Ok(_) if completed => self.workers.release(worker, payload),
            Ok(_) => {}
            Err(DriveError::Refused(_)) => self.artefacts.discard(token.job, &files).await,
            // The journal may hold the completion all the same; the next start knows.
            Err(DriveError::Stopped) => {}
        }
    }

    async fn complete(
        &self,
        driver: &Driver,
        worker: Incarnation,
        token: Token,
        payload: &v1::Payload,
        handovers: Vec<Handover>,
    ) -> Input {
        let valid = driver.look(move |sched, _| {
            let mut stages = sched.job(token.job).into_iter().flat_map(|job| job.stages());
            stages.any(|stage| matches!(stage.phase(), Phase::Running(running) if running.token == token))
        });
        let completed = |result| Input::Completed {
            worker,
            token,
            result,
            handovers,
        };
        if !valid.await.unwrap_or(false) {
            // The scheduler has the last word: it knows repeated completions from stale ones.
            return completed(None);
        }
        match self.fetch(token, payload).await {
            Ok(result) => completed(Some(result)),
            Err(ResultError::Fetch { source, .. }) if source.class() == ErrorClass::Unavailable => {
                tracing::info!(%worker, %token, %source, "the holder of a result is gone; the attempt is lost");
                Input::Stopped { worker, token }
            }
            Err(error) => Input::Failed {
                worker,
                token,
                failure: failure(&error),
                lost: None,
            },
        }
    }

    async fn fetch(&self, token: Token, payload: &v1::Payload) -> Result<ResultInfo, ResultError> {
        let handle = Handle::from_bytes(&payload.handle).map_err(|source| ResultError::Handle { token, source })?;
        let metadata: Option<Metadata> =
            serde_json::from_str(handle.manifest.metadata()).map_err(|error| ResultError::Metadata {
                token,
                error: error.to_string(),
            })?;
        let metadata = metadata.unwrap_or_default();
        let names: Vec<String> = handle.manifest.entries().iter().flat_map(names).collect();
        if !metadata.artefacts.is_empty() && metadata.artefacts.len() != names.len() {
            return Err(ResultError::Count {
                token,
                described: metadata.artefacts.len(),
                found: names.len(),
            });
        }
        check_size(token, &handle.manifest)?;
        let _turn = self.turns.acquire().await;
        let fetch = |source| ResultError::Fetch {
            token,
            source: Box::new(source),
        };
        let mut consumer = self
            .connector
            .consume(handle, ConsumeOptions::within(FETCH))
            .map_err(fetch)?;
        let fetched = consumer.fetch_all().await.map_err(fetch)?;
        let mut described = metadata.artefacts.into_iter();
        let files = fetched.tensors.iter().zip(names).map(|(view, name)| {
            let description = described.next();
            let (name, media_type) = description.map_or((name, String::new()), |file| (file.name, file.media_type));
            let mut bytes = Vec::with_capacity(usize::try_from(view.nbytes().0).unwrap_or_default());
            view.rows().for_each(|row| bytes.extend_from_slice(row));
            File {
                name: name.chars().filter(|c| !c.is_control()).take(NAME).collect(),
                media_type: media_type_or_unknown(media_type),
                bytes: Bytes::from(bytes),
            }
        });
        let files = files.collect();
        drop(fetched);
        let keep = |source| ResultError::Keep {
            token,
            source: Box::new(source),
        };
        let artefacts = self.artefacts.keep(token.job, files).await;
        Ok(ResultInfo {
            artefacts: artefacts.map_err(keep)?,
            info: metadata.info.map(|info| info.to_string()).unwrap_or_default(),
        })
    }
}

/// Completions that are being worked on: a worker that reconnects repeats them.
#[derive(Debug, Default)]
struct Busy(Mutex<BTreeSet<Token>>);

/// Ends the work on a completion when it goes, however that comes about.
#[derive(Debug)]
struct Work<'a> {
    busy: &'a Busy,
    token: Token,
}

impl Busy {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<Token>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to work on a completion; `None` where somebody does.
    fn begin(&self, token: Token) -> Option<Work<'_>> {
        let new = self.lock().insert(token);
        new.then(|| Work { busy: self, token })
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        self.busy.lock().remove(&self.token);
    }
}

fn check_size(token: Token, manifest: &Manifest) -> Result<(), ResultError> {
    let nbytes = manifest.nbytes();
    if nbytes > LARGEST {
        return Err(ResultError::TooLarge { token, nbytes });
    }
    Ok(())
}

fn failure(error: &ResultError) -> Failure {
    error.to_failure()
}

/// One name per tensor: that of its entry, numbered where the entry is a list.
fn names(entry: &stagewire_core::Entry) -> Vec<String> {
    match &entry.value {
        stagewire_core::EntryValue::List(tensors) => (0..tensors.len())
            .map(|index| format!("{}.{index}", entry.name))
            .collect(),
        value => value.tensors().iter().map(|_| entry.name.clone()).collect(),
    }
}

/// `type/subtype` of the characters that RFC 6838 allows, with parameters cut off.
fn media_type_or_unknown(text: String) -> String {
    let essence = text.split(';').next().unwrap_or_default().trim();
    let part = |part: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "!#$&-^_.+".contains(c);
        (1..=127).contains(&part.len()) && part.chars().all(allowed)
    };
    match essence.split_once('/') {
        Some((kind, sub)) if part(kind) && part(sub) => essence.to_ascii_lowercase(),
        _ => UNKNOWN_TYPE.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::{Attempt, DType, Entry, EntryValue, Epoch, JobId, PayloadKind, TensorSpec};

    use super::*;

    fn token() -> Token {
        Token {
            epoch: Epoch(1),
            job: JobId(uuid::Uuid::from_u128(2)),
            attempt: Attempt(3),
        }
    }

    #[test]
    fn a_completion_is_worked_on_once_at_a_time_even_after_a_panic() {
        let busy = Busy::default();
        let panicked = std::panic::catch_unwind(|| {
            let _work = busy.begin(token()).expect("nobody works on it");
            assert!(busy.begin(token()).is_none(), "somebody works on it");
            panic!("in the middle of the work");
        });
        assert!(panicked.is_err());
        assert!(busy.begin(token()).is_some(), "nobody works on it any more");
    }

    #[test]
    fn a_result_may_have_so_many_bytes_and_no_more() {
        let manifest = |sizes: &[u64]| {
            let file = |(index, size): (usize, &u64)| Entry {
                name: format!("file-{index}"),
                value: EntryValue::Tensor(TensorSpec::new(DType::U8, vec![*size]).unwrap()),
            };
            let files = sizes.iter().enumerate().map(file).collect();
            Manifest::new(PayloadKind::Frames, files).unwrap()
        };
        assert!(check_size(token(), &manifest(&[LARGEST.0 - 1, 1])).is_ok());
        let failure = check_size(token(), &manifest(&[LARGEST.0, 1]))
            .unwrap_err()
            .to_failure();
        assert_eq!(
            (failure.class, failure.reason.as_str()),
            (ErrorClass::Invalid, "result.too_large")
        );
        assert!(
            failure
                .message
                .contains("1073741825 bytes, and the server keeps at most 1073741824"),
            "{failure}"
        );
    }

    #[test]
    fn only_media_types_pass_as_media_types() {
        let check = |text: &str| media_type_or_unknown(text.to_owned());
        assert_eq!(check("Video/MP4; codecs=avc1"), "video/mp4");
        assert_eq!(check("image/svg+xml"), "image/svg+xml");
        for wrong in ["", "video", "video/", "a/b\r\nSet-Cookie: x", "a b/c", "text/ht ml"] {
            assert_eq!(check(wrong), UNKNOWN_TYPE, "{wrong:?}");
        }
    }
}
