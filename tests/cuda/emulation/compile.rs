//! The kernels of `kernels/` as shared libraries for this processor.
//!
//! A library's name holds a hash of all that it is made from, so each is compiled once, by whichever test needs it first,
//! and stays for later runs. What runs thread blocks (`emulation/block.cpp`) is a library of its own that all others link.

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

/// Runs the thread blocks of all kernels.
const RUNTIME: &str = "emulation/block.cpp";

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
    let runtime = compile(root, RUNTIME, &[], None)?;
    let defines: Vec<String> = source.defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
    compile(root, source.file, &defines, Some(&runtime))
}

/// The library of one file, which links `linked`.
fn compile(root: &Path, file: &str, defines: &[String], linked: Option<&Path>) -> DeviceResult<PathBuf> {
    let mut flags: Vec<&str> = FLAGS.to_vec();
    if linked.is_some() {
        // Kernels use C's headers alone, and those of C++ take longer to read than most kernels.
        flags.push("-nostdinc++");
    }
    flags.extend(defines.iter().map(String::as_str));
    if with_address_sanitizer() {
        // The compiler takes several times as long with it, most of that to optimise.
        flags.extend(["-fsanitize=address", "-O1"]);
    }
    let path = root.join(file);
    let mut hasher = DefaultHasher::new();
    (file, &flags, linked, texts(root, file)).hash(&mut hasher);
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{:016x}.so", hasher.finish()));
    let _compiling = Compiling::begin(&library);
    if library.is_file() {
        return Ok(library);
    }
    // Another process may compile the same: the last one to finish wins, and all are equal.
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

/// The right to make a library. One thread at a time has it for each library, and as many threads as there are processors
/// have it together: a compiler takes up to a gigabyte, and tests that each run a thread per processor would start enough
/// of them to use up the machine's memory.
struct Compiling(PathBuf);

static COMPILING: LazyLock<Mutex<HashSet<PathBuf>>> = LazyLock::new(Mutex::default);
static COMPILER_ENDED: Condvar = Condvar::new();

impl Compiling {
    fn begin(library: &Path) -> Self {
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

/// A file and what it includes of ours, by the paths within `root`.
fn texts(root: &Path, file: &str) -> BTreeMap<PathBuf, String> {
    let mut texts = BTreeMap::new();
    let mut to_read = vec![PathBuf::from(file)];
    while let Some(file) = to_read.pop() {
        if texts.contains_key(&file) {
            continue;
        }
        // One that is not there is the compiler's to complain about.
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
