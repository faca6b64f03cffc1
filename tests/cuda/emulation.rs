//! An emulated GPU: the kernels' own source runs under `kernels/emulation`, device memory is host memory, and streams
//! are lists of pending operations.
//!
//! An enqueued operation need not happen before something waits for it. A test chooses how eager each stream is. Memory
//! that is read or reused before its copy is done goes wrong under one setting or another, and always in the same way
//! for the same seed.

pub mod compile;
mod matmul;
mod memory;
mod options;
pub mod ptx;

use self::matmul::{multiply, multiply_fp8};
pub use self::options::{Eagerness, EmulatedOptions};
use self::ptx::{Architecture, Interpreter, PtxCompiler};
use libloading::Library;
use pagetide::backend::cuda::device::{
    Copy, Device, DeviceError, DeviceEvent, DeviceInfo, DevicePtr, DeviceResult, FP8_SCALE_BLOCK, Fp8Matmul,
    Fp8Operands, Fp8Scaling, GraphId, Grid, KernelId, Matmul, ModuleId, ModuleSource, PinnedMemory, Stream,
};
use ptx_interpreter::counters::Counters;
use ptx_interpreter::{GpuOptions, Module};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_char, c_void};
use std::fs;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

/// `struct Launch` of `kernels/emulation/block.h`.
#[repr(C)]
struct Launch {
    grid: [u32; 3],
    only_block: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    order: u32,
    seed: u64,
}

type Emulate = unsafe extern "C" fn(*const Launch, *const c_void, usize, *mut c_char, usize) -> i32;

/// A module. It is compiled when one of its kernels is first launched, because most tests launch kernels of few of the
/// modules that a backend loads.
struct EmulatedModule {
    source: ModuleSource,
    code: OnceCell<ModuleCode>,
}

enum ModuleCode {
    Native(Library),
    /// For the interpreter, perhaps with a module that it is compared with.
    Ptx(Arc<Module>, Option<Arc<Module>>),
}

impl EmulatedModule {
    fn new(source: ModuleSource) -> Self {
        Self { source, code: OnceCell::new() }
    }
}

/// An operation on a stream.
#[derive(Clone, Debug)]
enum Operation {
    Copies(Vec<Copy>),
    Fill { to: DevicePtr, value: u8, bytes: usize },
    Launch { kernel: KernelId, grid: Grid, params: Vec<u8> },
    Matmul { matmul: Matmul, x: DevicePtr, w: DevicePtr, bias: DevicePtr, out: DevicePtr },
    Fp8Matmul { matmul: Fp8Matmul, operands: Fp8Operands },
    Graph(GraphId),
    Record(u64),
    Wait(DeviceEvent),
}

#[derive(Default)]
struct StreamState {
    pending: VecDeque<Operation>,
    recorded: u64,
    done: u64,
}

pub struct EmulatedDevice {
    info: DeviceInfo,
    options: EmulatedOptions,
    random: Cell<u64>,
    streams: RefCell<HashMap<Stream, StreamState>>,
    /// Addresses and sizes.
    allocated: RefCell<HashMap<u64, usize>>,
    pinned: RefCell<HashMap<u64, usize>>,
    modules: RefCell<Vec<Rc<EmulatedModule>>>,
    kernels: RefCell<Vec<(String, Rc<EmulatedModule>)>>,
    /// Runs the kernels, and owns the memory of the device, if they are PTX.
    interpreter: Option<RefCell<Interpreter>>,
    graphs: RefCell<Vec<Vec<Operation>>>,
    capturing: RefCell<Option<Vec<Operation>>>,
    /// The error that every call returns once the device has failed.
    failure: RefCell<Option<DeviceError>>,
    /// Operations until the device fails.
    fails_after: Cell<Option<u64>>,
    /// Copies that a GPU's copy engines would make, by stream.
    pub num_copies: [Cell<u64>; Stream::ALL.len()],
    pub num_launches: Cell<u64>,
    pub num_graph_launches: Cell<u64>,
    pub num_recordings: Cell<u64>,
    /// Matrix products that were enqueued or recorded.
    pub num_matmuls: Cell<u64>,
    /// Launches, launches of graphs and products so far, each time when a profiler began or ended to measure.
    pub profiled: RefCell<Vec<[u64; 3]>>,
}

