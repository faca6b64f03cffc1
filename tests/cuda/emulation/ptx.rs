//! The kernels as executed PTX: NVRTC compiles them, as at a start on a GPU machine, and the interpreter of `tests/ptx`
//! runs what it makes.
//!
//! `PAGETIDE_TEST_NVRTC` names NVRTC's folder. nvcc is in the same pip environment (`scripts/compile-kernels.sh`).

use super::compile::{Compiling, texts};
use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts};
use pagetide::backend::cuda::device::{DeviceError, DeviceInfo, DeviceResult, Grid, ModuleSource};
use pagetide::backend::cuda::driver::{DriverOptions, NEWEST_CUDA, open_nvrtc};
use ptx_interpreter::counters::Counters;
use ptx_interpreter::{GpuOptions, GridLaunch, Module, PtxError, VirtualGpu};
use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Instant;

/// An architecture that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    Sm80,
    Sm90a,
}

impl Architecture {
    pub const ALL: [Self; 2] = [Self::Sm80, Self::Sm90a];

    pub fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "compute_80",
            Self::Sm90a => "compute_90a",
        }
    }

    /// A device of this architecture.
    pub fn device_info(self) -> DeviceInfo {
        let (compute_capability, max_shared_bytes) = match self {
            Self::Sm80 => ((8, 0), 163 << 10),
            Self::Sm90a => ((9, 0), 227 << 10),
        };
        let (name, num_sms, total_memory) = (String::new(), 100, 1 << 36);
        DeviceInfo { name, compute_capability, num_sms, max_shared_bytes, total_memory }
    }
}

/// `PAGETIDE_TEST_DEVICE=ptx-sm_80` or `ptx-sm_90a`: all tests run on executed PTX.
pub fn asked_for() -> Option<Architecture> {
    match std::env::var("PAGETIDE_TEST_DEVICE").as_deref() {
        Ok("ptx-sm_80") => Some(Architecture::Sm80),
        Ok("ptx-sm_90a") => Some(Architecture::Sm90a),
        _ => None,
    }
}

/// nvcc; `None` if `PAGETIDE_TEST_NVRTC` is not set.
pub fn nvcc() -> Option<PathBuf> {
    let folder = PathBuf::from(std::env::var_os("PAGETIDE_TEST_NVRTC")?);
    let nvcc = folder.join("../bin/nvcc");
    assert!(nvcc.is_file(), "PAGETIDE_TEST_NVRTC is set, and there is no {}", nvcc.display());
    Some(nvcc)
}

/// What makes PTX of a kernel.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum PtxCompiler {
    /// The compiler of a start on a GPU machine. It takes less time than nvcc.
    Nvrtc,
    /// Keeps more instructions in the line that they come from.
    Nvcc,
}

/// The PTX of a module of the kernels in `root`. It is compiled if it does not exist yet.
pub fn compiled(
    root: &Path,
    source: &ModuleSource,
    architecture: Architecture,
    compiler: PtxCompiler,
) -> DeviceResult<PathBuf> {
    let defines: Vec<String> = source.defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
    let mut hasher = DefaultHasher::new();
    (source.file, &defines, architecture.name(), compiler, texts(root, source.file)).hash(&mut hasher);
    let name = source.file.trim_end_matches(".cu");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{:016x}.ptx", hasher.finish()));
    let _compiling = Compiling::begin(&path);
    if path.is_file() {
        return Ok(path);
    }
    let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
    let failed = |log| DeviceError::Compile { file: name.into(), arch: architecture.name().into(), log };
    match compiler {
        PtxCompiler::Nvrtc => {
            let ptx = compile_with_nvrtc(root, source.file, defines, architecture)?.map_err(failed)?;
            fs::write(&unfinished, ptx).map_err(|error| DeviceError::Other(error.to_string()))?;
        }
        PtxCompiler::Nvcc => {
            compile_with_nvcc(root, source.file, &defines, architecture, &unfinished)?.map_err(failed)?;
        }
    }
    fs::rename(&unfinished, &path).map_err(|error| DeviceError::Other(error.to_string()))?;
    Ok(path)
}

