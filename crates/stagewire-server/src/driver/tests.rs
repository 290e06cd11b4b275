use stagewire_core::{ByteCount, JobId, StageName};
use stagewire_sched::{Limits, StageSpec, Topology};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::*;
use crate::artefacts::Artefacts;
use crate::history::Histories;
use crate::host::StoreHost;
use crate::inputs::{InputBounds, Inputs};
use crate::metrics::Metrics;
use crate::rehearsal::Disk;
use crate::workers::Workers;

fn submit(n: u128) -> Input {
    Input::Submit {
        job: JobId(Uuid::from_u128(n)),
        params: "{}".into(),
        key: None,
        urgency: stagewire_sched::Urgency::default(),
    }
}

struct Rig {
    _dir: tempfile::TempDir,
    outlet: Arc<Outlet>,
}

impl Rig {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = stagewire_api::RunDir::locate(Some(&dir.path().join("run")));
        let store = StoreHost::start(&run_dir, ByteCount(1 << 20), None).await.unwrap();
        let artefacts = Artefacts::open(&dir.path().join("artefacts"), TaskTracker::new()).unwrap();
        let bounds = InputBounds {
            largest: ByteCount(1),
            total: ByteCount(1),
            idle: Duration::MAX,
        };
        let inputs = Inputs::open(&dir.path().join("inputs"), bounds, []).unwrap();
        let outlet = Arc::new(Outlet {
            workers: Arc::new(Workers::default()),
            histories: Arc::new(Histories::default()),
            store: Arc::new(store),
            artefacts: Arc::new(artefacts),
            inputs: Arc::new(inputs),
            metrics: Arc::new(Metrics::new()),
            pace: Arc::default(),
        });
        Self { _dir: dir, outlet }
    }

    fn drive(&self, disk: Disk) -> (Driver, Drive) {
        let stage = StageSpec::new(StageName::new("paint").unwrap());
        let topology = Topology::new(vec![stage], vec![]).unwrap();
        let mut journal = Journal::open_backend(disk, "test".into(), "test").unwrap();
        let replayed = replay(&mut journal, "test".as_ref(), &topology, Limits::default(), LONG).unwrap();
        let clock = Clock::not_before(replayed.last);
        Drive::new(replayed.sched, journal, clock, Arc::clone(&self.outlet))
    }
}

#[tokio::test]
async fn a_server_that_cannot_write_says_nothing_more() {
    let rig = Rig::new().await;
    let disk = Disk::holding(Vec::new(), usize::MAX);
    let (driver, mut drive) = rig.drive(disk.clone());
    drive.begin().await.unwrap();
    let running = tokio::spawn(drive.run(CancellationToken::new()));
    let kept = JobId(Uuid::from_u128(1));
    assert_eq!(driver.decide(submit(1)).await, Ok(Some(kept)));

    disk.fail_after(0);
    let lost = JobId(Uuid::from_u128(2));
    assert_eq!(
        driver.decide(submit(2)).await,
        Err(DriveError::Stopped),
        "nothing is acknowledged"
    );
    let error = running.await.unwrap().unwrap_err();
    assert!(matches!(error, JournalError::Write(_)), "{error}");
    assert!(rig.outlet.histories.get(lost).is_none(), "no note of it got out");
    assert_eq!(
        driver.look(|sched, _| sched.jobs().count()).await,
        Err(DriveError::Stopped)
    );

    // What was acknowledged is there when the disk is.
    let (_, drive) = rig.drive(Disk::holding(disk.after_kill(), usize::MAX));
    assert_eq!(
        drive.core.sched().jobs().map(|job| job.id()).collect::<Vec<_>>(),
        [kept]
    );
}

#[tokio::test]
async fn inputs_that_wait_together_share_a_sync() {
    let rig = Rig::new().await;
    let (driver, mut drive) = rig.drive(Disk::holding(Vec::new(), usize::MAX));
    drive.begin().await.unwrap();
    let before = drive.journal.as_ref().unwrap().batches();
    let submits = futures::future::join_all((1..=100).map(|n| driver.decide(submit(n))));
    let stop = CancellationToken::new();
    let end = async {
        let answers = submits.await;
        stop.cancel();
        answers
    };
    let (answers, journal) = tokio::join!(end, drive.run(stop.clone()));
    assert!(answers.iter().all(Result::is_ok));
    let batches = journal.unwrap().batches() - before;
    assert!((1..10).contains(&batches), "{batches} batches for 100 submissions");
}
