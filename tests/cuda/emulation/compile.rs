//! Compiles the kernels of `kernels/` to shared libraries for this processor.
//!
//! A library's name contains a hash of everything that it is made from. So the first test that needs a library compiles
//! it, and it is kept for later tests and runs. The runtime that runs thread blocks (`emulation/block.cpp`) is a
//! library of its own, which all others link.

use pagetide::backend::cuda::device::{DeviceError, DeviceResult, ModuleSource};
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Condvar, LazyLock, Mutex};

const FLAGS: &[&str] = &[
    "-std=c++17",
    "-Og",
    "-fPIC",
    "-fno-exceptions",
    "-fno-asynchronous-unwind-tables",
    "-shared",
    "-DCUDA_EMULATION",
    // Kernels read numbers as bytes and bytes as numbers.
    "-fno-strict-aliasing",
    // Products and sums are fused only where a kernel says so.
    "-ffp-contract=off",
];

/// For the repository's files. What is broken on purpose has unused variables.
const WARNINGS: &[&str] = &["-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function"];

/// Conversions of float16 and fused products are instructions of this processor, if it has them. Otherwise each is a
/// call, with the same result.
fn processor_flags() -> &'static [&'static str] {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("f16c") && is_x86_feature_detected!("fma") {
        return &["-mf16c", "-mfma"];
    }
    &[]
}

/// Runs the thread blocks of all kernels.
const RUNTIME: &str = "emulation/block.cpp";

/// The repository's kernels.
pub fn kernels() -> PathBuf {
    crate::support::root().join("kernels")
}

/// True if `scripts/test-kernels-asan.sh` runs the tests: then reads and writes out of bounds end the process.
fn with_address_sanitizer() -> bool {
    std::env::var_os("PAGETIDE_KERNEL_SANITIZER").is_some_and(|value| value == "address")
}

/// The shared library of a module of the kernels in `root`. It is compiled if it does not exist yet.
pub fn library(root: &Path, source: &ModuleSource) -> DeviceResult<PathBuf> {
    let runtime = compile(root, RUNTIME, &[], None)?;
    let defines: Vec<String> = source.defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
    compile(root, source.file, &defines, Some(&runtime))
}

/// Compiles one file to a library that links `linked`.
fn compile(root: &Path, file: &str, defines: &[String], linked: Option<&Path>) -> DeviceResult<PathBuf> {
    let mut flags: Vec<&str> = [FLAGS, processor_flags()].concat();
    if linked.is_none() {
        // It is compiled once, and most of the time is spent in it.
        flags.push("-O2");
    } else {
        // Kernels use only C's headers. The C++ headers of the same names take longer to compile than most kernels. The
        // runtime links the libraries that they need.
        flags.extend(["-nostdinc++", "-nostdlib"]);
    }
    flags.extend(defines.iter().map(String::as_str));
    if with_address_sanitizer() {
        // The sanitizer makes the compiler several times as slow, mostly in optimisation.
        flags.extend(["-fsanitize=address", "-O1"]);
    }
    let path = root.join(file);
    let texts_here = texts(root, file);
    if texts_here == texts(&kernels(), file) {
        flags.extend(WARNINGS);
    }
    let mut hasher = DefaultHasher::new();
    (file, &flags, linked, texts_here).hash(&mut hasher);
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{:016x}.so", hasher.finish()));
    let _compiling = Compiling::begin(&library);
    if library.is_file() {
        return Ok(library);
    }
    // Another process may compile the same library. The last one to finish wins, and all results are equal.
    let unfinished = library.with_extension(format!("{}.tmp", std::process::id()));
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let output = Command::new(&compiler)
        .args(&flags)
        .arg("-o")
        .arg(&unfinished)
        .args(["-x", "c++"])
        .arg(&path)
        .args(["-x", "none"])
        .args(linked)
        .output()
        .map_err(|error| DeviceError::Other(format!("{compiler}: {error}")))?;
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(DeviceError::Compile { file: name, arch: "the emulation".into(), log });
    }
    fs::rename(&unfinished, &library).map_err(|error| DeviceError::Other(error.to_string()))?;
    Ok(library)
}

/// The right to make a library. For each library one thread has it at a time, so that the others find the finished
/// library. At most as many threads as there are processors have it at once: a compiler takes up to a gigabyte, and
/// tests that each run a thread for each processor would otherwise use up the machine's memory.
pub(super) struct Compiling(PathBuf);

static COMPILING: LazyLock<Mutex<HashSet<PathBuf>>> = LazyLock::new(Mutex::default);
static COMPILER_ENDED: Condvar = Condvar::new();

impl Compiling {
    pub(super) fn begin(library: &Path) -> Self {
        let most = std::thread::available_parallelism().map_or(1, usize::from);
        let compiling = COMPILING.lock().expect("nothing panics while it holds this");
        COMPILER_ENDED
            .wait_while(compiling, |running| running.len() >= most || running.contains(library))
            .expect("nothing panics while it holds this")
            .insert(library.into());
        Self(library.into())
    }
}

impl Drop for Compiling {
    fn drop(&mut self) {
        COMPILING.lock().expect("nothing panics while it holds this").remove(&self.0);
        COMPILER_ENDED.notify_all();
    }
}

/// The texts of a file and of all files of ours that it includes, by their paths within `root`.
pub(super) fn texts(root: &Path, file: &str) -> BTreeMap<PathBuf, String> {
    let mut texts = BTreeMap::new();
    let mut to_read = vec![PathBuf::from(file)];
    while let Some(file) = to_read.pop() {
        if texts.contains_key(&file) {
            continue;
        }
        // The compiler will complain about a file that does not exist.
        let Ok(text) = fs::read_to_string(root.join(&file)) else { continue };
        let folder = file.parent().unwrap_or(Path::new(""));
        let included = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.split('"').next());
        to_read.extend(included.map(|path| joined(folder, path)));
        texts.insert(file, text);
    }
    texts
}

/// `folder/path` without `..`.
fn joined(folder: &Path, path: &str) -> PathBuf {
    let mut joined = folder.to_path_buf();
    for part in path.split('/') {
        if part == ".." {
            joined.pop();
        } else {
            joined.push(part);
        }
    }
    joined
}
