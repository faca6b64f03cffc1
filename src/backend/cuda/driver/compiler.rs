//! Compiles the kernels, whose sources are part of the program, with NVRTC.
//!
//! Compiled kernels are kept in files that are named by a hash of everything that goes into them, so that a second
//! start with the same model and configuration compiles nothing.

use super::super::device::{DeviceError, DeviceResult, ModuleSource};
use cudarc::nvrtc::sys;
use pagetide_base::folders::user_cache;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// `(path below kernels/, text)` of every listed file.
macro_rules! files {
    ($($path:literal),+ $(,)?) => {
        &[$(($path, include_str!(concat!("../../../../kernels/", $path)))),+]
    };
}

/// The modules.
const SOURCES: &[(&str, &str)] = files![
    "attention.cu",
    "attention_hopper.cu",
    "attention_rows.cu",
    "experts.cu",
    "experts_hopper.cu",
    "few_rows.cu",
    "few_rows_qkv.cu",
    "fp8.cu",
    "heads.cu",
    "quantized.cu",
    "rows.cu",
    "sampling.cu",
    "transfers.cu"
];

/// The headers that they include.
const HEADERS: &[(&str, &str)] = files![
    "include/activation.cuh",
    "include/attention.cuh",
    "include/attention_merge.cuh",
    "include/batch.cuh",
    "include/experts.cuh",
    "include/few_rows.cuh",
    "include/heads.cuh",
    "include/kv_cache.cuh",
    "include/kv_codes.cuh",
    "include/logits_row.cuh",
    "include/lookup.cuh",
    "include/ptx.cuh",
    "include/ptx_hopper.cuh",
    "include/quantized.cuh",
    "include/reduce.cuh",
    "include/sampling.cuh",
    "include/swizzle.cuh",
    "include/types.cuh",
    "include/warp_groups.cuh",
];

/// Machine code of a module, and NVRTC's messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    pub bytes: Vec<u8>,
    /// Warnings; usually empty.
    pub log: String,
}

/// NVRTC's name of a device's architecture, in the form that allows architecture-specific instructions.
pub fn architecture(compute_capability: (u32, u32)) -> String {
    let (major, minor) = compute_capability;
    let specific = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{specific}")
}

/// The release of the open NVRTC.
pub fn nvrtc_version() -> DeviceResult<(i32, i32)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are ours to write.
    check(unsafe { sys::nvrtcVersion(&mut major, &mut minor) }, "nvrtcVersion")?;
    Ok((major, minor))
}

/// Architectures that NVRTC compiles for: 90 is sm_90 and sm_90a.
fn supported_architectures() -> DeviceResult<Vec<i32>> {
    let mut len = 0;
    // SAFETY: `len` is ours to write.
    check(unsafe { sys::nvrtcGetNumSupportedArchs(&mut len) }, "nvrtcGetNumSupportedArchs")?;
    let mut supported = vec![0; len.max(0) as usize];
    // SAFETY: the buffer is as long as NVRTC said.
    check(unsafe { sys::nvrtcGetSupportedArchs(supported.as_mut_ptr()) }, "nvrtcGetSupportedArchs")?;
    Ok(supported)
}

/// Compiles a module for `arch` (`sm_90a`). NVRTC must be open; no driver and no GPU is needed.
pub fn compile(source: &ModuleSource, arch: &str) -> DeviceResult<Cubin> {
    let text = text_of(source)?;
    let number = arch.trim_start_matches("sm_").trim_end_matches('a').parse().unwrap_or(0);
    let supported = supported_architectures()?;
    if !supported.contains(&number) {
        let (major, minor) = nvrtc_version()?;
        let log = format!("NVRTC {major}.{minor} compiles for {supported:?}; a newer one may compile for {number}");
        return Err(DeviceError::Compile { file: source.file.into(), arch: arch.into(), log });
    }
    Program::new(source.file, &text)?.compile(source, arch)
}

/// A module's text with all its headers inserted, so that NVRTC does not look for files.
fn text_of(source: &ModuleSource) -> DeviceResult<String> {
    let Some((path, text)) = SOURCES.iter().find(|(path, _)| *path == source.file) else {
        return Err(DeviceError::Other(format!("there is no kernel file {}", source.file)));
    };
    let mut expanded = String::new();
    expand(path, text, &mut Vec::new(), &mut expanded);
    Ok(expanded)
}

