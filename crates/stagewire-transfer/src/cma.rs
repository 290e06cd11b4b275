//! `cma`: peers copy out of any memory of this process, with `process_vm_readv`.

mod out_of_process;

use std::fs;
use std::sync::Arc;

use async_trait::async_trait;
use out_of_process::{MAX_PIECES, OutOfProcess, read_word};
use stagewire_core::{Peer, Record, RegionRef, TransportAddress};

use crate::copy::Shape;
use crate::link::{Grip, Link};
use crate::pull::pull;
use crate::shm::register;
use crate::wire::{Kind, Place};
use crate::{
    Abilities, CmaUnavailable, ConnectError, ConnectOptions, Host, Mapping, Memory, Pinned, Region, RegisterError,
    RegisterOptions, Remote, Target, TransferError, TransferOptions, TransferStats, Transport,
};

const KIND: Kind = Kind::Cma;

/// From so many bytes, two threads copy. Measured: slower at 1 MiB, 1.5 to 2 times as fast at 64 MiB.
const SHAPE: Shape = Shape {
    large_from: 4 << 20,
    max_rows: MAX_PIECES as u64,
};

/// Threads that copy so many bytes.
#[cfg(feature = "probe")]
pub(crate) fn threads(bytes: u64) -> usize {
    if bytes < SHAPE.large_from {
        1
    } else {
        crate::copy::threads()
    }
}

#[derive(Debug)]
pub(crate) struct Cma {
    host: Arc<Host>,
}

impl Cma {
    pub(crate) fn new(host: Arc<Host>) -> Self {
        Self { host }
    }
}

#[async_trait]
impl Transport for Cma {
    fn name(&self) -> &'static str {
        KIND.name()
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            map: false,
            pull: true,
            push: false,
            strided: true,
            checked: true,
            device: false,
        }
    }

    fn address(&self) -> TransportAddress {
        self.host.address(KIND)
    }

    fn register(&self, memory: Memory, options: RegisterOptions) -> Result<Region, RegisterError> {
        register(&self.host, KIND, memory, &options, None)
    }

    async fn connect(&self, peer: &Peer, options: ConnectOptions) -> Result<Arc<dyn Remote>, ConnectError> {
        let link = self.host.link(KIND, peer, &options).await?;
        probe_peer(&link)?;
        Ok(Arc::new(CmaRemote { link }))
    }

    fn stats(&self) -> TransferStats {
        self.host.shared().counters.meter(KIND).stats()
    }
}

#[derive(Debug)]
struct CmaRemote {
    link: Arc<Link>,
}

#[async_trait]
impl Remote for CmaRemote {
    async fn pin(&self, region: &RegionRef, options: TransferOptions) -> Result<Box<dyn Pinned>, TransferError> {
        let grip = self.link.pin(KIND, region, &options).await?;
        Ok(Box::new(CmaPinned { grip: Arc::new(grip) }))
    }

    fn is_alive(&self) -> bool {
        self.link.is_alive()
    }

    async fn closed(&self) -> String {
        self.link.closed().await
    }
}

#[derive(Debug)]
struct CmaPinned {
    grip: Arc<Grip>,
}

#[async_trait]
impl Pinned for CmaPinned {
    fn len(&self) -> u64 {
        self.grip.len()
    }

    async fn pull(&self, records: &[Record], dst: &Target, options: TransferOptions) -> Result<(), TransferError> {
        let Place::Address(address) = self.grip.place() else {
            unreachable!("the owner answers a cma pin with an address");
        };
        let mover = OutOfProcess {
            pid: self.grip.link().process().pid,
            address,
            canary: self.grip.link().canary(),
            grip: self.grip.clone(),
        };
        pull(&self.grip, records, dst, &options, SHAPE, mover).await
    }

    async fn map(&self) -> Result<Mapping, TransferError> {
        Err(TransferError::Unsupported {
            transport: KIND.name(),
            ability: "map",
            instead: "pull instead, or have the producer put the payload into its arena",
        })
    }
}

/// Tries whether the kernel lets this process read others: first the system call, on itself, then the settings that
/// forbid to read a process that is not a descendant.
pub(crate) fn probe_self(canary: &u64) -> Result<(), CmaUnavailable> {
    let unavailable = CmaUnavailable::new;
    match read_word(std::process::id(), std::ptr::from_ref(canary).addr() as u64) {
        Ok(word) if word == *canary => {}
        Ok(_) => return Err(unavailable("process_vm_readv returned other bytes".to_owned())),
        Err(error) => {
            return Err(unavailable(format!(
                "process_vm_readv fails ({error}); a seccomp filter, as containers have one, may forbid it"
            )));
        }
    }
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    match yama_forbids(scope.as_deref(), &status) {
        Some(scope) => Err(unavailable(format!(
            "kernel.yama.ptrace_scope is {scope}: a process may not read one that it did not start; \
             set it to 0 or give CAP_SYS_PTRACE"
        ))),
        None => Ok(()),
    }
}

/// The value of Yama's setting, where it forbids to read other processes and no capability overrules it.
fn yama_forbids(scope: Option<&str>, status: &str) -> Option<u32> {
    const CAP_SYS_PTRACE: u32 = 19;
    let scope: u32 = scope?.trim().parse().ok()?;
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = capabilities.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    let overruled = capabilities.is_some_and(|bits| bits >> CAP_SYS_PTRACE & 1 == 1) && scope < 3;
    (scope > 0 && !overruled).then_some(scope)
}

/// Tries whether this process may read that peer.
fn probe_peer(link: &Link) -> Result<(), ConnectError> {
    let (peer, pid) = (link.peer(), link.process().pid);
    let (address, expected) = link.canary();
    let reason = match read_word(pid, address) {
        Ok(word) if word == expected => return Ok(()),
        Ok(_) => "it returns other bytes than the peer says are there".to_owned(),
        // A process that is ending has no memory some time before it counts as dead.
        Err(error) if !link.is_alive() || error.raw_os_error() == Some(libc::ESRCH) => {
            let how = "its process died".to_owned();
            return Err(ConnectError::Gone { peer, how });
        }
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => format!(
            "process_vm_readv says {error}; the peer has other privileges, is not dumpable, or a security module forbids it"
        ),
        Err(error) => format!("process_vm_readv says {error}"),
    };
    Err(ConnectError::Forbidden { peer, pid, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yama_forbids_unless_a_capability_overrules_it() {
        let (none, ptrace) = ("Name:\tx\nCapEff:\t0000000000000000\n", "CapEff:\t0000000000080000\n");
        assert_eq!(yama_forbids(None, none), None);
        assert_eq!(yama_forbids(Some("0\n"), none), None);
        assert_eq!(yama_forbids(Some("1\n"), none), Some(1));
        assert_eq!(yama_forbids(Some("2\n"), ptrace), None);
        assert_eq!(yama_forbids(Some("3\n"), ptrace), Some(3), "nobody may, for ever");
    }
}
