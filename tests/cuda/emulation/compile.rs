//! The kernels of `kernels/` as shared libraries for this processor.

use pagetide::backend::cuda::device::{DeviceError, DeviceResult, ModuleSource};
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Condvar, Mutex};

const FLAGS: &[&str] = &[
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-DCUDA_EMULATION",
    // Kernels look at numbers as bytes and the other way round.
    "-fno-strict-aliasing",
    // A product and a sum are fused where a kernel says so.
    "-ffp-contract=off",
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
];

/// The repository's kernels.
pub fn kernels() -> PathBuf {
    crate::support::root().join("kernels")
}

/// True where `scripts/test-kernels-asan.sh` runs the tests: reads and writes out of bounds end the process.
fn with_address_sanitizer() -> bool {
    std::env::var_os("PAGETIDE_KERNEL_SANITIZER").is_some_and(|value| value == "address")
}

/// The shared library of a module of the kernels in `root`, compiled unless an earlier run has done it.
pub fn library(root: &Path, source: &ModuleSource) -> DeviceResult<PathBuf> {
    let file = root.join(source.file);
    let mut flags: Vec<String> = FLAGS.iter().map(|flag| flag.to_string()).collect();
    flags.extend(source.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    if with_address_sanitizer() {
        // The compiler takes several times as long with it, most of that to optimise.
        flags.extend(["-fsanitize=address".into(), "-O1".into()]);
    }
    let mut hasher = DefaultHasher::new();
    (source.file, fs::read(&file).ok(), &flags, all_headers(root)).hash(&mut hasher);
    let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{:016x}.so", hasher.finish()));
    if library.is_file() {
        return Ok(library);
    }
    let _compiling = Compiling::begin();
    if library.is_file() {
        // Another test has compiled it meanwhile.
        return Ok(library);
    }
    // Several tests may still compile the same: the last one to finish wins, and all are equal.
    let unfinished = library.with_extension(format!("{}.{:?}", std::process::id(), std::thread::current().id()));
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let output = Command::new(&compiler)
        .args(&flags)
        .args(["-x", "c++", "-o"])
        .arg(&unfinished)
        .arg(&file)
        .output()
        .map_err(|error| DeviceError::Other(format!("{compiler}: {error}")))?;
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(DeviceError::Compile { file: name, arch: "the emulation".into(), log });
    }
    fs::rename(&unfinished, &library).map_err(|error| DeviceError::Other(error.to_string()))?;
    Ok(library)
}

/// The right to run a compiler: as many as there are processors have it at a time. One takes up to a gigabyte, and
/// tests that each run a thread per processor would start enough of them to use up the machine's memory.
struct Compiling;

static COMPILERS: Mutex<usize> = Mutex::new(0);
static COMPILER_ENDED: Condvar = Condvar::new();

impl Compiling {
    fn begin() -> Self {
        let most = std::thread::available_parallelism().map_or(1, usize::from);
        let compilers = COMPILERS.lock().expect("nothing panics while it holds this");
        *COMPILER_ENDED
            .wait_while(compilers, |running| *running >= most)
            .expect("nothing panics while it holds this") += 1;
        Self
    }
}

impl Drop for Compiling {
    fn drop(&mut self) {
        *COMPILERS.lock().expect("nothing panics while it holds this") -= 1;
        COMPILER_ENDED.notify_one();
    }
}

/// What every module may include.
fn all_headers(root: &Path) -> Vec<Vec<u8>> {
    let mut files: Vec<PathBuf> = ["include", "emulation"]
        .iter()
        .flat_map(|folder| fs::read_dir(root.join(folder)).expect("kernels have this folder"))
        .map(|entry| entry.expect("a folder's entry").path())
        .collect();
    files.sort();
    files.iter().map(|file| fs::read(file).expect("a header")).collect()
}
