//! Shared by the kernels' tests: a device, random numbers, uploads and downloads.

use crate::emulation::{EmulatedDevice, EmulatedOptions};
use pagetide::backend::cuda::device::{Copy, Device, DeviceBuffer, PinnedBuffer, Stream};
use pagetide::backend::cuda::driver::{self, DriverOptions};
use pagetide::backend::cuda::{CudaOptions, CudaTensor, FewRowsUse};
use pagetide::backend::{CodeType, DType, KvLayout};
use std::fs;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::rc::Rc;

pub const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The repository: where this was compiled, or `PAGETIDE_ROOT` on a machine that the test program was copied to.
pub fn root() -> PathBuf {
    let compiled_in = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    std::env::var_os("PAGETIDE_ROOT").map_or_else(|| compiled_in.into(), PathBuf::from)
}

/// Whether the tests run on a GPU.
pub fn on_gpu() -> bool {
    std::env::var_os("PAGETIDE_TEST_DEVICE").is_some_and(|kind| kind == "cuda")
}

/// Whether kernels that are broken on purpose can be run to see that a check notices. A GPU runs the kernels that are
/// built into the program, and for PTX each of them would be compiled anew: the module `ptx` has its own.
pub fn on_emulation() -> bool {
    !on_gpu() && !executes_ptx()
}

/// Whether the tests run on executed PTX, which is much slower than the emulation.
pub fn executes_ptx() -> bool {
    crate::emulation::ptx::asked_for().is_some()
}

/// The emulation, or, with `PAGETIDE_TEST_DEVICE=cuda`, the first GPU; with `ptx-sm_80` or `ptx-sm_90a`, the emulation
/// with kernels that run as PTX.
pub fn device(thread_order: u32) -> Rc<dyn Device> {
    device_with(thread_order, false)
}

/// The same, with matrix products whose rows do not depend on each other.
pub fn batch_invariant_device(thread_order: u32) -> Rc<dyn Device> {
    device_with(thread_order, true)
}

/// The emulation's products are always batch-invariant.
fn device_with(thread_order: u32, batch_invariant: bool) -> Rc<dyn Device> {
    if on_gpu() {
        let config = DriverOptions { batch_invariant, ..DriverOptions::default() };
        return driver::find(&config).unwrap().open().unwrap();
    }
    Rc::new(EmulatedDevice::new(EmulatedOptions { thread_order, ..EmulatedOptions::default() }))
}

/// [`device`] for whole models, which compute rows that nobody takes: a graph is recorded for more rows than a step
/// has.
pub fn model_device() -> Rc<dyn Device> {
    if on_gpu() {
        return device(0);
    }
    Rc::new(EmulatedDevice::new(EmulatedOptions { takes_unwritten: true, ..EmulatedOptions::default() }))
}

/// The thread orders that everything is run under. A GPU has its own order, accesses out of bounds are the same under
/// any order, and the interpreter of PTX finds races whatever the order.
pub fn thread_orders() -> std::ops::Range<u32> {
    if on_gpu() || executes_ptx() || std::env::var_os("PAGETIDE_KERNEL_SANITIZER").is_some() { 0..1 } else { 0..3 }
}

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// From `from` to `to`, both included.
    pub fn range(&mut self, from: usize, to: usize) -> usize {
        from + self.below(to - from + 1)
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: std::marker::Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// In [-1, 1).
    pub fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    /// Numbers that `dtype` represents exactly.
    pub fn floats(&mut self, n: usize, dtype: DType) -> Vec<f32> {
        round(&(0..n).map(|_| self.float()).collect::<Vec<_>>(), dtype)
    }
}

/// Rounds numbers to those of `dtype`.
pub fn round(values: &[f32], dtype: DType) -> Vec<f32> {
    dtype.decode(&dtype.encode(values))
}

/// `vector` as a KV cache of these codes of a byte holds it, by the definition of [`CodeType`].
pub fn coded(vector: &[f32], codes: CodeType) -> Vec<f32> {
    let largest = vector.iter().fold(0_f32, |largest, x| largest.max(x.abs()));
    let largest_code = if codes == CodeType::Int8 { 127.0 } else { 448.0 };
    // Rounded up: all bits behind those of a bfloat16 are dropped, after adding the largest number that they can be.
    let scale = f32::from_bits(((largest / largest_code).to_bits() + 0xffff) & 0xffff_0000);
    let quotient = |x: &f32| if scale == 0.0 { 0.0 } else { x / scale };
    let code = |x: &f32| match codes {
        CodeType::Int8 => quotient(x).round_ties_even(),
        CodeType::Fp8 => nearest_e4m3(quotient(x)),
        CodeType::Int4 => unreachable!("a GPU has no such cache"),
    };
    vector.iter().map(|x| code(x) * scale).collect()
}

/// The number of E4M3 that is nearest to one of at most 448, even in the middle between two.
pub fn nearest_e4m3(x: f32) -> f32 {
    // Neighbours are 2^-3 of the power of two below apart, and 2^-9 below 2^-6.
    let exponent = x.abs().log2().floor().max(-6.0) as i32;
    let step = 2_f32.powi(exponent - 3);
    (x / step).round_ties_even() * step
}

