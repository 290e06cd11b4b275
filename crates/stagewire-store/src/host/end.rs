//! How a store ends: with everything in it, or leaving that to the next process.

use std::sync::{Arc, MutexGuard, PoisonError};

use super::index::{Entry, Slot};
use super::open::blocking;
use super::{HostStore, Inner};
use crate::journal::Record;
use crate::{KeeperError, LeaveError, Share};

impl HostStore {
    /// Ends the store in an orderly way: its objects are gone, and so are their files and the keeper of their memory.
    /// Nothing comes over to the next process, and nothing is done here any more.
    ///
    /// # Errors
    /// [`KeeperError`] where the keeper did not answer; it ends by itself.
    ///
    /// # Cancel safety
    /// A dropped future goes on.
    pub async fn close(&self) -> Result<(), KeeperError> {
        let inner = Arc::clone(&self.inner);
        blocking(move || {
            let _turn = inner.ending();
            match inner.lock_and_close() {
                Some(entries) => inner.end(entries),
                None => Ok(()),
            }
        })
        .await
    }

    /// Stops, and leaves every sealed object to the next process that opens the data directory, within the time that the
    /// keeper waits for it ([`KeeperCommand::linger`](crate::KeeperCommand::linger)). Drafts are aborted. Where there is
    /// nothing to leave, or the store is not a durable one, it ends as with [`HostStore::close`]. Returns what was left.
    ///
    /// Nothing is done here any more. Who reads an object may go on until the process ends.
    ///
    /// A durable store that is dropped without a word leaves everything as well, as safe as a killed process would.
    ///
    /// # Errors
    /// [`LeaveError`]: the index cannot be written, so that what was deleted last may be there again, or there is no
    /// keeper, so that only what is in files survives.
    ///
    /// # Cancel safety
    /// A dropped future goes on.
    pub async fn leave(&self) -> Result<Share, LeaveError> {
        let inner = Arc::clone(&self.inner);
        blocking(move || inner.leave()).await
    }
}

impl Inner {
    fn lock_and_close(&self) -> Option<Vec<Entry>> {
        self.lock().close()
    }

    /// Ends everything. Blocks.
    fn end(&self, entries: Vec<Entry>) -> Result<(), KeeperError> {
        for entry in entries {
            let payload = entry.about().payload;
            let written = self.durable.as_ref().map_or(Ok(()), |durable| {
                durable.journal.append(Record::Gone(payload)).map(drop)
            });
            if let Err(error) = &written {
                tracing::error!(%payload, %error, "a payload that is gone is still in the store's index");
            }
            self.part_with(entry, written.is_ok());
        }
        self.free_condemned();
        if let Some(spill) = &self.spill {
            spill.end();
        }
        let Some(durable) = &self.durable else { return Ok(()) };
        if let Err(error) = durable.journal.sync() {
            tracing::error!(%error, "a deleted payload may come back after a loss of power");
        }
        durable.keeping.stop()
    }

    /// Who ends the store second returns no earlier than the first.
    fn ending(&self) -> MutexGuard<'_, ()> {
        self.ending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves everything. Blocks.
    fn leave(&self) -> Result<Share, LeaveError> {
        let _turn = self.ending();
        if let Some(spill) = &self.spill {
            // Waits for what is under way: the index says the same as the files from here on.
            spill.leave();
        }
        let Some(entries) = self.lock_and_close() else {
            return Ok(Share::default());
        };
        let durable = match &self.durable {
            Some(durable) if !entries.is_empty() => durable,
            _ => return Ok(self.end(entries).map(|()| Share::default())?),
        };
        let mut left = Share::default();
        for entry in &entries {
            left.add(entry.about().nbytes());
        }
        let _ = self.left.set(entries);
        // Nothing is appended any more: there is nothing that could change.
        let written = durable.journal.retry().and_then(|()| durable.journal.sync());
        durable.keeping.make_sure(self.host.arena(), &durable.journal)?;
        written?;
        Ok(left)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Whoever watches the deadlines finds nobody to watch them for.
        self.deadlines.notify_one();
        // Before the index goes, which would take the files with it.
        if let Some(spill) = &self.spill {
            spill.leave();
        }
        if self.durable.is_none() {
            return;
        }
        // What the index on disk names stays as it is, whatever else this process does with its arena.
        let index = self.index.get_mut().unwrap_or_else(PoisonError::into_inner);
        let sealed = index.slots().filter_map(|slot| match slot {
            Slot::Sealed(entry) => entry.object(),
            Slot::Draft { .. } => None,
        });
        let left = self.left.get().into_iter().flatten().filter_map(Entry::object);
        let condemned = self.condemned.get_mut().unwrap_or_else(PoisonError::into_inner);
        for object in sealed.chain(left).chain(&*condemned) {
            object.leave();
        }
    }
}