/// Returns the PTX, or the compiler's messages.
fn compile_with_nvrtc(
    root: &Path,
    file: &str,
    mut options: Vec<String>,
    architecture: Architecture,
) -> DeviceResult<Result<String, String>> {
    static IS_OPEN: LazyLock<Result<(), String>> = LazyLock::new(|| {
        let folder = std::env::var("PAGETIDE_TEST_NVRTC").map_err(|_| "executed PTX needs PAGETIDE_TEST_NVRTC")?;
        let options = DriverOptions { cuda_library_path: vec![folder], ..DriverOptions::default() };
        open_nvrtc(&options, NEWEST_CUDA).map(drop).map_err(|why| why.to_string())
    });
    IS_OPEN.clone().map_err(DeviceError::Other)?;
    let text = fs::read_to_string(root.join(file)).map_err(|error| DeviceError::Other(format!("{file}: {error}")))?;
    options.extend(["--std=c++17".into(), "--generate-line-info".into()]);
    let options = CompileOptions {
        name: Some(file.into()),
        arch: Some(architecture.name()),
        include_paths: vec![root.display().to_string()],
        options,
        ..CompileOptions::default()
    };
    Ok(match compile_ptx_with_opts(text, options) {
        Ok(ptx) => Ok(ptx.to_src()),
        Err(CompileError::CompileError { log, .. }) => Err(log.to_string_lossy().into_owned()),
        Err(other) => Err(format!("{other:?}")),
    })
}

/// Writes the PTX to `to`, or returns the compiler's messages.
fn compile_with_nvcc(
    root: &Path,
    file: &str,
    defines: &[String],
    architecture: Architecture,
    to: &Path,
) -> DeviceResult<Result<(), String>> {
    let nvcc = nvcc().ok_or(DeviceError::Other("executed PTX needs PAGETIDE_TEST_NVRTC".into()))?;
    let output = Command::new(&nvcc)
        // The lines name files as the repository does.
        .current_dir(root)
        .args(["-ptx", "-lineinfo", "-std=c++17", &format!("-arch={}", architecture.name())])
        .args(defines)
        .arg("-o")
        .arg(to)
        .arg(file)
        .output()
        .map_err(|error| DeviceError::Other(format!("{}: {error}", nvcc.display())))?;
    let is_compiled = output.status.success();
    Ok(if is_compiled { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) })
}

/// A decoded module. Tests that run at the same time share it.
pub fn module(
    root: &Path,
    source: &ModuleSource,
    architecture: Architecture,
    compiler: PtxCompiler,
) -> DeviceResult<Arc<Module>> {
    static MODULES: LazyLock<Mutex<HashMap<PathBuf, Arc<Module>>>> = LazyLock::new(Mutex::default);
    let path = compiled(root, source, architecture, compiler)?;
    if let Some(known) = MODULES.lock().expect("nothing panics while it holds this").get(&path) {
        return Ok(known.clone());
    }
    let text = fs::read_to_string(&path).map_err(|error| DeviceError::Other(error.to_string()))?;
    let parsed = Module::parse(&text).map_err(|error| DeviceError::Other(format!("{}: {error}", path.display())))?;
    let parsed = Arc::new(parsed);
    MODULES.lock().expect("nothing panics while it holds this").insert(path, parsed.clone());
    Ok(parsed)
}

/// The interpreter's side of an emulated device.
pub struct Interpreter {
    pub gpu: VirtualGpu,
    pub architecture: Architecture,
    /// The counters of each launch and its time in seconds, if they are asked for.
    pub launches: Option<Vec<(Counters, f64)>>,
}

impl Interpreter {
    pub fn new(architecture: Architecture, options: GpuOptions) -> Self {
        Self { gpu: VirtualGpu::new(options), architecture, launches: None }
    }

    /// Runs a kernel, or compares it with that of another module. What the sanitizer finds is the device's failure.
    pub fn launch(
        &mut self,
        module: &Module,
        other: Option<&Arc<Module>>,
        name: &str,
        grid: Grid,
        params: &[u8],
    ) -> DeviceResult<()> {
        let launch = GridLaunch::new(grid.blocks, [grid.threads, 1, 1], grid.shared_bytes);
        let failed = |error: PtxError| DeviceError::Other(error.to_string());
        if let Some(other) = other {
            let divergence = self.gpu.compare((module, name), (other, name), &launch, params).map_err(failed)?;
            return divergence.map_or(Ok(()), |divergence| Err(DeviceError::Lost(divergence.to_string())));
        }
        let started = Instant::now();
        let report = self.gpu.launch(module, name, &launch, params).map_err(failed)?;
        let failure = report.failure();
        if let Some(launches) = &mut self.launches {
            launches.push((report.counters, started.elapsed().as_secs_f64()));
        }
        failure.map_or(Ok(()), |failure| Err(DeviceError::Lost(failure)))
    }
}
