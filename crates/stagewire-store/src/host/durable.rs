//! What makes a store survive its process: its index on disk, and its memory with a keeper.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stagewire_transfer::{Arena, Extent, Inherited, ProcessWatch, SegmentName};
use tokio::sync::watch;

use crate::journal::Journal;
use crate::keeper::Link;
use crate::{DurableOptions, KeeperCommand, KeeperError, OpenError, StoreLock};

const ID: &str = "store.id";
/// Pause before another try to start a keeper.
const RETRY: Duration = Duration::from_secs(1);

/// Everything that a data directory gives to its store.
#[derive(Debug)]
pub(super) struct Durable {
    pub(super) journal: Arc<Journal>,
    pub(super) keeping: Arc<Keeping>,
    /// Names the data directory, wherever it is moved to.
    pub(super) id: String,
    /// Dropped with the store: ends the task that watches the keeper.
    alive: watch::Sender<()>,
    _lock: StoreLock,
}

/// What was found in a data directory.
pub(super) struct Found {
    pub(super) durable: Durable,
    pub(super) segments: Vec<Inherited>,
    pub(super) torn_bytes: u64,
}

impl Durable {
    /// Takes the data directory. Blocks.
    pub(super) fn open(options: &DurableOptions) -> Result<Found, OpenError> {
        let DurableOptions { dir, keeper } = options;
        let dir = private_dir(dir)?;
        let lock = StoreLock::of_data_dir(&dir)?;
        let id = id(&dir)?;
        let (journal, torn_bytes) = Journal::open(&dir)?;
        let link = Link::open(&dir, keeper)?;
        let segments = link.fetch()?;
        let keeping = Keeping {
            dir,
            command: keeper.clone(),
            state: Mutex::new(State {
                link: Arc::new(link),
                kept: segments.iter().map(|segment| segment.name).collect(),
                stopped: false,
            }),
            turn: Mutex::default(),
        };
        let durable = Self {
            journal: Arc::new(journal),
            keeping: Arc::new(keeping),
            id,
            alive: watch::Sender::new(()),
            _lock: lock,
        };
        Ok(Found {
            durable,
            segments,
            torn_bytes,
        })
    }

    /// Starts another keeper where this one dies, and lets it drop what the arena has given up.
    pub(super) fn watch(&self, arena: &Arena) {
        tokio::spawn(watch_keeper(
            Arc::clone(&self.keeping),
            Arc::clone(&self.journal),
            arena.clone(),
            self.alive.subscribe(),
        ));
    }
}

impl Drop for Durable {
    /// Also where nothing came of opening the store.
    fn drop(&mut self) {
        if self.journal.is_empty() {
            self.keeping.dismiss();
        }
    }
}

/// The keeper, and what it has.
#[derive(Debug)]
pub(super) struct Keeping {
    dir: PathBuf,
    command: KeeperCommand,
    state: Mutex<State>,
    /// Held by who changes what the keeper has.
    turn: Mutex<()>,
}

#[derive(Debug)]
struct State {
    link: Arc<Link>,
    kept: BTreeSet<SegmentName>,
    stopped: bool,
}

impl Keeping {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns once the keeper has the memory of these extents. Waits for the keeper only where one lies in a segment
    /// that it has not got yet, which is rare.
    pub(super) async fn keep(self: &Arc<Self>, arena: &Arena, extents: Vec<Extent>) -> Result<(), KeeperError> {
        let missing = {
            let state = self.state();
            extents
                .into_iter()
                .filter(|extent| !state.kept.contains(&extent.location().segment))
                .collect::<Vec<_>>()
        };
        if missing.is_empty() {
            return Ok(());
        }
        let (keeping, arena) = (Arc::clone(self), arena.clone());
        let kept = tokio::task::spawn_blocking(move || keeping.keep_now(&arena, &missing)).await;
        kept.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }

    /// The same, blocking.
    pub(super) fn keep_now(&self, arena: &Arena, extents: &[Extent]) -> Result<(), KeeperError> {
        let turn = self.turn();
        for extent in extents {
            let lent = extent.lend();
            if self.state().kept.contains(&lent.name) {
                continue;
            }
            let link = Arc::clone(&self.state().link);
            match link.keep(lent) {
                Ok(()) => {
                    self.state().kept.insert(lent.name);
                }
                // It has died: the next one gets everything.
                Err(KeeperError::Io { .. }) => return self.restart(arena, &turn),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Starts a keeper where there is none, and gives it every segment.
    fn restart(&self, arena: &Arena, _turn: &MutexGuard<'_, ()>) -> Result<(), KeeperError> {
        if self.state().stopped {
            return Ok(());
        }
        self.forget_kept();
        let link = Link::open(&self.dir, &self.command)?;
        let mut kept = BTreeSet::new();
        arena.lend_each(|lent| {
            kept.insert(lent.name);
            link.keep(lent)
        })?;
        let pid = link.process().pid;
        if self.install(link, kept) {
            tracing::warn!(dir = %self.dir.display(), pid, "the keeper of the store's memory had ended; another one has it now");
        }
        Ok(())
    }

    /// Goes on with another keeper. Returns whether there is still something to keep.
    fn install(&self, link: Link, kept: BTreeSet<SegmentName>) -> bool {
        let link = Arc::new(link);
        let mut state = self.state();
        let stopped = state.stopped;
        state.link = Arc::clone(&link);
        state.kept = kept;
        drop(state);
        if stopped {
            // While that one was started.
            link.dismiss();
        }
        !stopped
    }

    /// Nothing is kept by a keeper that has died: who seals waits for the next one.
    fn forget_kept(&self) {
        self.state().kept.clear();
    }

    /// Lets the keeper drop what neither the arena has nor the index names any more. A store that goes away without
    /// having been closed takes its arena along, and leaves the rest to the next process.
    pub(super) fn drop_retired(&self, arena: &Arena, journal: &Journal) {
        let _turn = self.turn();
        let (link, kept) = {
            let state = self.state();
            (Arc::clone(&state.link), state.kept.clone())
        };
        let mut there: BTreeSet<_> = arena.segment_names().into_iter().collect();
        there.extend(journal.segments());
        for name in kept.difference(&there) {
            match link.drop_segment(*name) {
                Ok(()) => {
                    self.state().kept.remove(name);
                }
                // A keeper that has died is another one's care.
                Err(error) => return tracing::debug!(%error, "the keeper did not drop a segment"),
            }
        }
    }

    /// Makes sure that the keeper has everything that the index names, by asking it. Blocks.
    pub(super) fn make_sure(&self, arena: &Arena, journal: &Journal) -> Result<(), KeeperError> {
        let turn = self.turn();
        let link = Arc::clone(&self.state().link);
        let kept: BTreeSet<_> = match link.fetch() {
            Ok(segments) => segments.iter().map(|segment| segment.name).collect(),
            Err(error) => {
                tracing::debug!(%error, "the keeper did not say what it has");
                BTreeSet::new()
            }
        };
        if journal.segments().is_subset(&kept) {
            return Ok(());
        }
        self.restart(arena, &turn)
    }

    /// Tells the keeper to end, without waiting for that: there is nothing to keep.
    pub(super) fn dismiss(&self) {
        let link = {
            let mut state = self.state();
            if std::mem::replace(&mut state.stopped, true) {
                return;
            }
            Arc::clone(&state.link)
        };
        link.dismiss();
    }

    /// Ends the keeper: nothing is to survive.
    pub(super) fn stop(&self) -> Result<(), KeeperError> {
        let _turn = self.turn();
        let link = {
            let mut state = self.state();
            state.stopped = true;
            Arc::clone(&state.link)
        };
        link.stop()
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn watch_keeper(keeping: Arc<Keeping>, journal: Arc<Journal>, arena: Arena, mut alive: watch::Receiver<()>) {
    let mut retired = arena.retired();
    loop {
        let process = keeping.state().link.process();
        let watch = ProcessWatch::open(process);
        let died = async {
            if let Ok(watch) = &watch {
                watch.died().await;
            }
        };
        let ended = tokio::select! {
            // First: what the store left is another one's care.
            biased;
            _ = alive.changed() => return,
            changed = retired.changed() => match changed {
                Ok(()) => false,
                Err(_) => return,
            },
            () = died => true,
        };
        if keeping.state().stopped {
            return;
        }
        if ended && keeping.state().link.process() == process {
            keeping.forget_kept();
        }
        let (keeping, journal, arena) = (Arc::clone(&keeping), Arc::clone(&journal), arena.clone());
        let done = tokio::task::spawn_blocking(move || {
            if ended {
                let turn = keeping.turn();
                // Somebody who wanted to keep a segment may have been first.
                if keeping.state().link.process() == process {
                    return keeping.restart(&arena, &turn);
                }
            }
            keeping.drop_retired(&arena, &journal);
            Ok(())
        });
        if let Ok(Err(error)) = done.await {
            tracing::error!(%error, "the store's memory has no keeper: it would not survive this process");
            tokio::time::sleep(RETRY).await;
        }
    }
}

/// Makes the directory, or proves that nobody else can enter it.
fn private_dir(dir: &Path) -> Result<PathBuf, OpenError> {
    let failed = |what| {
        move |source| OpenError::Dir {
            what,
            dir: dir.to_owned(),
            source,
        }
    };
    let mut builder = fs::DirBuilder::new();
    builder
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(failed("make"))?;
    let found = fs::metadata(dir).map_err(failed("look at"))?;
    let (mode, owner, me) = (found.mode() & 0o777, found.uid(), rustix::process::geteuid().as_raw());
    if mode & 0o077 != 0 || owner != me {
        let problem = format!("it has mode {mode:03o} and belongs to user {owner}");
        return Err(OpenError::Insecure {
            dir: dir.to_owned(),
            problem,
        });
    }
    fs::canonicalize(dir).map_err(failed("find"))
}

/// The id of the directory, made where there is none. Only who has its lock may call this.
fn id(dir: &Path) -> Result<String, OpenError> {
    let failed = |what| {
        move |source| OpenError::Dir {
            what,
            dir: dir.to_owned(),
            source,
        }
    };
    let path = dir.join(ID);
    match fs::read_to_string(&path) {
        Ok(id) if !id.is_empty() => return Ok(id),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("read store.id of")(error)),
        _ => {}
    }
    let id = format!("{:032x}", rand::random::<u128>());
    // Renamed, so that it is there whole or not at all.
    let new = dir.join("store.id.new");
    fs::write(&new, &id).map_err(failed("write store.id of"))?;
    fs::rename(&new, &path).map_err(failed("write store.id of"))?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// A store that ends while another keeper is started for it leaves none behind.
    #[test]
    fn a_keeper_that_comes_too_late_is_dismissed() {
        let dir = tempfile::tempdir().expect("a directory");
        let command = crate::keeper::test_command();
        let open = || Link::open(dir.path(), &command).expect("a keeper");
        let first = Arc::new(open());
        let keeping = Keeping {
            dir: dir.path().to_owned(),
            command: command.clone(),
            state: Mutex::new(State {
                link: Arc::clone(&first),
                kept: BTreeSet::new(),
                stopped: false,
            }),
            turn: Mutex::default(),
        };
        keeping.dismiss();
        // Waits until the first one has gone.
        let second = open();
        let process = second.process();
        assert_ne!(process, first.process());
        assert!(!keeping.install(second, BTreeSet::new()));
        let begin = Instant::now();
        while Path::new(&format!("/proc/{}", process.pid)).exists() {
            assert!(begin.elapsed() < Duration::from_secs(20), "it lingers");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
