use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Map, json};
use stagewire_core::{ErrorClass, Failure, JobId, StageName, Timestamp};
use stagewire_sched::{Event, Input, Limits, Outcome, Sched, StageSpec, Topology, Urgency};

use super::super::InputBounds;
use super::*;

const BOUNDS: InputBounds = InputBounds {
    largest: ByteCount(4 * LEAST),
    total: ByteCount(4 * LEAST),
    idle: Duration::from_hours(1),
};

struct World {
    _dir: tempfile::TempDir,
    inputs: Arc<Inputs>,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let inputs = Inputs::open(dir.path(), BOUNDS, ["image".to_owned()]).unwrap();
        Self {
            _dir: dir,
            inputs: Arc::new(inputs),
        }
    }

    /// An input that is there.
    fn add(&self, text: &str) -> InputName {
        let name = InputName::new(blake3::hash(text.as_bytes()));
        std::fs::write(self.inputs.path(&name), text).unwrap();
        let mut state = lock(&self.inputs.state);
        state.insert(name.clone(), text.len() as u64, "text/plain".to_owned());
        name
    }

    fn pin(&self, name: &InputName) -> super::super::Pins {
        self.inputs.pin(&params(name)).unwrap()
    }

    fn room(&self) -> Room {
        Room::none(Arc::clone(&self.inputs))
    }

    fn taken(&self) -> u64 {
        lock(&self.inputs.state).taken()
    }

    fn has(&self, name: &InputName) -> bool {
        let known = self.inputs.find(&name.to_string()).is_ok();
        assert_eq!(
            known,
            Path::exists(&self.inputs.path(name)),
            "the files are those that are known"
        );
        known
    }

    fn uses(&self) -> u64 {
        lock(&self.inputs.state).uses
    }
}

fn params(name: &InputName) -> Map<String, serde_json::Value> {
    json!({"image": name.to_string()}).as_object().unwrap().clone()
}

fn nobody(uses: u64) -> Needed {
    Needed {
        names: BTreeSet::new(),
        uses,
    }
}

/// A scheduler with a job for each of these.
fn sched(names: &[&InputName]) -> Sched {
    let stage = StageSpec::new(StageName::new("paint").unwrap());
    let mut sched = Sched::new(Topology::new(vec![stage], vec![]).unwrap(), Limits::default());
    let now = Timestamp::default();
    for (n, name) in names.iter().enumerate() {
        let input = Input::Submit {
            job: JobId(uuid::Uuid::from_u128(n as u128)),
            params: serde_json::to_string(&params(name)).unwrap().into(),
            key: None,
            urgency: Urgency::default(),
        };
        for event in sched.decide(now, input).unwrap().events {
            sched.apply(now, &event);
        }
    }
    sched
}

/// The job of this number fails for good at that time.
fn die(sched: &mut Sched, job: u128, at: u64) {
    let job = JobId(uuid::Uuid::from_u128(job));
    let outcome = Outcome::Failed(Failure::new(
        ErrorClass::Internal,
        "stage.exception",
        "it cannot be painted",
    ));
    sched.apply(Timestamp(at), &Event::JobEnded { job, outcome });
}

/// A driver without jobs.
fn idle() -> Driver {
    Driver::still(sched(&[]), || ())
}

#[tokio::test]
async fn room_that_comes_free_in_the_meantime_is_taken_once() {
    for wanted in [LEAST, 2 * LEAST, 3 * LEAST] {
        let world = World::new();
        let needed = world.add("needed");
        let mut other = world.room();
        other.hold(3 * LEAST, &idle()).await.unwrap();
        let other = Mutex::new(Some(other));
        let driver = Driver::still(sched(&[&needed]), move || drop(other.lock().unwrap().take()));
        let mut room = world.room();
        room.hold(wanted, &driver).await.unwrap();
        assert_eq!(world.taken(), LEAST + wanted);
        drop(room);
        assert_eq!(world.taken(), LEAST);
    }
}

