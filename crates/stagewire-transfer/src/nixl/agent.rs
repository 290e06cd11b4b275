//! An agent: what registers memory with NIXL, and what moves it.

use std::ffi::{CStr, CString, c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::library::NixlLibrary;
use super::symbols::{AgentConfig, Code, Handle, Symbols};
use crate::NixlUnavailable;

const BACKEND: &CStr = c"UCX";

/// NIXL's own thread looks after its connections when one of them wakes it, and after so many µs at the latest, in case
/// UCX misses something. 0 would have it spin.
const PROGRESS_US: u64 = 10_000;

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Space {
    Host,
    /// Of a GPU, by its ordinal.
    Cuda(u32),
}

impl Space {
    const fn code(self) -> c_int {
        match self {
            Self::Host => 0,
            Self::Cuda(_) => 1,
        }
    }
}

/// Memory that was registered under a number of its own, which is never used again.
///
/// NIXL looks host memory up by device number, address and length, and the device number of host memory means nothing to
/// it. So the registration's number goes there: registrations may overlap, and a reference to one that ended is not
/// mistaken for the one that took its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Span {
    pub(super) space: Space,
    pub(super) number: u64,
    pub(super) address: u64,
    pub(super) len: u64,
}

impl Span {
    const fn device(&self) -> u64 {
        match self.space {
            Space::Host => self.number,
            Space::Cuda(ordinal) => ordinal as u64,
        }
    }

    /// Whether it may be the span of a region of so many bytes: whoever asks may have it from a peer.
    pub(super) fn is_of(&self, len: u64) -> bool {
        self.len == len && self.address.checked_add(len).is_some()
    }
}

/// One contiguous copy between two spans, by offsets in each.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stretch {
    pub(super) local: u64,
    pub(super) remote: u64,
    pub(super) len: u64,
}

/// Which way a request moves bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    Read,
    Write,
}

/// What NIXL said no with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) struct NixlError(Code);

impl fmt::Display for NixlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            -1 => "it takes a parameter for invalid",
            -3 => "something is in a state that does not allow it",
            -6 => "it does not know the peer or the memory",
            -4 | -2 => "its backend failed, or the peer is gone",
            _ => "it failed in an unknown way",
        })?;
        write!(f, " (status {})", self.0)
    }
}

fn check(code: Code) -> Result<(), NixlError> {
    if code == 0 { Ok(()) } else { Err(NixlError(code)) }
}

/// A request to move bytes. It must be given back with [`Agent::release`]; dropped, it stays in NIXL's books for ever.
#[derive(Debug)]
pub(super) struct Request(Handle);

/// An agent of NIXL with UCX.
pub(super) struct Agent {
    library: Arc<NixlLibrary>,
    raw: Handle,
    backend: Handle,
}

// SAFETY: NIXL's agents have no thread affinity; they only must not be called from two threads at once, and this type is
// not Sync.
unsafe impl Send for Agent {}

/// Two agents made at once can wait for each other for ever inside UCX.
static MAKING: Mutex<()> = Mutex::new(());

impl Agent {
    /// Makes an agent. With `progress`, NIXL answers peers on a thread of its own. Takes some 20 to 500 ms.
    pub(super) fn new(library: &Arc<NixlLibrary>, name: &str, progress: bool) -> Result<Self, NixlUnavailable> {
        let making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = |what| {
            move |error: NixlError| NixlUnavailable::Agent {
                version: library.version().to_string(),
                what,
                problem: error.to_string(),
            }
        };
        let symbols = library.symbols();
        let name = CString::new(name).expect("names of agents are made here and have no NUL");
        let config = AgentConfig {
            progress_thread: progress,
            listen_thread: false,
            listen_port: 0,
            thread_sync: 0,
            workers: 1,
            progress_delay_us: PROGRESS_US,
            listen_delay_us: 0,
            telemetry: false,
            reserved: [0; 8],
        };
        let mut raw = ptr::null_mut();
        // SAFETY: all pointers are valid for the call; NIXL copies what they point to.
        check(unsafe { (symbols.create_configured_agent)(name.as_ptr(), &raw const config, &raw mut raw) })
            .map_err(failed("make an agent"))?;
        let mut agent = Self {
            library: library.clone(),
            raw,
            backend: ptr::null_mut(),
        };
        let (mut kinds, mut parameters) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the agent was just made.
        check(unsafe { (symbols.get_plugin_params)(raw, BACKEND.as_ptr(), &raw mut kinds, &raw mut parameters) })
            .map_err(failed("find its plug-in for UCX"))?;
        // SAFETY: agent and parameters were just made by NIXL. The two lists are used no more after the call.
        let made = check(unsafe {
            let made = (symbols.create_backend)(raw, BACKEND.as_ptr(), parameters, &raw mut agent.backend);
            (symbols.destroy_mem_list)(kinds);
            (symbols.destroy_params)(parameters);
            made
        });
        made.map_err(failed("start UCX"))?;
        drop(making);
        Ok(agent)
    }

