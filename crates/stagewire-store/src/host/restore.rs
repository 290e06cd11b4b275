//! Brings objects back from files.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use stagewire_core::PayloadId;
use stagewire_transfer::{ExtentMut, Filling, Target};
use tokio::sync::watch;
use tokio::time::sleep;

use super::Inner;
use super::fetch::{check_destinations, misfit};
use super::index::Place;
use super::object::{About, HostObject};
use super::rooms::in_pages;
use crate::journal::Record;
use crate::spill::{ReadError, Sink, SpillFile};
use crate::{ObjectState, SpillFault, StoreError};

/// How long an object waits for room in memory when it is brought back.
pub(super) const WAIT: Duration = Duration::from_secs(30);

impl Inner {
    /// The object in memory, brought back where it is in a file.
    pub(super) async fn get(self: &Arc<Self>, payload: PayloadId) -> Result<Arc<HostObject>, StoreError> {
        loop {
            let (about, place) = self.index(payload).read(payload)?;
            match place {
                Place::Memory(object) | Place::Writing(object) => return Ok(object),
                Place::Reading(_, mut done) => {
                    // Nothing is ever sent: it closes.
                    let _ = done.changed().await;
                }
                Place::File(file) => {
                    let (done, reading) = watch::channel(());
                    if !self.lock().begin_reading(&about, reading) {
                        continue;
                    }
                    let restore = Restore {
                        store: Arc::clone(self),
                        about,
                        file,
                        _done: done,
                    };
                    // It goes on when this caller has gone: others may wait for it.
                    let restored = self.runtime.spawn(restore.run()).await;
                    return restored.unwrap_or_else(|_| {
                        let source = SpillFault::new("read a file for", payload.to_string(), Errno::CANCELED);
                        Err(StoreError::Spill { payload, source })
                    });
                }
            }
        }
    }

    /// Copies the object into these destinations, from wherever it is.
    pub(super) async fn fetch(
        self: &Arc<Self>,
        payload: PayloadId,
        destinations: &[Arc<Target>],
    ) -> Result<(), StoreError> {
        let (about, place) = self.index(payload).read(payload)?;
        let file = match place {
            Place::Memory(object) | Place::Writing(object) => return object.copy_to(destinations).await,
            Place::File(file) | Place::Reading(file, _) => file,
        };
        check_destinations(&about, destinations)?;
        let begin = |(part, destination): (usize, &Arc<Target>)| {
            let filling = destination.begin();
            filling.map_err(|source| misfit(&about, part, destination, source))
        };
        let fillings = destinations.iter().enumerate().map(begin);
        let fillings = self.read(&about, &file, fillings.collect::<Result<_, _>>()?).await?;
        fillings.into_iter().for_each(Filling::commit);
        Ok(())
    }

    /// Reads a file into one sink for each part.
    async fn read<S: Sink>(&self, about: &About, file: &Arc<SpillFile>, sinks: Vec<S>) -> Result<Vec<S>, StoreError> {
        let payload = about.payload;
        let spill = self.spill.as_ref().expect("a store with files has a place for them");
        spill.read(file, sinks).await.map_err(|error| match error {
            ReadError::Fault(source) => StoreError::Spill { payload, source },
            ReadError::Corrupt { found } => StoreError::Corrupt {
                payload,
                file: spill.path(file),
                written: file.digest(),
                found,
            },
        })
    }
}

/// One object on its way back.
struct Restore {
    store: Arc<Inner>,
    about: Arc<About>,
    file: Arc<SpillFile>,
    /// Closes when it has ended, for those who wait for it.
    _done: watch::Sender<()>,
}

impl Restore {
    async fn run(self) -> Result<Arc<HostObject>, StoreError> {
        let (store, payload) = (&self.store, self.about.payload);
        let wanted = in_pages(&self.about.parts);
        let mut late = pin!(sleep(WAIT));
        let room = store.room(wanted, None, late.as_mut()).await;
        let room = room.ok_or_else(|| StoreError::Exhausted {
            payload,
            wanted,
            waited: WAIT,
            usage: Box::new(store.usage()),
        })?;
        let room = room.give(payload, wanted);
        let extents = store.allocate(payload, &self.about.parts, late).await?;
        let extents = store.read(&self.about, &self.file, extents).await?;
        let extents: Vec<_> = extents
            .into_iter()
            .map(|extent| extent.map(ExtentMut::freeze))
            .collect();
        store.keep(payload, &extents).await?;
        let parts = store.register(payload, extents)?;
        room.set(ObjectState::Sealed);
        let object = Arc::new(HostObject::new(Arc::clone(&self.about), parts, room));
        let mut index = store.lock();
        if !index.is_reading(&self.about) {
            return Err(StoreError::NotFound { payload });
        }
        let moved = store.journal(|| Record::Moved(payload, object.place()));
        moved.map_err(|source| StoreError::Index { payload, source })?;
        let file = index.end_reading(&self.about, Some(&object));
        drop(index);
        if let Some(file) = file {
            store.part_with_file(file);
        }
        store.counts.restored.add(self.about.nbytes());
        Ok(object)
    }
}

impl Drop for Restore {
    /// Where it failed, the object is still in its file.
    fn drop(&mut self) {
        let _ = self.store.lock().end_reading(&self.about, None);
    }
}
