//! `pagetide doctor`: reports what this machine has, and what would stop a start.

mod many_rows;

use clap::Args;
use many_rows::ManyRowsOfFormats;
use pagetide_actors::preflight;
use pagetide_backend::cpu::Isa;
use pagetide_backend::cuda::device::{
    Copy, CopyMethod, Device, DeviceBuffer, DeviceInfo, DeviceResult, KernelOccupancy, Matmul, ModuleSource,
    PinnedBuffer, Stream,
};
use pagetide_backend::cuda::driver::{self, DriverOptions, LibrarySummary, compiler};
use pagetide_backend::cuda::{self, CudaOptions};
use pagetide_backend::{DType, KvLayout};
use pagetide_base::error::StartError;
use pagetide_config::{Config, DeviceConfig, DeviceKind};
use pagetide_model::files;
use pagetide_model::loader::{LoadOutlook, LoadTarget, QuantizedSource};
use pagetide_terminal::options::ConfigOptions;
use pagetide_terminal::output;
use serde::Serialize;
use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Instant;

#[derive(Args)]
pub struct DoctorArgs {
    /// Print the findings as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    options: ConfigOptions,
}

/// The exit status is 1 if the configured device cannot be used, or the model's files are missing or wrong.
pub fn run(args: &DoctorArgs) -> Result<ExitCode, StartError> {
    let report = DoctorReport::new(&args.options.resolve()?.config);
    let text = if args.json {
        serde_json::to_string_pretty(&report).expect("a report is plain data") + "\n"
    } else {
        report.to_string()
    };
    output::print(text)?;
    Ok(if report.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The findings. Each part may be an error with its reason.
#[derive(Serialize)]
struct DoctorReport {
    version: &'static str,
    /// The configured device.
    device_kind: &'static str,
    driver: Finding<Driver>,
    nvrtc: Finding<Nvrtc>,
    cublaslt: Finding<LibraryFacts>,
    /// Measurements of the opened GPU.
    gpu: Finding<OpenGpu>,
    cpu: Finding<Cpu>,
    kernel_cache: Finding<KernelCacheFacts>,
    /// The location of the configured model.
    model: Finding<String>,
    /// The weight matrices as a start would hold them: `Q4_0 28 matrices 1.7 MiB`.
    #[serde(skip_serializing_if = "Option::is_none")]
    weights: Option<String>,
    /// How a start would convert the weights, if it has to.
    #[serde(skip_serializing_if = "Option::is_none")]
    conversions: Option<String>,
    /// Where a start would take quantised weights from, if `model.quantization` asks for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    quantized: Option<QuantizedFacts>,
    /// On a CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    many_rows: Option<ManyRowsOfFormats>,
    /// The configured type of the KV cache.
    cache_dtype: &'static str,
    /// The device that a start would use: `cuda (NVIDIA H100 80GB HBM3)`.
    runs_on: Option<String>,
    /// What would stop a start.
    problems: Vec<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Finding<T> {
    Error(String),
    #[serde(untagged)]
    Found(T),
}

#[derive(Serialize)]
struct Driver {
    path: Option<PathBuf>,
    cuda_version: String,
    devices: Vec<GpuFacts>,
}

#[derive(Serialize)]
struct GpuFacts {
    name: String,
    compute_capability: String,
    multiprocessors: u32,
    memory_bytes: usize,
    shared_memory_per_block_bytes: u32,
}

#[derive(Serialize)]
struct LibraryFacts {
    path: Option<PathBuf>,
    version: String,
}

#[derive(Serialize)]
struct Nvrtc {
    #[serde(flatten)]
    library: LibraryFacts,
    /// Time to compile one kernel file for `architecture`.
    compile_s: f64,
    architecture: String,
}

#[derive(Serialize)]
struct OpenGpu {
    free_bytes: usize,
    total_bytes: usize,
    /// Speeds of large copies.
    copies: CopySpeeds,
    small_copies: Option<SmallCopies>,
    /// The heads, types and block size that the kernels of attention were compiled for: the model's, if it is here.
    attention_of: String,
    attention: Vec<Occupancy>,
    /// Why its prompts are not computed on warp groups (docs/gpu.md, "Prompts on Hopper").
    no_warp_groups: Option<&'static str>,
    /// Why `device.fp8_activations` cannot be true.
    no_fp8_activations: Option<String>,
}

/// How many thread blocks of a kernel run on a multiprocessor.
#[derive(Serialize)]
struct Occupancy {
    kernel: String,
    registers: u32,
    shared_bytes: u32,
    blocks_per_multiprocessor: u32,
    /// As it follows from registers, threads and shared memory.
    expected_blocks: u32,
}

/// How the small copies of a swap are made.
#[derive(Serialize)]
struct SmallCopies {
    /// With one call of the driver for many of them.
    batched: bool,
    /// Time that the copies of a list were measured to take with one call. `None`: not measured.
    batched_ms: Option<f32>,
    one_by_one_ms: Option<f32>,
}

/// In GB/s (10⁹ bytes). Host memory is pinned.
#[derive(Serialize)]
struct CopySpeeds {
    host_to_device: f64,
    device_to_host: f64,
    /// The sum of both directions at the same time.
    both_ways: f64,
    /// Bytes copied; each is read and written.
    on_device: f64,
}

#[derive(Serialize)]
struct Cpu {
    /// The instruction set that would be used.
    isa: &'static str,
    available: Vec<&'static str>,
    /// `device.isa = auto` is `avx512-widened`, because it multiplies weights in bfloat16 faster than `avx512`.
    has_slow_dot_products: bool,
    threads: usize,
}

#[derive(Serialize)]
struct QuantizedFacts {
    /// The file that keeps them.
    path: Option<PathBuf>,
    /// Of the file, if it is there. Else a start makes it.
    bytes: Option<u64>,
    writable: bool,
    /// Weights are converted to `--dtype` when they are uploaded.
    on_gpu: bool,
}

#[derive(Serialize)]
struct KernelCacheFacts {
    folder: PathBuf,
    kernels: usize,
    bytes: u64,
    writable: bool,
}

impl<T> Finding<T> {
    fn new<E: Display>(result: Result<T, E>) -> Self {
        match result {
            Ok(found) => Self::Found(found),
            Err(error) => Self::Error(error.to_string()),
        }
    }
}

impl DoctorReport {
    fn new(config: &Config) -> Self {
        let device = &config.device;
        let cpu = cpu(device);
        let options = &device.driver_options();
        let model = files::whereabouts(&config.model.source());
        let target = LoadTarget::of(&config.load_options());
        let checked = match &model {
            Ok(_) => preflight::check_model(config, target),
            Err(error) => Err(StartError::new(error.to_string())),
        };
        let (outlook, no_model) = match checked {
            Ok(outlook) => (outlook, None),
            Err(error) => (LoadOutlook::default(), Some(error.to_string())),
        };
        let LoadOutlook { conversions, weights, quantized, gpu: of_model } = outlook;
        let gpu = find_gpu(options, of_model.as_ref());
        let cpu_name = match &cpu {
            Finding::Found(cpu) => Ok(format!("cpu ({}, {} threads)", cpu.isa, cpu.threads)),
            Finding::Error(error) => Err(error.clone()),
        };
        let gpu_name = match &gpu {
            Ok((info, _)) => Ok(format!("cuda ({})", info.name)),
            Err(why) => Err(why.clone()),
        };
        let runs_on = match device.kind {
            DeviceKind::Cpu => cpu_name,
            DeviceKind::Cuda => gpu_name,
            DeviceKind::Auto => gpu_name.or(cpu_name),
        };
        let no_device = runs_on.as_ref().err().map(|why| format!("device.kind = {}: {why}", device.kind));
        let runs_on_gpu = device.kind != DeviceKind::Cpu;
        let no_fp8 = gpu.as_ref().ok().and_then(|(_, gpu)| gpu.no_fp8_activations.as_ref());
        let no_fp8 = no_fp8.filter(|_| runs_on_gpu && device.fp8_activations);
        let no_fp8 = no_fp8.map(|why| format!("device.fp8_activations = true: {why}"));
        let is_converted = target == LoadTarget::Gpu && !weights.has_quantized();
        let isa = Isa::choose(device.isa.chosen()).ok().filter(|_| target == LoadTarget::Cpu);
        Self {
            version: env!("CARGO_PKG_VERSION"),
            device_kind: device.kind.name(),
            driver: Finding::new(driver(options)),
            nvrtc: Finding::new(nvrtc(options)),
            cublaslt: Finding::new(driver::open_cublaslt(options, newest_cuda(options)).map(LibraryFacts::from)),
            gpu: Finding::new(gpu.map(|(_, found)| found)),
            cpu,
            kernel_cache: cache(options),
            model: Finding::new(model),
            weights: (!weights.is_empty()).then(|| weights.to_string()),
            conversions: (!conversions.is_empty()).then(|| conversions.to_string()),
            quantized: quantized.map(|source| QuantizedFacts::new(source, is_converted)),
            many_rows: isa.and_then(|isa| ManyRowsOfFormats::measure(isa, &weights)),
            cache_dtype: config.cache.dtype.name(),
            runs_on: runs_on.ok(),
            problems: no_device.into_iter().chain(no_fp8).chain(no_model).collect(),
        }
    }
}

/// Opens the GPU that a start would use, and tries it: kernels compile and load, matrix products and copies work.
fn find_gpu(options: &DriverOptions, of_model: Option<&CudaOptions>) -> Result<(DeviceInfo, OpenGpu), String> {
    let gpu = driver::find(options).map_err(|why| why.to_string())?;
    let device = gpu.open().map_err(|error| error.to_string())?;
    let attention = match of_model {
        // Nothing is computed, so there are no buffers.
        Some(of_model) => CudaOptions { max_rows: 0, max_seqs: 0, max_model_len: 0, ..of_model.clone() },
        None => llama_attention(options.batch_invariant),
    };
    let open = try_gpu(&device, &attention).map_err(|error| format!("{} fails: {error}", gpu.info().name))?;
    Ok((gpu.info().clone(), open))
}

/// The attention of a Llama of 8 billion parameters.
fn llama_attention(batch_invariant: bool) -> CudaOptions {
    let (dtype, num_kv_heads) = (DType::BF16, 8);
    let kv = KvLayout { num_layers: 32, num_kv_heads, head_dim: 128, block_size: 16, dtype: dtype.into() };
    CudaOptions { batch_invariant, ..CudaOptions::for_attention(dtype, 4 * num_kv_heads, kv) }
}

fn try_gpu(device: &Rc<dyn Device>, attention: &CudaOptions) -> DeviceResult<OpenGpu> {
    let (free_bytes, total_bytes) = device.memory()?;
    device.load_modules(&[cuda::sampling::source()])?;
    let [x, w, out] = [(); 3].map(|()| DeviceBuffer::new(device, 64 * 64 * 4));
    let (x, w, out) = (x?, w?, out?);
    let matmul = Matmul { m: 64, n: 64, k: 64, dtype: DType::BF16, out: DType::F32, bias: false };
    // SAFETY: the buffers are large enough and live until everything is done; the operands are zeros.
    unsafe {
        device.fill(Stream::Compute, x.ptr(), 0, x.bytes())?;
        device.fill(Stream::Compute, w.ptr(), 0, w.bytes())?;
        device.matmul(matmul, x.ptr(), w.ptr(), x.ptr(), out.ptr())?;
    }
    device.synchronize()?;
    let small_copies = device.copy_method().map(|CopyMethod { batched, measured_ms }| SmallCopies {
        batched,
        batched_ms: measured_ms.map(|(batched, _)| batched),
        one_by_one_ms: measured_ms.map(|(_, one_by_one)| one_by_one),
    });
    let copies = measure_copies(device)?;
    let no_warp_groups = cuda::attention::load(device, attention)?;
    let CudaOptions { dtype, num_heads, kv, .. } = attention;
    let KvLayout { num_kv_heads, head_dim, block_size, dtype: kv_dtype, .. } = kv;
    let attention_of = format!(
        "{num_heads} heads of {head_dim}, {num_kv_heads} KV heads, {}, KV cache of {kv_dtype} in blocks of {block_size}",
        dtype.name()
    );
    let occupancy = |kernel: KernelOccupancy| Occupancy {
        kernel: kernel.name,
        registers: kernel.registers,
        shared_bytes: kernel.shared_bytes,
        blocks_per_multiprocessor: kernel.blocks_per_sm,
        expected_blocks: kernel.expected_blocks,
    };
    let attention = device.kernels().into_iter().map(occupancy).collect();
    let no_fp8_activations = device.lacks_fp8_products();
    Ok(OpenGpu {
        free_bytes,
        total_bytes,
        copies,
        small_copies,
        attention_of,
        attention,
        no_warp_groups,
        no_fp8_activations,
    })
}

fn measure_copies(device: &Rc<dyn Device>) -> DeviceResult<CopySpeeds> {
    // A copy over a link of 64 GB/s takes a millisecond, against which the time to start it is nothing.
    const LINK_BYTES: usize = 64 << 20;
    // More than the L2 cache of any GPU holds.
    const DEVICE_BYTES: usize = 256 << 20;
    const TIMES: usize = 4;
    let [source, sink] = [PinnedBuffer::new(device, LINK_BYTES)?, PinnedBuffer::new(device, LINK_BYTES)?];
    let [first, second] = [DeviceBuffer::new(device, DEVICE_BYTES)?, DeviceBuffer::new(device, DEVICE_BYTES)?];
    let up = (Stream::CopyIn, Copy { to: first.ptr(), from: source.ptr(), bytes: LINK_BYTES });
    let down = (Stream::CopyOut, Copy { to: sink.ptr(), from: second.ptr(), bytes: LINK_BYTES });
    let across = (Stream::Compute, Copy { to: second.ptr(), from: first.ptr(), bytes: DEVICE_BYTES });
    let speed = |copies: &[(Stream, Copy)]| -> DeviceResult<f64> {
        let mut start = Instant::now();
        // The first run is not counted.
        for time in 0..=TIMES {
            if time == 1 {
                device.synchronize()?;
                start = Instant::now();
            }
            for (stream, copy) in copies {
                // SAFETY: the buffers live until everything is done; no two streams write the same one.
                unsafe { device.copy(*stream, *copy)? };
            }
        }
        device.synchronize()?;
        let bytes: usize = copies.iter().map(|(_, copy)| TIMES * copy.bytes).sum();
        Ok(bytes as f64 / start.elapsed().as_secs_f64() / 1e9)
    };
    Ok(CopySpeeds {
        host_to_device: speed(&[up])?,
        device_to_host: speed(&[down])?,
        both_ways: speed(&[up, down])?,
        on_device: speed(&[across])?,
    })
}

fn driver(options: &DriverOptions) -> Result<Driver, driver::NoGpu> {
    let driver = driver::probe(options)?;
    let (major, minor) = driver.cuda_version;
    let facts = |info: &DeviceInfo| GpuFacts {
        name: info.name.clone(),
        compute_capability: format!("{}.{}", info.compute_capability.0, info.compute_capability.1),
        multiprocessors: info.num_sms,
        memory_bytes: info.total_memory,
        shared_memory_per_block_bytes: info.max_shared_bytes,
    };
    let devices = driver.devices.iter().map(facts).collect();
    Ok(Driver { path: driver.library, cuda_version: format!("{major}.{minor}"), devices })
}

/// The newest release of CUDA's libraries that the driver can run. Without a driver, the newest one that is known here.
fn newest_cuda(options: &DriverOptions) -> u32 {
    driver::probe(options).map_or(driver::NEWEST_CUDA, |driver| driver.cuda_version.0)
}

/// Tries NVRTC by compiling a kernel, which needs no GPU.
fn nvrtc(options: &DriverOptions) -> Result<Nvrtc, String> {
    let library = driver::open_nvrtc(options, newest_cuda(options)).map_err(|why| why.to_string())?;
    let capability = driver::probe(options).ok().and_then(|driver| Some(driver.devices.first()?.compute_capability));
    let architecture = compiler::architecture(capability.unwrap_or(driver::MIN_COMPUTE_CAPABILITY));
    let source: ModuleSource = cuda::sampling::source();
    let start = Instant::now();
    compiler::compile(&source, &architecture).map_err(|error| error.to_string())?;
    Ok(Nvrtc { library: library.into(), compile_s: start.elapsed().as_secs_f64(), architecture })
}

fn cpu(config: &DeviceConfig) -> Finding<Cpu> {
    let isa = Isa::choose(config.isa.chosen());
    let available = Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(Isa::name).collect();
    Finding::new(isa.map(|isa| Cpu {
        isa: isa.name(),
        available,
        has_slow_dot_products: Isa::detect() == Isa::Avx512Widened,
        threads: config.num_threads(),
    }))
}

fn cache(options: &DriverOptions) -> Finding<KernelCacheFacts> {
    let Some(folder) = compiler::cache_folder(options.kernel_cache.as_deref()) else {
        return Finding::Error("there is no home directory for compiled kernels: set device.kernel_cache".into());
    };
    let files = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    let sizes = files
        .filter(|file| file.path().extension().is_some_and(|extension| extension == "cubin"))
        .filter_map(|file| Some(file.metadata().ok()?.len()));
    let (kernels, bytes) = sizes.fold((0, 0), |(kernels, bytes), size| (kernels + 1, bytes + size));
    let writable = is_writable(&folder);
    Finding::Found(KernelCacheFacts { folder, kernels, bytes, writable })
}

impl QuantizedFacts {
    fn new(source: QuantizedSource, on_gpu: bool) -> Self {
        let (path, bytes) = match source {
            QuantizedSource::Kept { path, bytes } => (Some(path), Some(bytes)),
            QuantizedSource::Made { path } => (path, None),
        };
        let writable = path.as_deref().and_then(Path::parent).is_some_and(is_writable);
        Self { path, bytes, writable, on_gpu }
    }
}

/// Whether files can be created in `folder`, or the folder itself if it does not exist yet.
fn is_writable(folder: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let Some(existing) = folder.ancestors().find(|folder| folder.exists() || folder.as_os_str().is_empty()) else {
        return false;
    };
    let existing = if existing.as_os_str().is_empty() { Path::new(".") } else { existing };
    let Ok(path) = std::ffi::CString::new(existing.as_os_str().as_bytes()) else { return false };
    // SAFETY: the path ends with a zero.
    existing.is_dir() && unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) } == 0
}

impl From<LibrarySummary> for LibraryFacts {
    fn from(library: LibrarySummary) -> Self {
        Self { path: library.path, version: library.version }
    }
}

// --- for people

const GIB: f64 = (1u64 << 30) as f64;
const MIB: f64 = (1u64 << 20) as f64;

impl<T: Display> Display for Finding<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Found(found) => found.fmt(f),
            Self::Error(error) => write!(f, "none: {error}"),
        }
    }
}