impl EmulatedDevice {
    pub fn new(options: EmulatedOptions) -> Self {
        let info = DeviceInfo {
            name: "emulation".into(),
            num_sms: options.num_sms,
            total_memory: options.total_memory,
            ..options.ptx.unwrap_or(Architecture::Sm90a).device_info()
        };
        let seed = options.seed.wrapping_add(u64::from(options.thread_order) << 32);
        let of_gpu = GpuOptions {
            seed,
            sanitize: options.sanitizes,
            check_results: !options.takes_unwritten,
            only_block: options.only_block,
            ..GpuOptions::default()
        };
        let interpreter = options.ptx.map(|architecture| RefCell::new(Interpreter::new(architecture, of_gpu)));
        if let Some(interpreter) = interpreter.as_ref().filter(|_| options.counts) {
            interpreter.borrow_mut().launches = Some(Vec::new());
        }
        Self {
            info,
            random: Cell::new(options.seed),
            options,
            streams: RefCell::new(Stream::ALL.into_iter().map(|stream| (stream, StreamState::default())).collect()),
            allocated: RefCell::default(),
            pinned: RefCell::default(),
            modules: RefCell::default(),
            kernels: RefCell::default(),
            interpreter,
            graphs: RefCell::default(),
            capturing: RefCell::default(),
            failure: RefCell::default(),
            fails_after: Cell::default(),
            num_copies: Default::default(),
            num_launches: Cell::default(),
            num_graph_launches: Cell::default(),
            num_recordings: Cell::default(),
            num_matmuls: Cell::default(),
            profiled: RefCell::default(),
        }
    }

    /// The device is lost with the `operations`-th operation from now.
    pub fn fail_after(&self, operations: u64) {
        self.fails_after.set(Some(operations));
    }

    /// The counters of the launches so far and the time of each in seconds, in their order.
    pub fn take_launches(&self) -> Vec<(Counters, f64)> {
        let interpreter = self.interpreter.as_ref().expect("only executed PTX is counted");
        interpreter.borrow_mut().launches.replace(Vec::new()).expect("the options ask for them")
    }

    /// Launches and products of the last recording.
    pub fn nodes_of_last_graph(&self) -> usize {
        self.graphs.borrow().last().map_or(0, Vec::len)
    }

    /// Memory that has not been freed: device and pinned bytes.
    pub fn bytes_in_use(&self) -> (usize, usize) {
        (self.allocated.borrow().values().sum(), self.pinned.borrow().values().sum())
    }

    fn count_copies(&self, stream: Stream, copies: usize) {
        let counted = &self.num_copies[stream as usize];
        counted.set(counted.get() + copies as u64);
    }

    fn compile(&self, source: &ModuleSource) -> DeviceResult<ModuleCode> {
        let root = &self.options.kernels;
        let Some(interpreter) = &self.interpreter else {
            let path = compile::library(root, source)?;
            // SAFETY: a library of ours, without initialisers that do anything.
            let library = unsafe { Library::new(path) }.map_err(|error| DeviceError::Other(error.to_string()))?;
            return Ok(ModuleCode::Native(library));
        };
        let architecture = interpreter.borrow().architecture;
        let other = self.options.against.as_ref();
        // A divergence is looked for in each instruction, and reported with its line.
        let compiler = if other.is_some() { PtxCompiler::Nvcc } else { PtxCompiler::Nvrtc };
        let module = |root: &PathBuf| ptx::module(root, source, architecture, compiler);
        Ok(ModuleCode::Ptx(module(root)?, other.map(module).transpose()?))
    }

    fn chance(&self, percent: u32) -> bool {
        let mut z = self.random.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.random.set(z);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % 100 < u64::from(percent)
    }

    fn check(&self) -> DeviceResult<()> {
        if let Some(left) = self.fails_after.get() {
            self.fails_after.set(Some(left.saturating_sub(1)));
            if left == 0 {
                self.failure.borrow_mut().get_or_insert(DeviceError::Lost("an injected failure".into()));
            }
        }
        self.failure.borrow().clone().map_or(Ok(()), Err)
    }

