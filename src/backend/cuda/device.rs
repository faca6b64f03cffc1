//! One GPU, as the backend uses it: memory, three streams, events, kernels, matrix products, graphs.
//!
//! The trait is as thin as the CUDA driver's own interface. It has two implementations: `driver` uses a GPU, and the
//! tests' emulation runs the same kernels on the CPU, with streams that run at random speeds. Everything above the
//! trait (batches, launches, swapping, graphs) is the same code for both.
//!
//! A device may be used only on the thread that made it.

use crate::DType;
use std::fmt;
use std::ops::Add;
use std::ptr::NonNull;
use std::rc::Rc;

/// An address in the space that device and pinned host memory share.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord, bytemuck::NoUninit)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    pub const NULL: Self = Self(0);
}

impl Add<usize> for DevicePtr {
    type Output = Self;

    /// The address `bytes` bytes further on.
    fn add(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// A stream. Work that is enqueued on one stream happens in order. Work on different streams is ordered only by events.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Stream {
    /// Kernels. A step makes no copies of [`Device::copy`]: see `transfers`.
    Compute,
    /// Swap-out: device to host.
    CopyOut,
    /// Swap-in: host to device.
    CopyIn,
}

impl Stream {
    pub const ALL: [Self; 3] = [Self::Compute, Self::CopyOut, Self::CopyIn];
}

/// A point in a stream. Numbers start at 1 and grow along a stream, so if an event is done, all events before it are
/// done too. A device forgets events that it knows to be done, and waiting for such an event costs nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct DeviceEvent {
    pub stream: Stream,
    pub number: u64,
}

/// A handle of a compiled module, of one of its kernels, or of a recorded graph.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct ModuleId(pub usize);
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct KernelId(pub usize);
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct GraphId(pub usize);

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DeviceError {
    #[error("out of GPU memory: {wanted} bytes wanted, {free} of {total} bytes free")]
    OutOfMemory { wanted: usize, free: usize, total: usize },
    #[error("out of pinned host memory: {wanted} bytes wanted")]
    OutOfPinnedMemory { wanted: usize },
    /// The context and all its memory are lost, because of an illegal access, a hardware error, or a device that is
    /// gone.
    #[error("the GPU failed: {0}")]
    Lost(String),
    #[error("kernel {file} does not compile for {arch}: {log}")]
    Compile { file: String, arch: String, log: String },
    #[error("{0}")]
    Other(String),
}

pub type DeviceResult<T> = Result<T, DeviceError>;

#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// `NVIDIA H100 80GB HBM3`
    pub name: String,
    /// `(9, 0)` for 9.0.
    pub compute_capability: (u32, u32),
    pub num_sms: u32,
    /// The most dynamic shared memory of a thread block, in bytes.
    pub max_shared_bytes: u32,
    pub total_memory: usize,
}

/// A file in `kernels/`, and the macros that specialise it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModuleSource {
    /// `attention.cu`
    pub file: &'static str,
    /// `("HEAD_DIM", "128")`
    pub defines: Vec<(&'static str, String)>,
}

/// The grid of a launch. All kernels take their parameters as one struct by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

/// `out = x · wᵀ + bias`, row-major: `x: [m, k]` and `w: [n, k]` of `dtype`, `bias: [n]` and `out: [m, n]` of `out`.
/// Accumulated in float32.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Matmul {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub dtype: DType,
    /// `dtype`, or float32.
    pub out: DType,
    pub bias: bool,
}

/// Which codes of the operands of an FP8 product have a scale in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Fp8Scaling {
    /// Those of a row. Scales of `x`: `[m]`, and of `w`: `[n]`.
    Rows,
    /// [`FP8_SCALE_BLOCK`] neighbours of a row of `x`, and as many in as many rows of `w`. Scales of `x`:
    /// `[k / 128, m]`, and of `w`: `[n / 128, k / 128]`, where `n / 128` is rounded up and
    /// [`Fp8Scaling::scales_of_row`] is the second size.
    Blocks,
}

/// Columns, and rows of weights, of a block that has a scale.
pub const FP8_SCALE_BLOCK: usize = 128;

impl Fp8Scaling {
    /// Scales of `n` rows of weights.
    pub fn rows(self, n: usize) -> usize {
        match self {
            Self::Rows => n,
            Self::Blocks => n.div_ceil(FP8_SCALE_BLOCK),
        }
    }

    /// Scales of a row of `k` columns of weights, with those that fill it up.
    pub fn scales_of_row(self, k: usize) -> usize {
        match self {
            Self::Rows => 1,
            // As cuBLASLt wants it.
            Self::Blocks => k.div_ceil(FP8_SCALE_BLOCK).next_multiple_of(4),
        }
    }

    /// Scales of a row of `k` activations.
    pub fn scales_of_activations(self, k: usize) -> usize {
        match self {
            Self::Rows => 1,
            Self::Blocks => k.div_ceil(FP8_SCALE_BLOCK),
        }
    }
}