impl Display for DoctorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "pagetide {}, device.kind = {}\n", self.version, self.device_kind)?;
        writeln!(f, "driver    {}", self.driver)?;
        writeln!(f, "NVRTC     {}", self.nvrtc)?;
        writeln!(f, "cuBLASLt  {}", self.cublaslt)?;
        match (&self.driver, &self.gpu) {
            // Said already.
            (Finding::Error(driver), Finding::Error(gpu)) if driver == gpu => writeln!(f, "GPU       none")?,
            _ => writeln!(f, "GPU       {}", self.gpu)?,
        }
        writeln!(f, "CPU       {}", self.cpu)?;
        writeln!(f, "kernels   {}", self.kernel_cache)?;
        writeln!(f, "model     {}", self.model)?;
        if let Some(weights) = &self.weights {
            writeln!(f, "weights   {weights}")?;
        }
        if let Some(conversions) = &self.conversions {
            writeln!(f, "          converted: {conversions}")?;
        }
        if let Some(quantized) = &self.quantized {
            writeln!(f, "          {quantized}")?;
        }
        if let Some(many_rows) = &self.many_rows {
            writeln!(f, "          {many_rows}")?;
        }
        writeln!(f, "KV cache  {}", self.cache_dtype)?;
        match &self.runs_on {
            Some(device) if self.problems.is_empty() => {
                writeln!(f, "\nReady to start: it would run on {device}.")
            }
            _ => {
                writeln!(f, "\nProblems that would stop a start:")?;
                self.problems.iter().try_for_each(|problem| writeln!(f, "  {problem}"))
            }
        }
    }
}