/// Appends `text` to `to`, and inserts each of our headers where it is first included. Other includes (the emulation's)
/// stay, but are in no active branch. Our headers are never included conditionally.
fn expand(path: &str, text: &str, seen: &mut Vec<&'static str>, to: &mut String) {
    to.push_str(&format!("#line 1 \"{path}\"\n"));
    for (number, line) in (1..).zip(text.lines()) {
        let header = line.trim().strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')).and_then(|name| {
            let name = name.strip_prefix("include/").unwrap_or(name);
            HEADERS.iter().find(|(header, _)| header.strip_prefix("include/") == Some(name))
        });
        match header {
            Some((name, _)) if seen.contains(name) => to.push('\n'),
            Some((name, text)) => {
                seen.push(name);
                expand(name, text, seen, to);
                to.push_str(&format!("#line {} \"{path}\"\n", number + 1));
            }
            // All text is now in one file.
            None if line.trim() == "#pragma once" => to.push('\n'),
            None => {
                to.push_str(line);
                to.push('\n');
            }
        }
    }
}

fn options(source: &ModuleSource, arch: &str) -> Vec<String> {
    let defines = source.defines.iter().map(|(name, value)| format!("--define-macro={name}={value}"));
    // Line numbers for profilers and compute-sanitizer. They do not affect the code.
    let mut options: Vec<String> =
        vec![format!("--gpu-architecture={arch}"), "--std=c++17".into(), "--generate-line-info".into()];
    options.extend(defines);
    options
}

/// A program object of NVRTC.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(name: &str, text: &str) -> DeviceResult<Self> {
        let name = c_string(name)?;
        let text = c_string(text)?;
        let mut program = std::ptr::null_mut();
        let (headers, names) = (std::ptr::null(), std::ptr::null());
        // SAFETY: both strings end with a zero and live until the call returns. NVRTC copies them.
        let created = unsafe { sys::nvrtcCreateProgram(&mut program, text.as_ptr(), name.as_ptr(), 0, headers, names) };
        check(created, "nvrtcCreateProgram")?;
        Ok(Self(program))
    }

    fn compile(&self, source: &ModuleSource, arch: &str) -> DeviceResult<Cubin> {
        let options = options(source, arch).iter().map(|option| c_string(option)).collect::<DeviceResult<Vec<_>>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the options end with a zero and live until the call returns.
        let compiled = unsafe { sys::nvrtcCompileProgram(self.0, pointers.len() as i32, pointers.as_ptr()) };
        let log = self.log();
        if compiled != sys::nvrtcResult::NVRTC_SUCCESS {
            let log = if log.is_empty() { format!("{compiled:?}") } else { log };
            return Err(DeviceError::Compile { file: source.file.into(), arch: arch.into(), log });
        }
        let mut len = 0;
        // SAFETY: the program has been compiled, and `len` is ours to write.
        check(unsafe { sys::nvrtcGetCUBINSize(self.0, &mut len) }, "nvrtcGetCUBINSize")?;
        let mut bytes = vec![0u8; len];
        // SAFETY: the buffer is as long as NVRTC said.
        check(unsafe { sys::nvrtcGetCUBIN(self.0, bytes.as_mut_ptr().cast()) }, "nvrtcGetCUBIN")?;
        if bytes.is_empty() {
            return Err(DeviceError::Other(format!("NVRTC returned no code of {} for {arch}", source.file)));
        }
        Ok(Cubin { bytes, log })
    }

    /// NVRTC's errors and warnings.
    fn log(&self) -> String {
        let mut len = 0;
        // SAFETY: the program exists, and `len` is ours to write.
        let sized = unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut len) };
        if sized != sys::nvrtcResult::NVRTC_SUCCESS || len == 0 {
            return String::new();
        }
        let mut bytes = vec![0u8; len];
        // SAFETY: the buffer is as long as NVRTC said.
        if unsafe { sys::nvrtcGetProgramLog(self.0, bytes.as_mut_ptr().cast()) } != sys::nvrtcResult::NVRTC_SUCCESS {
            return String::new();
        }
        let text = CStr::from_bytes_until_nul(&bytes).map(CStr::to_bytes).unwrap_or(&bytes);
        String::from_utf8_lossy(text).trim().to_string()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: it was created and is destroyed once.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn check(result: sys::nvrtcResult, call: &str) -> DeviceResult<()> {
    match result {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => Err(DeviceError::Other(format!("{call}: {other:?}"))),
    }
}

fn c_string(text: &str) -> DeviceResult<CString> {
    CString::new(text).map_err(|_| DeviceError::Other("a zero byte in a kernel's source or options".into()))
}

