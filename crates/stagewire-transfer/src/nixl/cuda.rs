//! Asks CUDA's driver whether an address is memory of a device.
//!
//! A UCX that cannot reach a device takes its memory for host memory, or crashes when it is touched. So what is said to
//! be on a device is looked at before NIXL sees it.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`, whose value for memory of a device is `CU_MEMORYTYPE_DEVICE`.
const MEMORY_TYPE: c_int = 2;
const DEVICE_MEMORY: c_uint = 2;

/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const DEVICE_ORDINAL: c_int = 9;

type GetAttribute = unsafe extern "C" fn(*mut c_void, c_int, u64) -> c_int;

/// Whether this is memory of the device with this ordinal.
///
/// # Errors
/// What it is instead.
pub(super) fn check(ordinal: u32, address: u64) -> Result<(), String> {
    static DRIVER: OnceLock<Result<GetAttribute, String>> = OnceLock::new();
    let get = DRIVER.get_or_init(load).clone()?;
    let (mut kind, mut device): (c_uint, c_uint) = (0, 0);
    // SAFETY: both attributes are values of four bytes; the driver only looks the address up.
    let codes = unsafe {
        [
            get((&raw mut kind).cast(), MEMORY_TYPE, address),
            get((&raw mut device).cast(), DEVICE_ORDINAL, address),
        ]
    };
    if codes != [0, 0] || kind != DEVICE_MEMORY {
        return Err(format!("address {address:#x} is no memory of a CUDA device"));
    }
    if device != ordinal {
        return Err(format!("address {address:#x} is memory of cuda:{device}"));
    }
    Ok(())
}

fn load() -> Result<GetAttribute, String> {
    // SAFETY: loading CUDA's driver runs its initialisers, which prepare global variables.
    let driver = unsafe { Library::new("libcuda.so.1") };
    let driver = driver.map_err(|error| format!("this host has no CUDA driver ({error})"))?;
    // The addresses of its functions stay valid for ever.
    let driver: &'static Library = Box::leak(Box::new(driver));
    let missing = |error: libloading::Error| format!("CUDA's driver is too old ({error})");
    // SAFETY: the type is that of the driver's documentation.
    let init = unsafe { driver.get::<unsafe extern "C" fn(c_uint) -> c_int>(b"cuInit") }.map_err(missing)?;
    // SAFETY: as above.
    let get = unsafe { driver.get::<GetAttribute>(b"cuPointerGetAttribute") }.map_err(missing)?;
    // SAFETY: the one call that every use of the driver begins with; 0 is the only flag.
    match unsafe { init(0) } {
        0 => Ok(*get),
        code => Err(format!("CUDA's driver does not start (status {code})")),
    }
}
