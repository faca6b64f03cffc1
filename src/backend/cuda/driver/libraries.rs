//! Finds and opens CUDA's libraries.
//!
//! cudarc opens libraries by name when the first function is called. This module opens them by path first. The system
//! then finds them by that name wherever they are, so no `LD_LIBRARY_PATH` is needed.

use std::ffi::{CStr, OsStr, c_void};
use std::fmt;
use std::path::{Path, PathBuf};

/// The newest release of CUDA whose libraries are searched.
pub const NEWEST_CUDA: u32 = 13;

/// A library that the backend needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Library {
    /// The driver's library.
    Cuda,
    /// The compiler of kernels.
    Nvrtc,
    /// Matrix products.
    CublasLt,
}

impl Library {
    /// File names, best first, without those of releases that the driver cannot run.
    fn file_names(self, driver_major: u32) -> Vec<String> {
        let releases = |stem: &str| {
            let majors = [NEWEST_CUDA, 12].into_iter().filter(|major| *major <= driver_major);
            majors.map(|major| format!("{stem}.so.{major}")).collect()
        };
        match self {
            Self::Cuda => vec!["libcuda.so.1".into()],
            Self::Nvrtc => releases("libnvrtc"),
            Self::CublasLt => releases("libcublasLt"),
        }
    }

    fn about(self) -> &'static str {
        match self {
            Self::Cuda => "NVIDIA driver",
            Self::Nvrtc => "NVRTC, which compiles the kernels,",
            Self::CublasLt => "cuBLASLt, which multiplies matrices,",
        }
    }
}

/// A library that is open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    pub library: Library,
    /// `None` if the system's loader found it and does not say where.
    pub path: Option<PathBuf>,
}

/// A library that was not found or cannot be opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Missing {
    library: Library,
    names: Vec<String>,
    folders: Vec<PathBuf>,
    /// Files that exist and could not be opened, and why.
    failures: Vec<String>,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { library, names, folders, failures } = self;
        let names = names.join(" or ");
        if failures.is_empty() {
            match library {
                Library::Cuda => write!(f, "no {} ({names} not found)", library.about())?,
                _ => write!(f, "{} was not found ({names})", library.about())?,
            }
        } else {
            write!(f, "{} cannot be opened ({})", library.about(), failures.join("; "))?;
        }
        let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        let folders = if folders.is_empty() { String::new() } else { format!(", {}", folders.join(", ")) };
        write!(f, ": looked in the system's library folders{folders}; set device.cuda_library_path to its folder")?;
        if *library != Library::Cuda {
            write!(f, ", or install it (pip install nvidia-cuda-nvrtc nvidia-cublas)")?;
        }
        Ok(())
    }
}

/// Folders of `libcuda.so.1` that some machines' loaders do not search.
const DRIVER_FOLDERS: [&str; 4] =
    ["usr/local/nvidia/lib64", "usr/local/nvidia/lib", "usr/lib/wsl/lib", "run/opengl-driver/lib"];

/// The folders that are searched.
pub struct LibraryFolders {
    /// The root of absolute paths: `/`, except in tests.
    pub root: PathBuf,
    /// `device.cuda_library_path`
    pub configured: Vec<PathBuf>,
    /// Reads an environment variable.
    pub variable: fn(&str) -> Option<PathBuf>,
}

