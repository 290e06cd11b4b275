//! Memory of a GPU, passed through.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use libloading::Library;
use stagewire_core::{Classify, Device, ErrorClass, Record};
use stagewire_transfer::{
    Borrowed, ConnectOptions, Memory, Pinned, RegisterOptions, Target, TransferOptions, Transport, Writable,
};

use super::{End, is_here};
use crate::support;

const GPU: Device = Device::Cuda(0);

/// As much of CUDA's driver as these tests need.
struct Driver {
    library: Library,
}

/// Memory of the first GPU.
struct DeviceMemory {
    driver: Arc<Driver>,
    address: u64,
}

impl Driver {
    /// The driver, with a context of the first GPU on this thread; says so where there is none.
    #[expect(clippy::print_stderr, reason = "a skip must be visible")]
    fn open() -> Option<Arc<Self>> {
        // SAFETY: loading the driver prepares its global variables.
        let library = unsafe { Library::new("libcuda.so.1") };
        let driver = match library {
            Ok(library) => Arc::new(Self { library }),
            Err(error) => {
                eprintln!("skipped: no CUDA driver ({error})");
                return None;
            }
        };
        // SAFETY: the signature of the driver's documentation.
        let started = unsafe { driver.call::<unsafe extern "C" fn(c_uint) -> c_int>(b"cuInit")(0) };
        if started != 0 {
            eprintln!("skipped: CUDA's driver finds no GPU (status {started})");
            return None;
        }
        let mut context = ptr::null_mut::<c_void>();
        // SAFETY: as above; the place for the context is valid.
        let made = unsafe {
            let retain =
                driver.call::<unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int>(b"cuDevicePrimaryCtxRetain");
            retain(&raw mut context, 0)
        };
        assert_eq!(made, 0, "a context");
        // SAFETY: as above.
        let set = unsafe { driver.call::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cuCtxSetCurrent")(context) };
        assert_eq!(set, 0, "the context");
        Some(driver)
    }

    /// # Safety
    /// The function must have this type.
    unsafe fn call<F: Copy>(&self, name: &[u8]) -> F {
        // SAFETY: the caller's contract; the library stays open as long as this.
        *unsafe { self.library.get::<F>(name) }.expect("the driver has it")
    }

    fn copy_of(self: &Arc<Self>, bytes: &[u8]) -> Arc<DeviceMemory> {
        let mut address = 0;
        // SAFETY: the signatures of the driver's documentation, with valid places and lengths.
        let codes = unsafe {
            let allocate = self.call::<unsafe extern "C" fn(*mut u64, usize) -> c_int>(b"cuMemAlloc_v2");
            let copy = self.call::<unsafe extern "C" fn(u64, *const c_void, usize) -> c_int>(b"cuMemcpyHtoD_v2");
            [
                allocate(&raw mut address, bytes.len()),
                copy(address, bytes.as_ptr().cast(), bytes.len()),
            ]
        };
        assert_eq!(codes, [0, 0], "memory of the GPU");
        Arc::new(DeviceMemory {
            driver: self.clone(),
            address,
        })
    }
}

impl DeviceMemory {
    fn pointer(&self) -> NonNull<u8> {
        NonNull::new(ptr::without_provenance_mut(self.address as usize)).expect("not null")
    }

    fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: the signature of the driver's documentation, with a valid place and length.
        let code = unsafe {
            let copy = self
                .driver
                .call::<unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int>(b"cuMemcpyDtoH_v2");
            copy(bytes.as_mut_ptr().cast(), self.address, len)
        };
        assert_eq!(code, 0, "a copy from the GPU");
        bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `copy_of`, and used no more.
        unsafe { self.driver.call::<unsafe extern "C" fn(u64) -> c_int>(b"cuMemFree_v2")(self.address) };
    }
}

async fn pin(owner: &End, reader: &End, memory: Memory) -> (stagewire_transfer::Region, Box<dyn Pinned>) {
    let region = owner
        .nixl
        .register(memory, RegisterOptions::default())
        .expect("registered");
    let remote = reader
        .nixl
        .connect(&owner.peer(), ConnectOptions::default())
        .await
        .expect("connected");
    let pinned = remote
        .pin(&region.reference(), TransferOptions::default())
        .await
        .expect("pinned");
    (region, pinned)
}

#[tokio::test]
async fn memory_of_a_gpu_is_pulled_and_pushed() {
    if !is_here() {
        return;
    }
    let Some(driver) = Driver::open() else { return };
    let (_parent, dir) = support::run_dir();
    let (owner, reader) = (End::start(&dir).await, End::start(&dir).await);
    let len = 8 << 20;
    let source = support::bulk(len);
    let whole = [Record::contiguous(0, 0, len as u64)];
    let there = driver.copy_of(&source);
    // SAFETY: the memory lives as long as its owner, and nobody writes it.
    let memory = unsafe { Borrowed::on_device(GPU, there.pointer(), len, there.clone()) };
    let (_region, pinned) = pin(&owner, &reader, memory.clone().into()).await;

    let on_host = Target::allocate(len as u64).expect("memory");
    pinned
        .pull(&whole, &on_host, TransferOptions::default())
        .await
        .expect("pulled to the host");
    assert!(on_host.as_slice().expect("pulled") == source);

    let here = driver.copy_of(&vec![0; len]);
    // SAFETY: the memory lives as long as its owner, and nobody else uses it.
    let on_gpu = unsafe { Target::on_device(GPU, here.pointer(), len, here.clone()) };
    pinned
        .pull(&whole, &on_gpu, TransferOptions::default())
        .await
        .expect("pulled to the GPU");
    assert!(here.bytes(len) == source);

    let target = driver.copy_of(&vec![0; len]);
    // SAFETY: as above.
    let writable = unsafe { Writable::on_device(GPU, target.pointer(), len, target.clone()) };
    let (_region, pinned) = pin(&owner, &reader, writable.into()).await;
    pinned
        .push(&whole, &memory.into(), TransferOptions::default())
        .await
        .expect("pushed from the GPU");
    assert!(target.bytes(len) == source);
}

/// What is said to be on a device and is not, with or without a GPU.
#[tokio::test]
async fn host_memory_is_not_taken_for_memory_of_a_device() {
    if !is_here() {
        return;
    }
    let (_parent, dir) = support::run_dir();
    let end = End::start(&dir).await;
    let bytes: Arc<Vec<u8>> = Arc::new(vec![1; 100]);
    let address = NonNull::new(bytes.as_ptr().cast_mut()).expect("not null");
    // SAFETY: readable as long as its owner lives; that it is on a device is the lie which is tried out.
    let memory = unsafe { Borrowed::on_device(GPU, address, 100, bytes) };
    let error = end
        .nixl
        .register(memory.into(), RegisterOptions::default())
        .expect_err("host memory");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Unsupported, "register.device")
    );
    assert_eq!(end.nixl.registrations(), 0);
}
