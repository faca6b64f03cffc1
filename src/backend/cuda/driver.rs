//! A real GPU: [`Device`] over the CUDA driver, cuBLASLt and NVRTC.
//!
//! - `libraries`: finds these libraries; `functions`: the functions of these that are called. Building and starting the
//!   program needs nothing of CUDA.
//! - `context`: a context with its streams and the meaning of its errors; `events`: points of a stream.
//! - `copies`: lists of copies; `timer`: a clock of the device.
//! - `compiler`: kernels, and the cache of compiled kernels; `recording`: graphs; `occupancy`: thread
//!   blocks on a multiprocessor.
//! - `matmul`: products; `cold_weights`: how long they take; `invariance`: those whose rows do not depend on each
//!   other; `descriptors`: cuBLASLt's descriptors; `scratch`: memory for a measurement.
//! - `gpu`: the device itself.
//!
//! [`find`] returns a GPU that can be used, or says why there is none. [`Gpu::open`] opens it, again after a failure.

mod cold_weights;
pub mod compiler;
mod context;
mod copies;
mod descriptors;
mod events;
mod functions;
mod gpu;
mod invariance;
mod invariant_algorithms;
mod libraries;
mod matmul;
mod occupancy;
mod recording;
mod scratch;
mod timer;

use super::device::{Device, DeviceInfo};
pub use copies::CopyBatches;
use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};
use cudarc::{cublaslt, nvrtc};
use functions::{
    CUBLASLT_FUNCTIONS, DRIVER_FUNCTIONS, FIRST_DRIVER_FUNCTIONS, NVRTC_FUNCTIONS, address, cublaslt_release,
    driver_function, has_function,
};
use gpu::{CudaDevice, CudaDeviceOptions};
pub use libraries::NEWEST_CUDA;
use libraries::{Found, Library, LibraryFolders};
use pagetide_base::error::StartError;
use std::ffi::c_void;
use std::path::PathBuf;
use std::rc::Rc;

/// The lowest compute capability that the kernels support.
pub const MIN_COMPUTE_CAPABILITY: (u32, u32) = (8, 0);

/// Where a GPU's libraries are searched, and how the GPU is used.
#[derive(Clone, Debug, PartialEq)]
pub struct DriverOptions {
    /// Folders of CUDA's libraries, in addition to those that the system knows.
    pub cuda_library_path: Vec<String>,
    /// The folder of compiled kernels. `None`: where the user's programs keep such files.
    pub kernel_cache: Option<String>,
    /// A matrix product's rows do not depend on how many rows there are.
    pub batch_invariant: bool,
    pub copy_batches: CopyBatches,
}

impl Default for DriverOptions {
    fn default() -> Self {
        Self {
            cuda_library_path: Vec::new(),
            kernel_cache: None,
            batch_invariant: false,
            copy_batches: CopyBatches::Auto,
        }
    }
}

/// Why no GPU can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NoGpu(String);

impl From<NoGpu> for StartError {
    fn from(NoGpu(why): NoGpu) -> Self {
        Self::new(format!("no GPU can be used: {why} (--device cpu runs without one; 'pagetide doctor' says more)"))
    }
}

/// What the driver reports.
#[derive(Clone, Debug, PartialEq)]
pub struct DriverSummary {
    /// `libcuda.so.1`, as far as known.
    pub library: Option<PathBuf>,
    /// The release of CUDA that it supports: `(13, 0)`.
    pub cuda_version: (u32, u32),
    /// In the order of CUDA's ordinals.
    pub devices: Vec<DeviceInfo>,
}

/// A library that the backend needs besides the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibrarySummary {
    pub path: Option<PathBuf>,
    /// `13.0`, `13.0.2`
    pub version: String,
}

/// A GPU that can be opened.
#[derive(Clone, Debug)]
pub struct Gpu {
    pub driver: DriverSummary,
    pub nvrtc: LibrarySummary,
    pub cublaslt: LibrarySummary,
    options: CudaDeviceOptions,
}

impl Gpu {
    pub fn info(&self) -> &DeviceInfo {
        &self.driver.devices[self.options.ordinal as usize]
    }