#[tokio::test]
async fn nothing_goes_where_that_is_not_enough_and_no_more_than_is() {
    let world = World::new();
    let (first, needed, last) = (world.add("first"), world.add("needed"), world.add("last"));
    let driver = Driver::still(sched(&[&needed]), || ());
    let mut room = world.room();
    let error = room.hold(4 * LEAST, &driver).await.unwrap_err();
    assert!(
        matches!(error, InputError::Room { used: ByteCount(used), .. } if used == 3 * LEAST),
        "{error}"
    );
    assert!(
        [&first, &needed, &last]
            .map(|name| world.has(name))
            .iter()
            .all(|there| *there)
    );
    room.hold(2 * LEAST, &driver).await.unwrap();
    assert_eq!(
        [&first, &needed, &last].map(|name| world.has(name)),
        [false, true, true]
    );
    room.hold(3 * LEAST, &driver).await.unwrap();
    assert_eq!(
        [&first, &needed, &last].map(|name| world.has(name)),
        [false, true, false]
    );
}

/// The dead letters of a driver, as numbers of their jobs, and how many were crowded out.
async fn dead(driver: &Driver) -> (Vec<u128>, u64) {
    let look = driver.look(|sched, _| {
        let dead = sched.dead_letters().map(|letter| letter.job.id().0.as_u128());
        (dead.collect(), sched.counters().dead_letters_crowded_out)
    });
    look.await.unwrap()
}

#[tokio::test]
async fn dead_letters_that_keep_inputs_go_for_others_the_first_to_die_first() {
    let world = World::new();
    let [shared, own, live, last] = ["shared", "own", "live", "last"].map(|text| world.add(text));
    let gone = InputName::new(blake3::hash(b"gone"));
    let mut sched = sched(&[&live, &shared, &gone, &shared, &own, &live, &last]);
    // All but the first, whose input is that of a dead letter, too.
    for (n, at) in (1..7).zip([5, 1, 2, 3, 4, 6]) {
        die(&mut sched, n, at);
    }
    let driver = Driver::still(sched, || ());
    assert_eq!(dead(&driver).await, (vec![2, 3, 4, 5, 1, 6], 0));

    let mut room = world.room();
    let error = room.hold(4 * LEAST, &driver).await.unwrap_err();
    assert!(matches!(error, InputError::Room { .. }), "{error}");
    assert_eq!(
        dead(&driver).await,
        (vec![2, 3, 4, 5, 1, 6], 0),
        "it would not be enough"
    );

    // 2 and 5 keep nothing that would go with them, and 3 and 1 only together.
    room.hold(LEAST, &driver).await.unwrap();
    assert_eq!(dead(&driver).await, (vec![2, 3, 5, 1, 6], 1));
    room.hold(2 * LEAST, &driver).await.unwrap();
    assert_eq!(dead(&driver).await, (vec![2, 5, 6], 3));
    let there = [&shared, &own, &live, &last].map(|name| world.has(name));
    assert_eq!(there, [false, false, true, true]);
    room.hold(3 * LEAST, &driver).await.unwrap();
    assert_eq!(dead(&driver).await, (vec![2, 5], 4));
    assert_eq!((world.has(&live), world.has(&last)), (true, false));
}

#[tokio::test]
async fn no_dead_letter_goes_while_there_are_inputs_that_nobody_needs() {
    let world = World::new();
    let [kept, pinned, _] = ["kept", "pinned", "unused"].map(|text| world.add(text));
    let mut sched = sched(&[&kept, &pinned]);
    (0..2).for_each(|n| die(&mut sched, n, n as u64 + 1));
    let driver = Driver::still(sched, || ());
    let _pins = world.pin(&pinned);
    let mut room = world.room();
    room.hold(2 * LEAST, &driver).await.unwrap();
    assert_eq!(dead(&driver).await, (vec![0, 1], 0));
    // What a submission under way refers to stays.
    room.hold(4 * LEAST, &driver).await.unwrap_err();
    assert_eq!(dead(&driver).await, (vec![0, 1], 0));
    room.hold(3 * LEAST, &driver).await.unwrap();
    assert_eq!(dead(&driver).await, (vec![1], 1));
    assert_eq!((world.has(&kept), world.has(&pinned)), (false, true));
}

