//! The interpreter's counters against what is known otherwise: the machine code that ptxas makes of the same PTX, and
//! the bytes that a kernel has to read and write. And the expectations of `docs/gpu.md`, which are computed from them.

use super::has_nvcc;
use crate::attention::shared::attend_to_prefixes;
use crate::attention::{attend, attend_as};
use crate::emulation::compile::kernels;
use crate::emulation::ptx::{Architecture, PtxCompiler, compiled, module, nvcc};
use crate::emulation::{EmulatedDevice, EmulatedOptions};
use crate::experts::mix_one;
use crate::few_rows;
use crate::fp8_products;
use crate::quantized::multiply;
use crate::support::{options, parallel, root};
use pagetide::backend::cuda::device::{Device, ModuleSource};
use pagetide::backend::cuda::{CudaOptions, FewRowsUse, WeightTiles, module_sources, quantized};
use pagetide::backend::quant::QuantFormat;
use pagetide::backend::{CodeType, DType, KvLayout, WeightFormat};
use ptx_interpreter::counters::{Counters, InstructionCounts};
use ptx_interpreter::program::Op;
use ptx_interpreter::report::{DEVICES, RooflineTimes};
use ptx_interpreter::table::Unit;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::Command;
use std::rc::Rc;

/// What a kernel has so many of: products on tensor cores, of warps or of warp groups, asynchronous copies of 16 bytes,
/// loads of matrices.
type OperationCounts = [usize; 3];

/// By kernel, as the interpreter has decoded them.
fn decoded(source: &ModuleSource, architecture: Architecture) -> BTreeMap<String, OperationCounts> {
    let module = module(&kernels(), source, architecture, PtxCompiler::Nvrtc).unwrap();
    let counts = module.entries().map(|program| {
        let count = |wanted: fn(&Op) -> bool| program.code.iter().filter(|instruction| wanted(&instruction.op)).count();
        let counts = [
            count(|op| matches!(op, Op::Mma { .. } | Op::Wgmma { .. })),
            count(|op| matches!(op, Op::CopyAsync { bytes: 16, .. })),
            count(|op| matches!(op, Op::LoadMatrix { .. })),
        ];
        (program.name.clone(), counts)
    });
    counts.collect()
}

