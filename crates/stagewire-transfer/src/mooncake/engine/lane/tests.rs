use std::time::Instant;

use stagewire_core::Device;
use tokio::sync::oneshot;

use super::super::fake::Fake;
use super::super::flight::Rebuilt;
use super::super::registration::Member;
use super::super::{Engine, EngineStatus, Rebuild};
use super::*;

type Held = Arc<()>;

impl Keep for Held {
    fn quarantine(self) {}
}

const LIMIT: Duration = Duration::from_secs(10);

fn lane(fake: &Arc<Fake>, rebuild: Option<Rebuild>) -> Arc<Lane<Held>> {
    let slot = Slot::new(Member::new(fake.clone()), rebuild);
    Arc::new(Lane::new(Arc::new(slot), "peer:1".to_owned(), Box::new(|| true)))
}

fn slices(from: u64, count: u64) -> Vec<EngineSlice> {
    let slice = |index| EngineSlice {
        local: index,
        remote: index,
        len: 1,
    };
    (from..from + count).map(slice).collect()
}

const LOCAL: EngineMemory = EngineMemory {
    address: 0,
    len: 10_000,
    device: Device::Cpu,
};

type Outcome = oneshot::Receiver<Result<Held, Failed>>;

/// Has the lane know of a transfer when this returns. Dropped, the outcome is abandoned.
fn start(lane: &Lane<Held>, slices: Vec<EngineSlice>, hold: Held) -> Outcome {
    let (job, outcome) = Job::new(EngineOperation::Read, slices, LOCAL, hold);
    lane.shared.enqueue(job);
    outcome
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < LIMIT, "not within {LIMIT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn no_more_than_512_slices_are_under_way_and_every_one_is_moved_once() {
    let fake = Arc::new(Fake::default());
    let lane = lane(&fake, None);
    let running = start(&lane, slices(0, 5000), Held::default());
    until("the queue is full", || fake.flying() == 512).await;
    fake.set(EngineStatus::Done);
    running.await.expect("an outcome").expect("moved");
    assert_eq!(fake.most(), 512);
    let mut submitted: Vec<u64> = fake.submitted().iter().map(|slice| slice.local).collect();
    submitted.sort_unstable();
    assert!(submitted.into_iter().eq(0..5000));
}

#[tokio::test]
async fn a_small_transfer_does_not_wait_for_a_large_one() {
    let fake = Arc::new(Fake::default());
    let lane = lane(&fake, None);
    let large = start(&lane, slices(0, 5000), Held::default());
    until("the queue is full", || fake.flying() == 512).await;
    let small = start(&lane, slices(9000, 1), Held::default());
    until("the small one waits for its turn", || {
        lane.shared.lock().jobs.is_empty()
    })
    .await;
    fake.set(EngineStatus::Done);
    small.await.expect("an outcome").expect("moved");
    large.await.expect("an outcome").expect("moved");
    let at = fake
        .submitted()
        .iter()
        .position(|slice| slice.local == 9000)
        .expect("submitted");
    assert!(at <= 1024, "{at} slices of the large transfer went first");
}

#[tokio::test]
async fn what_an_abandoned_transfer_holds_stays_until_nothing_is_under_way() {
    let fake = Arc::new(Fake::default());
    let lane = lane(&fake, None);
    let hold = Held::default();
    let weak = Arc::downgrade(&hold);
    let running = start(&lane, slices(0, 600), hold);
    until("it is under way", || fake.flying() == 512).await;
    drop(running);
    // The queue is full: this one is given up before its turn.
    let waiting = Held::default();
    let waits = Arc::downgrade(&waiting);
    let other = start(&lane, slices(9000, 1), waiting);
    until("the other waits", || lane.shared.lock().jobs.is_empty()).await;
    drop(other);
    until("what never began is let go", || waits.strong_count() == 0).await;
    assert_eq!(weak.strong_count(), 1, "let go while the engine may still write");
    fake.set(EngineStatus::Done);
    until("it has ended", || weak.strong_count() == 0).await;
    assert_eq!(fake.submitted().len(), 512, "it went on though nobody waits");
}

#[tokio::test]
async fn the_first_failure_is_told_once_nothing_is_under_way() {
    let fake = Arc::new(Fake::default());
    let lane = lane(&fake, None);
    let hold = Held::default();
    let weak = Arc::downgrade(&hold);
    let running = start(&lane, slices(0, 600), hold);
    until("it is under way", || fake.flying() == 512).await;
    fake.set(EngineStatus::Failed { slice: 3 });
    let failure = running.await.expect("an outcome").expect_err("failed").failure;
    assert!(
        matches!(failure, Failure::Slice { slice, .. } if slice.local % 64 == 3),
        "{failure:?}"
    );
    assert_eq!((fake.flying(), weak.strong_count()), (0, 0));
    assert_eq!(fake.submitted().len(), 512, "it went on after a failure");
    fake.refuse();
    let failure = start(&lane, slices(7, 1), Held::default())
        .await
        .expect("an outcome")
        .expect_err("refused")
        .failure;
    assert!(
        matches!(failure, Failure::Submit { slice, .. } if slice.local == 7),
        "{failure:?}"
    );
}

#[tokio::test]
async fn a_stuck_engine_is_replaced() {
    let (stuck, fresh) = (Arc::new(Fake::default()), Arc::new(Fake::default()));
    stuck.set(EngineStatus::Failed { slice: 0 });
    fresh.set(EngineStatus::Done);
    let other: Arc<dyn Engine> = fresh.clone();
    let lane = lane(&stuck, Some(Box::new(move || Ok(other.clone()))));
    let begun = Instant::now();
    let rebuilt = loop {
        let failure = start(&lane, slices(0, 1), Held::default())
            .await
            .expect("an outcome")
            .expect_err("failed")
            .failure;
        if let Failure::Stuck { rebuilt, failures, .. } = failure {
            assert!(failures >= 3);
            break rebuilt;
        }
        assert!(begun.elapsed() < LIMIT, "never noticed");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    assert_eq!(rebuilt, Rebuilt::Yes);
    assert!(
        begun.elapsed() >= Duration::from_secs(1),
        "a connection that broke was taken for more"
    );
    start(&lane, slices(0, 1), Held::default())
        .await
        .expect("an outcome")
        .expect("moved");
    assert_eq!(fresh.submitted().len(), 1);
}

#[tokio::test]
async fn local_memory_is_registered_for_as_long_as_it_takes_part() {
    let fake = Arc::new(Fake::that_registers_local());
    let lane = lane(&fake, None);
    let (one, two) = (
        start(&lane, slices(0, 1), Held::default()),
        start(&lane, slices(1, 1), Held::default()),
    );
    until("both are under way", || fake.flying() == 2).await;
    assert_eq!(fake.calls(), ["register 0+10000"]);
    fake.set(EngineStatus::Done);
    one.await.expect("an outcome").expect("moved");
    two.await.expect("an outcome").expect("moved");
    assert_eq!(fake.calls(), ["register 0+10000", "unregister 0"]);
}

#[tokio::test]
async fn a_thread_that_ends_leaves_nothing_behind() {
    let fake = Arc::new(Fake::default());
    fake.set(EngineStatus::Done);
    let lane = lane(&fake, None);
    let shared = Arc::downgrade(&lane.shared);
    start(&lane, slices(0, 1), Held::default())
        .await
        .expect("an outcome")
        .expect("moved");
    drop(lane);
    until("the thread has ended", || shared.strong_count() == 0).await;
    assert_eq!(Arc::strong_count(&fake), 1, "the engine is still held");
}