/// Uploads bytes to new device memory.
pub fn upload_bytes(device: &Rc<dyn Device>, bytes: &[u8]) -> DeviceBuffer {
    let buffer = DeviceBuffer::new(device, bytes.len()).unwrap();
    let mut staging = PinnedBuffer::new(device, bytes.len()).unwrap();
    // SAFETY: no enqueued operation uses it.
    unsafe { staging.as_mut_slice() }.copy_from_slice(bytes);
    let copy = Copy { to: buffer.ptr(), from: staging.ptr(), bytes: bytes.len() };
    // SAFETY: dropping `staging` waits for the device.
    unsafe { device.copy(Stream::Compute, copy) }.unwrap();
    buffer
}

pub fn upload(device: &Rc<dyn Device>, values: &[f32], dtype: DType) -> DeviceBuffer {
    upload_bytes(device, &dtype.encode(values))
}

/// All bytes of a buffer, once everything enqueued is done.
pub fn download_bytes(device: &Rc<dyn Device>, buffer: &DeviceBuffer) -> Vec<u8> {
    let staging = PinnedBuffer::new(device, buffer.bytes()).unwrap();
    let copy = Copy { to: staging.ptr(), from: buffer.ptr(), bytes: buffer.bytes() };
    // SAFETY: both live until the device has done the copy.
    unsafe { device.copy(Stream::Compute, copy) }.unwrap();
    device.synchronize().unwrap();
    // SAFETY: the copy is done.
    unsafe { staging.as_slice() }.to_vec()
}

pub fn download(device: &Rc<dyn Device>, buffer: &DeviceBuffer, dtype: DType) -> Vec<f32> {
    dtype.decode(&download_bytes(device, buffer))
}

#[track_caller]
pub fn assert_close(got: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        assert!(error <= tolerance * (1.0 + expected.abs()), "{what}: element {i} is {got}, not {expected}");
    }
}

/// The allowed error of a result of this type.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-6,
        DType::F16 => 1.5e-3,
        DType::BF16 => 1e-2,
    }
}

/// Options for a model with these sizes, without kernels for few rows, which have tests of their own.
pub fn options(dtype: DType, num_heads: usize, kv: KvLayout) -> CudaOptions {
    CudaOptions {
        dtype,
        num_heads,
        kv,
        vocab_size: 64,
        max_rows: 64,
        max_seqs: 16,
        max_model_len: 4096,
        max_logit_rows: 8,
        graphs: false,
        batch_invariant: false,
        fp8_activations: false,
        few_rows: FewRowsUse::Never,
        softcap: false,
        experts: false,
        windows: vec![None],
    }
}

/// Overwrites a tensor's first numbers.
pub fn set(device: &Rc<dyn Device>, tensor: &CudaTensor, values: &[f32]) {
    if values.is_empty() {
        return;
    }
    let bytes = tensor.dtype().encode(values);
    let mut staging = PinnedBuffer::new(device, bytes.len()).unwrap();
    // SAFETY: no enqueued operation uses it.
    unsafe { staging.as_mut_slice() }.copy_from_slice(&bytes);
    let copy = Copy { to: tensor.buffer().ptr(), from: staging.ptr(), bytes: bytes.len() };
    // SAFETY: dropping `staging` waits for the device.
    unsafe { device.copy(Stream::Compute, copy) }.unwrap();
}

/// A tensor's first numbers.
pub fn get(device: &Rc<dyn Device>, tensor: &CudaTensor, len: usize) -> Vec<f32> {
    let mut values = download(device, tensor.buffer(), tensor.dtype());
    values.truncate(len);
    values
}

/// The bits of the numbers, to compare NaN and -0 too.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Runs a test for each case, on as many threads as there are processors.
pub fn parallel(cases: std::ops::Range<u64>, test: impl Fn(u64) + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = std::sync::atomic::AtomicU64::new(cases.start);
    std::thread::scope(|scope| {
        let worker = || {
            loop {
                let case = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                if case >= cases.end {
                    return;
                }
                test(case);
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
}

/// Kernels with one piece of their text replaced must fail a check: by a wrong result, by a result that depends on the
/// threads' order, or by an error of the emulation.
pub fn breaks(file: &str, from: &str, to: &str, check: impl Fn(&dyn Fn(u32) -> Rc<dyn Device>)) {
    let failure = failure_of_broken(file, from, to, &EmulatedOptions::default(), check);
    assert!(failure.is_some(), "nobody notices {to:?} in place of {from:?} in {file}");
}

/// What a check says of such kernels.
pub fn failure_of_broken(
    file: &str,
    from: &str,
    to: &str,
    options: &EmulatedOptions,
    check: impl Fn(&dyn Fn(u32) -> Rc<dyn Device>),
) -> Option<String> {
    let folder = broken_copy(file, from, to);
    let broken = |thread_order| -> Rc<dyn Device> {
        let options = EmulatedOptions { kernels: folder.path().into(), thread_order, ..options.clone() };
        Rc::new(EmulatedDevice::new(options))
    };
    failure_of(|| check(&broken))
}

/// What a check of broken kernels says. That they do not compile is no answer: then nothing was checked.
pub fn failure_of(check: impl FnOnce()) -> Option<String> {
    let panic = std::panic::catch_unwind(AssertUnwindSafe(check)).err()?;
    let message = panic.downcast_ref::<String>().cloned();
    let message = message.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default();
    assert!(!message.contains("does not compile"), "{message}");
    Some(message)
}

/// A copy of the kernels with one piece of their text replaced.
pub fn broken_copy(file: &str, from: &str, to: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy_folder(&root().join("kernels"), folder.path());
    let path = folder.path().join(file);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{file} has no {from:?}");
    fs::write(&path, text.replacen(from, to, 1)).unwrap();
    folder
}

fn copy_folder(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            fs::create_dir(&target).unwrap();
            copy_folder(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}