/// By kernel, in the machine code of the same PTX.
fn assembled(source: &ModuleSource, architecture: Architecture) -> BTreeMap<String, OperationCounts> {
    let tools = nvcc().unwrap().with_file_name("");
    let ptx = compiled(&kernels(), source, architecture, PtxCompiler::Nvrtc).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let cubin = folder.path().join("module.cubin");
    let run = |tool: &str, arguments: &[&std::ffi::OsStr]| {
        let output = Command::new(tools.join(tool)).args(arguments).output().unwrap();
        assert!(output.status.success(), "{tool}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let name = architecture.name().replace("compute", "sm");
    run("ptxas", &["--gpu-name".as_ref(), name.as_ref(), ptx.as_os_str(), "-o".as_ref(), cubin.as_os_str()]);
    let text = run("nvdisasm", &["--no-dataflow".as_ref(), "-c".as_ref(), cubin.as_os_str()]);
    let (mut counts, mut kernel) = (BTreeMap::<String, OperationCounts>::new(), String::new());
    for line in text.lines() {
        if let Some(section) = line.trim_start().strip_prefix(".section\t.text.") {
            kernel = section.split(',').next().unwrap().into();
            counts.insert(kernel.clone(), [0; 3]);
        }
        let has = |part: &str| usize::from(line.contains(part));
        if let Some(counts) = counts.get_mut(&kernel) {
            counts[0] += has(" HMMA.") + has(" HGMMA.");
            counts[1] += has(" LDGSTS.").min(has(".128"));
            counts[2] += has(" LDSM.");
        }
    }
    counts
}

fn compare_operations(source: &ModuleSource, architecture: Architecture) {
    let (mut decoded, mut assembled) = (decoded(source, architecture), assembled(source, architecture));
    if source.file == "attention_hopper.cu" {
        // Behind a shuffle, ptxas has a second path for lanes that do not come there together, with the next copy.
        decoded.values_mut().chain(assembled.values_mut()).for_each(|counts| counts[1] = 0);
    }
    assert_eq!(decoded, assembled, "{source:?}, {architecture:?}");
    let products: usize = decoded.values().map(|counts| counts[0]).sum();
    let has_products =
        ["attention", "experts", "few_rows", "quantized"].iter().any(|file| source.file.starts_with(file));
    assert_eq!(products > 0, has_products, "{}", source.file);
}

/// What the interpreter executes once is one instruction of the machine.
#[test]
fn machine_code_has_the_same_operations() {
    if !has_nvcc() {
        return;
    }
    let mut compared: Vec<(Architecture, ModuleSource)> = Vec::new();
    for architecture in Architecture::ALL {
        let mut add = |source| {
            let module = (architecture, source);
            if !compared.contains(&module) {
                compared.push(module);
            }
        };
        let info = architecture.device_info();
        for head_dim in [64, 128] {
            let kv = KvLayout { num_layers: 2, num_kv_heads: 2, head_dim, block_size: 16, dtype: DType::BF16.into() };
            let options = options(DType::BF16, 8, kv);
            let few_rows = FewRowsUse::Always;
            let options = CudaOptions { experts: true, fp8_activations: true, few_rows, ..options };
            module_sources(&options, &info).into_iter().for_each(&mut add);
        }
        WeightTiles::ALL.iter().for_each(|tiles| add(quantized::source(*tiles, DType::BF16)));
    }
    parallel(0..compared.len() as u64, |i| {
        let (architecture, source) = &compared[i as usize];
        compare_operations(source, *architecture);
    });
}

/// The counters of each launch.
fn counted(run: impl FnOnce(&Rc<dyn Device>)) -> Vec<Counters> {
    let options = EmulatedOptions { ptx: Some(Architecture::Sm90a), counts: true, ..EmulatedOptions::default() };
    let device = Rc::new(EmulatedDevice::new(options));
    run(&(device.clone() as Rc<dyn Device>));
    device.take_launches().into_iter().map(|(counters, _)| counters).collect()
}

/// Those of a kernel's last launch.
fn last<'a>(launches: &'a [Counters], kernel: &str) -> &'a Counters {
    let found = launches.iter().rev().find(|counters| counters.kernel == kernel);
    found.unwrap_or_else(|| panic!("{kernel} was not launched"))
}

#[test]
fn attention_reads_every_key_once() {
    if !has_nvcc() {
        return;
    }
    let (group, num_kv_heads, head_dim, tokens) = (4, 2, 64, 150);
    let launches = counted(|device| attend(device, (group * num_kv_heads, num_kv_heads, head_dim), (tokens - 1, 1)));
    let decode = last(&launches, "attention_decode");
    let element = DType::BF16.size_bytes();
    let num_blocks: u32 = decode.launch.grid.iter().product();
    let of_queries = num_blocks as usize * group * head_dim * element;
    let of_cache = 2 * tokens * num_kv_heads * head_dim * element;
    assert_eq!(decode.of_unit(Unit::AsyncCopy).global_bytes, (of_queries + of_cache) as u64);
    // Products of 16 rows: the heads of a group, and rows of zeros.
    let products = 2 * 2 * 16 * head_dim * tokens.next_multiple_of(16) * num_kv_heads;
    assert!(decode.total().tensor_operations >= products as u64, "{}", decode.total().tensor_operations);
    let rope = last(&launches, "rope_and_write_kv");
    assert_eq!(rope.of_unit(Unit::Store).global_bytes, (2 * num_kv_heads * head_dim * element) as u64);
}