/// As [`Matmul`], with operands in E4M3 and scales for them in float32. `n` and `k` are multiples of 16; with
/// [`Fp8Scaling::Blocks`], `k` is one of [`FP8_SCALE_BLOCK`]. No code is NaN. With a bias, `out` is not float32.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Fp8Matmul {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub scaling: Fp8Scaling,
    pub out: DType,
    pub bias: bool,
}

/// The addresses of an [`Fp8Matmul`]'s operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fp8Operands {
    pub x: DevicePtr,
    pub x_scales: DevicePtr,
    pub w: DevicePtr,
    pub w_scales: DevicePtr,
    pub bias: DevicePtr,
    pub out: DevicePtr,
}

/// Page-locked host memory that kernels read and write over the bus.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PinnedMemory {
    /// The host's address.
    pub host: NonNull<u8>,
    /// The device's address of the same memory.
    pub device: DevicePtr,
}

/// One copy of a batch of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    pub to: DevicePtr,
    pub from: DevicePtr,
    pub bytes: usize,
}

/// How many thread blocks of a kernel run on a multiprocessor at the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelOccupancy {
    pub name: String,
    /// Threads of a block.
    pub threads: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// Shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// As the driver says.
    pub blocks_per_sm: u32,
    /// As it follows from the other figures and the device's limits.
    pub expected_blocks: u32,
}

impl fmt::Display for KernelOccupancy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, threads, registers, shared_bytes, blocks_per_sm, expected_blocks } = self;
        write!(
            f,
            "{name} ({threads} threads, {registers} registers, {shared_bytes} bytes of shared memory): {blocks_per_sm} of \
             {expected_blocks} thread blocks on a multiprocessor"
        )
    }
}

/// How a device makes the small copies of a list.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyMethod {
    /// With one call of the driver for many of them.
    pub batched: bool,
    /// Milliseconds that a list was measured to take, with one call and one by one.
    pub measured_ms: Option<(f32, f32)>,
}

/// One GPU. Work is enqueued and done later. An error may be reported by a later call than the one that caused it.
pub trait Device {
    fn info(&self) -> &DeviceInfo;
    /// Free and total bytes.
    fn memory(&self) -> DeviceResult<(usize, usize)>;

    /// Allocates device memory, aligned to at least 256 bytes. Use [`DeviceBuffer`] instead.
    fn allocate(&self, bytes: usize) -> DeviceResult<DevicePtr>;
    /// # Safety
    /// `ptr` comes from [`Device::allocate`], and no enqueued work uses it.
    unsafe fn free(&self, ptr: DevicePtr);
    /// Allocates page-locked host memory that the host can also read fast. What a kernel has written there is seen by
    /// the host once an event behind the kernel is done. Use [`PinnedBuffer`] instead.
    fn allocate_pinned(&self, bytes: usize) -> DeviceResult<PinnedMemory>;
    /// # Safety
    /// As [`Device::free`].
    unsafe fn free_pinned(&self, memory: PinnedMemory);

    /// # Safety
    /// Both ranges stay allocated until the copy is done, and nothing else writes them meanwhile.
    unsafe fn copy(&self, stream: Stream, copy: Copy) -> DeviceResult<()>;
    /// Many copies at once, in any order.
    /// # Safety
    /// As [`Device::copy`]. No range that is written overlaps another range of the batch.
    unsafe fn copy_batch(&self, stream: Stream, copies: &[Copy]) -> DeviceResult<()>;
    /// How [`Device::copy_batch`] makes small copies, if that was chosen.
    fn copy_method(&self) -> Option<CopyMethod> {
        None
    }
    /// Sets `bytes` bytes to `value`.
    /// # Safety
    /// As [`Device::copy`].
    unsafe fn fill(&self, stream: Stream, to: DevicePtr, value: u8, bytes: usize) -> DeviceResult<()>;

    /// Returns an event for all work that has been enqueued on `stream` so far.
    fn record(&self, stream: Stream) -> DeviceResult<DeviceEvent>;
    /// Makes all work that is enqueued on `stream` from now on wait for `event`.
    fn wait(&self, stream: Stream, event: DeviceEvent) -> DeviceResult<()>;
    fn is_done(&self, event: DeviceEvent) -> DeviceResult<bool>;
    /// Waits on the host until everything enqueued is done.
    fn synchronize(&self) -> DeviceResult<()>;

    /// Loads modules. Those that are not in the kernel cache are compiled, all at the same time.
    fn load_modules(&self, sources: &[ModuleSource]) -> DeviceResult<Vec<ModuleId>>;
    /// The kernel `name` of a module. It may be launched with up to `shared_bytes` bytes of dynamic shared memory.
    fn kernel(&self, module: ModuleId, name: &str, shared_bytes: u32) -> DeviceResult<KernelId>;
    /// Thread blocks of a kernel that the device runs at the same time, at least 1.
    fn resident_blocks(&self, kernel: KernelId) -> u32;
    /// The kernels so far, if the device knows their occupancy.
    fn kernels(&self) -> Vec<KernelOccupancy> {
        Vec::new()
    }
    /// Launches on [`Stream::Compute`]. `params` is the kernel's parameter struct.
    /// # Safety
    /// `params` is the struct that the kernel expects, and its addresses stay valid until the kernel is done.
    unsafe fn launch(&self, kernel: KernelId, grid: Grid, params: &[u8]) -> DeviceResult<()>;

