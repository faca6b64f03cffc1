//! Every kernel compiles with NVRTC for every supported kind of model and configuration, as at a start on a GPU
//! machine. This needs no GPU and no driver, only NVRTC. It is taken from `PAGETIDE_TEST_NVRTC`, the folder of
//! `libnvrtc.so`, or from where the program looks. `scripts/compile-kernels.sh` gets NVRTC and nvcc from pip.

use pagetide_backend::cuda::attention::{TileShape, WarpGroupPrefill, simple_shared_bytes};
use pagetide_backend::cuda::device::{DeviceError, DeviceInfo, ModuleSource};
use pagetide_backend::cuda::driver::{DriverOptions, NEWEST_CUDA, compiler, open_nvrtc};
use pagetide_backend::cuda::experts::{HOPPER_PRODUCT_SHARED_BYTES, PRODUCT_SHARED_BYTES, routing_shared_bytes};
use pagetide_backend::cuda::few_rows;
use pagetide_backend::cuda::quantized::{self, few_shared_bytes, tiled_shared_bytes};
use pagetide_backend::cuda::rows::REDUCE_BYTES;
use pagetide_backend::cuda::sampling::SCRATCH_BYTES;
use pagetide_backend::cuda::{CudaOptions, FewRowsUse, WeightTiles, module_sources};
use pagetide_backend::{CodeType, DType, KvDType, KvLayout};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

const HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];
/// Query heads of a KV head.
const GROUPS: [usize; 4] = [1, 4, 7, 8];
const BLOCK_SIZES: [usize; 3] = [1, 16, 256];
const NUM_EXPERTS: usize = 128;

fn ampere() -> DeviceInfo {
    device((8, 0), 163 << 10)
}

fn hopper() -> DeviceInfo {
    device((9, 0), 227 << 10)
}

fn blackwell() -> DeviceInfo {
    device((10, 0), 227 << 10)
}

fn device(compute_capability: (u32, u32), max_shared_bytes: u32) -> DeviceInfo {
    DeviceInfo { name: String::new(), compute_capability, num_sms: 100, max_shared_bytes, total_memory: 1 << 36 }
}

fn options(dtype: DType, head_dim: usize, group: usize, block_size: usize) -> CudaOptions {
    let num_kv_heads = 8;
    CudaOptions {
        dtype,
        num_heads: group * num_kv_heads,
        kv: KvLayout { num_layers: 32, num_kv_heads, head_dim, block_size, dtype: dtype.into() },
        vocab_size: 32_000,
        max_rows: 2048,
        max_seqs: 256,
        max_model_len: 4096,
        max_logit_rows: 256,
        graphs: true,
        batch_invariant: false,
        // Its kernels compile for every GPU, although only Hopper has the products.
        fp8_activations: dtype != DType::F32,
        few_rows: FewRowsUse::Timed,
        // Like Gemma 2, which has heads of these sizes.
        softcap: head_dim >= 128 && group == 1,
        experts: true,
        windows: vec![None],
    }
}

/// A module, with the dynamic shared memory of its kernels.
struct Specialisation {
    arch: String,
    source: ModuleSource,
    shared_bytes: Vec<(&'static str, usize)>,
}

/// Every head size with every group, each of both with every block size, and the other types and KV caches with every
/// head size; every kind of quantised weights.
fn specialisations() -> Vec<Specialisation> {
    let mut all: Vec<Specialisation> = Vec::new();
    for info in [ampere(), hopper(), blackwell()] {
        let arch = compiler::architecture(info.compute_capability);
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            for (i, head_dim) in HEAD_DIMS.into_iter().enumerate() {
                for (j, group) in GROUPS.into_iter().enumerate() {
                    // The other kernels do not depend on the group, and hardly on the head size.
                    let is_diagonal = j == i % GROUPS.len();
                    if dtype != DType::BF16 && !is_diagonal {
                        continue;
                    }
                    let mut options = options(dtype, head_dim, group, BLOCK_SIZES[(i + j) % BLOCK_SIZES.len()]);
                    add(&mut all, &arch, &options, &info, is_diagonal);
                    if is_diagonal {
                        // Codes need blocks of 8 tokens or a multiple of that.
                        options.kv.block_size = options.kv.block_size.max(8);
                        for codes in [CodeType::Int8, CodeType::Fp8] {
                            options.kv.dtype = KvDType::Codes(codes);
                            add(&mut all, &arch, &options, &info, true);
                        }
                    }
                }
            }
        }
        for dtype in [DType::BF16, DType::F16] {
            for tiles in WeightTiles::ALL {
                let shared_bytes = vec![
                    ("quantized_product_few", few_shared_bytes(tiles)),
                    ("quantized_product", tiled_shared_bytes(tiles)),
                    ("quantized_expert_product", tiled_shared_bytes(tiles)),
                ];
                let source = quantized::source(tiles, dtype);
                all.push(Specialisation { arch: arch.clone(), source, shared_bytes });
            }
        }
    }
    all
}