#[test]
fn attention_reads_shared_keys_once() {
    if !has_nvcc() {
        return;
    }
    let [alone, shared] = [false, true].map(|shares| {
        let mut keys = 0;
        let launches = counted(|device| keys = attend_to_prefixes(device, shares));
        (keys, last(&launches, "attention_decode").of_unit(Unit::AsyncCopy).global_bytes)
    });
    // K and V. The queries of each sequence and chunk are read once in both cases.
    let bytes_of_key = 2 * 2 * 32 * DType::BF16.size_bytes() as u64;
    assert!(shared.0 < alone.0);
    assert_eq!(alone.1 - shared.1, (alone.0 - shared.0) * bytes_of_key);
}

#[test]
fn weights_are_read_once() {
    if !has_nvcc() {
        return;
    }
    let (rows, n, k) = (5, 40, 256);
    let launches = counted(|device| multiply(device, QuantFormat::Q4_0, (rows, n, k)));
    let product = last(&launches, "quantized_product_few");
    // Tiles of 16 rows and 64 columns: codes of 4 bits, and a scale of 16 bits for 32 of them.
    let tile_bytes = 16 * 64 / 2 + 16 * 64 / 32 * 2;
    assert_eq!(product.of_unit(Unit::AsyncCopy).global_bytes, (n.div_ceil(16) * (k / 64) * tile_bytes) as u64);
    assert_eq!(product.of_unit(Unit::Store).global_bytes, (rows * n * size_of::<f32>()) as u64);
    let operations = 2 * 8 * n.next_multiple_of(16) * k;
    assert_eq!(product.total().tensor_operations, operations as u64);
}

#[test]
fn plain_weights_are_read_once() {
    if !has_nvcc() {
        return;
    }
    let (rows, n, k) = (5, 40, 1032);
    let launches = counted(|device| few_rows::multiply(device, (rows, n, k)));
    let product = last(&launches, "few_rows_product");
    assert_eq!(product.of_unit(Unit::AsyncCopy).global_bytes, (n * k * DType::BF16.size_bytes()) as u64);
    // The launch has a power of two of rows.
    assert_eq!(product.of_unit(Unit::Store).global_bytes, (8 * n * size_of::<f32>()) as u64);
    let operations = 2 * 8 * n.next_multiple_of(16) * k.next_multiple_of(64);
    assert_eq!(product.total().tensor_operations, operations as u64);
}

/// A kernel at a shape: what is executed of it, and how many times as much the shape is.
struct ExpectedKernel {
    kernel: &'static str,
    shape: &'static str,
    counts: InstructionCounts,
    times: u64,
}