    /// Opens the GPU: its primary context. It may be opened again after the device was lost and dropped. The driver
    /// may refuse that until the process is restarted; the error says so.
    pub fn open(&self) -> Result<Rc<dyn Device>, StartError> {
        let open = || CudaDevice::new(&self.options, self.info().clone());
        match catch_panics(|| Ok(open())) {
            Ok(Ok(device)) => Ok(Rc::new(device)),
            Ok(Err(error)) => Err(StartError::new(format!(
                "the GPU ({}) cannot be opened: {error}; is another program using all of it, or does this one have to \
                 be started again?",
                self.info().name
            ))),
            Err(error) => Err(error.into()),
        }
    }

    /// [`Gpu::open`] as a function, to be called on the thread that will use the device.
    pub fn opener(self) -> Box<dyn Fn() -> Result<Rc<dyn Device>, StartError>> {
        Box::new(move || self.open())
    }
}

/// Asks the driver for its version and its devices. A driver without devices is an error too.
pub fn probe(settings: &DriverOptions) -> Result<DriverSummary, NoGpu> {
    catch_panics(|| {
        let places = LibraryFolders::new(&settings.cuda_library_path);
        let opened = places.open(Library::Cuda, 0).map_err(|missing| NoGpu(missing.to_string()))?;
        // SAFETY: opening a library by name, as above.
        if !unsafe { sys::is_culib_present() } {
            return Err(NoGpu(format!("{opened:?} is open, but is no libcuda.so.1")));
        }
        let library = path_of(&opened, driver_function("cuInit"))?;
        require("the NVIDIA driver", FIRST_DRIVER_FUNCTIONS, has_function)?;
        // SAFETY: no preconditions.
        match unsafe { sys::cuInit(0) } {
            CUresult::CUDA_SUCCESS => {}
            error => return Err(NoGpu(explain_init(error, library.as_deref()))),
        }
        let mut version = 0;
        // SAFETY: the number is ours to write.
        check(unsafe { sys::cuDriverGetVersion(&mut version) }, "cuDriverGetVersion")?;
        let cuda_version = (version as u32 / 1000, version as u32 % 1000 / 10);
        let mut num_devices = 0;
        // SAFETY: as above.
        check(unsafe { sys::cuDeviceGetCount(&mut num_devices) }, "cuDeviceGetCount")?;
        if num_devices <= 0 {
            return Err(NoGpu(explain_init(CUresult::CUDA_ERROR_NO_DEVICE, library.as_deref())));
        }
        let (major, minor) = cuda_version;
        require(
            &format!(
                "the NVIDIA driver (CUDA {major}.{minor}) is too old; CUDA 12.8 (release 570) or newer is needed: it"
            ),
            DRIVER_FUNCTIONS,
            has_function,
        )?;
        let devices = (0..num_devices).map(device_info).collect::<Result<_, _>>()?;
        Ok(DriverSummary { library, cuda_version, devices })
    })
}

/// Finds a GPU that can be used: driver, device and libraries.
pub fn find(settings: &DriverOptions) -> Result<Gpu, NoGpu> {
    let driver = probe(settings)?;
    let able = driver.devices.iter().position(|device| device.compute_capability >= MIN_COMPUTE_CAPABILITY);
    let Some(ordinal) = able else {
        let devices: Vec<String> = driver
            .devices
            .iter()
            .map(|device| format!("{}: {}.{}", device.name, device.compute_capability.0, device.compute_capability.1))
            .collect();
        let (major, minor) = MIN_COMPUTE_CAPABILITY;
        return Err(NoGpu(format!(
            "compute capability {major}.{minor} or newer is needed (Ampere, Hopper and later): {}",
            devices.join(", ")
        )));
    };
    // NVRTC first: cuBLASLt may need it, and finds it by its name once it is open.
    let nvrtc = open_nvrtc(settings, driver.cuda_version.0)?;
    let cublaslt = open_cublaslt(settings, driver.cuda_version.0)?;
    let options = CudaDeviceOptions {
        ordinal: ordinal as u32,
        kernel_cache: compiler::cache_folder(settings.kernel_cache.as_deref()),
        batch_invariant: settings.batch_invariant,
        copy_batches: settings.copy_batches,
    };
    Ok(Gpu { driver, nvrtc, cublaslt, options })
}

