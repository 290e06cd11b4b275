//! What happened to each job, for those who watch now and those who come later.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stagewire_core::{JobId, StageName, Timestamp};
use stagewire_sched::Choice;
use tokio::sync::Notify;

use crate::note::{Note, NoteId, NoteKind, ProgressNote};

/// The histories of all jobs that are remembered.
#[derive(Debug, Default)]
pub(crate) struct Histories(Mutex<BTreeMap<JobId, Arc<History>>>);

/// The history of one job.
#[derive(Debug, Default)]
pub(crate) struct History {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    notes: Vec<Arc<Note>>,
    /// The newest progress of each stage that runs, with the version in which it came.
    progress: BTreeMap<StageName, (u64, ProgressNote)>,
    version: u64,
    /// Why each stage was offered last to whom. Known to this server alone: it is not journaled.
    choices: BTreeMap<StageName, Arc<Choice>>,
    /// Where the present life of the job begins among the notes.
    life: usize,
    /// No more will come: the job has ended, or was forgotten.
    over: bool,
}

/// What a watcher has not seen yet.
#[derive(Debug, Default)]
pub(crate) struct News {
    pub(crate) notes: Vec<Arc<Note>>,
    pub(crate) progress: Vec<(StageName, ProgressNote)>,
    /// Number of the last note, for progress.
    pub(crate) seq: u64,
    pub(crate) over: bool,
}

/// How far a watcher has come.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cursor {
    after: Option<NoteId>,
    version: u64,
}