    fn enqueue(&self, stream: Stream, operation: Operation) -> DeviceResult<()> {
        self.check()?;
        if stream == Stream::Compute
            && let Some(recording) = &mut *self.capturing.borrow_mut()
        {
            let is_event = matches!(operation, Operation::Record(_) | Operation::Wait(_));
            assert!(!is_event, "an event on a stream that is being recorded");
            recording.push(operation);
            return Ok(());
        }
        self.streams.borrow_mut().get_mut(&stream).expect("all streams are there").pending.push_back(operation);
        let Eagerness { compute, copy_out, copy_in } = self.options.eagerness;
        for (stream, eagerness) in [(Stream::Compute, compute), (Stream::CopyOut, copy_out), (Stream::CopyIn, copy_in)]
        {
            while self.chance(eagerness) && self.do_next(stream)? {}
        }
        Ok(())
    }

    /// Does a stream's next operation. Returns false if there is none.
    fn do_next(&self, stream: Stream) -> DeviceResult<bool> {
        let next = self.streams.borrow_mut().get_mut(&stream).expect("all streams are there").pending.pop_front();
        let Some(operation) = next else { return Ok(false) };
        match operation {
            Operation::Record(number) => {
                self.streams.borrow_mut().get_mut(&stream).expect("all streams are there").done = number;
            }
            Operation::Wait(_) if self.options.ignores_waits => {}
            Operation::Wait(event) => self.reach(event)?,
            operation => self.perform(&operation)?,
        }
        Ok(true)
    }

    /// Does operations until the event is done.
    fn reach(&self, event: DeviceEvent) -> DeviceResult<()> {
        while self.streams.borrow()[&event.stream].done < event.number {
            assert!(self.do_next(event.stream)?, "{event:?} is waited for and was never recorded");
        }
        Ok(())
    }

