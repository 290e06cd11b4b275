//! `cma`: peers copy out of any memory of this process, with `process_vm_readv`.

use std::fs;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use async_trait::async_trait;
use libc::{c_void, iovec};
use smallvec::SmallVec;
use stagewire_core::{Peer, Record, RegionRef, TransportAddress};

use crate::copy::{MoveError, Mover, Piece, Shape};
use crate::link::{Grip, Link};
use crate::pull::pull;
use crate::shm::register;
use crate::wire::{Kind, Place};
use crate::{
    Abilities, CmaUnavailable, ConnectError, ConnectOptions, Host, Mapping, Memory, Pinned, Region, RegisterError,
    RegisterOptions, Remote, Target, TransferError, TransferOptions, TransferStats, Transport,
};

const KIND: Kind = Kind::Cma;

/// Pieces that one system call takes: `UIO_MAXIOV` of the kernel, less one for the owner's random word.
const MAX_PIECES: usize = 1023;

/// Bytes of the owner's random word.
const WORD: u64 = size_of::<u64>() as u64;

type Vectors = SmallVec<[iovec; 2]>;

/// From so many bytes, two threads copy. Measured: slower at 1 MiB, 1.5 to 2 times as fast at 64 MiB.
const SHAPE: Shape = Shape {
    large_from: 4 << 20,
    max_pieces: MAX_PIECES,
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

/// Copies out of another process. The grip keeps the memory in place there.
struct OutOfProcess {
    pid: u32,
    address: u64,
    /// Address and value of the owner's random word.
    canary: (u64, u64),
    grip: Arc<Grip>,
}

impl Mover for OutOfProcess {
    /// Each call reads the owner's random word last. A process that executed another program has the same number and
    /// lives, but another memory. One call reads one memory, and keeps it as it is even where the process ends meanwhile:
    /// so the word proves what came before it.
    unsafe fn copy(&self, pieces: &[Piece], dst: NonNull<u8>, _large: bool) -> Result<(), MoveError> {
        for pieces in pieces.chunks(MAX_PIECES) {
            let mut word = 0_u64;
            // SAFETY: the caller's contract.
            let (mut local, mut remote) = unsafe { self.vectors(pieces, dst, &raw mut word) };
            let (mut local, mut remote) = (&mut local[..], &mut remote[..]);
            while !local.is_empty() {
                match read_process(self.pid, local, remote) {
                    // Part of it, up to an unreadable page: the next turn says which, from its first byte.
                    Ok(copied) if copied > 0 => {
                        advance(&mut local, copied);
                        advance(&mut remote, copied);
                    }
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Err(MoveError::Lost),
                    Err(error) if error.raw_os_error() != Some(libc::EFAULT) => return Err(MoveError::Os(error)),
                    _ => {
                        // Another program may be running there by now.
                        let (address, expected) = self.canary;
                        if !matches!(read_word(self.pid, address), Ok(word) if word == expected) {
                            return Err(MoveError::Lost);
                        }
                        let offset = (remote[0].iov_base.addr() as u64).wrapping_sub(self.address);
                        return Err(MoveError::Unreadable { offset });
                    }
                }
            }
            if word != self.canary.1 {
                return Err(MoveError::Lost);
            }
        }
        Ok(())
    }

    /// The copies have proven what they read; a connection that is over ends pulls all the same.
    fn verify(&self) -> Result<(), MoveError> {
        if self.grip.link().is_open() {
            Ok(())
        } else {
            Err(MoveError::Lost)
        }
    }
}

impl OutOfProcess {
    /// The pieces, then the random word.
    ///
    /// # Safety
    /// The pieces must lie inside the destination.
    unsafe fn vectors(&self, pieces: &[Piece], dst: NonNull<u8>, word: *mut u64) -> (Vectors, Vectors) {
        let vector = |base: *mut c_void, len: u64| iovec {
            iov_base: base,
            iov_len: len as usize,
        };
        // An address of another process: it only becomes a pointer because the system call wants one.
        let there = |address: u64, len: u64| vector(std::ptr::without_provenance_mut(address as usize), len);
        let (mut local, mut remote) = (
            Vectors::with_capacity(pieces.len() + 1),
            Vectors::with_capacity(pieces.len() + 1),
        );
        for piece in pieces {
            // SAFETY: the caller's contract.
            let base = unsafe { dst.add(piece.dst as usize) };
            local.push(vector(base.as_ptr().cast(), piece.len));
            remote.push(there(self.address.wrapping_add(piece.src), piece.len));
        }
        local.push(vector(word.cast(), WORD));
        remote.push(there(self.canary.0, WORD));
        (local, remote)
    }
}

/// Drops the first `bytes` bytes.
fn advance(vectors: &mut &mut [iovec], mut bytes: usize) {
    while let Some(first) = vectors.first_mut() {
        if bytes < first.iov_len {
            first.iov_base = first.iov_base.wrapping_byte_add(bytes);
            first.iov_len -= bytes;
            return;
        }
        bytes -= first.iov_len;
        *vectors = &mut std::mem::take(vectors)[1..];
    }
}

/// One `process_vm_readv`: copies from `remote` in process `pid` to `local` here, as far as it gets.
fn read_process(pid: u32, local: &[iovec], remote: &[iovec]) -> io::Result<usize> {
    let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
    // SAFETY: both arrays are as long as said. The callers made the local vectors from memory that is reserved for the
    // copy; the remote ones are checked by the kernel.
    let copied = unsafe {
        libc::process_vm_readv(
            pid,
            local.as_ptr(),
            local.len() as libc::c_ulong,
            remote.as_ptr(),
            remote.len() as libc::c_ulong,
            0,
        )
    };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

/// Reads one word of a process.
fn read_word(pid: u32, address: u64) -> io::Result<u64> {
    let mut word = 0_u64;
    let local = iovec {
        iov_base: std::ptr::from_mut(&mut word).cast(),
        iov_len: size_of::<u64>(),
    };
    let remote = iovec {
        iov_base: std::ptr::without_provenance_mut(address as usize),
        iov_len: size_of::<u64>(),
    };
    match read_process(pid, &[local], &[remote])? {
        8 => Ok(word),
        read => Err(io::Error::other(format!("{read} of 8 bytes were read"))),
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
        Err(_) if !link.is_alive() => {
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

    #[test]
    fn vectors_advance_across_their_ends() {
        let bytes = [0_u8; 12];
        let vector = |at: usize, len| iovec {
            iov_base: bytes[at..].as_ptr().cast_mut().cast(),
            iov_len: len,
        };
        let mut vectors = [vector(0, 4), vector(4, 4), vector(8, 4)];
        let mut rest = &mut vectors[..];
        advance(&mut rest, 6);
        assert_eq!((rest.len(), rest[0].iov_len), (2, 2));
        assert_eq!(rest[0].iov_base.addr(), bytes.as_ptr().addr() + 6);
        advance(&mut rest, 6);
        assert!(rest.is_empty());
    }
}