#[tokio::test]
async fn an_upload_that_has_its_room_needs_nothing_of_anybody() {
    let world = World::new();
    let looks = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&looks);
    let driver = Driver::still(sched(&[]), move || _ = seen.fetch_add(1, Ordering::Relaxed));
    let mut room = world.room();
    room.hold(2 * LEAST, &driver).await.unwrap();
    // Whatever the others have.
    lock(&world.inputs.state).held += 10 * LEAST;
    for nbytes in [0, 1, LEAST, 2 * LEAST] {
        room.hold(nbytes, &driver).await.unwrap();
    }
    assert_eq!(looks.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn an_input_counts_once_when_it_takes_the_place_of_its_upload() {
    let world = World::new();
    let mut room = world.room();
    room.hold(3 * LEAST, &idle()).await.unwrap();
    let name = InputName::new(blake3::hash(b"x"));
    room.fill(name.clone(), 3 * LEAST, "text/plain".to_owned());
    let state = lock(&world.inputs.state);
    assert_eq!((state.held, state.reserved), (3 * LEAST, 0));
    drop(state);
    // It is given back as it was taken.
    assert_eq!(world.inputs.drop_oldest(4 * LEAST, &nobody(world.uses())), 1);
    assert_eq!(world.taken(), 0);
}

#[tokio::test]
async fn their_number_is_bounded_too() {
    let world = World::new();
    let mut rooms = Vec::new();
    for n in 0..8 {
        let mut room = world.room();
        let held = room.hold(n % 2, &idle()).await;
        assert_eq!(held.is_ok(), n < 4, "{n}");
        rooms.push(room);
    }
    rooms.clear();
    for n in 0..8 {
        let mut room = world.room();
        room.hold(1, &idle()).await.unwrap();
        room.fill(InputName::new(blake3::hash(&[n])), 1, "text/plain".to_owned());
    }
    assert_eq!(lock(&world.inputs.state).entries.len(), 4);
}

#[test]
fn what_is_used_after_the_look_at_the_jobs_stays() {
    let world = World::new();
    let (before, after, sent, unused) = (
        world.add("before"),
        world.add("after"),
        world.add("sent"),
        world.add("unused"),
    );
    // Its submission had begun, and ended before it was decided what goes.
    let pins = world.pin(&before);
    let look = world.uses();
    drop(pins);
    drop(world.pin(&after));
    lock(&world.inputs.state).touch(&sent);
    assert_eq!(
        world.inputs.drop_oldest(4 * LEAST, &nobody(look)),
        0,
        "it would not be enough"
    );
    assert_eq!(world.inputs.drop_oldest(LEAST, &nobody(look)), 1);
    let there = [&before, &after, &sent, &unused].map(|name| world.has(name));
    assert_eq!(there, [true, true, true, false]);
}

#[test]
fn the_time_of_an_input_begins_when_no_job_needs_it_any_more() {
    let world = World::new();
    let (needed, idle) = (world.add("needed"), world.add("idle"));
    let begin = Instant::now();
    let at = |minutes| begin + Duration::from_mins(minutes);
    let job = |uses| Needed {
        names: BTreeSet::from([needed.clone()]),
        uses,
    };
    assert_eq!(world.inputs.drop_idle(at(59), &job(world.uses())), 0);
    assert_eq!(world.inputs.drop_idle(at(61), &job(world.uses())), 1);
    assert_eq!((world.has(&needed), world.has(&idle)), (true, false));
    for minutes in [300, 301, 359] {
        assert_eq!(
            world.inputs.drop_idle(at(minutes), &nobody(world.uses())),
            0,
            "{minutes}"
        );
    }
    assert_eq!(world.inputs.drop_idle(at(360), &nobody(world.uses())), 1);
    assert_eq!(world.taken(), 0);
}

#[tokio::test]
async fn a_fault_in_dropping_is_told() {
    let world = World::new();
    let error = world.inputs.dropping(|_| panic!("a defect")).await.unwrap_err();
    assert!(matches!(error, InputError::Store { .. }), "{error}");
}