    fn write_product(&self, out: DevicePtr, result: &[u8]) {
        match &self.interpreter {
            Some(interpreter) => interpreter.borrow_mut().gpu.memory.write(out.0, result),
            // SAFETY: the caller that enqueued the product promised the range.
            None => unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), out.0 as *mut u8, result.len()) },
        }
    }

    fn perform(&self, operation: &Operation) -> DeviceResult<()> {
        match operation {
            Operation::Copies(copies) => {
                for copy in copies {
                    if let Some(interpreter) = &self.interpreter {
                        interpreter.borrow_mut().gpu.memory.copy(copy.to.0, copy.from.0, copy.bytes);
                        continue;
                    }
                    // SAFETY: the caller of `copy` promised both ranges.
                    unsafe { std::ptr::copy(copy.from.0 as *const u8, copy.to.0 as *mut u8, copy.bytes) };
                }
            }
            Operation::Fill { to, value, bytes } if self.interpreter.is_some() => {
                let interpreter = self.interpreter.as_ref().expect("it was just there");
                interpreter.borrow_mut().gpu.memory.fill(to.0, *value, *bytes);
            }
            Operation::Fill { to, value, bytes } => {
                // SAFETY: as above.
                unsafe { std::ptr::write_bytes(to.0 as *mut u8, *value, *bytes) };
            }
            Operation::Launch { kernel, grid, params } => self.launch_now(*kernel, *grid, params)?,
            Operation::Matmul { matmul, x, w, bias, out } => {
                self.write_product(*out, &multiply(matmul, *x, *w, *bias));
            }
            Operation::Fp8Matmul { matmul, operands } => {
                self.write_product(operands.out, &multiply_fp8(matmul, operands));
            }
            Operation::Graph(graph) => {
                let operations = self.graphs.borrow()[graph.0].clone();
                // It is replayed for fewer rows than it was recorded for. Nobody takes the others.
                let check_results = |checks| {
                    let Some(interpreter) = &self.interpreter else { return false };
                    std::mem::replace(&mut interpreter.borrow_mut().gpu.options.check_results, checks)
                };
                let before = check_results(false);
                operations.iter().try_for_each(|operation| self.perform(operation))?;
                check_results(before);
            }
            Operation::Record(_) | Operation::Wait(_) => unreachable!("events are the streams' own"),
        }
        Ok(())
    }

    fn launch_now(&self, kernel: KernelId, grid: Grid, params: &[u8]) -> DeviceResult<()> {
        let (name, module) = self.kernels.borrow()[kernel.0].clone();
        if self.options.leaves_out == Some(name.as_str()) {
            return Ok(());
        }
        let code = match module.code.get() {
            Some(code) => code,
            None => {
                let code = self.compile(&module.source)?;
                module.code.get_or_init(|| code)
            }
        };
        let library = match code {
            ModuleCode::Native(library) => library,
            ModuleCode::Ptx(module, other) => {
                let interpreter = self.interpreter.as_ref().expect("PTX was compiled for it");
                let done = interpreter.borrow_mut().launch(module, other.as_ref(), &name, grid, params);
                if let Err(error) = &done {
                    *self.failure.borrow_mut() = Some(error.clone());
                }
                return done;
            }
        };
        // SAFETY: the symbol is the function that the KERNEL macro makes; `module` keeps the library open.
        let symbol = unsafe { library.get::<Emulate>(format!("emulate_{name}").as_bytes()) };
        let emulate = symbol.map_err(|error| DeviceError::Other(error.to_string()))?;
        // With the largest alignment that a kernel's struct may need.
        let mut aligned = vec![0_u128; params.len().div_ceil(16)];
        // SAFETY: `aligned` has room, and both are plain bytes.
        unsafe { std::ptr::copy_nonoverlapping(params.as_ptr(), aligned.as_mut_ptr().cast(), params.len()) };
        let launch = Launch {
            grid: grid.blocks,
            only_block: self.options.only_block.unwrap_or([u32::MAX; 3]),
            threads: grid.threads,
            shared_bytes: grid.shared_bytes,
            order: self.options.thread_order,
            seed: self.options.seed,
        };
        let mut message = [0_u8; 2048];
        // SAFETY: the function is the one that the KERNEL macro makes; it checks the parameters' size itself.
        let failed = unsafe {
            emulate(&launch, aligned.as_ptr().cast(), params.len(), message.as_mut_ptr().cast(), message.len())
        };
        if failed == 0 {
            return Ok(());
        }
        let length = message.iter().position(|byte| *byte == 0).unwrap_or(message.len());
        let error = DeviceError::Lost(format!("{name}: {}", String::from_utf8_lossy(&message[..length])));
        *self.failure.borrow_mut() = Some(error.clone());
        Err(error)
    }

    /// The address of the one allocation of device memory with this size.
    pub fn allocation_of(&self, bytes: usize) -> DevicePtr {
        let allocated = self.allocated.borrow();
        let mut found = allocated.iter().filter(|(_, size)| **size == bytes).map(|(address, _)| DevicePtr(*address));
        let first = found.next().expect("there is an allocation of this size");
        assert_eq!(found.next(), None, "several allocations of {bytes} bytes");
        first
    }

    fn allocate_in(&self, pool: &RefCell<HashMap<u64, usize>>, bytes: usize) -> NonNull<u8> {
        let address = memory::allocate(bytes);
        pool.borrow_mut().insert(address.as_ptr() as u64, bytes);
        address
    }

    fn free_in(&self, pool: &RefCell<HashMap<u64, usize>>, address: u64) {
        let bytes = pool.borrow_mut().remove(&address).expect("freed once, and allocated before");
        // SAFETY: `allocate_in` has allocated so many bytes there, and who frees memory uses it no more.
        let intact = unsafe { memory::free(address, bytes) };
        assert!(intact || std::thread::panicking(), "a write beyond an allocation of {bytes} bytes");
    }
}

