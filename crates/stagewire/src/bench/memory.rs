use std::fs;

use anyhow::Context;

/// Bytes of this process that are in memory.
pub(super) fn resident() -> anyhow::Result<u64> {
    let statm = fs::read_to_string("/proc/self/statm").context("cannot read /proc/self/statm")?;
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    let pages = pages.context("/proc/self/statm has another form than proc(5) says")?;
    Ok(pages * rustix::param::page_size() as u64)
}
