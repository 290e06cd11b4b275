//! What every [`Store`] promises, as checks that a backend's tests run.
//!
//! ```ignore
//! #[tokio::test]
//! async fn conforms() {
//!     stagewire_store::conformance::run(|limit| async move { MyStore::start(limit).await }).await;
//! }
//! ```
//!
//! Every check panics with what was broken. What a store cannot do, it says in [`Store::abilities`]: the checks of that are
//! skipped, visibly. A store under test has an open gate; gates are checked apart, by [`tokens_are_checked`].

mod objects;
mod room;
mod tokens;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{ByteCount, PayloadId};
use stagewire_transfer::Target;
use uuid::Uuid;

use crate::{NewObject, Object, Retention, Store, StoreAbilities, StoreError};

pub use objects::*;
pub use room::*;
pub use tokens::tokens_are_checked;

/// Bytes of the stores that the checks ask for.
pub const LIMIT: ByteCount = ByteCount(1 << 20);

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Name of the check.
    pub check: &'static str,
    /// What is wrong.
    pub problem: Option<String>,
    /// Why it was not run, where it was not.
    pub skipped: Option<&'static str>,
}

type Run = for<'a> fn(&'a Arc<dyn Store>) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// One rule.
struct Check {
    name: &'static str,
    /// Why it does not apply to a store of these abilities.
    missing: fn(StoreAbilities) -> Option<&'static str>,
    run: Run,
}

const fn nothing(_: StoreAbilities) -> Option<&'static str> {
    None
}

fn bound(abilities: StoreAbilities) -> Option<&'static str> {
    (!abilities.bound).then_some("it does not know what holds its space")
}

fn retention(abilities: StoreAbilities) -> Option<&'static str> {
    (!abilities.retention).then_some("it has an order of its own for what leaves when room is short")
}

fn deadlines(abilities: StoreAbilities) -> Option<&'static str> {
    (!abilities.deadlines).then_some("it ends no object by itself")
}

fn order_and_deadlines(abilities: StoreAbilities) -> Option<&'static str> {
    retention(abilities).or_else(|| deadlines(abilities))
}

fn deletes_drafts(abilities: StoreAbilities) -> Option<&'static str> {
    (!abilities.deletes_drafts).then_some("only its writer ends a draft")
}

/// Names of functions become names of checks.
macro_rules! checks {
    ($($missing:ident: $name:ident $how:tt),* $(,)?) => {
        &[$(Check {
            name: stringify!($name),
            missing: $missing,
            run: |store| checks!(@ $how store, $name),
        }),*]
    };
    (@ one $store:ident, $name:ident) => { Box::pin($name(&**$store)) };
    (@ shared $store:ident, $name:ident) => { Box::pin($name($store)) };
}

const CHECKS: &[Check] = checks![
    nothing: objects_come_back_exact one,
    nothing: nobody_reads_what_is_not_sealed one,
    nothing: put_if_absent_is_truthful shared,
    nothing: aborted_drafts_leave_nothing one,
    nothing: deleted_objects_are_gone one,
    deletes_drafts: deleted_drafts_are_gone one,
    nothing: readers_keep_what_they_read one,
    nothing: fetched_bytes_are_exact one,
    bound: a_full_store_says_what_holds_the_space one,
    bound: a_writer_waits_for_room shared,
    bound: reserved_room_is_kept one,
    retention: cached_objects_make_room_and_held_ones_do_not one,
    retention: what_is_read_is_not_evicted one,
    deadlines: deadlines_are_fixed one,
    order_and_deadlines: what_is_over_goes_first one,
];

/// Runs every check but [`tokens_are_checked`], each on a fresh store of [`LIMIT`] bytes. Skips are printed.
///
/// # Panics
/// Where the store breaks a promise.
#[expect(clippy::print_stderr, reason = "a skip is to be seen")]
pub async fn run<S, F, Fut>(fresh: F)
where
    S: Store,
    F: FnMut(ByteCount) -> Fut,
    Fut: Future<Output = S>,
{
    let outcomes = outcomes(fresh).await;
    for Outcome { check, skipped, .. } in &outcomes {
        if let Some(why) = skipped {
            eprintln!("skipped: {check}: {why}");
        }
    }
    let broken: Vec<_> = outcomes
        .into_iter()
        .filter(|outcome| outcome.problem.is_some())
        .collect();
    assert!(broken.is_empty(), "{broken:#?}");
}