/// Compiled kernels on disk.
pub struct KernelCache {
    /// `None`: compiled kernels are not kept.
    folder: Option<PathBuf>,
    /// Whether it was reported that the folder cannot be written.
    warned: Cell<bool>,
}

/// `device.kernel_cache`, or the user's usual cache folder.
pub fn cache_folder(configured: Option<&str>) -> Option<PathBuf> {
    configured.map(PathBuf::from).or_else(|| user_cache("kernels"))
}

impl KernelCache {
    pub fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, warned: Cell::new(false) }
    }

    /// Machine code of all `sources`. Those that are not in the cache are compiled, all at the same time.
    pub fn load(&self, sources: &[ModuleSource], arch: &str) -> DeviceResult<Vec<Vec<u8>>> {
        let version = nvrtc_version()?;
        let mut paths = Vec::with_capacity(sources.len());
        for source in sources {
            let name = cache_file_name(source, arch, version)?;
            paths.push(self.folder.as_ref().map(|folder| folder.join(name)));
        }
        let mut kept: Vec<Option<Vec<u8>>> = paths.iter().map(|path| read(path.as_deref()?)).collect();
        let compiled: Vec<Option<DeviceResult<Cubin>>> = std::thread::scope(|scope| {
            let start = |(source, kept): (_, &Option<Vec<u8>>)| {
                kept.is_none().then(|| scope.spawn(move || compile(source, arch)))
            };
            let threads: Vec<_> = sources.iter().zip(&kept).map(start).collect();
            let panicked = |_| Err(DeviceError::Other("the compiler of kernels panicked".into()));
            threads.into_iter().map(|thread| Some(thread?.join().unwrap_or_else(panicked))).collect()
        });
        for ((cubin, kept), path) in compiled.into_iter().zip(&mut kept).zip(paths) {
            let Some(cubin) = cubin else { continue };
            let bytes = cubin?.bytes;
            if let Some(path) = path {
                self.keep(&path, &bytes);
            }
            *kept = Some(bytes);
        }
        Ok(kept.into_iter().flatten().collect())
    }

    /// Writes a temporary file and renames it, so that no other process reads half a file. If that fails, the kernel is
    /// compiled again next time.
    fn keep(&self, path: &Path, bytes: &[u8]) {
        let write = || -> std::io::Result<()> {
            let folder = path.parent().expect("it was joined to its folder");
            std::fs::create_dir_all(folder)?;
            // Another thread or process may be writing the same kernel.
            static WRITES: AtomicU64 = AtomicU64::new(0);
            let write = WRITES.fetch_add(1, Ordering::Relaxed);
            let unfinished = path.with_extension(format!("{}-{write}.tmp", std::process::id()));
            let mut file = std::fs::File::create(&unfinished)?;
            let written = file
                .write_all(blake3::hash(bytes).as_bytes())
                .and_then(|()| file.write_all(bytes))
                .and_then(|()| std::fs::rename(&unfinished, path));
            if written.is_err() {
                let _ = std::fs::remove_file(&unfinished);
            }
            written
        };
        if let Err(error) = write()
            && !self.warned.replace(true)
        {
            tracing::warn!(
                "compiled kernels cannot be kept in {} ({error}): every start compiles them again; see \
                 device.kernel_cache",
                path.display()
            );
        }
    }
}

/// The cubin of a cache file. `None` if there is no file or it is damaged.
fn read(path: &Path) -> Option<Vec<u8>> {
    let file = std::fs::read(path).ok()?;
    let (hash, bytes) = file.split_at_checked(blake3::OUT_LEN)?;
    (blake3::hash(bytes).as_bytes() == hash).then(|| bytes.to_vec())
}

