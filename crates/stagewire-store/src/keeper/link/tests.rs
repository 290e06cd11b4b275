use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use stagewire_core::{ByteCount, Classify, ErrorClass};
use stagewire_transfer::{Arena, Extent};
use tempfile::TempDir;

use super::*;
use crate::keeper::KeeperOptions;

/// The keeper itself, not a test.
#[test]
#[ignore = "run as a child process by the tests of the keeper"]
fn keeper_process() {
    if let Some(options) = KeeperOptions::from_env() {
        crate::keeper::run(&options).expect("it keeps");
    }
}

pub(crate) fn command() -> KeeperCommand {
    let program = std::env::current_exe().expect("this test");
    let args = [
        "keeper::link::tests::keeper_process",
        "--exact",
        "--ignored",
        "--nocapture",
    ];
    KeeperCommand::new(program, args)
}

fn lingering(linger: Duration) -> KeeperCommand {
    KeeperCommand { linger, ..command() }
}

fn dir() -> TempDir {
    tempfile::tempdir().expect("a directory")
}

fn filled(arena: &Arena, byte: u8) -> Extent {
    let mut extent = arena.allocate(10_000).expect("room");
    extent.fill(byte);
    extent.freeze()
}

fn pid(link: &Link) -> Pid {
    Pid::from_raw(i32::try_from(link.process().pid).expect("a pid")).expect("a pid")
}

/// Whether the process ends within that time.
fn ends_within(pid: Pid, time: Duration) -> bool {
    let process = pidfd_open(pid, PidfdFlags::empty()).expect("it runs");
    let timeout = Timespec::try_from(time).expect("short");
    let mut ends = [PollFd::new(&process, PollFlags::IN)];
    poll(&mut ends, Some(&timeout)).expect("nobody interrupts") > 0
}

/// Waits until the process is gone: a zombie is, too.
fn gone(pid: Pid) {
    let begin = Instant::now();
    let stat = format!("/proc/{}/stat", pid.as_raw_nonzero());
    loop {
        let state = std::fs::read_to_string(&stat).ok();
        let state = state.and_then(|stat| stat.rsplit_once(") ").map(|(_, rest)| rest[..1].to_owned()));
        if state.is_none_or(|state| state == "Z") {
            return;
        }
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "process {pid:?} is still there"
        );
        std::thread::sleep(PAUSE);
    }
}

#[test]
fn memory_outlives_its_owner() {
    let dir = dir();
    let arena = Arena::new(ByteCount(1 << 20));
    let extent = filled(&arena, 7);
    let location = extent.location();
    let link = Link::open(dir.path(), &command()).expect("a keeper");
    let keeper = link.process();
    assert!(link.fetch().expect("it answers").is_empty());
    link.keep(extent.lend()).expect("kept");
    link.keep(extent.lend()).expect("kept once");
    // The owner dies: its connection and its memory go.
    drop((link, extent, arena));

    let link = Link::open(dir.path(), &command()).expect("the keeper");
    assert_eq!(link.process(), keeper, "one for each directory");
    let mut segments = link.fetch().expect("it answers");
    assert_eq!(segments.len(), 1);
    let segment = segments.remove(0);
    assert_eq!(segment.name, location.segment);
    let arena = Arena::new(ByteCount(1 << 20));
    let extents = arena
        .adopt(segment, &[(location.offset, location.len)])
        .expect("as it was");
    assert_eq!(extents[0].bytes(), Some([7; 10_000].as_slice()));
    link.drop_segment(location.segment).expect("it answers");
    assert!(link.fetch().expect("it answers").is_empty());
    link.stop().expect("it answers");
    gone(pid(&link));
    assert!(!dir.path().join(super::super::SOCKET).exists());
}

#[test]
fn a_directory_has_one_keeper() {
    let dir = dir();
    let link = Link::open(dir.path(), &command()).expect("a keeper");
    let second = command().command(dir.path()).status().expect("it ends");
    assert!(!second.success());
    link.fetch().expect("the first one goes on");
    link.stop().expect("it answers");
}

