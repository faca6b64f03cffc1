//! One GPU, as the backend uses it: memory, three streams, events, kernels, matrix products, graphs.
//!
//! The trait is as thin as the CUDA driver's own interface and has two implementations: `driver` talks to a GPU; the
//! tests' emulation runs the same kernels on the CPU, with streams that run at random speeds. Everything above this
//! line (batches, kernels' launches, swapping, graphs) is one code for both.
//!
//! A device belongs to the thread that made it.

use crate::backend::DType;
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

    /// Moves by bytes.
    fn add(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// What is enqueued on one stream happens in order; streams are ordered among each other by events alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Stream {
    /// Kernels, and the copies that belong to a step.
    Compute,
    /// Swap-out: device to host.
    CopyOut,
    /// Swap-in: host to device.
    CopyIn,
}

impl Stream {
    pub const ALL: [Self; 3] = [Self::Compute, Self::CopyOut, Self::CopyIn];
}

/// A point in a stream. Numbers start at 1 and grow along a stream, so that an event that is done says the same of all
/// before it. A device forgets events that it knows to be done: to wait for one costs nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Event {
    pub stream: Stream,
    pub number: u64,
}

/// A compiled module, a kernel of it, and a recorded graph: names that the device has given out.
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
    /// The context and all its memory are lost: an illegal access, a hardware error, a device that has gone.
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
    /// 9.0 is `(9, 0)`.
    pub compute_capability: (u32, u32),
    pub num_sms: u32,
    /// Most dynamic shared memory of a thread block, in bytes.
    pub max_shared_bytes: u32,
    pub total_memory: usize,
}

/// A file below `kernels/`, and the macros it is specialised by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModuleSource {
    /// `attention.cu`
    pub file: &'static str,
    /// `("HEAD_DIM", "128")`
    pub defines: Vec<(&'static str, String)>,
}

/// A kernel's grid. All kernels take their parameters as one struct by value.
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

/// One copy of a batch of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    pub to: DevicePtr,
    pub from: DevicePtr,
    pub bytes: usize,
}

/// One GPU. Work is enqueued and done later; an error may be reported by a later call than the one it belongs to.
pub trait Device {
    fn info(&self) -> &DeviceInfo;
    /// Free and total bytes.
    fn memory(&self) -> DeviceResult<(usize, usize)>;

    /// At least 256-byte aligned. Use [`DeviceBuffer`].
    fn allocate(&self, bytes: usize) -> DeviceResult<DevicePtr>;
    /// # Safety
    /// `ptr` is of [`Device::allocate`], and nothing that is enqueued uses it.
    unsafe fn free(&self, ptr: DevicePtr);
    /// Page-locked host memory that the host can also read fast; its address is its device address. Use
    /// [`PinnedBuffer`].
    fn allocate_pinned(&self, bytes: usize) -> DeviceResult<NonNull<u8>>;
    /// # Safety
    /// As [`Device::free`].
    unsafe fn free_pinned(&self, ptr: NonNull<u8>);

    /// # Safety
    /// Both ranges are allocated and stay so until the copy is done; nothing else writes them meanwhile.
    unsafe fn copy(&self, stream: Stream, copy: Copy) -> DeviceResult<()>;
    /// The same, many at once, in any order.
    /// # Safety
    /// As [`Device::copy`]; no range that is written overlaps another of the batch.
    unsafe fn copy_batch(&self, stream: Stream, copies: &[Copy]) -> DeviceResult<()>;
    /// Sets `bytes` bytes to `value`.
    /// # Safety
    /// As [`Device::copy`].
    unsafe fn fill(&self, stream: Stream, to: DevicePtr, value: u8, bytes: usize) -> DeviceResult<()>;

    /// Marks what has been enqueued on `stream` so far.
    fn record(&self, stream: Stream) -> DeviceResult<Event>;
    /// What is enqueued on `stream` from now on happens after `event`.
    fn wait(&self, stream: Stream, event: Event) -> DeviceResult<()>;
    fn is_done(&self, event: Event) -> DeviceResult<bool>;
    /// Waits on the host until everything enqueued is done.
    fn synchronize(&self) -> DeviceResult<()>;

    /// Compiles what the kernel cache does not hold, all sources at the same time.
    fn load_modules(&self, sources: &[ModuleSource]) -> DeviceResult<Vec<ModuleId>>;
    /// The kernel `name` of a module, which will be launched with up to `shared_bytes` of dynamic shared memory.
    fn kernel(&self, module: ModuleId, name: &str, shared_bytes: u32) -> DeviceResult<KernelId>;
    /// Launches on [`Stream::Compute`]. `params` is the kernel's parameter struct.
    /// # Safety
    /// `params` is what the kernel expects, and all its addresses are good until the kernel is done.
    unsafe fn launch(&self, kernel: KernelId, grid: Grid, params: &[u8]) -> DeviceResult<()>;

    /// On [`Stream::Compute`].
    /// # Safety
    /// The addresses hold what `matmul` says, 16-byte aligned, until it is done.
    unsafe fn matmul(
        &self,
        matmul: Matmul,
        x: DevicePtr,
        w: DevicePtr,
        bias: DevicePtr,
        out: DevicePtr,
    ) -> DeviceResult<()>;

    /// What is enqueued on [`Stream::Compute`] from here to [`Device::end_capture`] is recorded instead of done:
    /// launches, matrix products and copies, no events.
    fn begin_capture(&self) -> DeviceResult<()>;
    fn end_capture(&self) -> DeviceResult<GraphId>;
    /// Does all that was recorded, with the same parameters, on [`Stream::Compute`].
    /// # Safety
    /// All addresses of the recording are still good.
    unsafe fn launch_graph(&self, graph: GraphId) -> DeviceResult<()>;
    /// Forgets all graphs.
    fn clear_graphs(&self);
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
            // What is still enqueued may use it; where the device is lost nothing is.
            let _ = self.device.synchronize();
            // SAFETY: it is ours, and nothing is enqueued.
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
    ptr: NonNull<u8>,
    bytes: usize,
}

impl PinnedBuffer {
    pub fn new(device: &Rc<dyn Device>, bytes: usize) -> DeviceResult<Self> {
        let ptr = if bytes == 0 { NonNull::dangling() } else { device.allocate_pinned(bytes)? };
        Ok(Self { device: device.clone(), ptr, bytes })
    }

    /// The same memory as the device sees it.
    pub fn ptr(&self) -> DevicePtr {
        DevicePtr(self.ptr.as_ptr() as u64)
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// # Safety
    /// No copy that writes this memory is enqueued, and it has been written before.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: ours, of this length.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.bytes) }
    }

    /// # Safety
    /// No copy that reads or writes this memory is enqueued.
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: ours, of this length.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.bytes > 0 {
            let _ = self.device.synchronize();
            // SAFETY: it is ours, and nothing is enqueued.
            unsafe { self.device.free_pinned(self.ptr) };
        }
    }
}
