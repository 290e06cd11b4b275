use stagewire_core::{Epoch, ErrorClass};
use uuid::Uuid;

use super::*;
use crate::note::NoteId;

const MS: u64 = 1_000_000;

fn stage(name: &str) -> StageName {
    StageName::new(name).unwrap()
}

struct Notes(Vec<Arc<Note>>);

impl Notes {
    fn add(&mut self, ms: u64, at: Option<(&str, u32)>, kind: NoteKind) -> &mut Self {
        let seq = self.0.len() as u64 + 1;
        self.0.push(Arc::new(Note {
            id: NoteId { epoch: Epoch(1), seq },
            at: Timestamp(1_000_000 * MS + ms * MS),
            stage: at.map(|(name, _)| stage(name)),
            attempt: at.and_then(|(_, attempt)| (attempt > 0).then_some(attempt)),
            worker: at.map(|(name, _)| format!("{name}-0")),
            kind,
        }));
        self
    }
}

fn chunk(from: &str, chunk: u32, chunks: u32, begin: u64, end: u64, mode: TransferMode, path: &str) -> NoteKind {
    NoteKind::Chunk(Handover {
        payload: PayloadId(Uuid::from_u128(9)),
        from: stage(from),
        chunk,
        chunks,
        nbytes: 4_766_666,
        mode,
        path: path.to_owned(),
        begin: Timestamp(1_000_000 * MS + begin * MS),
        end: Timestamp(1_000_000 * MS + end * MS),
    })
}

fn published(chunks: u32) -> NoteKind {
    NoteKind::Published {
        payload: PayloadId(Uuid::from_u128(9)),
        nbytes: 14_300_000,
        chunks,
        mode: TransferMode::P2p,
    }
}

/// Encode, denoise (whose first worker dies), decode in three chunks.
fn story() -> Notes {
    let mut notes = Notes(Vec::new());
    let lost = Failure::new(
        ErrorClass::Unavailable,
        "worker.lost",
        "the worker died <b>at step 2</b>",
    );
    notes
        .add(0, None, NoteKind::Submitted)
        .add(0, Some(("encode", 0)), NoteKind::Queued)
        .add(40, Some(("encode", 1)), NoteKind::Running)
        .add(380, Some(("encode", 1)), published(1))
        .add(400, Some(("encode", 1)), NoteKind::StageDone)
        .add(400, Some(("denoise", 0)), NoteKind::Queued)
        .add(420, Some(("denoise", 2)), NoteKind::Running)
        .add(900, Some(("denoise", 2)), NoteKind::Requeued(Some(lost)))
        .add(900, Some(("denoise", 0)), NoteKind::Queued)
        .add(1200, Some(("denoise", 3)), NoteKind::Running)
        .add(2900, Some(("denoise", 3)), published(3))
        .add(2910, Some(("decode", 4)), NoteKind::Running)
        .add(
            3000,
            Some(("denoise", 3)),
            chunk("encode", 0, 1, 1205, 1212, TransferMode::Store, "shm"),
        )
        .add(3000, Some(("denoise", 3)), NoteKind::StageDone)
        .add(
            3900,
            Some(("decode", 4)),
            chunk("denoise", 0, 3, 2912, 2914, TransferMode::P2p, "cma"),
        )
        .add(
            3900,
            Some(("decode", 4)),
            chunk("denoise", 1, 3, 3200, 3203, TransferMode::P2p, "cma"),
        )
        .add(
            3900,
            Some(("decode", 4)),
            chunk("denoise", 2, 3, 3500, 3502, TransferMode::P2p, "cma"),
        )
        .add(3900, Some(("decode", 4)), NoteKind::StageDone)
        .add(3900, None, NoteKind::Succeeded);
    notes
}

fn timeline(notes: &Notes) -> Timeline {
    let stages = ["encode", "denoise", "decode"].map(stage);
    Timeline::of(
        JobId(Uuid::from_u128(1)),
        "succeeded",
        &stages,
        &notes.0,
        Timestamp(1_000_000 * MS + 5000 * MS),
    )
}

#[test]
fn attempts_and_chunks_stand_where_they_happened() {
    let timeline = timeline(&story());
    let denoise = &timeline.lanes[1].attempts;
    assert_eq!(denoise.len(), 2);
    assert_eq!((denoise[0].how, denoise[1].how), (End::Requeued, End::Done));
    assert_eq!(denoise[1].queued.unwrap().since(timeline.begin).as_millis(), 900);
    assert_eq!(denoise[1].end.unwrap().since(denoise[1].begin).as_millis(), 1800);
    assert_eq!(timeline.chunks.len(), 4);
    assert_eq!(timeline.until.since(timeline.begin).as_millis(), 3900);
    let json = timeline.to_json();
    assert_eq!(json["stages"][1]["attempts"][0]["failure"]["reason"], "worker.lost");
    assert_eq!(json["handovers"][3]["mode"], "p2p");
}

#[test]
fn a_job_that_ends_early_ends_its_attempts() {
    let mut notes = Notes(Vec::new());
    notes
        .add(0, None, NoteKind::Submitted)
        .add(10, Some(("encode", 1)), NoteKind::Running)
        .add(30, None, NoteKind::Cancelled);
    let timeline = timeline(&notes);
    assert_eq!(timeline.lanes[0].attempts[0].how, End::Stopped);
    assert_eq!(timeline.lanes[0].attempts[0].end, Some(timeline.until));
}

#[test]
fn the_page_is_whole_and_escapes_what_came_from_outside() {
    let html = page(
        &timeline(&story()),
        "wan",
        r#"{"prompt":"<script>alert('x')</script> & \"y\""}"#,
    );
    assert!(html.contains("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp;"));
    assert!(html.contains("the worker died &lt;b&gt;at step 2&lt;/b&gt;"));
    for forbidden in ["<script", "http://", "https://", "src=", "@import", "url("] {
        assert!(!html.contains(forbidden), "{forbidden} is in the page");
    }
    for shown in ["3.90 s", "cma", "denoise", "chunk 2 of 3", "succeeded"] {
        assert!(html.contains(shown), "{shown} is not in the page");
    }
    if let Some(path) = std::env::var_os("STAGEWIRE_TIMELINE_PAGE") {
        std::fs::write(path, &html).unwrap();
    }
}