/// Adds the modules of a model, if they are not in the list. Without `all_modules` only those of attention.
fn add(all: &mut Vec<Specialisation>, arch: &str, options: &CudaOptions, info: &DeviceInfo, all_modules: bool) {
    let shape = TileShape::choose(options.dtype, &options.kv, info.max_shared_bytes as usize);
    let head_dim = options.kv.head_dim;
    for source in module_sources(options, info) {
        let is_wanted = all_modules || source.file.starts_with("attention");
        let is_listed = |other: &Specialisation| other.arch == arch && other.source == source;
        if !is_wanted || all.iter().any(is_listed) {
            continue;
        }
        let shared_bytes = match (source.file, shape) {
            ("attention.cu", Some(shape)) => vec![
                ("attention_prefill", shape.prefill_shared_bytes()),
                ("attention_decode", shape.decode_shared_bytes()),
            ],
            ("attention_hopper.cu", _) => {
                let kernel = WarpGroupPrefill::choose(options, info).expect("it has a module");
                vec![("attention_prefill_hopper", kernel.shared_bytes())]
            }
            ("attention_rows.cu", _) => vec![("attention_rows", simple_shared_bytes(head_dim))],
            ("experts.cu", shape) => {
                let [route, group] = routing_shared_bytes(NUM_EXPERTS);
                let product = shape.map(|_| ("expert_product", PRODUCT_SHARED_BYTES));
                [("route", route), ("group_choices", group)].into_iter().chain(product).collect()
            }
            ("experts_hopper.cu", _) => vec![("expert_product_hopper", HOPPER_PRODUCT_SHARED_BYTES)],
            ("few_rows.cu", _) => {
                [("few_rows_product", few_rows::shared_bytes(1)), ("few_rows_gated", few_rows::shared_bytes(2))]
                    .to_vec()
            }
            ("few_rows_qkv.cu", _) => vec![("few_rows_qkv", few_rows::shared_bytes(1))],
            ("fp8.cu", _) => vec![("quantize_rows", REDUCE_BYTES as usize)],
            ("rows.cu", _) => ["add_norm", "add_gated"].map(|name| (name, REDUCE_BYTES as usize)).to_vec(),
            ("sampling.cu", _) => {
                ["sample_tokens", "find_logprobs"].map(|name| (name, SCRATCH_BYTES as usize)).to_vec()
            }
            _ => Vec::new(),
        };
        all.push(Specialisation { arch: arch.into(), source, shared_bytes });
    }
}

/// Returns false, and prints why, if there is no NVRTC.
fn has_nvrtc() -> bool {
    let folder = std::env::var("PAGETIDE_TEST_NVRTC").ok();
    let is_wanted = folder.is_some();
    let config = DriverOptions { cuda_library_path: folder.into_iter().collect(), ..DriverOptions::default() };
    match open_nvrtc(&config, NEWEST_CUDA) {
        Ok(nvrtc) => {
            println!("NVRTC {} from {:?}", nvrtc.version, nvrtc.path);
            true
        }
        Err(why) => {
            assert!(!is_wanted, "PAGETIDE_TEST_NVRTC is set, and {why}");
            println!("skipped: {why}");
            false
        }
    }
}

/// Where the machine code of a specialisation is kept. The name is a hash of all that it depends on.
fn cubin_path(specialisation: &Specialisation) -> PathBuf {
    let Specialisation { source, arch, .. } = specialisation;
    let name = compiler::cache_file_name(source, arch, compiler::nvrtc_version().unwrap()).unwrap();
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("cubins").join(name)
}