fn path(path: &Option<PathBuf>) -> String {
    path.as_ref().map_or(String::new(), |path| format!(" ({})", path.display()))
}

impl Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA {}{}", self.cuda_version, path(&self.path))?;
        for (ordinal, gpu) in self.devices.iter().enumerate() {
            write!(
                f,
                "\n          {ordinal}: {}, compute capability {}, {} multiprocessors, {:.1} GiB, {} KiB of shared memory",
                gpu.name,
                gpu.compute_capability,
                gpu.multiprocessors,
                gpu.memory_bytes as f64 / GIB,
                gpu.shared_memory_per_block_bytes / 1024
            )?;
        }
        Ok(())
    }
}

impl Display for LibraryFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.version, path(&self.path))
    }
}

impl Display for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; compiles a file for {} in {:.2} s", self.library, self.architecture, self.compile_s)
    }
}

impl Display for OpenGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            free_bytes,
            total_bytes,
            copies,
            small_copies,
            attention_of,
            attention,
            no_warp_groups,
            no_fp8_activations,
        } = self;
        write!(
            f,
            "opens; {:.1} of {:.1} GiB free; copies: host to device {:.1} GB/s, device to host {:.1}, both at once \
             {:.1}, on the device {:.0}",
            *free_bytes as f64 / GIB,
            *total_bytes as f64 / GIB,
            copies.host_to_device,
            copies.device_to_host,
            copies.both_ways,
            copies.on_device
        )?;
        if let Some(small) = small_copies {
            let how = if small.batched { "with one call for many" } else { "one by one" };
            write!(f, "\n          small copies are made {how}")?;
            if let (Some(batched), Some(one_by_one)) = (small.batched_ms, small.one_by_one_ms) {
                write!(f, " (128 of 32 KiB: {batched:.2} ms with one call for many, {one_by_one:.2} ms one by one)")?;
            }
        }
        write!(f, "\n          attention of {attention_of}:")?;
        for kernel in attention {
            let Occupancy { kernel, registers, shared_bytes, blocks_per_multiprocessor: blocks, expected_blocks } =
                kernel;
            write!(
                f,
                "\n            {kernel}: {blocks} of {expected_blocks} thread blocks on a multiprocessor ({registers} \
                 registers, {:.1} KiB)",
                f64::from(*shared_bytes) / 1024.0
            )?;
        }
        if let Some(why) = no_warp_groups {
            write!(f, "\n            prompts are not computed on warp groups: {why}")?;
        }
        if let Some(why) = no_fp8_activations {
            write!(f, "\n          device.fp8_activations cannot be true: {why}")?;
        }
        Ok(())
    }
}

