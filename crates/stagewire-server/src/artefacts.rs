//! Finished files: kept in a folder, under ids that the server makes.

use std::collections::BTreeSet;
use std::path::Path as FilePath;
use std::sync::Arc;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{GetResult, ObjectStore, ObjectStoreExt};
use stagewire_core::{ByteCount, Classify, ErrorClass, JobId};
use stagewire_sched::{ArtefactInfo, ResultInfo};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

/// Why a file cannot be kept or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ArtefactError {
    #[error("artefact {id} of job {job} does not exist")]
    Unknown { job: JobId, id: String },
    #[error("cannot {what} artefacts of job {job}; is the disk full?")]
    Store {
        what: &'static str,
        job: JobId,
        source: object_store::Error,
    },
}

impl Classify for ArtefactError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Unknown { .. } => ErrorClass::NotFound,
            Self::Store { .. } => ErrorClass::Unavailable,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Unknown { .. } => "artefact.unknown",
            Self::Store { .. } => "artefact.store",
        }
    }
}

/// One file of a result, with its bytes.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) name: String,
    pub(crate) media_type: String,
    pub(crate) bytes: Bytes,
}

/// The folder: `JOB/ARTEFACT`, both of them ids.
#[derive(Debug)]
pub(crate) struct Artefacts {
    store: Arc<dyn ObjectStore>,
    tasks: TaskTracker,
}

impl Artefacts {
    /// Uses `dir`, which is made where it is missing.
    ///
    /// # Errors
    /// Where the folder cannot be made or used.
    pub(crate) fn open(dir: &FilePath, tasks: TaskTracker) -> std::io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let store = LocalFileSystem::new_with_prefix(dir)?
            .with_fsync(true)
            .with_automatic_cleanup(true);
        Ok(Self {
            store: Arc::new(store),
            tasks,
        })
    }

    /// Writes the files of a result; the disk has them when this returns.
    ///
    /// # Errors
    /// [`ArtefactError::Store`]; nothing is kept then.
    pub(crate) async fn keep(&self, job: JobId, files: Vec<File>) -> Result<Vec<ArtefactInfo>, ArtefactError> {
        let mut kept = Vec::with_capacity(files.len());
        for file in files {
            let info = ArtefactInfo {
                id: Uuid::new_v4().to_string(),
                name: file.name,
                media_type: file.media_type,
                nbytes: ByteCount(file.bytes.len() as u64),
            };
            let put = self.store.put(&path(job, &info.id), file.bytes.into()).await;
            kept.push(info);
            if let Err(source) = put {
                self.discard(job, &kept).await;
                return Err(ArtefactError::Store {
                    what: "write",
                    job,
                    source,
                });
            }
        }
        Ok(kept)
    }

    /// Deletes files that nobody will ask for.
    pub(crate) async fn discard(&self, job: JobId, files: &[ArtefactInfo]) {
        for file in files {
            self.delete(&path(job, &file.id)).await;
        }
    }

    /// The same, soon.
    pub(crate) fn discard_soon(self: &Arc<Self>, job: JobId, files: Vec<ArtefactInfo>) {
        let this = Arc::clone(self);
        self.tasks.spawn(async move { this.discard(job, &files).await });
    }

    /// Opens one file.
    ///
    /// # Errors
    /// [`ArtefactError`].
    pub(crate) async fn get(&self, job: JobId, file: &ArtefactInfo) -> Result<GetResult, ArtefactError> {
        self.store
            .get(&path(job, &file.id))
            .await
            .map_err(|source| match source {
                object_store::Error::NotFound { .. } => ArtefactError::Unknown {
                    job,
                    id: file.id.clone(),
                },
                source => ArtefactError::Store {
                    what: "read",
                    job,
                    source,
                },
            })
    }

    /// Deletes everything of a job, soon.
    pub(crate) fn forget(self: &Arc<Self>, job: JobId) {
        let this = Arc::clone(self);
        self.tasks.spawn(async move {
            let prefix = Path::from(job.to_string());
            let paths: Result<Vec<_>, _> = this.store.list(Some(&prefix)).try_collect().await;
            for object in paths.unwrap_or_default() {
                this.delete(&object.location).await;
            }
        });
    }

    /// Deletes what no job knows: files of results that were written and, because of a crash, never accepted.
    pub(crate) async fn sweep<'a>(&self, known: impl IntoIterator<Item = (JobId, &'a ResultInfo)>) {
        let known: BTreeSet<Path> = known
            .into_iter()
            .flat_map(|(job, result)| result.artefacts.iter().map(move |file| path(job, &file.id)))
            .collect();
        let found: Result<Vec<_>, _> = self.store.list(None).try_collect().await;
        for object in found.unwrap_or_default() {
            if !known.contains(&object.location) {
                self.delete(&object.location).await;
            }
        }
    }

    async fn delete(&self, path: &Path) {
        match self.store.delete(path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
            Err(error) => tracing::warn!(%path, %error, "cannot delete an artefact"),
        }
    }
}

fn path(job: JobId, id: &str) -> Path {
    Path::from(job.to_string()).join(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str) -> File {
        File {
            name: name.to_owned(),
            media_type: "video/mp4".to_owned(),
            bytes: Bytes::from_static(b"moving pictures"),
        }
    }

    #[tokio::test]
    async fn files_are_kept_under_ids_whatever_they_are_called() {
        let dir = tempfile::tempdir().unwrap();
        let artefacts = Arc::new(Artefacts::open(dir.path(), TaskTracker::new()).unwrap());
        let job = JobId(Uuid::from_u128(7));
        let kept = artefacts
            .keep(job, vec![file("../../evil"), file("video.mp4")])
            .await
            .unwrap();
        assert_eq!((kept[0].name.as_str(), kept[0].nbytes), ("../../evil", ByteCount(15)));
        assert_eq!(std::fs::read_dir(dir.path().join(job.to_string())).unwrap().count(), 2);
        assert_eq!(
            std::fs::read_dir(dir.path().parent().unwrap().join("evil"))
                .ok()
                .map(drop),
            None
        );
        let bytes = artefacts.get(job, &kept[1]).await.unwrap().bytes().await.unwrap();
        assert_eq!(bytes, "moving pictures");

        // A restart knows of one of them.
        let known = ResultInfo {
            artefacts: vec![kept[1].clone()],
            info: String::new(),
        };
        artefacts.sweep([(job, &known)]).await;
        assert!(matches!(
            artefacts.get(job, &kept[0]).await,
            Err(ArtefactError::Unknown { .. })
        ));
        assert!(artefacts.get(job, &kept[1]).await.is_ok());
        artefacts.forget(job);
        artefacts.tasks.close();
        artefacts.tasks.wait().await;
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