fn expected_kernels() -> Vec<ExpectedKernel> {
    let attention_over = |codes, kernel, shape, seq, times| {
        // Which has the other kernel for prompts.
        let batch_invariant = kernel == "attention_prefill";
        let launches = counted(|device| attend_as(device, (4, 1, 128), seq, batch_invariant, codes));
        ExpectedKernel { kernel, shape, counts: last(&launches, kernel).total(), times }
    };
    let attention = |kernel, shape, seq, times| attention_over(None, kernel, shape, seq, times);
    let over_int8 = |kernel, seq, times| {
        attention_over(Some(CodeType::Int8), kernel, "the same over a KV cache of int8", seq, times)
    };
    let product = |kernel, shape, format: WeightFormat, (rows, n, k), times| {
        let launches = counted(|device| multiply(device, format, (rows, n, k)));
        ExpectedKernel { kernel, shape, counts: last(&launches, kernel).total(), times }
    };
    let few_rows = |shape, rows| {
        let launches = counted(|device| few_rows::multiply(device, (rows, 256, 1024)));
        let kernel = "few_rows_product";
        ExpectedKernel { kernel, shape, counts: last(&launches, kernel).total(), times: 64 }
    };
    // The second of a layer's products.
    let experts = |kernel| {
        let shape = "bfloat16, 128 rows for each of 128 experts, 2048 x 768";
        let launches = counted(|device| mix_one(device, (128, 256, 256), kernel == "expert_product_hopper"));
        ExpectedKernel { kernel, shape, counts: last(&launches, kernel).total(), times: 128 * 8 * 3 }
    };
    let quantized = |kernel, is_in_blocks| {
        let launches = counted(|device| fp8_products::multiply(device, (8, 16, 4096), is_in_blocks));
        let shape = "bfloat16, 2048 rows of 4096";
        ExpectedKernel { kernel, shape, counts: last(&launches, kernel).total(), times: 256 }
    };
    let [q4_0, q8_0] = [QuantFormat::Q4_0, QuantFormat::Q8_0].map(WeightFormat::from);
    vec![
        attention("attention_decode", "64 sequences of 512 tokens, 32 heads of 128, 8 KV heads", (511, 1), 64 * 8),
        over_int8("attention_decode", (511, 1), 64 * 8),
        attention("attention_prefill", "a prompt of 512 tokens, 32 heads of 128, 8 KV heads", (0, 512), 8),
        over_int8("attention_prefill", (0, 512), 8),
        attention("attention_prefill_hopper", "a prompt of 512 tokens, 32 heads of 128, 8 KV heads", (0, 512), 8),
        over_int8("attention_prefill_hopper", (0, 512), 8),
        experts("expert_product"),
        experts("expert_product_hopper"),
        few_rows("bfloat16, 1 row, 4096 x 4096", 1),
        few_rows("bfloat16, 8 rows, 4096 x 4096", 8),
        product("quantized_product_few", "Q4_0, 8 rows, 4096 x 4096", q4_0, (8, 256, 1024), 64),
        product("quantized_product_few", "Q8_0, 8 rows, 4096 x 4096", q8_0, (8, 256, 1024), 64),
        product("quantized_product_few", "FP8, 8 rows, 4096 x 4096", WeightFormat::Fp8, (8, 256, 1024), 64),
        product("quantized_product", "Q4_0, 512 rows, 4096 x 4096", q4_0, (64, 256, 1024), 512),
        product("quantized_product", "FP8, 512 rows, 4096 x 4096", WeightFormat::Fp8, (64, 256, 1024), 512),
        quantized("quantize_rows", false),
        quantized("quantize_row_blocks", true),
    ]
}

fn expectations() -> String {
    let device = DEVICES.iter().find(|device| device.name == "h200").expect("it is in the table");
    let mut table = String::from(
        "| kernel | shape | MB | million issue slots | bank conflicts | memory, µs | issue, µs | shared memory, µs \
         | tensor cores, µs |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for ExpectedKernel { kernel, shape, counts, times } in expected_kernels() {
        let RooflineTimes { issue, memory, shared, tensor } = RooflineTimes::of(&counts, device);
        let microseconds = [memory, issue, shared, tensor].map(|time| time * times as f64 * 1e6);
        let longest = microseconds.iter().copied().fold(0.0, f64::max);
        let cells = microseconds.map(|time| match time == longest {
            true => format!("**{time:.1}**"),
            false => format!("{time:.1}"),
        });
        let _ = writeln!(
            table,
            "| `{kernel}` | {shape} | {:.1} | {:.2} | {:.0}% | {} |",
            (counts.sectors * 32 * times) as f64 / 1e6,
            (counts.warps * times) as f64 / 1e6,
            100.0 * (counts.shared_passes - counts.ideal_shared_passes) as f64 / counts.shared_passes.max(1) as f64,
            cells.join(" | "),
        );
    }
    table
}

const BEGIN: &str = "<!-- expectations -->\n";
const END: &str = "<!-- end of expectations -->\n";

/// `UPDATE_DOCS=1` writes the table.
#[test]
fn the_page_has_the_expectations_of_the_counters() {
    if !has_nvcc() {
        return;
    }
    let path = root().join("docs/gpu.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let start = page.find(BEGIN).expect("the page marks where the table begins") + BEGIN.len();
    let end = page.find(END).expect("the page marks where the table ends");
    let expected = format!("{}\n{}\n{}", &page[..start], expectations(), &page[end..]);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, expected).unwrap();
    } else {
        assert!(page == expected, "docs/gpu.md: UPDATE_DOCS=1 cargo test --test cuda ptx::counters:\n{expected}");
    }
}