impl Display for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { isa, available, has_slow_dot_products, threads } = self;
        write!(f, "{isa} (has {}), {threads} threads", available.join(", "))?;
        if *has_slow_dot_products {
            write!(
                f,
                "\n          device.isa = auto is avx512-widened: this processor multiplies bfloat16 weights faster in \
                 float32"
            )?;
        }
        Ok(())
    }
}

impl Display for QuantizedFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, bytes, writable, on_gpu } = self;
        match (path, bytes) {
            (Some(path), Some(bytes)) => {
                write!(f, "a start reads {:.1} MiB from {}", *bytes as f64 / MIB, path.display())?;
            }
            (Some(path), None) if *writable => {
                write!(f, "a start quantises the weights and keeps them in {}", path.display())?;
            }
            (Some(path), None) => {
                write!(f, "every start quantises the weights: {} cannot be written", path.display())?;
            }
            (None, _) => {
                f.write_str(
                    "every start quantises the weights: model.quantization_cache is off, or there is no home directory",
                )?;
            }
        }
        if *on_gpu { f.write_str("; a GPU holds them in --dtype") } else { Ok(()) }
    }
}

impl Display for KernelCacheFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { folder, kernels, bytes, writable } = self;
        let mib = *bytes as f64 / MIB;
        write!(f, "{kernels} compiled files, {mib:.1} MiB in {}", folder.display())?;
        if *writable { Ok(()) } else { write!(f, ", which is not writable: every start compiles them again") }
    }
}
