//! The functions of NIXL's C interface that are used here, declared after its documentation and checked by name.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

/// Result of a call: 0 is success, 1 in progress, below 0 an error.
pub(super) type Code = c_int;

/// Something that the library made, and that only it looks into.
pub(super) type Handle = *mut c_void;

/// How an agent is made.
#[repr(C)]
pub(super) struct AgentConfig {
    pub(super) progress_thread: bool,
    pub(super) listen_thread: bool,
    pub(super) listen_port: c_int,
    /// 0 is none: this crate never calls one agent from two threads at once.
    pub(super) thread_sync: c_int,
    pub(super) workers: c_uint,
    pub(super) progress_delay_us: u64,
    pub(super) listen_delay_us: u64,
    pub(super) telemetry: bool,
    /// A later version that reads more fields finds zeros.
    pub(super) reserved: [u64; 8],
}

macro_rules! symbols {
    ($($(#[$doc:meta])* $name:ident($($argument:ty),*);)*) => {
        /// Addresses of the functions; valid for ever, because the library is never closed.
        #[derive(Clone, Copy)]
        pub(super) struct Symbols {
            $($(#[$doc])* pub(super) $name: unsafe extern "C" fn($($argument),*) -> Code,)*
        }

        impl Symbols {
            /// Looks all functions up.
            ///
            /// # Errors
            /// The name of the first one that is not there.
            ///
            /// # Safety
            /// The library must be NIXL's C interface, and must never be closed.
            pub(super) unsafe fn load(library: &Library) -> Result<Self, &'static str> {
                Ok(Self { $($name: {
                    const NAME: &str = concat!("nixl_capi_", stringify!($name));
                    // SAFETY: the caller's contract; the types are those that the library documents.
                    let symbol = unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> Code>(NAME.as_bytes()) };
                    *symbol.map_err(|_| NAME)?
                },)* })
            }
        }
    };
}

symbols! {
    /// Name, configuration, where the agent goes.
    create_configured_agent(*const c_char, *const AgentConfig, *mut Handle);
    destroy_agent(Handle);
    /// Agent, name of the plug-in, where its memory kinds and its parameters go.
    get_plugin_params(Handle, *const c_char, *mut Handle, *mut Handle);
    destroy_mem_list(Handle);
    destroy_params(Handle);
    /// Agent, name of the plug-in, parameters, where the backend goes.
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    destroy_backend(Handle);
    /// Memory kind, where the list goes.
    create_reg_dlist(c_int, *mut Handle);
    /// List, address, bytes, device, extra metadata and its bytes.
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist(Handle);
    register_mem(Handle, Handle, Handle);
    deregister_mem(Handle, Handle, Handle);
    /// Agent, list, where the bytes and their number go (to be freed with `free`), options.
    get_local_partial_md(Handle, Handle, *mut *mut c_void, *mut usize, Handle);
    /// Agent, bytes, their number, where the agent's name goes (to be freed with `free`).
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(Handle, *const c_char);
    /// Memory kind, where the list goes.
    create_xfer_dlist(c_int, *mut Handle);
    /// List, address, bytes, device.
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    destroy_xfer_dlist(Handle);
    /// Agent, 0 to read or 1 to write, local list, remote list, name of the peer, where the request goes, options.
    create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
}