impl LibraryFolders {
    /// The folders of this machine.
    pub fn new(configured: &[String]) -> Self {
        Self {
            root: "/".into(),
            configured: configured.iter().map(PathBuf::from).collect(),
            variable: |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from),
        }
    }

    /// The existing folders to search after the system's loader. For the driver these are its folders in containers and
    /// WSL; for the other libraries CUDA's own folders and then those of pip's wheels.
    fn folders(&self, library: Library) -> Vec<PathBuf> {
        let mut found = match library {
            Library::Cuda => DRIVER_FOLDERS.map(|folder| self.root.join(folder)).into(),
            Library::Nvrtc | Library::CublasLt => self.toolkit_folders(),
        };
        found.retain(|folder| folder.is_dir());
        let mut distinct = std::collections::HashSet::new();
        found.retain(|folder| distinct.insert(folder.clone()));
        found
    }

    fn toolkit_folders(&self) -> Vec<PathBuf> {
        let variable = |name| (self.variable)(name);
        let mut found = Vec::new();
        let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable);
        let mut installed = children(&self.root.join("usr/local"), "cuda");
        // The newest first. `cuda`, the machine's default, comes before all.
        installed.sort_by_key(|folder| std::cmp::Reverse(version(folder)));
        for toolkit in toolkits.chain(installed) {
            found.extend(["lib64", "targets/x86_64-linux/lib", "lib"].map(|lib| toolkit.join(lib)));
        }
        let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable);
        let mut prefixes: Vec<PathBuf> = environments.collect();
        // If `python3` belongs to a virtual environment, that one's folders.
        let path = variable("PATH").unwrap_or_default();
        let python = std::env::split_paths(&path).find(|folder| folder.join("python3").is_file());
        prefixes.extend(python.and_then(|folder| folder.parent().map(Path::to_path_buf)));
        prefixes.extend(variable("HOME").map(|home| home.join(".local")));
        prefixes.extend(["usr", "usr/local"].map(|prefix| self.root.join(prefix)));
        prefixes.extend(children(&self.root.join("opt"), ""));
        for prefix in prefixes {
            for python in children(&prefix.join("lib"), "python3") {
                for packages in ["site-packages", "dist-packages"] {
                    found.extend(wheels(&python.join(packages).join("nvidia")));
                }
            }
        }
        found
    }

    /// Opens `library` in a release that a driver of CUDA `driver_major` can run.
    pub fn open(&self, library: Library, driver_major: u32) -> Result<Found, Missing> {
        let names = library.file_names(driver_major);
        let mut failures = Vec::new();
        let in_folders = |folders: &[PathBuf], failures: &mut Vec<String>| {
            for path in folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name))) {
                if !path.is_file() {
                    continue;
                }
                if library == Library::Nvrtc {
                    open_builtins(&path);
                }
                match open_for_good(path.as_os_str()) {
                    Ok(()) => return Some(Found { library, path: Some(path) }),
                    Err(error) => failures.push(format!("{}: {error}", path.display())),
                }
            }
            None
        };
        if let Some(found) = in_folders(&self.configured, &mut failures) {
            return Ok(found);
        }
        for name in &names {
            if open_for_good(OsStr::new(name)).is_ok() {
                return Ok(Found { library, path: None });
            }
        }
        let mut folders = self.folders(library);
        if let Some(found) = in_folders(&folders, &mut failures) {
            return Ok(found);
        }
        folders.splice(0..0, self.configured.iter().cloned());
        Err(Missing { library, names, folders, failures })
    }
}

/// Folders of shared libraries in pip's layout, in `site-packages/nvidia`: one for all packages (`cu13/lib`), or one
/// for each (`cublas/lib`).
fn wheels(nvidia: &Path) -> Vec<PathBuf> {
    let mut packages = children(nvidia, "");
    packages.sort_by_key(|package| std::cmp::Reverse(version(package)));
    packages.into_iter().map(|package| package.join("lib")).collect()
}