#[test]
fn who_does_not_know_the_secret_gets_nothing() {
    let dir = dir();
    let arena = Arena::new(ByteCount(1 << 20));
    let extent = filled(&arena, 7);
    let link = Link::open(dir.path(), &command()).expect("a keeper");
    link.keep(extent.lend()).expect("kept");
    let wrong = Secret::new([1; 32]);
    let error = Link::connect(dir.path(), &wrong).expect_err("not the owner");
    assert_eq!(error.class(), ErrorClass::Denied, "{error}");

    // Nor who skips the greeting, or says nothing at all.
    let socket = socket::connect_in(dir.path()).expect("it listens");
    socket::send(&socket, &Request::Fetch, None).expect("sent");
    let reply = socket::receive::<Reply>(&socket).expect("it answers");
    assert!(matches!(reply, Some((Reply::Refused { .. }, None))), "{reply:?}");
    assert!(matches!(socket::receive::<Reply>(&socket), Ok(None)), "it hangs up");
    let silent = socket::connect_in(dir.path()).expect("it listens");
    socket::send(&silent, &"hello", None).expect("sent");
    link.fetch().expect("the owner is still the owner");
    link.stop().expect("it answers");
}

#[test]
fn a_secret_that_others_can_read_is_none() {
    use std::os::unix::fs::PermissionsExt;
    let dir = dir();
    Secret::make(dir.path()).expect("made");
    let path = dir.path().join("keeper.secret");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).expect("changed");
    let error = Link::open(dir.path(), &command()).expect_err("open to others");
    assert!(matches!(error, KeeperError::Insecure { .. }), "{error}");
    std::fs::remove_file(&path).expect("there");
    std::os::unix::fs::symlink("/dev/zero", &path).expect("a link");
    let error = Link::open(dir.path(), &command()).expect_err("a link");
    assert!(matches!(error, KeeperError::Io { .. }), "{error}");
}

#[test]
fn a_keeper_without_an_owner_ends_by_itself() {
    let dir = dir();
    let linger = Duration::from_millis(100);
    let link = Link::open(dir.path(), &lingering(linger)).expect("a keeper");
    let keeper = pid(&link);
    assert!(!ends_within(keeper, 3 * linger), "it stays as long as its owner");
    drop(link);
    gone(keeper);
    // The next owner gets a new one.
    let link = Link::open(dir.path(), &command()).expect("a keeper");
    assert_ne!(pid(&link), keeper);
    link.stop().expect("it answers");
}

#[test]
fn a_dead_keeper_is_told_and_replaced() {
    let dir = dir();
    let arena = Arena::new(ByteCount(1 << 20));
    let extent = filled(&arena, 7);
    let link = Link::open(dir.path(), &command()).expect("a keeper");
    kill_process(pid(&link), Signal::KILL).expect("it runs");
    gone(pid(&link));
    let error = link.keep(extent.lend()).expect_err("nobody is there");
    assert!(matches!(error, KeeperError::Io { .. }), "{error}");
    let link = Link::open(dir.path(), &command()).expect("another keeper");
    link.keep(extent.lend()).expect("kept");
    link.stop().expect("it answers");
}

#[test]
fn a_program_that_is_no_keeper_is_an_error() {
    let dir = dir();
    let missing = KeeperCommand::new("/nowhere/keeper", Vec::<String>::new());
    let error = Link::open(dir.path(), &missing).expect_err("nothing to start");
    assert!(matches!(error, KeeperError::Start { .. }), "{error}");
}

/// Whether the process is no more, not even as a zombie.
fn reaped(pid: Pid) {
    let begin = Instant::now();
    while Path::new(&format!("/proc/{}", pid.as_raw_nonzero())).exists() {
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "process {pid:?} is still there"
        );
        std::thread::sleep(PAUSE);
    }
}

/// Whoever dismisses a keeper waits for nothing, and leaves nothing behind.
#[test]
fn a_dismissed_keeper_ends_whoever_talks_to_it() {
    for busy in [false, true] {
        let dir = dir();
        let link = Arc::new(Link::open(dir.path(), &command()).expect("a keeper"));
        let keeper = pid(&link);
        let talk = busy.then(|| link.socket.lock().expect("no panic"));
        // Would wait for ever for who talks.
        link.dismiss();
        drop(talk);
        reaped(keeper);
        assert_eq!(Arc::strong_count(&link), 1, "busy: {busy}");
    }
}