/// Opens an NVRTC whose code a driver of CUDA `driver_major` can run. No driver is needed.
pub fn open_nvrtc(settings: &DriverOptions, driver_major: u32) -> Result<LibrarySummary, NoGpu> {
    catch_panics(|| {
        let opened = open(settings, Library::Nvrtc, driver_major)?;
        // SAFETY: opening a library by name.
        if !unsafe { nvrtc::sys::is_culib_present() } {
            return Err(NoGpu(format!("{opened:?} is open, but is no libnvrtc")));
        }
        // SAFETY: the library is never closed.
        let function = |name: &str| unsafe { address(nvrtc::sys::culib().get::<*const c_void>(name)) };
        require("NVRTC", NVRTC_FUNCTIONS, |name| function(name).is_some())?;
        let path = path_of(&opened, function("nvrtcVersion"))?;
        let (major, minor) = compiler::nvrtc_version().map_err(|error| NoGpu(error.to_string()))?;
        check_release("NVRTC", major as u32, driver_major, path.as_deref())?;
        Ok(LibrarySummary { path, version: format!("{major}.{minor}") })
    })
}

/// Opens cuBLASLt in the same way.
pub fn open_cublaslt(settings: &DriverOptions, driver_major: u32) -> Result<LibrarySummary, NoGpu> {
    catch_panics(|| {
        let opened = open(settings, Library::CublasLt, driver_major)?;
        // SAFETY: opening a library by name.
        if !unsafe { cublaslt::sys::is_culib_present() } {
            return Err(NoGpu(format!("{opened:?} is open, but is no libcublasLt")));
        }
        // SAFETY: the library is never closed.
        let function = |name: &str| unsafe { address(cublaslt::sys::culib().get::<*const c_void>(name)) };
        require("cuBLASLt", CUBLASLT_FUNCTIONS, |name| function(name).is_some())?;
        let path = path_of(&opened, function("cublasLtGetVersion"))?;
        let [major, minor, patch] = cublaslt_release();
        check_release("cuBLASLt", major as u32, driver_major, path.as_deref())?;
        Ok(LibrarySummary { path, version: format!("{major}.{minor}.{patch}") })
    })
}

fn open(settings: &DriverOptions, library: Library, driver_major: u32) -> Result<Found, NoGpu> {
    let opened = LibraryFolders::new(&settings.cuda_library_path).open(library, driver_major);
    opened.map_err(|missing| NoGpu(missing.to_string()))
}

/// Checks the library's release: the loader may have another release under the name that was tried first.
fn check_release(name: &str, major: u32, driver_major: u32, path: Option<&std::path::Path>) -> Result<(), NoGpu> {
    if major <= driver_major {
        return Ok(());
    }
    let path = path.map_or(String::new(), |path| format!(" ({})", path.display()));
    Err(NoGpu(format!("{name} {major}{path} is newer than the driver, which runs CUDA {driver_major}")))
}

/// The file that a library was loaded from. If we opened it by its path and another file is loaded under the same name,
/// that is an error, because cudarc would use the other file.
fn path_of(opened: &Found, function: Option<*const c_void>) -> Result<Option<PathBuf>, NoGpu> {
    let loaded = function.and_then(libraries::file_of);
    let real = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
    match (&opened.path, &loaded) {
        (Some(ours), Some(other)) if real(ours) != real(other) => Err(NoGpu(format!(
            "{} was found, but the system's loader takes {} instead: add the former's folder to LD_LIBRARY_PATH, or \
             remove the latter",
            ours.display(),
            other.display()
        ))),
        _ => Ok(loaded.or_else(|| opened.path.clone())),
    }
}

fn require(who: &str, names: &[&str], has: impl Fn(&str) -> bool) -> Result<(), NoGpu> {
    match names.iter().find(|name| !has(name)) {
        None => Ok(()),
        Some(name) => Err(NoGpu(format!("{who} lacks the function {name}"))),
    }
}

fn check(result: CUresult, call: &str) -> Result<(), NoGpu> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(NoGpu(format!("{call}: {result:?}"))) }
}

