use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{ByteCount, Incarnation, PayloadId};
use stagewire_store::{
    HostStore, NewObject, Object, Retention, SpillOptions, Store, StoreError, StoreOptions, TokenGate,
};
use stagewire_transfer::{Host, HostOptions, Target};
use tempfile::TempDir;
use uuid::Uuid;

/// Long enough for whatever must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A host in a directory of its own.
pub(crate) struct World {
    pub(crate) host: Arc<Host>,
    pub(crate) dir: TempDir,
}

impl World {
    pub(crate) async fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let host = start(&dir).await;
        Self { host, dir }
    }

    pub(crate) fn store(&self, limit: ByteCount, gate: TokenGate) -> HostStore {
        HostStore::new(&self.host, limit, Arc::new(gate))
    }

    pub(crate) fn spill_dir(&self) -> PathBuf {
        self.dir.path().join("spill")
    }

    /// A store of some pages, with files of at most as many as `quota`.
    pub(crate) async fn spilling(&self, pages: u64, quota: u64) -> HostStore {
        let mut options = StoreOptions::new(ByteCount(pages * PAGE), Arc::new(TokenGate::open()));
        options.spill = Some(SpillOptions {
            dir: self.spill_dir(),
            quota: ByteCount(quota * PAGE),
        });
        let opened = HostStore::open(&self.host, options).await;
        opened.expect("a directory of its own").0
    }

    /// The spill files that there are.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        files(&self.spill_dir())
    }
}

/// Files with payloads.
pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("a directory");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut files: Vec<_> = paths.filter(|path| !path.ends_with("store.id")).collect();
    files.sort();
    files
}

pub(crate) const PAGE: u64 = 4096;

/// How much of something is tried: `few`, or `full` where `make soak` asks for it.
pub(crate) fn count(few: u32, full: u32) -> u32 {
    match std::env::var_os("STAGEWIRE_SOAK") {
        Some(_) => full,
        None => few,
    }
}

pub(crate) async fn start(dir: &TempDir) -> Arc<Host> {
    let options = HostOptions {
        dir: dir.path().join("peers"),
        incarnation: Incarnation(Uuid::new_v4()),
        arena_limit: ByteCount(64 << 20),
    };
    Host::start(options).await.expect("a host")
}

pub(crate) fn id(n: u128) -> PayloadId {
    PayloadId(Uuid::from_u128(n))
}

/// Bytes that differ at every place and between seeds.
pub(crate) fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(next).collect();
    bytes.truncate(len as usize);
    bytes
}

/// Waits until it is so.
pub(crate) async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let late = tokio::time::Instant::now() + PATIENCE;
    while !is_so() {
        assert!(tokio::time::Instant::now() < late, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Puts an object whose parts follow from the seed.
pub(crate) async fn put(
    store: &dyn Store,
    payload: PayloadId,
    seed: u64,
    parts: &[u64],
    retention: Retention,
    wait: Duration,
) -> Result<Arc<dyn Object>, StoreError> {
    let mut object = NewObject::new(payload, parts.iter().copied().map(ByteCount));
    object.retention = retention;
    object.wait = wait;
    let mut draft = store.create(object).await?;
    for (part, len) in parts.iter().enumerate() {
        draft
            .bytes_mut(part)?
            .copy_from_slice(&pattern(seed + part as u64, *len));
    }
    draft.seal().await
}

/// Fetches an object into fresh memory and compares every byte.
pub(crate) async fn fetch(store: &dyn Store, payload: PayloadId, seed: u64, parts: &[u64]) -> Result<(), StoreError> {
    let target = |len: &u64| Arc::new(Target::allocate(*len).expect("memory"));
    let targets: Vec<_> = parts.iter().map(target).collect();
    store.fetch(payload, &targets).await?;
    for (part, (target, len)) in targets.iter().zip(parts).enumerate() {
        let bytes = target.as_slice().expect("filled");
        assert!(
            bytes == pattern(seed + part as u64, *len),
            "part {part} came back changed"
        );
    }
    Ok(())
}

pub(crate) fn check(object: &dyn Object, seed: u64, parts: &[u64]) {
    assert_eq!(object.parts(), parts.len());
    for (part, len) in parts.iter().enumerate() {
        let bytes = object.part(part).expect("it is there");
        assert!(
            bytes == pattern(seed + part as u64, *len),
            "part {part} came back changed"
        );
    }
}

#[expect(clippy::print_stderr, reason = "a skip must be visible")]
pub(crate) fn skip(why: &str) {
    eprintln!("skipped: {why}");
}

/// A small file system.
pub(crate) struct Disk<'a>(&'a Path);

impl<'a> Disk<'a> {
    pub(crate) fn mount(dir: &'a Path, size: u64) -> Option<Self> {
        let options = format!("size={size},mode=700");
        let mount = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "stagewire"])
            .arg(dir)
            .output();
        mount.ok()?.status.success().then_some(Self(dir))
    }
}

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        let unmounted = std::process::Command::new("umount").arg("-l").arg(self.0).status();
        assert!(
            unmounted.is_ok_and(|status| status.success()),
            "{} is still mounted",
            self.0.display()
        );
    }
}