    /// Prepares memory for transfers.
    ///
    /// # Safety
    /// The memory must stay mapped until it was deregistered, and no request may use it by then.
    pub(super) unsafe fn register(&self, span: &Span) -> Result<(), NixlError> {
        let list = RegisterList::new(self.symbols(), Some(span))?;
        // SAFETY: agent and list are valid; the caller's contract for the memory.
        check(unsafe { (self.symbols().register_mem)(self.raw, list.raw, ptr::null_mut()) })
    }

    /// Ends a registration.
    pub(super) fn deregister(&self, span: &Span) -> Result<(), NixlError> {
        let list = RegisterList::new(self.symbols(), Some(span))?;
        // SAFETY: agent and list are valid.
        check(unsafe { (self.symbols().deregister_mem)(self.raw, list.raw, ptr::null_mut()) })
    }

    /// What a peer loads to reach this agent, or, with a registration, to reach its memory.
    pub(super) fn metadata(&self, span: Option<&Span>) -> Result<Vec<u8>, NixlError> {
        let list = RegisterList::new(self.symbols(), span)?;
        let (mut data, mut len) = (ptr::null_mut::<c_void>(), 0_usize);
        // SAFETY: agent and list are valid, and so are the places for the results.
        check(unsafe {
            (self.symbols().get_local_partial_md)(self.raw, list.raw, &raw mut data, &raw mut len, ptr::null_mut())
        })?;
        // SAFETY: NIXL allocated `len` bytes with malloc and leaves them to the caller.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) }.to_vec();
        // SAFETY: as above; used no more.
        unsafe { libc::free(data) };
        Ok(bytes)
    }

    /// Learns of a peer, or of more memory of one that is known, under the name that the metadata carry.
    pub(super) fn load(&self, metadata: &[u8]) -> Result<(), NixlError> {
        let mut name = ptr::null_mut();
        // SAFETY: the bytes are valid for the call.
        check(unsafe {
            (self.symbols().load_remote_md)(self.raw, metadata.as_ptr().cast(), metadata.len(), &raw mut name)
        })?;
        // SAFETY: NIXL allocated the name with malloc and leaves it to the caller.
        unsafe { libc::free(name.cast()) };
        Ok(())
    }

    /// Forgets a peer, its memory and the connection. No request to it may be in flight.
    pub(super) fn forget(&self, peer: &CStr) -> Result<(), NixlError> {
        // SAFETY: the agent is valid, the name too.
        check(unsafe { (self.symbols().invalidate_remote_md)(self.raw, peer.as_ptr()) })
    }

    /// Prepares a request for stretches of two registered spans.
    pub(super) fn request(
        &self,
        op: Op,
        peer: &CStr,
        local: &Span,
        remote: &Span,
        stretches: &[Stretch],
    ) -> Result<Request, NixlError> {
        let symbols = self.symbols();
        let (mut here, mut there) = (TransferList::new(symbols, local)?, TransferList::new(symbols, remote)?);
        for stretch in stretches {
            here.add(local, stretch.local, stretch.len)?;
            there.add(remote, stretch.remote, stretch.len)?;
        }
        let mut request = ptr::null_mut();
        // SAFETY: agent, lists and name are valid; NIXL copies them and checks that both spans are registered.
        check(unsafe {
            let op = c_int::from(op == Op::Write);
            (symbols.create_xfer_req)(
                self.raw,
                op,
                here.raw,
                there.raw,
                peer.as_ptr(),
                &raw mut request,
                ptr::null_mut(),
            )
        })?;
        Ok(Request(request))
    }