impl Device for EmulatedDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> DeviceResult<(usize, usize)> {
        self.check()?;
        let used: usize = self.allocated.borrow().values().sum();
        Ok((self.info.total_memory - used, self.info.total_memory))
    }

    fn allocate(&self, bytes: usize) -> DeviceResult<DevicePtr> {
        let (free, total) = self.memory()?;
        if bytes > free {
            return Err(DeviceError::OutOfMemory { wanted: bytes, free, total });
        }
        let Some(interpreter) = &self.interpreter else {
            return Ok(DevicePtr(self.allocate_in(&self.allocated, bytes).as_ptr() as u64));
        };
        let of_kernels = &mut interpreter.borrow_mut().gpu.memory;
        if memory::is_sparse(bytes) {
            let address = self.allocate_in(&self.allocated, bytes).as_ptr() as u64;
            // SAFETY: it is unmapped before it is freed, and the host does not run while a kernel does.
            unsafe { of_kernels.map_unwritten(address, bytes) };
            return Ok(DevicePtr(address));
        }
        let address = of_kernels.allocate(bytes);
        self.allocated.borrow_mut().insert(address, bytes);
        Ok(DevicePtr(address))
    }

    unsafe fn free(&self, ptr: DevicePtr) {
        if let Some(interpreter) = &self.interpreter {
            let of_kernels = &mut interpreter.borrow_mut().gpu.memory;
            let is_sparse = self.allocated.borrow().get(&ptr.0).is_some_and(|bytes| memory::is_sparse(*bytes));
            if !is_sparse {
                self.allocated.borrow_mut().remove(&ptr.0).expect("freed once, and allocated before");
                return of_kernels.free(ptr.0);
            }
            of_kernels.unmap_host(ptr.0);
        }
        self.free_in(&self.allocated, ptr.0);
    }

    fn allocate_pinned(&self, bytes: usize) -> DeviceResult<PinnedMemory> {
        self.check()?;
        let memory = self.allocate_in(&self.pinned, bytes);
        if let Some(interpreter) = &self.interpreter {
            // SAFETY: it is unmapped before it is freed, and the host does not run while a kernel does.
            unsafe { interpreter.borrow_mut().gpu.memory.map_host(memory.as_ptr() as u64, bytes) };
        }
        Ok(PinnedMemory { host: memory, device: DevicePtr(memory.as_ptr() as u64) })
    }

    unsafe fn free_pinned(&self, memory: PinnedMemory) {
        if let Some(interpreter) = &self.interpreter {
            interpreter.borrow_mut().gpu.memory.unmap_host(memory.device.0);
        }
        self.free_in(&self.pinned, memory.device.0);
    }

    unsafe fn copy(&self, stream: Stream, copy: Copy) -> DeviceResult<()> {
        self.count_copies(stream, 1);
        self.enqueue(stream, Operation::Copies(vec![copy]))
    }

    unsafe fn copy_batch(&self, stream: Stream, copies: &[Copy]) -> DeviceResult<()> {
        self.count_copies(stream, copies.len());
        self.enqueue(stream, Operation::Copies(copies.to_vec()))
    }

    unsafe fn fill(&self, stream: Stream, to: DevicePtr, value: u8, bytes: usize) -> DeviceResult<()> {
        self.enqueue(stream, Operation::Fill { to, value, bytes })
    }

    fn record(&self, stream: Stream) -> DeviceResult<DeviceEvent> {
        let number = {
            let mut streams = self.streams.borrow_mut();
            let state = streams.get_mut(&stream).expect("all streams are there");
            state.recorded += 1;
            state.recorded
        };
        self.enqueue(stream, Operation::Record(number))?;
        Ok(DeviceEvent { stream, number })
    }

    fn wait(&self, stream: Stream, event: DeviceEvent) -> DeviceResult<()> {
        assert_ne!(stream, event.stream, "a stream need not wait for itself");
        self.enqueue(stream, Operation::Wait(event))
    }

    fn is_done(&self, event: DeviceEvent) -> DeviceResult<bool> {
        self.check()?;
        // The caller polls for the event: it has to wait for a while, but not forever.
        if self.streams.borrow()[&event.stream].done < event.number && self.chance(40) {
            self.reach(event)?;
        }
        Ok(self.streams.borrow()[&event.stream].done >= event.number)
    }

    fn synchronize(&self) -> DeviceResult<()> {
        self.check()?;
        assert!(self.capturing.borrow().is_none(), "nobody waits for a device that is recording");
        for stream in Stream::ALL {
            while self.do_next(stream)? {}
        }
        Ok(())
    }

    fn load_modules(&self, sources: &[ModuleSource]) -> DeviceResult<Vec<ModuleId>> {
        let mut modules = self.modules.borrow_mut();
        let ids = (modules.len()..modules.len() + sources.len()).map(ModuleId).collect();
        modules.extend(sources.iter().map(|source| Rc::new(EmulatedModule::new(source.clone()))));
        Ok(ids)
    }

    fn kernel(&self, module: ModuleId, name: &str, _: u32) -> DeviceResult<KernelId> {
        let module = self.modules.borrow()[module.0].clone();
        let file = &module.source.file;
        let text =
            fs::read_to_string(self.options.kernels.join(file)).map_err(|why| DeviceError::Other(why.to_string()))?;
        // `KERNEL(threads, name, Params)`
        if !text.contains(&format!(", {name}, ")) {
            return Err(DeviceError::Other(format!("{file} has no kernel {name}")));
        }
        self.kernels.borrow_mut().push((name.into(), module));
        Ok(KernelId(self.kernels.borrow().len() - 1))
    }

    fn resident_blocks(&self, _: KernelId) -> u32 {
        self.options.resident_blocks.unwrap_or(2 * self.info.num_sms)
    }

    unsafe fn launch(&self, kernel: KernelId, grid: Grid, params: &[u8]) -> DeviceResult<()> {
        assert!(grid.blocks.iter().all(|blocks| *blocks > 0) && grid.blocks[1] < 65_536 && grid.blocks[2] < 65_536);
        self.num_launches.set(self.num_launches.get() + 1);
        self.enqueue(Stream::Compute, Operation::Launch { kernel, grid, params: params.to_vec() })
    }

    unsafe fn matmul(
        &self,
        matmul: Matmul,
        x: DevicePtr,
        w: DevicePtr,
        bias: DevicePtr,
        out: DevicePtr,
    ) -> DeviceResult<()> {
        assert!([x, w, bias, out].iter().all(|ptr| ptr.0.is_multiple_of(16)), "a product's operands are aligned");
        self.num_matmuls.set(self.num_matmuls.get() + 1);
        self.enqueue(Stream::Compute, Operation::Matmul { matmul, x, w, bias, out })
    }

    fn lacks_fp8_products(&self) -> Option<String> {
        (self.info.compute_capability != (9, 0)).then(|| "the emulated GPU is no Hopper".into())
    }

    unsafe fn fp8_matmul(&self, matmul: Fp8Matmul, operands: Fp8Operands) -> DeviceResult<()> {
        let Fp8Operands { x, x_scales, w, w_scales, bias, out } = operands;
        let addresses = [x, x_scales, w, w_scales, bias, out];
        assert!(addresses.iter().all(|ptr| ptr.0.is_multiple_of(16)), "a product's operands are aligned");
        let Fp8Matmul { n, k, scaling, .. } = matmul;
        let columns = if scaling == Fp8Scaling::Rows { 16 } else { FP8_SCALE_BLOCK };
        assert!(n.is_multiple_of(16) && k.is_multiple_of(columns), "cuBLASLt refuses {matmul:?}");
        self.num_matmuls.set(self.num_matmuls.get() + 1);
        self.enqueue(Stream::Compute, Operation::Fp8Matmul { matmul, operands })
    }

    fn can_time(&self) -> bool {
        self.options.clock.is_some() && self.capturing.borrow().is_none()
    }

    unsafe fn time_cold(
        &self,
        w: DevicePtr,
        _: usize,
        enqueue: &dyn Fn(DevicePtr) -> DeviceResult<()>,
    ) -> DeviceResult<f32> {
        let (launch_ms, matmul_ms) = self.options.clock.expect("it can time");
        let counts = || (self.num_launches.get(), self.num_matmuls.get());
        let before = counts();
        enqueue(w)?;
        let after = counts();
        Ok((after.0 - before.0) as f32 * launch_ms + (after.1 - before.1) as f32 * matmul_ms)
    }

    fn begin_capture(&self) -> DeviceResult<()> {
        self.check()?;
        assert!(self.capturing.borrow_mut().replace(Vec::new()).is_none(), "a recording within a recording");
        Ok(())
    }

    fn end_capture(&self) -> DeviceResult<GraphId> {
        self.num_recordings.set(self.num_recordings.get() + 1);
        let recorded = self.capturing.borrow_mut().take().expect("a recording has begun");
        self.graphs.borrow_mut().push(recorded);
        Ok(GraphId(self.graphs.borrow().len() - 1))
    }

    unsafe fn launch_graph(&self, graph: GraphId) -> DeviceResult<()> {
        self.num_graph_launches.set(self.num_graph_launches.get() + 1);
        self.enqueue(Stream::Compute, Operation::Graph(graph))
    }

    fn clear_graphs(&self) {
        self.graphs.borrow_mut().clear();
    }

    fn set_profiled(&self, is_profiled: bool) -> DeviceResult<()> {
        let mut profiled = self.profiled.borrow_mut();
        assert_eq!(profiled.len() % 2, usize::from(!is_profiled), "it begins and ends in turn");
        profiled.push([&self.num_launches, &self.num_graph_launches, &self.num_matmuls].map(Cell::get));
        Ok(())
    }
}

impl Drop for EmulatedDevice {
    fn drop(&mut self) {
        let left = self.bytes_in_use();
        assert!(left == (0, 0) || std::thread::panicking(), "never freed: {left:?} bytes (device, pinned)");
    }
}
