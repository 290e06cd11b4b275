//! Which cores the two processes of a benchmark run on.

use std::fs;
use std::io;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// While it lives, the owner and this process have half of the cores each.
///
/// The scheduler else puts sender and receiver now on one core and now on two, which changes a short exchange by a factor of
/// three, for one way to do it and not for the other that is measured beside it.
#[derive(Debug)]
pub(in crate::bench) struct Apart {
    owner: u32,
    before: CpuSet,
}

impl Apart {
    /// `None` where there is one core only.
    pub(in crate::bench) fn new(owner: u32) -> io::Result<Option<Self>> {
        let before = sched_getaffinity(None)?;
        let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| before.is_set(*core)).collect();
        let (theirs, ours) = cores.split_at(cores.len() / 2);
        if theirs.is_empty() {
            return Ok(None);
        }
        let apart = Self { owner, before };
        place(owner, &set(theirs))?;
        place(std::process::id(), &set(ours))?;
        Ok(Some(apart))
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        for process in [self.owner, std::process::id()] {
            // Where it fails, the process has ended.
            let _ = place(process, &self.before);
        }
    }
}

fn set(cores: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    for core in cores {
        set.set(*core);
    }
    set
}

/// All threads of a process; those that it makes later follow who makes them.
fn place(process: u32, cores: &CpuSet) -> io::Result<()> {
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        let thread = task?.file_name().to_str().and_then(|id| id.parse().ok());
        // One that has ended meanwhile needs no place.
        let _ = sched_setaffinity(thread.and_then(Pid::from_raw), cores);
    }
    Ok(())
}
