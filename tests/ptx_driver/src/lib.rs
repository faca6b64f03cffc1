//! Device memory and launches for a driver that is written in C: `tests/driver/kernels_ptx.h` declares the same
//! functions. There is one device. Functions that can fail return 0 or an error of the driver's, and print why.

use ptx_interpreter::{GpuOptions, GridLaunch, Module, VirtualGpu};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

/// CUDA_ERROR_ILLEGAL_ADDRESS and CUDA_ERROR_LAUNCH_FAILED.
const ILLEGAL_ADDRESS: c_int = 700;
const LAUNCH_FAILED: c_int = 719;

static DEVICE: Mutex<Option<VirtualGpu>> = Mutex::new(None);

fn with_device<T>(use_it: impl FnOnce(&mut VirtualGpu) -> T) -> T {
    let mut device = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    use_it(device.get_or_insert_with(|| VirtualGpu::new(options())))
}

/// `PTX_SEED` chooses the order of threads. A graph is replayed for fewer rows than it was recorded for, and nobody
/// takes the others.
fn options() -> GpuOptions {
    let seed = std::env::var("PTX_SEED").ok().and_then(|seed| seed.parse().ok());
    GpuOptions { seed: seed.unwrap_or(1), check_results: false, ..GpuOptions::default() }
}

/// Runs what panics if an address is not that of an allocation.
fn access(use_it: impl FnOnce(&mut VirtualGpu)) -> c_int {
    let done = catch_unwind(AssertUnwindSafe(|| with_device(use_it)));
    if done.is_ok() { 0 } else { ILLEGAL_ADDRESS }
}

#[unsafe(no_mangle)]
pub extern "C" fn ptx_allocate(bytes: usize) -> u64 {
    with_device(|gpu| gpu.memory.allocate(bytes))
}

#[unsafe(no_mangle)]
pub extern "C" fn ptx_free(address: u64) {
    with_device(|gpu| gpu.memory.free(address));
}

/// Makes pinned memory accessible to the device.
///
/// # Safety
/// The memory stays valid until [`ptx_unmap`], and nobody writes to it while an operation uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ptx_map(address: u64, bytes: usize) {
    // SAFETY: the caller's promise.
    with_device(|gpu| unsafe { gpu.memory.map_host(address, bytes) });
}

#[unsafe(no_mangle)]
pub extern "C" fn ptx_unmap(address: u64) {
    with_device(|gpu| gpu.memory.unmap_host(address));
}

#[unsafe(no_mangle)]
pub extern "C" fn ptx_copy(to: u64, from: u64, bytes: usize) -> c_int {
    access(|gpu| gpu.memory.copy(to, from, bytes))
}

#[unsafe(no_mangle)]
pub extern "C" fn ptx_fill(to: u64, value: u8, bytes: usize) -> c_int {
    access(|gpu| gpu.memory.fill(to, value, bytes))
}

/// Writes what the device is said to have computed.
///
/// # Safety
/// `from` points to `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ptx_write(to: u64, from: *const u8, bytes: usize) -> c_int {
    // SAFETY: the caller's promise.
    let contents = unsafe { std::slice::from_raw_parts(from, bytes) };
    access(|gpu| gpu.memory.write(to, contents))
}

/// A module of PTX text, or null. It is never freed.
///
/// # Safety
/// `text` ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ptx_load(text: *const c_char) -> *const c_void {
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    let parsed = text
        .to_str()
        .map_err(|error| error.to_string())
        .and_then(|text| Module::parse(text).map_err(|error| error.to_string()));
    match parsed {
        Ok(module) => Box::into_raw(Box::new(module)).cast(),
        Err(why) => {
            eprintln!("a module of PTX: {why}");
            std::ptr::null()
        }
    }
}

/// The bytes of a kernel's parameters, or -1 if the module has no such kernel.
///
/// # Safety
/// `module` comes from [`ptx_load`], and `name` ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ptx_param_bytes(module: *const c_void, name: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let (module, name) = unsafe { (&*module.cast::<Module>(), CStr::from_ptr(name)) };
    match module.entry(&name.to_string_lossy()) {
        Ok(kernel) => kernel.param_bytes as c_int,
        Err(_) => -1,
    }
}

/// Runs a kernel to its end. A race, or anything else that the interpreter reports, is a failure.
///
/// # Safety
/// As for [`ptx_param_bytes`]; `blocks` points to three numbers, and `params` to `param_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ptx_launch(
    module: *const c_void,
    name: *const c_char,
    blocks: *const [c_uint; 3],
    threads: c_uint,
    shared_bytes: c_uint,
    params: *const u8,
    param_bytes: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let (module, name) = unsafe { (&*module.cast::<Module>(), CStr::from_ptr(name)) };
    // SAFETY: as above.
    let (blocks, params) = unsafe { (*blocks, std::slice::from_raw_parts(params, param_bytes)) };
    let launch = GridLaunch::new(blocks, [threads, 1, 1], shared_bytes);
    let name = name.to_string_lossy();
    let failures: Vec<String> = match with_device(|gpu| gpu.launch(module, &name, &launch, params)) {
        Ok(report) => report.findings.iter().map(ToString::to_string).collect(),
        Err(error) => vec![error.to_string()],
    };
    if failures.is_empty() {
        return 0;
    }
    eprintln!("{}", failures.join("\n"));
    LAUNCH_FAILED
}