/// The name of a file for the machine code of a module: a hash of everything that it depends on, with `nvrtc` the
/// version of the compiler. Fails if there is no such module.
pub fn cache_file_name(source: &ModuleSource, arch: &str, nvrtc: (i32, i32)) -> DeviceResult<String> {
    let mut hasher = blake3::Hasher::new();
    let mut add = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    add(&text_of(source)?);
    for option in options(source, arch) {
        add(&option);
    }
    add(&format!("{nvrtc:?}"));
    let stem = source.file.trim_end_matches(".cu");
    Ok(format!("{stem}-{arch}-{}.cubin", &hasher.finalize().to_hex()[..32]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_file_is_part_of_the_program() {
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
        let on_disk = |folder: &str, extension: &str| {
            let mut names: Vec<String> = std::fs::read_dir(kernels.join(folder))
                .expect("the folder is there")
                .map(|entry| format!("{folder}{}", entry.expect("a folder's entry").file_name().to_string_lossy()))
                .filter(|name| name.ends_with(extension))
                .collect();
            names.sort();
            names
        };
        let embedded = |files: &[(&str, &str)]| files.iter().map(|(path, _)| path.to_string()).collect::<Vec<_>>();
        assert_eq!(embedded(SOURCES), on_disk("", ".cu"));
        assert_eq!(embedded(HEADERS), on_disk("include/", ".cuh"));
    }

    #[test]
    fn a_module_holds_each_of_its_headers_once_and_no_other() {
        for (file, _) in SOURCES {
            let text = text_of(&ModuleSource { file, defines: Vec::new() }).unwrap();
            assert!(text.starts_with(&format!("#line 1 \"{file}\"\n")));
            for line in text.lines().filter(|line| line.starts_with("#include \"")) {
                assert!(line.contains("../emulation/"), "{file}: {line}");
            }
            for (header, _) in HEADERS {
                let times = text.matches(&format!("#line 1 \"{header}\"")).count();
                assert!(
                    times <= 1 && (times == 1 || *header != "include/types.cuh"),
                    "{file} has {header} {times} times"
                );
            }
        }
    }

    /// The text of a header is put in place of its first `#include`. If that were left out, so would the header.
    #[test]
    fn no_header_is_included_under_a_condition() {
        for (file, text) in SOURCES.iter().chain(HEADERS) {
            let mut depth = 0;
            for line in text.lines() {
                depth += i32::from(line.starts_with("#if")) - i32::from(line.starts_with("#endif"));
                let is_emulation = line.contains("emulation/");
                assert!(depth == 0 || is_emulation || !line.starts_with("#include \""), "{file}: {line}");
            }
            assert_eq!(depth, 0, "{file}");
        }
    }

    #[test]
    fn lines_keep_their_numbers() {
        let mut text = String::new();
        expand("a.cu", "one\n#include \"include/reduce.cuh\"\nthree\n", &mut vec!["include/types.cuh"], &mut text);
        assert!(text.starts_with("#line 1 \"a.cu\"\none\n#line 1 \"include/reduce.cuh\"\n"), "{text}");
        assert!(text.ends_with("#line 3 \"a.cu\"\nthree\n"), "{text}");
    }

    fn heads(head_dim: usize) -> ModuleSource {
        ModuleSource { file: "heads.cu", defines: vec![("HEAD_DIM", head_dim.to_string())] }
    }

    #[test]
    fn a_cache_file_is_named_by_all_that_it_depends_on() {
        let name = |head_dim, arch, nvrtc| cache_file_name(&heads(head_dim), arch, nvrtc).unwrap();
        let first = name(64, "sm_80", (13, 0));
        assert_eq!(first, name(64, "sm_80", (13, 0)));
        assert!(first.starts_with("heads-sm_80-") && first.ends_with(".cubin"), "{first}");
        let others = [name(65, "sm_80", (13, 0)), name(64, "sm_90a", (13, 0)), name(64, "sm_80", (12, 8))];
        assert!(others.iter().all(|other| *other != first), "{first} {others:?}");
        assert!(cache_file_name(&ModuleSource { file: "none.cu", defines: Vec::new() }, "sm_80", (13, 0)).is_err());
    }

    #[test]
    fn a_damaged_cache_file_counts_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, path) = (KernelCache::new(Some(folder.path().into())), folder.path().join("deep/er/a.cubin"));
        assert_eq!(read(&path), None);
        cache.keep(&path, b"machine code");
        assert_eq!(read(&path).as_deref(), Some(&b"machine code"[..]));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");
        let mut file = std::fs::read(&path).unwrap();
        *file.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &file).unwrap();
        assert_eq!(read(&path), None);
        std::fs::write(&path, b"short").unwrap();
        assert_eq!(read(&path), None);
    }

    #[test]
    fn a_cache_that_cannot_be_written_stops_nothing() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        let cache = KernelCache::new(Some(folder.path().join("file")));
        cache.keep(&folder.path().join("file/a.cubin"), b"machine code");
        assert!(cache.warned.get());
    }

    #[test]
    fn architectures_have_nvrtc_s_names() {
        assert_eq!(architecture((8, 0)), "sm_80");
        assert_eq!(architecture((8, 9)), "sm_89");
        assert_eq!(architecture((9, 0)), "sm_90a");
        assert_eq!(architecture((12, 0)), "sm_120a");
    }
}
