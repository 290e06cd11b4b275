//! From a stream of bytes to an input that is safe on disk.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::Stream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use uuid::Uuid;

use super::patience::Patience;
use super::room::Room;
use super::{InputError, InputInfo, InputName, Inputs, PART, UPLOADS, lock};
use crate::driver::Driver;

/// Pieces that wait for the disk.
const PIECES: usize = 4;

impl Inputs {
    /// Takes an input, and tells whether it is new. The disk has it when this returns; unless it returns one, nothing is
    /// left of it.
    ///
    /// # Errors
    /// [`InputError`].
    ///
    /// # Cancel safety
    /// A dropped future leaves the whole input or nothing.
    pub(crate) async fn receive<E: std::fmt::Display>(
        self: &Arc<Self>,
        driver: &Driver,
        media_type: String,
        declared: Option<u64>,
        body: &mut (impl Stream<Item = Result<Bytes, E>> + Unpin),
    ) -> Result<(InputInfo, bool), InputError> {
        let turn = Arc::clone(&self.uploads).try_acquire_owned();
        let turn = turn.map_err(|_| InputError::Busy { limit: UPLOADS })?;
        let largest = self.bounds.largest;
        let fits = |size: u64| match size > largest.0 {
            true => Err(InputError::TooLarge {
                declared,
                limit: largest,
            }),
            false => Ok(()),
        };
        let mut room = Room::none(Arc::clone(self));
        fits(declared.unwrap_or(0))?;
        room.hold(declared.unwrap_or(0), driver).await?;
        let (part, file) = Part::create(&self.dir).map_err(|source| InputError::store("write", source))?;
        let mut writer = Writer::start(file);
        let mut patience = Patience::default();
        let mut size = 0;
        loop {
            let Some(piece) = patience.next(body, size).await? else {
                break;
            };
            size += piece.len() as u64;
            fits(size)?;
            room.hold(size, driver).await?;
            if !writer.write(piece).await {
                break;
            }
        }
        let (file, name) = writer.finish().await?;
        let this = Arc::clone(self);
        // On a thread that ends what it has begun, whoever still waits for it.
        let kept = tokio::task::spawn_blocking(move || {
            let kept = this.keep(part, &file, room, name, media_type, size);
            drop(turn);
            kept
        });
        let kept = kept.await.unwrap_or_else(|error| Err(io::Error::other(error)));
        kept.map_err(|source| InputError::store("keep", source))
    }

    /// Gives a complete file its name.
    fn keep(
        &self,
        part: Part,
        file: &File,
        room: Room,
        name: InputName,
        media_type: String,
        nbytes: u64,
    ) -> io::Result<(InputInfo, bool)> {
        // Whoever changed it would change what its name says.
        file.set_permissions(Permissions::from_mode(0o400))?;
        file.sync_all()?;
        let _files = lock(&self.files);
        if let Some(found) = self.again(&name) {
            return Ok((found, false));
        }
        let named = self.give_name(part, &name, &media_type);
        if let Err(error) = named {
            for path in [self.path(&name), self.type_path(&name)] {
                // Mostly it is not there; if it is, the next start finds it.
                let _ = std::fs::remove_file(path);
            }
            return Err(error);
        }
        room.fill(name.clone(), nbytes, media_type.clone());
        let info = InputInfo {
            name,
            nbytes,
            media_type,
        };
        Ok((info, true))
    }

    /// What is there already, used now.
    fn again(&self, name: &InputName) -> Option<InputInfo> {
        let mut state = lock(&self.state);
        state.touch(name);
        let entry = state.entries.get(name)?;
        Some(InputInfo {
            name: name.clone(),
            nbytes: entry.nbytes,
            media_type: entry.media_type.clone(),
        })
    }

    fn give_name(&self, part: Part, name: &InputName, media_type: &str) -> io::Result<()> {
        let mut about = File::create(self.type_path(name))?;
        about.write_all(media_type.as_bytes())?;
        about.sync_all()?;
        part.rename(&self.path(name))?;
        File::open(&self.dir)?.sync_all()
    }
}

/// A file that is not complete, and goes unless it is renamed.
#[derive(Debug)]
struct Part {
    path: Option<PathBuf>,
}

impl Part {
    fn create(dir: &Path) -> io::Result<(Self, File)> {
        let path = dir.join(format!("{}{PART}", Uuid::new_v4()));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        Ok((Self { path: Some(path) }, file))
    }

    fn rename(mut self, to: &Path) -> io::Result<()> {
        let path = self.path.take().expect("taken once");
        std::fs::rename(&path, to).inspect_err(|_| self.path = Some(path))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if let Some(path) = &self.path
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::warn!(path = %path.display(), %error, "cannot delete an input that is not complete");
        }
    }
}

/// Writes and digests on a thread of its own.
struct Writer {
    pieces: mpsc::Sender<Bytes>,
    written: JoinHandle<io::Result<(File, InputName)>>,
}

impl Writer {
    fn start(mut file: File) -> Self {
        let (pieces, mut coming) = mpsc::channel::<Bytes>(PIECES);
        let written = tokio::task::spawn_blocking(move || {
            let mut digest = blake3::Hasher::new();
            while let Some(piece) = coming.blocking_recv() {
                digest.update(&piece);
                file.write_all(&piece)?;
            }
            Ok((file, InputName::new(digest.finalize())))
        });
        Self { pieces, written }
    }

    /// False where it cannot be written; `finish` says why.
    async fn write(&mut self, piece: Bytes) -> bool {
        self.pieces.send(piece).await.is_ok()
    }

    async fn finish(self) -> Result<(File, InputName), InputError> {
        drop(self.pieces);
        let written = self.written.await.unwrap_or_else(|error| Err(io::Error::other(error)));
        written.map_err(|source| InputError::store("write", source))
    }
}
