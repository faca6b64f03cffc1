//! [`Device`] over the driver.

use super::super::device::{
    Copy, CopyMethod, Device, DeviceError, DeviceEvent, DeviceInfo, DevicePtr, DeviceResult, Fp8Matmul, Fp8Operands,
    GraphId, Grid, KernelId, KernelOccupancy, Matmul, ModuleId, ModuleSource, PinnedMemory, Stream,
};
use super::cold_weights::ColdWeights;
use super::compiler::{KernelCache, architecture};
use super::context::Context;
use super::copies::{CopyBatches, CopyCalls};
use super::events::{EventCalls, EventLog};
use super::functions::cublaslt_release;
use super::matmul::Matmuls;
use super::occupancy::{self, SmLimits};
use super::recording;
use cudarc::driver::sys::{self, CUresult};
use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_void};
use std::ptr::NonNull;
use std::rc::Rc;

/// The options of an opened GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaDeviceOptions {
    /// Index among the devices that `CUDA_VISIBLE_DEVICES` shows.
    pub ordinal: u32,
    /// The folder of compiled kernels. `None`: they are not kept.
    pub kernel_cache: Option<std::path::PathBuf>,
    /// Whether the rows of a matrix product must not depend on how many rows there are.
    pub batch_invariant: bool,
    pub copy_batches: CopyBatches,
}

/// A GPU.
pub struct CudaDevice {
    info: DeviceInfo,
    limits: SmLimits,
    kernel_cache: KernelCache,
    events: RefCell<EventLog<sys::CUevent>>,
    modules: RefCell<Vec<sys::CUmodule>>,
    kernels: RefCell<Vec<LoadedKernel>>,
    graphs: RefCell<Vec<sys::CUgraphExec>>,
    /// Bytes of the L2 cache.
    l2_bytes: usize,
    /// Dropped before the context that it works in.
    products: RefCell<Matmuls>,
    is_recording: Cell<bool>,
    /// Whether the last work on the compute stream was one of our kernels. Then the next one may start before it has
    /// ended, and waits for it (`KERNEL` in `kernels/include/types.cuh`). Kernels of libraries take no part in this.
    follows_kernel: Cell<bool>,
    copies: CopyCalls,
    context: Rc<Context>,
}

struct LoadedKernel {
    occupancy: KernelOccupancy,
    function: sys::CUfunction,
    params_bytes: usize,
}

/// Parameters of a launch, with the largest alignment that a kernel may need.
#[repr(C, align(16))]
struct Params([u8; MAX_PARAMS_BYTES]);

/// The compute capability on which cuBLASLt has scales for rows and for blocks of 128.
const FP8_COMPUTE_CAPABILITY: (u32, u32) = (9, 0);
/// The first version that has them.
const FIRST_CUBLASLT_WITH_FP8_SCALES: [usize; 3] = [12, 9, 0];

/// The limit of all architectures.
const MAX_PARAMS_BYTES: usize = 4096;

impl CudaDevice {
    /// The libraries are open, and the device is one that `probe` has found.
    pub fn new(options: &CudaDeviceOptions, info: DeviceInfo) -> DeviceResult<Self> {
        let mut device = 0;
        // SAFETY: `device` is ours to write.
        let got = unsafe { sys::cuDeviceGet(&mut device, options.ordinal as i32) };
        if got != CUresult::CUDA_SUCCESS {
            return Err(DeviceError::Other(format!("cuDeviceGet({}): {got:?}", options.ordinal)));
        }
        let context = Rc::new(Context::new(device)?);
        let mut l2_bytes = 0;
        let l2 = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
        // SAFETY: the number is ours to write.
        context.check(unsafe { sys::cuDeviceGetAttribute(&mut l2_bytes, l2, device) }, "cuDeviceGetAttribute")?;
        let l2_bytes = l2_bytes.max(0) as usize;
        let device = Self {
            info,
            limits: SmLimits::of(&context, device)?,
            kernel_cache: KernelCache::new(options.kernel_cache.clone()),
            events: RefCell::new(EventLog::new()),
            modules: RefCell::default(),
            kernels: RefCell::default(),
            graphs: RefCell::default(),
            l2_bytes,
            products: RefCell::new(Matmuls::new(context.clone(), l2_bytes, options.batch_invariant)?),
            is_recording: Cell::new(false),
            follows_kernel: Cell::new(false),
            copies: CopyCalls::new(context.clone()),
            context,
        };
        device.try_out()?;
        device.copies.choose(options.copy_batches, &device)?;
        Ok(device)
    }