/// As [`run`], for who wants to know of each check what came of it.
pub async fn outcomes<S, F, Fut>(mut fresh: F) -> Vec<Outcome>
where
    S: Store,
    F: FnMut(ByteCount) -> Fut,
    Fut: Future<Output = S>,
{
    let mut outcomes = Vec::new();
    for check in CHECKS {
        let store: Arc<dyn Store> = Arc::new(fresh(LIMIT).await);
        let skipped = (check.missing)(store.abilities());
        let problem = match skipped {
            Some(_) => None,
            // A task of its own, whose panics are caught.
            None => tokio::spawn(async move { (check.run)(&store).await })
                .await
                .err()
                .map(what_panicked),
        };
        outcomes.push(Outcome {
            check: check.name,
            problem,
            skipped,
        });
    }
    outcomes
}

fn what_panicked(error: tokio::task::JoinError) -> String {
    let shown = error.to_string();
    let Ok(panic) = error.try_into_panic() else {
        return shown;
    };
    let said = panic.downcast_ref::<String>().map(String::as_str);
    said.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or(&shown)
        .to_owned()
}

fn new_id() -> PayloadId {
    PayloadId(Uuid::new_v4())
}

/// Bytes that differ at every place and between objects.
fn pattern(payload: PayloadId, part: usize, len: u64) -> Vec<u8> {
    let seed = payload.0.as_u128() as u64 ^ part as u64;
    (0..len)
        .map(|at| (seed.wrapping_mul(at + 1) >> 24) as u8 ^ at as u8)
        .collect()
}

async fn put(store: &dyn Store, payload: PayloadId, parts: &[u64]) -> Result<Arc<dyn Object>, StoreError> {
    let object = NewObject::new(payload, parts.iter().copied().map(ByteCount));
    put_object(store, object, parts).await
}

async fn put_kept(store: &dyn Store, retention: Retention, parts: &[u64]) -> Result<PayloadId, StoreError> {
    let payload = new_id();
    let mut object = NewObject::new(payload, parts.iter().copied().map(ByteCount));
    object.retention = retention;
    put_object(store, object, parts).await.map(|_| payload)
}

async fn put_object(store: &dyn Store, object: NewObject, parts: &[u64]) -> Result<Arc<dyn Object>, StoreError> {
    let payload = object.payload;
    let mut draft = store.create(object).await?;
    for (part, len) in parts.iter().enumerate() {
        draft.bytes_mut(part)?.copy_from_slice(&pattern(payload, part, *len));
    }
    draft.seal().await
}

fn check(object: &dyn Object, payload: PayloadId, parts: &[u64]) {
    assert_eq!(object.payload(), payload);
    assert_eq!(object.parts(), parts.len());
    for (part, len) in parts.iter().enumerate() {
        let bytes = object.part(part).expect("the part is there");
        assert!(
            bytes == pattern(payload, part, *len),
            "part {part} of {len} bytes came back changed"
        );
    }
    assert_eq!(object.part(parts.len()), None);
    assert_eq!(
        object.regions().len(),
        parts.len(),
        "one for each part, if only to say that there is none"
    );
}

/// A store may count whole pages of up to this size for each part.
const PAGE: u64 = 4096;

/// Checks that the books show `parts`, where there are some.
fn holds(store: &dyn Store, parts: &[u64]) {
    if !store.abilities().bound {
        return;
    }
    let used = store.usage().used().0;
    let least: u64 = parts.iter().sum();
    let most: u64 = parts.iter().map(|len| len.next_multiple_of(PAGE)).sum();
    assert!(
        (least..=most).contains(&used),
        "{used} bytes held for parts of {parts:?}"
    );
}

/// Checks how many objects the books show, where there are some.
fn counts(store: &dyn Store, drafts: u64, sealed: u64) {
    let usage = store.usage();
    if store.abilities().bound {
        assert_eq!((usage.drafts.objects, usage.sealed.objects), (drafts, sealed));
    }
}

fn destinations(parts: &[u64]) -> Vec<Arc<Target>> {
    let target = |len: &u64| Arc::new(Target::allocate(*len).expect("memory"));
    parts.iter().map(target).collect()
}

fn cached(millis: u64) -> Retention {
    Retention::Cached {
        cost: Duration::from_millis(millis),
    }
}
