//! The libraries that stand for CUDA's, compiled once, and what they can be told and asked.

use libloading::{Library, Symbol};
use pagetide::backend::cuda::driver::{CopyBatches, DriverOptions, Gpu, NoGpu, find};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Compiles `name.c` into `folder/file`.
pub fn compile(folder: &Path, name: &str, file: &str, flags: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/driver").join(name);
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let mut command = Command::new(compiler);
    command
        .args(["-std=gnu11", "-O1", "-fPIC", "-shared", "-Wall", "-Wno-unused-function"])
        .arg(format!("-Wl,-soname,{file}"))
        .args(flags);
    // Renamed when it is whole: another run may have the last one open.
    let unfinished = folder.join(format!("{file}.{}", std::process::id()));
    command.arg("-o").arg(&unfinished).arg(source);
    if file.starts_with("libcublasLt") {
        command.arg(folder.join("libcuda.so.1"));
    }
    let output = command.output().expect("there is a C compiler");
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(unfinished, folder.join(file)).unwrap();
}

/// All three.
pub fn compile_all(folder: &Path) {
    compile(folder, "libcuda.c", "libcuda.so.1", &[]);
    compile(folder, "libnvrtc.c", "libnvrtc.so.13", &[]);
    compile(folder, "libcublasLt.c", "libcublasLt.so.13", &[]);
}

/// The libraries in this process; one test at a time.
pub struct Fake {
    folder: PathBuf,
    cuda: Library,
    cublaslt: Library,
    _one_at_a_time: MutexGuard<'static, ()>,
}

impl Fake {
    /// `None`, and says so, on a machine that has CUDA's own libraries: these would be taken.
    pub fn lock() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        static FOLDER: OnceLock<PathBuf> = OnceLock::new();
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = FOLDER.get_or_init(|| {
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-cuda");
            std::fs::create_dir_all(&folder).unwrap();
            compile_all(&folder);
            folder
        });
        // SAFETY: the initializers of these libraries do nothing. The driver is open when cuBLASLt looks for it.
        let open = |name| unsafe { Library::new(folder.join(name)) }.expect("it was just compiled");
        let cuda = open("libcuda.so.1");
        let cublaslt = open("libcublasLt.so.13");
        let fake = Self { folder: folder.clone(), cuda, cublaslt, _one_at_a_time: alone };
        match fake.find(false) {
            Err(why) if why.to_string().contains("the system's loader takes") => {
                println!("skipped: {why}");
                None
            }
            _ => {
                fake.fail("", 0);
                fake.hold(false);
                fake.copy_times(0.01, 0.1);
                fake.backwards_from(0);
                fake.blocks(-1);
                Some(fake)
            }
        }
    }

    pub fn find(&self, batch_invariant: bool) -> Result<Gpu, NoGpu> {
        find(&DriverOptions { batch_invariant, ..self.options() })
    }

    pub fn options(&self) -> DriverOptions {
        let path = |path: PathBuf| path.to_str().expect("UTF-8").to_owned();
        DriverOptions {
            cuda_library_path: vec![path(self.folder.clone())],
            kernel_cache: Some(path(self.folder.join("kernels"))),
            batch_invariant: false,
            copy_batches: CopyBatches::Auto,
        }
    }

    /// Milliseconds that a copy takes, and a call for many.
    pub fn copy_times(&self, copy: f64, batch: f64) {
        // SAFETY: the function is of this type.
        unsafe {
            let times: Symbol<'_, unsafe extern "C" fn(f64, f64)> = self.cuda.get("fake_copy_times").unwrap();
            times(copy, batch);
        }
    }

    /// The next call of a function of the driver answers `error`.
    pub fn fail(&self, function: &str, error: c_int) {
        let function = CString::new(function).unwrap();
        // SAFETY: the function is of this type, and copies the name.
        unsafe {
            let fail: Symbol<'_, unsafe extern "C" fn(*const c_char, c_int)> = self.cuda.get("fake_fail").unwrap();
            fail(function.as_ptr(), error);
        }
    }

    /// No event is passed until this is taken back.
    pub fn hold(&self, on: bool) {
        // SAFETY: the function is of this type.
        unsafe {
            let hold: Symbol<'_, unsafe extern "C" fn(c_int)> = self.cuda.get("fake_hold").unwrap();
            hold(on as c_int);
        }
    }

    /// Functions of the driver called since the last time, but for the one that every call begins with.
    pub fn calls(&self) -> Vec<String> {
        // SAFETY: the function is of this type; its answer is copied before the next call.
        let text = unsafe {
            let calls: Symbol<'_, unsafe extern "C" fn() -> *const c_char> = self.cuda.get("fake_calls").unwrap();
            CStr::from_ptr(calls()).to_str().unwrap().to_owned()
        };
        text.split_whitespace().map(str::to_owned).collect()
    }

    /// How often the primary context is held, and how often it was reset since the last time.
    pub fn primary(&self) -> (i32, i32) {
        (self.count(&self.cuda, "fake_holders", 0), self.count(&self.cuda, "fake_resets", 0))
    }

    /// Retains the primary context, as CUDA's runtime does within cuBLASLt, or releases it.
    pub fn hold_primary(&self, on: bool) {
        // SAFETY: the functions are of these types.
        let done = unsafe {
            if on {
                let mut context = std::ptr::null_mut::<c_void>();
                let retain: Symbol<'_, unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int> =
                    self.cuda.get("cuDevicePrimaryCtxRetain").unwrap();
                retain(&mut context, 0)
            } else {
                let release: Symbol<'_, unsafe extern "C" fn(c_int) -> c_int> =
                    self.cuda.get("cuDevicePrimaryCtxRelease_v2").unwrap();
                release(0)
            }
        };
        assert_eq!(done, 0);
    }

    /// The carve-out that was set last, in percent.
    pub fn carve_out(&self) -> i32 {
        self.count(&self.cuda, "fake_carve_out", 0)
    }

    /// So many thread blocks of every kernel run on a multiprocessor; -1: as many as follow from its figures.
    pub fn blocks(&self, blocks: i32) {
        self.count(&self.cuda, "fake_blocks", blocks);
    }

    /// Launches since the last time that may start before the kernel before them has ended.
    pub fn early_starts(&self) -> i32 {
        self.count(&self.cuda, "fake_early_starts", 0)
    }

    fn count(&self, library: &Library, function: &str, argument: c_int) -> i32 {
        // SAFETY: the functions that this is called with are of this type, or take no argument.
        unsafe {
            let count: Symbol<'_, unsafe extern "C" fn(c_int) -> c_int> = library.get(function).unwrap();
            count(argument)
        }
    }

    /// Contexts, streams, events, modules, graphs, executable graphs, allocations, pinned allocations; handles and
    /// descriptors of cuBLASLt.
    pub fn alive(&self) -> [i32; 10] {
        std::array::from_fn(|kind| match kind {
            8 => self.count(&self.cublaslt, "fake_handles", 0),
            9 => self.count(&self.cublaslt, "fake_descriptors", 0),
            kind => self.count(&self.cuda, "fake_live", kind as c_int),
        })
    }

    /// From so many rows on, algorithm 0 of cuBLASLt sums in another order. 0: never.
    pub fn backwards_from(&self, rows: i32) {
        self.count(&self.cublaslt, "fake_backwards_from", rows);
    }

    /// Products since the last time, by algorithm.
    pub fn products(&self) -> [i32; 4] {
        std::array::from_fn(|algorithm| self.count(&self.cublaslt, "fake_products", algorithm as c_int))
    }
}