    /// Tries memory, a stream and an event: in a process whose last context was lost they may fail at once.
    fn try_out(&self) -> DeviceResult<()> {
        let ptr = self.allocate(256)?;
        // SAFETY: the memory is ours, and is freed only when everything is done.
        let done = unsafe { self.fill(Stream::Compute, ptr, 0, 256) }
            .and_then(|()| self.record(Stream::Compute))
            .and_then(|event| self.wait(Stream::CopyOut, event))
            .and_then(|()| self.synchronize());
        // SAFETY: as above.
        unsafe { self.free(ptr) };
        done
    }

    /// Work is enqueued that is not one of our kernels.
    fn enqueues_other(&self, stream: Stream) {
        if stream == Stream::Compute {
            self.follows_kernel.set(false);
        }
    }

    fn calls(&self) -> Calls<'_> {
        Calls(&self.context)
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> DeviceResult<(usize, usize)> {
        self.context.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are ours to write.
        self.context.check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free, total))
    }

    fn allocate(&self, bytes: usize) -> DeviceResult<DevicePtr> {
        self.context.enter()?;
        let mut ptr = 0;
        // SAFETY: `ptr` is ours to write.
        let result = unsafe { sys::cuMemAlloc_v2(&mut ptr, bytes) };
        if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (free, total) = self.memory()?;
            return Err(DeviceError::OutOfMemory { wanted: bytes, free, total });
        }
        self.context.check(result, "cuMemAlloc")?;
        Ok(DevicePtr(ptr))
    }

    unsafe fn free(&self, ptr: DevicePtr) {
        self.context.enter_to_free();
        // SAFETY: the caller's promise. In a lost context the call fails, and the memory is freed with the context.
        let _ = unsafe { sys::cuMemFree_v2(ptr.0) };
    }

    fn allocate_pinned(&self, bytes: usize) -> DeviceResult<PinnedMemory> {
        self.context.enter()?;
        let mut ptr = std::ptr::null_mut();
        // Not write-combined: the host could not read that fast.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: `ptr` is ours to write.
        let result = unsafe { sys::cuMemHostAlloc(&mut ptr, bytes, flags) };
        if matches!(result, CUresult::CUDA_ERROR_OUT_OF_MEMORY | CUresult::CUDA_ERROR_OPERATING_SYSTEM) {
            return Err(DeviceError::OutOfPinnedMemory { wanted: bytes });
        }
        self.context.check(result, "cuMemHostAlloc")?;
        let host =
            NonNull::new(ptr.cast()).ok_or_else(|| DeviceError::Other("cuMemHostAlloc gave no memory".into()))?;
        let mut memory = PinnedMemory { host, device: DevicePtr::NULL };
        // With unified addressing it is the same address on most systems, but CUDA does not promise that.
        // SAFETY: the memory was allocated as mapped; the address is ours to write.
        let mapped = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut memory.device.0, ptr, 0) };
        self.context.check(mapped, "cuMemHostGetDevicePointer").inspect_err(|_| {
            // SAFETY: nobody uses it yet.
            unsafe { self.free_pinned(memory) };
        })?;
        Ok(memory)
    }

    unsafe fn free_pinned(&self, memory: PinnedMemory) {
        self.context.enter_to_free();
        // SAFETY: the caller's promise, as for `free`.
        let _ = unsafe { sys::cuMemFreeHost(memory.host.as_ptr().cast()) };
    }

    unsafe fn copy(&self, stream: Stream, copy: Copy) -> DeviceResult<()> {
        self.context.enter()?;
        self.enqueues_other(stream);
        // SAFETY: the caller's promise.
        unsafe { self.copies.copy(stream, copy) }
    }

    unsafe fn copy_batch(&self, stream: Stream, copies: &[Copy]) -> DeviceResult<()> {
        self.context.enter()?;
        assert!(stream != Stream::Compute || !self.is_recording.get(), "lists of copies are not recorded");
        self.enqueues_other(stream);
        // SAFETY: the caller's promise.
        unsafe { self.copies.copy_all(stream, copies) }
    }

    fn copy_method(&self) -> Option<CopyMethod> {
        Some(self.copies.method())
    }

    unsafe fn fill(&self, stream: Stream, to: DevicePtr, value: u8, bytes: usize) -> DeviceResult<()> {
        self.context.enter()?;
        if bytes == 0 {
            return Ok(());
        }
        self.enqueues_other(stream);
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuMemsetD8Async(to.0, value, bytes, self.context.stream(stream)) };
        self.context.check(result, "cuMemsetD8Async")
    }

    fn record(&self, stream: Stream) -> DeviceResult<DeviceEvent> {
        self.context.enter()?;
        assert!(stream != Stream::Compute || !self.is_recording.get(), "events are not recorded");
        self.enqueues_other(stream);
        self.events.borrow_mut().record(stream, &self.calls())
    }

    fn wait(&self, stream: Stream, event: DeviceEvent) -> DeviceResult<()> {
        self.context.enter()?;
        assert!(stream != Stream::Compute || !self.is_recording.get(), "events are not recorded");
        self.enqueues_other(stream);
        // A stream need not wait for its own events.
        let pending = if stream == event.stream { None } else { self.events.borrow_mut().pending(event) };
        let Some(object) = pending else { return Ok(()) };
        // SAFETY: stream and event are the context's.
        let result = unsafe { sys::cuStreamWaitEvent(self.context.stream(stream), object, 0) };
        self.context.check(result, "cuStreamWaitEvent")
    }

    fn is_done(&self, event: DeviceEvent) -> DeviceResult<bool> {
        self.context.enter()?;
        self.events.borrow_mut().is_done(event, &self.calls())
    }

    fn synchronize(&self) -> DeviceResult<()> {
        self.context.enter()?;
        // A step has failed while it was recorded.
        if self.is_recording.take() {
            recording::abandon(&self.context);
        }
        for stream in Stream::ALL {
            // SAFETY: the stream is the context's.
            let result = unsafe { sys::cuStreamSynchronize(self.context.stream(stream)) };
            self.context.check(result, "cuStreamSynchronize")?;
        }
        self.events.borrow_mut().all_done();
        Ok(())
    }

    fn load_modules(&self, sources: &[ModuleSource]) -> DeviceResult<Vec<ModuleId>> {
        self.context.enter()?;
        let cubins = self.kernel_cache.load(sources, &architecture(self.info.compute_capability))?;
        let load = |cubin: Vec<u8>| {
            let mut module = std::ptr::null_mut();
            // SAFETY: `module` is ours to write. The image is complete (it was just compiled, or its hash was checked),
            // and the driver copies it.
            let result = unsafe { sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()) };
            self.context.check(result, "cuModuleLoadData")?;
            let mut modules = self.modules.borrow_mut();
            modules.push(module);
            Ok(ModuleId(modules.len() - 1))
        };
        cubins.into_iter().map(load).collect()
    }

    fn kernel(&self, module: ModuleId, name: &str, shared_bytes: u32) -> DeviceResult<KernelId> {
        self.context.enter()?;
        let module = self.modules.borrow()[module.0];
        let symbol = CString::new(name).map_err(|_| DeviceError::Other(format!("no kernel is called {name:?}")))?;
        let call = |call: &str| format!("{call}({name})");
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, and `function` is ours to write.
        let found = unsafe { sys::cuModuleGetFunction(&mut function, module, symbol.as_ptr()) };
        self.context.check(found, &call("cuModuleGetFunction"))?;
        let occupancy = occupancy::prepare(&self.context, &self.limits, function, name, shared_bytes)?;
        // Loaded now and not at the first launch, which may be part of a recording.
        // SAFETY: the function belongs to the loaded module.
        self.context.check(unsafe { sys::cuFuncLoad(function) }, &call("cuFuncLoad"))?;
        let (mut offset, mut params_bytes) = (0, 0);
        // SAFETY: the function belongs to the loaded module, and both numbers are ours to write.
        let read = unsafe { sys::cuFuncGetParamInfo(function, 0, &mut offset, &mut params_bytes) };
        self.context.check(read, &call("cuFuncGetParamInfo"))?;
        let mut kernels = self.kernels.borrow_mut();
        kernels.push(LoadedKernel { occupancy, function, params_bytes });
        Ok(KernelId(kernels.len() - 1))
    }

    fn resident_blocks(&self, kernel: KernelId) -> u32 {
        (self.kernels.borrow()[kernel.0].occupancy.blocks_per_sm * self.info.num_sms).max(1)
    }

    fn kernels(&self) -> Vec<KernelOccupancy> {
        self.kernels.borrow().iter().map(|kernel| kernel.occupancy.clone()).collect()
    }

    unsafe fn launch(&self, kernel: KernelId, grid: Grid, params: &[u8]) -> DeviceResult<()> {
        self.context.enter()?;
        let kernels = self.kernels.borrow();
        let LoadedKernel { occupancy: KernelOccupancy { name, .. }, function, params_bytes } = &kernels[kernel.0];
        assert!(
            params.len() == *params_bytes && params.len() <= MAX_PARAMS_BYTES,
            "{name} takes {params_bytes} bytes of parameters, not {}",
            params.len()
        );
        let mut copy = std::mem::MaybeUninit::<Params>::uninit();
        let copy: *mut c_void = copy.as_mut_ptr().cast();
        // SAFETY: there is room for `MAX_PARAMS_BYTES`.
        unsafe { std::ptr::copy_nonoverlapping(params.as_ptr(), copy.cast(), params.len()) };
        let mut pointers = [copy];
        let [x, y, z] = grid.blocks;
        let mut may_start_early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: Default::default(),
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let has_dependent_launch = self.info.compute_capability >= (9, 0);
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared_bytes,
            hStream: self.context.stream(Stream::Compute),
            attrs: &mut may_start_early,
            numAttrs: u32::from(has_dependent_launch && self.follows_kernel.replace(true)),
        };
        // SAFETY: before the call returns the driver reads the configuration and as many bytes as the kernel's one
        // parameter has. The caller vouches for their contents. The kernel waits for those before it.
        let result = unsafe { sys::cuLaunchKernelEx(&config, *function, pointers.as_mut_ptr(), std::ptr::null_mut()) };
        if result == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        self.context.check(result, &format!("cuLaunchKernelEx({name}, {grid:?})"))
    }

    unsafe fn matmul(
        &self,
        matmul: Matmul,
        x: DevicePtr,
        w: DevicePtr,
        bias: DevicePtr,
        out: DevicePtr,
    ) -> DeviceResult<()> {
        self.context.enter()?;
        self.enqueues_other(Stream::Compute);
        // SAFETY: the caller's promise.
        unsafe { self.products.borrow_mut().enqueue(matmul, [x, w, bias, out], !self.is_recording.get()) }
    }

    fn lacks_fp8_products(&self) -> Option<String> {
        let ((major, minor), release) = (self.info.compute_capability, cublaslt_release());
        ((major, minor) != FP8_COMPUTE_CAPABILITY || release < FIRST_CUBLASLT_WITH_FP8_SCALES).then(|| {
            let [release, minor_release, patch] = release;
            format!(
                "cuBLASLt has FP8 products with such scales on compute capability 9.0 (Hopper) and from its version 12.9 \
                 on; this GPU has compute capability {major}.{minor}, and cuBLASLt is version \
                 {release}.{minor_release}.{patch}"
            )
        })
    }

    unsafe fn fp8_matmul(&self, matmul: Fp8Matmul, operands: Fp8Operands) -> DeviceResult<()> {
        self.context.enter()?;
        self.enqueues_other(Stream::Compute);
        // SAFETY: the caller's promise.
        unsafe { self.products.borrow_mut().enqueue_fp8(matmul, operands, !self.is_recording.get()) }
    }

    fn can_time(&self) -> bool {
        !self.is_recording.get()
    }

    unsafe fn time_cold(
        &self,
        w: DevicePtr,
        bytes: usize,
        enqueue: &dyn Fn(DevicePtr) -> DeviceResult<()>,
    ) -> DeviceResult<f32> {
        self.context.enter()?;
        // SAFETY: the caller's promise.
        let weights = unsafe { ColdWeights::new(&self.context, w, bytes, self.l2_bytes)? };
        // A recording begins with nothing before it, and what follows the last graph waits for it.
        let begin = || self.enqueues_other(Stream::Compute);
        // SAFETY: the caller's promise. Algorithms are chosen in the call that is not recorded.
        let time = unsafe { weights.time(begin, enqueue) };
        self.enqueues_other(Stream::Compute);
        time
    }

    fn begin_capture(&self) -> DeviceResult<()> {
        self.context.enter()?;
        assert!(!self.is_recording.get(), "a recording within a recording");
        self.enqueues_other(Stream::Compute);
        recording::begin(&self.context)?;
        self.is_recording.set(true);
        Ok(())
    }

    fn end_capture(&self) -> DeviceResult<GraphId> {
        self.context.enter()?;
        assert!(self.is_recording.take(), "a recording has begun");
        self.enqueues_other(Stream::Compute);
        let executable = recording::end(&self.context)?;
        let mut graphs = self.graphs.borrow_mut();
        graphs.push(executable);
        Ok(GraphId(graphs.len() - 1))
    }

    unsafe fn launch_graph(&self, graph: GraphId) -> DeviceResult<()> {
        self.context.enter()?;
        self.enqueues_other(Stream::Compute);
        let executable = self.graphs.borrow()[graph.0];
        // SAFETY: the graph exists, and the caller vouches for its addresses.
        unsafe { recording::launch(&self.context, executable) }
    }

    fn clear_graphs(&self) {
        // A graph may be running.
        let _ = self.synchronize();
        self.context.enter_to_free();
        for executable in self.graphs.borrow_mut().drain(..) {
            // SAFETY: it was made and is destroyed once.
            let _ = unsafe { sys::cuGraphExecDestroy(executable) };
        }
    }

    fn set_profiled(&self, is_profiled: bool) -> DeviceResult<()> {
        self.context.enter()?;
        // SAFETY: they only tell a profiler, and do nothing without one.
        let (result, call) = unsafe {
            if is_profiled {
                (sys::cuProfilerStart(), "cuProfilerStart")
            } else {
                (sys::cuProfilerStop(), "cuProfilerStop")
            }
        };
        self.context.check(result, call)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        self.clear_graphs();
        for event in self.events.borrow_mut().take() {
            // SAFETY: it was created and is destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(event) };
        }
        for module in self.modules.borrow_mut().drain(..) {
            // SAFETY: it was loaded and is unloaded once, and no enqueued work needs it.
            let _ = unsafe { sys::cuModuleUnload(module) };
        }
    }
}

/// The driver's events.
struct Calls<'a>(&'a Context);

impl EventCalls<sys::CUevent> for Calls<'_> {
    fn create(&self) -> DeviceResult<sys::CUevent> {
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: `event` is ours to write.
        self.0.check(unsafe { sys::cuEventCreate(&mut event, flags) }, "cuEventCreate")?;
        Ok(event)
    }

    fn record(&self, event: sys::CUevent, stream: Stream) -> DeviceResult<()> {
        // SAFETY: both are the context's.
        self.0.check(unsafe { sys::cuEventRecord(event, self.0.stream(stream)) }, "cuEventRecord")
    }

    fn is_done(&self, event: sys::CUevent) -> DeviceResult<bool> {
        // SAFETY: the event is the context's.
        match unsafe { sys::cuEventQuery(event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => self.0.check(result, "cuEventQuery").map(|()| true),
        }
    }
}