    /// Starts a request. `true` where it is over already. May block for the whole copy.
    ///
    /// # Safety
    /// Until the request is over, its local memory must be as the direction demands: readable, or written by nobody
    /// else.
    pub(super) unsafe fn post(&self, request: &Request) -> Result<bool, NixlError> {
        // SAFETY: agent and request are valid; the caller's contract for the memory.
        Self::progress(unsafe { (self.symbols().post_xfer_req)(self.raw, request.0, ptr::null_mut()) })
    }

    /// Whether a request is over.
    pub(super) fn is_over(&self, request: &Request) -> Result<bool, NixlError> {
        // SAFETY: agent and request are valid.
        Self::progress(unsafe { (self.symbols().get_xfer_status)(self.raw, request.0) })
    }

    fn progress(code: Code) -> Result<bool, NixlError> {
        match code {
            0 => Ok(true),
            1 => Ok(false),
            error => Err(NixlError(error)),
        }
    }

    /// Gives a request back, which must be over.
    pub(super) fn release(&self, request: Request) -> Result<(), NixlError> {
        // SAFETY: agent and request are valid.
        check(unsafe { (self.symbols().release_xfer_req)(self.raw, request.0) })?;
        // SAFETY: released, and used no more.
        check(unsafe { (self.symbols().destroy_xfer_req)(request.0) })
    }

    fn symbols(&self) -> &Symbols {
        self.library.symbols()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let symbols = self.library.symbols();
        if !self.backend.is_null() {
            // SAFETY: only the handle goes; the backend itself belongs to the agent.
            unsafe { (symbols.destroy_backend)(self.backend) };
        }
        // SAFETY: used no more.
        unsafe { (symbols.destroy_agent)(self.raw) };
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Agent(NIXL {})", self.library.version())
    }
}

/// Memory as NIXL's registration takes it.
struct RegisterList<'a> {
    symbols: &'a Symbols,
    raw: Handle,
}

impl<'a> RegisterList<'a> {
    fn new(symbols: &'a Symbols, span: Option<&Span>) -> Result<Self, NixlError> {
        let mut raw = ptr::null_mut();
        let kind = span.map_or(Space::Host, |span| span.space).code();
        // SAFETY: the place for the result is valid.
        check(unsafe { (symbols.create_reg_dlist)(kind, &raw mut raw) })?;
        let list = Self { symbols, raw };
        if let Some(span) = span {
            let (address, len) = (span.address as usize, span.len as usize);
            // SAFETY: the list was just made; there is no extra metadata.
            check(unsafe { (symbols.reg_dlist_add_desc)(raw, address, len, span.device(), ptr::null(), 0) })?;
        }
        Ok(list)
    }
}

impl Drop for RegisterList<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new`.
        unsafe { (self.symbols.destroy_reg_dlist)(self.raw) };
    }
}

/// Memory as NIXL's requests take it.
struct TransferList<'a> {
    symbols: &'a Symbols,
    raw: Handle,
}

impl<'a> TransferList<'a> {
    fn new(symbols: &'a Symbols, span: &Span) -> Result<Self, NixlError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the place for the result is valid.
        check(unsafe { (symbols.create_xfer_dlist)(span.space.code(), &raw mut raw) })?;
        Ok(Self { symbols, raw })
    }

    fn add(&mut self, span: &Span, offset: u64, len: u64) -> Result<(), NixlError> {
        let address = (span.address + offset) as usize;
        // SAFETY: the list is valid.
        check(unsafe { (self.symbols.xfer_dlist_add_desc)(self.raw, address, len as usize, span.device()) })
    }
}

impl Drop for TransferList<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new`.
        unsafe { (self.symbols.destroy_xfer_dlist)(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_has_the_length_of_its_region_and_ends_in_memory() {
        let span = |address, len| Span {
            space: Space::Host,
            number: 1,
            address,
            len,
        };
        assert!(span(4096, 100).is_of(100));
        assert!(!span(4096, 101).is_of(100));
        assert!(!span(4096, 99).is_of(100));
        assert!(span(u64::MAX - 100, 100).is_of(100));
        assert!(!span(u64::MAX - 99, 100).is_of(100));
    }
}