    /// Enqueues a product on [`Stream::Compute`].
    /// # Safety
    /// The operands are as `matmul` says, 16-byte aligned, and stay valid until it is done.
    unsafe fn matmul(
        &self,
        matmul: Matmul,
        x: DevicePtr,
        w: DevicePtr,
        bias: DevicePtr,
        out: DevicePtr,
    ) -> DeviceResult<()>;

    /// Why [`Device::fp8_matmul`] cannot be called; `None` if it can.
    fn lacks_fp8_products(&self) -> Option<String>;
    /// Enqueues a product on [`Stream::Compute`].
    /// # Safety
    /// As [`Device::matmul`]; the scales have the sizes that [`Fp8Scaling`] states.
    unsafe fn fp8_matmul(&self, matmul: Fp8Matmul, operands: Fp8Operands) -> DeviceResult<()>;

    /// Whether [`Device::time_cold`] can be called now: the device has a clock, and no work is being recorded.
    fn can_time(&self) -> bool {
        false
    }
    /// Milliseconds of what `enqueue` enqueues on [`Stream::Compute`] for the matrix of `bytes` bytes at `w`, as a step
    /// runs it: in a graph, with weights that are not in the cache. `enqueue` is called many times, also for copies of
    /// the matrix.
    /// # Safety
    /// The matrix and all that is enqueued stay valid until the device is done.
    unsafe fn time_cold(
        &self,
        _w: DevicePtr,
        _bytes: usize,
        _enqueue: &dyn Fn(DevicePtr) -> DeviceResult<()>,
    ) -> DeviceResult<f32> {
        Err(DeviceError::Other("this device has no clock".into()))
    }

    /// Work that is enqueued on [`Stream::Compute`] from here to [`Device::end_capture`] is recorded and not done. It
    /// may be launches, matrix products and copies, but no events.
    fn begin_capture(&self) -> DeviceResult<()>;
    fn end_capture(&self) -> DeviceResult<GraphId>;
    /// Enqueues all recorded work, with the same parameters, on [`Stream::Compute`].
    /// # Safety
    /// All addresses of the recording are still valid.
    unsafe fn launch_graph(&self, graph: GraphId) -> DeviceResult<()>;
    /// Forgets all graphs.
    fn clear_graphs(&self);

    /// Begins or ends what a profiler measures that waits for this: `ncu --profile-from-start off`, or `nsys profile
    /// --capture-range cudaProfilerApi`.
    fn set_profiled(&self, is_profiled: bool) -> DeviceResult<()>;
}

/// Device memory that is freed when dropped.
pub struct DeviceBuffer {
    device: Rc<dyn Device>,
    ptr: DevicePtr,
    bytes: usize,
}

impl DeviceBuffer {
    pub fn new(device: &Rc<dyn Device>, bytes: usize) -> DeviceResult<Self> {
        let ptr = if bytes == 0 { DevicePtr::NULL } else { device.allocate(bytes)? };
        Ok(Self { device: device.clone(), ptr, bytes })
    }

    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // Enqueued work may still use it. On a lost device there is no such work.
            let _ = self.device.synchronize();
            // SAFETY: the memory is ours, and no work is enqueued.
            unsafe { self.device.free(self.ptr) };
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer({:#x}, {} bytes)", self.ptr.0, self.bytes)
    }
}

/// Pinned host memory that is freed when dropped.
pub struct PinnedBuffer {
    device: Rc<dyn Device>,
    memory: PinnedMemory,
    bytes: usize,
}

impl PinnedBuffer {
    pub fn new(device: &Rc<dyn Device>, bytes: usize) -> DeviceResult<Self> {
        let nothing = PinnedMemory { host: NonNull::dangling(), device: DevicePtr::NULL };
        let memory = if bytes == 0 { nothing } else { device.allocate_pinned(bytes)? };
        Ok(Self { device: device.clone(), memory, bytes })
    }

    /// The same memory as the device sees it.
    pub fn ptr(&self) -> DevicePtr {
        self.memory.device
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// # Safety
    /// No work that writes this memory is enqueued, and it has been written before.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: the memory is ours and of this length.
        unsafe { std::slice::from_raw_parts(self.memory.host.as_ptr(), self.bytes) }
    }

    /// # Safety
    /// No work that reads or writes this memory is enqueued.
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the memory is ours and of this length.
        unsafe { std::slice::from_raw_parts_mut(self.memory.host.as_ptr(), self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.bytes > 0 {
            let _ = self.device.synchronize();
            // SAFETY: the memory is ours, and no work is enqueued.
            unsafe { self.device.free_pinned(self.memory) };
        }
    }
}