/// The version at the end of `cuda-12.8` or `cu13`. A name without a version comes first.
fn version(folder: &Path) -> (bool, u32, u32) {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
    let mut numbers = digits.split('.').map(|number| number.parse().unwrap_or(0));
    (digits.is_empty(), numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// The entries of `folder` whose names start with `prefix`, sorted by name.
fn children(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    paths
}

/// NVRTC opens its `libnvrtc-builtins` by name when it first compiles. This opens the one beside it, so that no other
/// is used.
fn open_builtins(nvrtc: &Path) {
    for builtins in nvrtc.parent().map_or(Vec::new(), |folder| children(folder, "libnvrtc-builtins.so.")) {
        // If this fails, NVRTC reports it when it compiles.
        let _ = open_for_good(builtins.as_os_str());
    }
}

/// Opens a library and never closes it, so that later it is found by its name.
fn open_for_good(name: &OsStr) -> Result<(), libloading::Error> {
    // SAFETY: the initializers of CUDA's libraries have no preconditions.
    let library = unsafe { libloading::Library::new(name)? };
    std::mem::forget(library);
    Ok(())
}

/// The file that the code at `address` comes from.
pub fn file_of(address: *const c_void) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address may be passed, and a zeroed Dl_info is valid if nothing is written.
    let info = unsafe {
        if libc::dladdr(address, info.as_mut_ptr()) == 0 {
            return None;
        }
        info.assume_init()
    };
    if info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr gives a string that lives as long as the library, which is never closed.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(name.to_string_lossy().into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The PATH of one test.
    static PATH: std::sync::OnceLock<std::ffi::OsString> = std::sync::OnceLock::new();

    fn nothing(_: &str) -> Option<PathBuf> {
        None
    }

    fn places(root: &Path) -> LibraryFolders {
        LibraryFolders { root: root.into(), configured: Vec::new(), variable: nothing }
    }

    fn make(root: &Path, folders: &[&str]) {
        for folder in folders {
            std::fs::create_dir_all(root.join(folder)).unwrap();
        }
    }

    #[test]
    fn cuda_s_own_folders_come_before_pip_s_and_newer_ones_before_older() {
        let root = tempfile::tempdir().unwrap();
        make(
            root.path(),
            &[
                "usr/local/cuda-12.8/lib64",
                "usr/local/cuda-12.10/lib64",
                "usr/local/cuda/targets/x86_64-linux/lib",
                "usr/local/lib/python3.12/dist-packages/nvidia/cublas/lib",
                "usr/local/lib/python3.12/dist-packages/nvidia/cu13/lib",
                "opt/any/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib",
                "usr/local/nvidia/lib64",
                // Neither a folder of CUDA's libraries nor a Python.
                "usr/local/lib/python3.12/dist-packages/numpy/lib",
                "opt/any/lib/perl5/site-packages/nvidia/cu13/lib",
            ],
        );
        let found = places(root.path()).folders(Library::Nvrtc);
        let found: Vec<_> =
            found.iter().map(|path| path.strip_prefix(root.path()).unwrap().to_str().unwrap()).collect();
        assert_eq!(
            found,
            [
                "usr/local/cuda/targets/x86_64-linux/lib",
                "usr/local/cuda-12.10/lib64",
                "usr/local/cuda-12.8/lib64",
                "usr/local/lib/python3.12/dist-packages/nvidia/cublas/lib",
                "usr/local/lib/python3.12/dist-packages/nvidia/cu13/lib",
                "opt/any/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib",
            ]
        );
        let driver = places(root.path()).folders(Library::Cuda);
        assert_eq!(driver, [root.path().join("usr/local/nvidia/lib64")]);
    }

    #[test]
    fn the_python_that_is_called_python3_is_searched() {
        let root = tempfile::tempdir().unwrap();
        make(root.path(), &["venv/bin", "venv/lib/python3.12/site-packages/nvidia/cu13/lib"]);
        std::fs::write(root.path().join("venv/bin/python3"), "").unwrap();
        let mut places = places(root.path());
        let bin = root.path().join("venv/bin").into_os_string();
        PATH.set(bin).unwrap();
        places.variable = |name| (name == "PATH").then(|| PathBuf::from(PATH.get().unwrap()));
        let expected = root.path().join("venv/lib/python3.12/site-packages/nvidia/cu13/lib");
        assert_eq!(places.folders(Library::CublasLt), [expected]);
    }

    #[test]
    fn a_library_opens_from_the_configured_folder_and_a_broken_one_is_named() {
        let root = tempfile::tempdir().unwrap();
        let broken = root.path().join("broken");
        make(root.path(), &["broken", "empty"]);
        std::fs::write(broken.join("libnvrtc.so.13"), "not a library").unwrap();
        let mut places = places(root.path());
        places.configured = vec![broken.clone(), root.path().join("empty")];
        // On a machine whose loader finds an NVRTC, that one is opened.
        if let Err(missing) = places.open(Library::Nvrtc, 13) {
            let message = missing.to_string();
            assert!(message.contains(&format!("{}: ", broken.join("libnvrtc.so.13").display())), "{message}");
            assert!(message.contains("device.cuda_library_path"), "{message}");
        }
    }

    #[test]
    fn a_missing_library_is_named_with_the_searched_folders() {
        let root = tempfile::tempdir().unwrap();
        make(root.path(), &["usr/local/cuda/lib64"]);
        // No release is this old, so there is no name to look for on any machine.
        let missing = places(root.path()).open(Library::CublasLt, 11).unwrap_err();
        assert!(missing.names.is_empty());
        assert_eq!(missing.folders, [root.path().join("usr/local/cuda/lib64")]);
        let names = Library::CublasLt.file_names(12);
        assert_eq!(names, ["libcublasLt.so.12"], "a driver of CUDA 12 cannot run a library of 13");
        let missing = Missing { names, ..missing };
        let message = missing.to_string();
        assert!(
            message.contains("cuBLASLt, which multiplies matrices, was not found (libcublasLt.so.12)"),
            "{message}"
        );
        assert!(message.contains("usr/local/cuda/lib64"), "{message}");
    }

    #[test]
    fn the_file_of_a_function_is_known() {
        let file = file_of(std::fs::read::<&str> as *const c_void).expect("this program's own file");
        assert_eq!(file.file_name(), std::env::current_exe().unwrap().file_name());
    }
}
