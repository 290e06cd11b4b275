use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Has the current runtime tell when a descriptor is ready.
pub(crate) fn watch(descriptor: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open and stays the same descriptor until `AsyncFd`, which never gives it out mutably here,
    // has taken it off the runtime and drops it.
    let watched = unsafe { AsyncFd::register_with_interest(descriptor, interest) };
    Ok(watched?)
}