/// `scripts/compile-kernels.py` reads the list.
#[test]
fn the_specialisations_are_listed() {
    if !has_nvrtc() {
        return;
    }
    let entry = |specialisation: Specialisation| {
        let cubin = cubin_path(&specialisation);
        let Specialisation { arch, source, shared_bytes } = specialisation;
        let defines: Vec<String> = source.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let shared_bytes: serde_json::Map<_, _> =
            shared_bytes.iter().map(|(kernel, bytes)| (kernel.to_string(), (*bytes).into())).collect();
        json!({"arch": arch, "file": source.file, "defines": defines, "shared_bytes": shared_bytes, "cubin": cubin})
    };
    let entries: Vec<_> = specialisations().into_iter().map(entry).collect();
    let list = Path::new(env!("CARGO_TARGET_TMPDIR")).join("specialisations.json");
    std::fs::write(list, serde_json::to_string_pretty(&entries).unwrap()).unwrap();
}

#[test]
fn every_file_is_specialised_for_every_architecture() {
    let list = specialisations();
    for file in [
        "attention.cu",
        "attention_rows.cu",
        "experts.cu",
        "few_rows.cu",
        "few_rows_qkv.cu",
        "heads.cu",
        "quantized.cu",
        "rows.cu",
        "sampling.cu",
        "transfers.cu",
    ] {
        for arch in ["sm_80", "sm_90a", "sm_100a"] {
            assert!(list.iter().any(|entry| entry.source.file == file && entry.arch == arch), "{file}, {arch}");
        }
    }
}

#[test]
fn every_specialisation_compiles_without_a_warning() {
    if !has_nvrtc() {
        return;
    }
    let cubins = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cubins");
    let _ = std::fs::remove_dir_all(&cubins);
    std::fs::create_dir(&cubins).unwrap();
    let left = Mutex::new(specialisations().into_iter());
    let work = || {
        let mut done = 0;
        loop {
            let next = left.lock().expect("nothing panics while it holds this").next();
            let Some(specialisation) = next else { break done };
            let Specialisation { arch, source, .. } = &specialisation;
            let cubin = compiler::compile(source, arch).unwrap_or_else(|error| panic!("{source:?}: {error}"));
            assert!(cubin.bytes.starts_with(b"\x7fELF"), "{source:?}: machine code");
            // ptxas also says here if it makes products of warp groups wait for each other.
            assert_eq!(cubin.log, "", "{source:?}");
            std::fs::write(cubin_path(&specialisation), cubin.bytes).unwrap();
            done += 1;
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let compiled: usize = std::thread::scope(|scope| {
        let working: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        working.into_iter().map(|thread| thread.join().expect("all compile")).sum()
    });
    println!("{compiled} modules compiled");
}

#[test]
fn an_error_names_file_and_line_and_an_unknown_architecture_is_said() {
    if !has_nvrtc() {
        return;
    }
    let broken = ModuleSource { file: "sampling.cu", defines: vec![("DTYPE", "no_such_type".into())] };
    let Err(DeviceError::Compile { file, arch, log }) = compiler::compile(&broken, "sm_80") else {
        panic!("it cannot compile")
    };
    assert_eq!((file.as_str(), arch.as_str()), ("sampling.cu", "sm_80"));
    assert!(log.contains("include/types.cuh(") && log.contains("no_such_type"), "{log}");
    let source = ModuleSource { file: "sampling.cu", defines: Vec::new() };
    let error = compiler::compile(&source, "sm_20").unwrap_err().to_string();
    assert!(error.contains("for sm_20: NVRTC ") && error.contains("90"), "{error}");
}

#[test]
fn a_second_start_compiles_nothing() {
    if !has_nvrtc() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let sources = [ModuleSource { file: "sampling.cu", defines: Vec::new() }];
    let load = || compiler::KernelCache::new(Some(folder.path().join("kernels"))).load(&sources, "sm_90a").unwrap();
    let compiled = load();
    let file = std::fs::read_dir(folder.path().join("kernels")).unwrap().next().unwrap().unwrap().path();
    let written = file.metadata().unwrap().modified().unwrap();
    assert_eq!(load(), compiled);
    assert_eq!(file.metadata().unwrap().modified().unwrap(), written);
    // A damaged file is compiled again.
    std::fs::write(&file, "damaged").unwrap();
    assert_eq!(load(), compiled);
    assert_eq!(load(), compiled);
}