fn explain_init(error: CUresult, library: Option<&std::path::Path>) -> String {
    let why = match error {
        CUresult::CUDA_ERROR_NO_DEVICE => "the NVIDIA driver sees no GPU (is it hidden by CUDA_VISIBLE_DEVICES?)",
        CUresult::CUDA_ERROR_STUB_LIBRARY => "the libcuda.so.1 found is the toolkit's stub, not the driver's",
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "libcuda.so.1 and the kernel's NVIDIA module are of different releases (restart the machine)"
        }
        _ => "the NVIDIA driver cannot start",
    };
    let library = library.map_or(String::new(), |path| format!(", {}", path.display()));
    format!("{why}: {error:?}{library}")
}

fn device_info(ordinal: i32) -> Result<DeviceInfo, NoGpu> {
    use CUdevice_attribute::*;
    let mut device = 0;
    // SAFETY: the number is ours to write.
    check(unsafe { sys::cuDeviceGet(&mut device, ordinal) }, "cuDeviceGet")?;
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: as above.
        check(unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) }, "cuDeviceGetAttribute")?;
        Ok(value.max(0) as u32)
    };
    let mut name = [0u8; 256];
    // SAFETY: the buffer has the given length.
    let named = unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device) };
    check(named, "cuDeviceGetName")?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let mut total_memory = 0;
    // SAFETY: the number is ours to write.
    check(unsafe { sys::cuDeviceTotalMem_v2(&mut total_memory, device) }, "cuDeviceTotalMem")?;
    Ok(DeviceInfo {
        name: String::from_utf8_lossy(name).into_owned(),
        compute_capability: (
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        num_sms: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        max_shared_bytes: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        total_memory,
    })
}

/// cudarc panics if a library or a function is missing. All functions that are called are looked up first. If one was
/// forgotten, the panic becomes an error, and the program still starts on the CPU.
fn catch_panics<T>(run: impl FnOnce() -> Result<T, NoGpu>) -> Result<T, NoGpu> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(NoGpu(format!("CUDA's libraries do not fit: {}", text.unwrap_or("a panic"))))
    })
}

#[cfg(test)]
mod tests {
    use super::functions::COPY_BATCH_FUNCTION;
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    /// Functions of `sys` modules that this module and its parts call.
    fn called_functions() -> BTreeSet<String> {
        let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/driver.rs");
        let folder = std::fs::read_dir(module.with_extension("")).unwrap();
        let mut called = BTreeSet::new();
        for file in folder.map(|entry| entry.unwrap().path()).chain([module]) {
            let text = std::fs::read_to_string(file).unwrap();
            for prefix in ["sys::cu", "sys::nvrtc", "lt::cublasLt"] {
                for (start, _) in text.match_indices(prefix) {
                    let name = text[start..].split("::").nth(1).unwrap();
                    let end = name.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(name.len());
                    if name[end..].starts_with('(') {
                        called.insert(name[..end].to_string());
                    }
                }
            }
        }
        called.remove("culib");
        called
    }

    /// A function that is not looked up would panic when it is called.
    #[test]
    fn every_function_that_is_called_is_looked_up_first() {
        let lists = [DRIVER_FUNCTIONS, &[COPY_BATCH_FUNCTION], NVRTC_FUNCTIONS, CUBLASLT_FUNCTIONS];
        let listed: BTreeSet<String> = lists.iter().flat_map(|list| list.iter().map(|name| name.to_string())).collect();
        assert_eq!(called_functions(), listed);
        assert!(FIRST_DRIVER_FUNCTIONS.iter().all(|name| DRIVER_FUNCTIONS.contains(name)));
    }

    #[test]
    fn a_panic_of_the_bindings_is_an_error() {
        let error = catch_panics::<()>(|| panic!("Missing symbol {}", "cuNothing")).unwrap_err();
        assert_eq!(error.to_string(), "CUDA's libraries do not fit: Missing symbol cuNothing");
        assert!(StartError::from(error).to_string().contains("no GPU can be used"));
    }

    #[test]
    fn a_library_that_the_driver_is_too_old_for_is_named() {
        assert!(check_release("NVRTC", 12, 13, None).is_ok());
        let error = check_release("NVRTC", 13, 12, Some(Path::new("/x/libnvrtc.so"))).unwrap_err().to_string();
        assert_eq!(error, "NVRTC 13 (/x/libnvrtc.so) is newer than the driver, which runs CUDA 12");
    }
}