impl Cursor {
    /// Everything that comes after this note; with `None` everything.
    pub(crate) const fn after(note: Option<NoteId>) -> Self {
        Self {
            after: note,
            version: 0,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Histories {
    /// The history of a job, which begins where there is none.
    pub(crate) fn of(&self, job: JobId) -> Arc<History> {
        Arc::clone(lock(&self.0).entry(job).or_default())
    }

    /// The history of a job, where there is one.
    pub(crate) fn get(&self, job: JobId) -> Option<Arc<History>> {
        lock(&self.0).get(&job).cloned()
    }

    /// Ends and drops the history of a job.
    pub(crate) fn forget(&self, job: JobId) {
        if let Some(history) = lock(&self.0).remove(&job) {
            lock(&history.state).over = true;
            history.changed.notify_waiters();
        }
    }

    /// Number of the last note of a job; 0 where there is none.
    pub(crate) fn last_seq(&self, job: JobId) -> u64 {
        self.get(job).map_or(0, |history| lock(&history.state).last_seq())
    }
}

impl State {
    fn last_seq(&self) -> u64 {
        self.notes.last().map_or(0, |note| note.id.seq)
    }
}

impl History {
    pub(crate) fn push(&self, note: Note) {
        let mut state = lock(&self.state);
        if let Some(stage) = &note.stage
            && matches!(
                note.kind,
                NoteKind::StageDone | NoteKind::Requeued(_) | NoteKind::Yielded(_)
            )
        {
            state.progress.remove(stage);
        }
        if note.kind.is_first() {
            (state.life, state.over) = (state.notes.len(), false);
        }
        if note.kind.is_last() {
            state.progress.clear();
            state.over = true;
        }
        state.notes.push(Arc::new(note));
        drop(state);
        self.changed.notify_waiters();
    }

    pub(crate) fn progress(&self, stage: StageName, note: ProgressNote) {
        let mut state = lock(&self.state);
        if state.over {
            return;
        }
        state.version += 1;
        let version = state.version;
        state.progress.insert(stage, (version, note));
        drop(state);
        self.changed.notify_waiters();
    }

    pub(crate) fn chose(&self, choice: Choice) {
        lock(&self.state).choices.insert(choice.stage.clone(), Arc::new(choice));
    }

    /// Why each stage was offered last to whom.
    pub(crate) fn choices(&self) -> Vec<Arc<Choice>> {
        lock(&self.state).choices.values().cloned().collect()
    }

    /// When the job was submitted, or redriven last.
    pub(crate) fn begin(&self) -> Option<Timestamp> {
        let state = lock(&self.state);
        state.notes.get(state.life).map(|note| note.at)
    }

    /// Everything so far.
    pub(crate) fn notes(&self) -> Vec<Arc<Note>> {
        lock(&self.state).notes.clone()
    }

    /// What comes after the cursor, which moves on. How an earlier life of the job went, and that it ended, is not news.
    pub(crate) fn news(&self, cursor: &mut Cursor) -> News {
        let state = lock(&self.state);
        let start = state.notes.partition_point(|note| Some(note.id) <= cursor.after);
        let notes = state.notes[start.max(state.life)..].to_vec();
        let progress = state
            .progress
            .iter()
            .filter(|(_, (version, _))| *version > cursor.version);
        let news = News {
            progress: progress
                .map(|(stage, (_, note))| (stage.clone(), note.clone()))
                .collect(),
            seq: state.last_seq(),
            over: state.over,
            notes,
        };
        cursor.after = state.notes.last().map(|note| note.id).max(cursor.after);
        cursor.version = state.version;
        news
    }

    /// Waits until there is something after the cursor, or nothing more will come.
    pub(crate) async fn wait(&self, cursor: &mut Cursor) -> News {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let news = self.news(cursor);
            if news.over || !news.notes.is_empty() || !news.progress.is_empty() {
                return news;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::{Failure, Progress};

    use super::*;

    fn note(id: &str, kind: NoteKind) -> Note {
        Note {
            id: id.parse().unwrap(),
            at: Timestamp(0),
            stage: Some(StageName::new("decode").unwrap()),
            attempt: None,
            worker: None,
            kind,
        }
    }

    fn progress(done: u64) -> ProgressNote {
        ProgressNote {
            at: Timestamp(0),
            attempt: None,
            worker: None,
            progress: Progress {
                done,
                total: 9,
                unit: "step".to_owned(),
            },
        }
    }

    #[test]
    fn a_watcher_that_comes_back_gets_the_rest_once() {
        let history = History::default();
        for (id, kind) in [
            ("1.1", NoteKind::Submitted),
            ("1.2", NoteKind::Queued),
            ("1.3", NoteKind::Running),
        ] {
            history.push(note(id, kind));
        }
        let mut cursor = Cursor::after(Some("1.1".parse().unwrap()));
        assert_eq!(history.news(&mut cursor).notes.len(), 2);
        assert_eq!(history.news(&mut cursor).notes.len(), 0);
        // It saw 1.3 to 1.5 of a server that crashed and remembers 1.1 to 1.3 only; 2.4 is news all the same.
        let mut cursor = Cursor::after(Some("1.5".parse().unwrap()));
        assert!(history.news(&mut cursor).notes.is_empty());
        history.push(note("2.4", NoteKind::Requeued(None)));
        assert_eq!(history.news(&mut cursor).notes.len(), 1);
    }

    #[test]
    fn a_job_that_is_redriven_has_news_again_and_old_ends_are_none() {
        let history = History::default();
        history.push(note("1.1", NoteKind::Submitted));
        let mut early = Cursor::default();
        assert_eq!(history.news(&mut early).notes.len(), 1);
        let failure = Failure::new(stagewire_core::ErrorClass::Internal, "test", "");
        history.push(note("1.2", NoteKind::Failed(failure)));
        assert!(history.news(&mut Cursor::default()).over);
        history.push(note("1.3", NoteKind::Redriven));
        for mut cursor in [early, Cursor::default()] {
            let news = history.news(&mut cursor);
            let kinds: Vec<_> = news.notes.iter().map(|note| note.kind.name()).collect();
            assert_eq!((kinds, news.over), (vec!["redriven"], false));
        }
        history.progress(StageName::new("decode").unwrap(), progress(1));
        assert_eq!(history.news(&mut Cursor::default()).progress.len(), 1);
        assert_eq!(history.notes().len(), 3, "the timeline has them all");
        history.push(note("1.4", NoteKind::Succeeded));
        assert!(history.news(&mut Cursor::default()).over);
    }

    #[test]
    fn only_the_newest_progress_is_kept_and_it_ends_with_the_attempt() {
        let history = History::default();
        let stage = StageName::new("decode").unwrap();
        let mut cursor = Cursor::default();
        history.progress(stage.clone(), progress(1));
        history.progress(stage.clone(), progress(2));
        let news = history.news(&mut cursor);
        assert_eq!(news.progress, [(stage.clone(), progress(2))]);
        assert!(history.news(&mut cursor).progress.is_empty());
        history.push(note("1.1", NoteKind::StageDone));
        assert!(history.news(&mut Cursor::default()).progress.is_empty());
        history.push(note("1.2", NoteKind::Succeeded));
        history.progress(stage, progress(3));
        let news = history.news(&mut Cursor::default());
        assert!(news.over && news.progress.is_empty());
    }

    #[tokio::test]
    async fn waiting_ends_with_news_and_with_the_end() {
        let histories = Arc::new(Histories::default());
        let job = JobId(uuid::Uuid::from_u128(1));
        let history = histories.of(job);
        let waiting = tokio::spawn({
            let history = Arc::clone(&history);
            async move {
                let mut cursor = Cursor::default();
                let first = history.wait(&mut cursor).await;
                (first.notes.len(), history.wait(&mut cursor).await.over)
            }
        });
        tokio::task::yield_now().await;
        history.push(note("1.1", NoteKind::Submitted));
        tokio::task::yield_now().await;
        histories.forget(job);
        assert_eq!(waiting.await.unwrap(), (1, true));
    }
}
