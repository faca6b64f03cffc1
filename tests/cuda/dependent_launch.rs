//! From sm_90 on a kernel may start before the one before it has ended. The PTX of every kernel shows that it waits
//! before its first access to memory, in all threads.

use crate::emulation::compile::kernels;
use crate::emulation::ptx::{Architecture, compiled, nvcc};
use crate::support::{broken_copy, on_gpu, options};
use pagetide::backend::cuda::device::ModuleSource;
use pagetide::backend::cuda::{CudaOptions, WeightTiles, module_sources, quantized};
use pagetide::backend::{DType, KvLayout};
use std::path::Path;

const WAIT: &str = "griddepcontrol.wait;";

/// Modules with all kernels. Those of quantised weights are the last.
fn sources() -> Vec<ModuleSource> {
    let info = Architecture::Sm90a.device_info();
    let of_type = |dtype: DType| {
        let kv = KvLayout { num_layers: 2, num_kv_heads: 2, head_dim: 64, block_size: 16, dtype: dtype.into() };
        module_sources(&CudaOptions { experts: true, ..options(dtype, 8, kv) }, &info)
    };
    let quantised = quantized::source(WeightTiles::ALL[0], DType::BF16);
    of_type(DType::F32).into_iter().chain(of_type(DType::BF16)).chain([quantised]).collect()
}

/// Whether a statement of PTX accesses memory that an earlier kernel may write, or ends the thread.
fn is_too_early(statement: &str, loads_weights: bool) -> bool {
    let opcode = statement.split_whitespace().find(|word| !word.starts_with(['@', '{', '}'])).unwrap_or_default();
    let mut parts = opcode.split('.');
    match parts.next().unwrap_or_default() {
        "ld" | "ldu" | "st" => !parts.any(|part| matches!(part, "param" | "shared" | "local")),
        "cp" => !loads_weights && !opcode.ends_with("_group") && !opcode.ends_with("_all"),
        "atom" | "red" | "multimem" | "ret" | "exit" | "call" => true,
        _ => false,
    }
}

/// The kernels of a module that do not wait, that may end before they do, or that access memory before.
fn careless(root: &Path, source: &ModuleSource) -> Vec<String> {
    let text = std::fs::read_to_string(compiled(root, source, Architecture::Sm90a).unwrap()).unwrap();
    let mut found = Vec::new();
    for entry in text.split(".entry ").skip(1) {
        let (name, code) = entry.split_once('(').expect("parameters");
        let before = code.split_once(WAIT).map(|(before, _)| before);
        // The one that loads weights first.
        let loads_weights = name == "quantized_product_few";
        let is_careless =
            |before: &str| before.split([';', '\n']).any(|statement| is_too_early(statement, loads_weights));
        if before.is_none_or(is_careless) || !code.contains("griddepcontrol.launch_dependents;") {
            found.push(name.to_string());
        }
    }
    found
}

#[test]
fn every_kernel_waits_for_those_before_it() {
    if nvcc().is_none() || on_gpu() {
        return;
    }
    let sources = sources();
    for source in &sources {
        assert_eq!(careless(&kernels(), source), [""; 0], "{}", source.file);
        let old = std::fs::read_to_string(compiled(&kernels(), source, Architecture::Sm80).unwrap()).unwrap();
        assert!(!old.contains("griddepcontrol"), "sm_80 has no such instruction");
    }
    let quantised = sources.last().expect("the modules of quantised weights");
    let without = broken_copy("quantized.cu", "    wait_for_earlier_kernels();\n", "");
    assert_eq!(careless(without.path(), quantised), ["quantized_product_few"]);
    let late = broken_copy("include/types.cuh", "        first_statement; ", "        ");
    assert!(careless(late.path(), quantised).len() > 1, "no kernel but the one that waits later waits");
}

#[test]
fn accesses_are_told_from_their_neighbours() {
    let too_early = |statement| is_too_early(statement, false);
    for statement in [
        "\tld.global.u32 \t%r1, [%rd1]",
        "\tld.u32 %r1, [%rd1]",
        "\tst.volatile.global.u32 [%rd1], %r1",
        "\t@%p1 red.global.add.u32 [%rd1], %r1",
        "\tatom.global.inc.u32 %r1, [%rd1], %r2",
        "\tcp.async.cg.shared.global [%r1], [%rd1], 16",
        "\t@!%p2 ret",
        "\texit",
    ] {
        assert!(too_early(statement), "{statement}");
    }
    for statement in [
        "\tld.param.u64 %rd1, [p_param_0]",
        "\tst.shared.f32 [%r1], %f1",
        "\tredux.sync.add.s32 %r1, %r2, -1",
        "\tcp.async.commit_group",
        "\tmov.u32 %r1, %tid.x",
        "$L__BB0_2:",
        "",
    ] {
        assert!(!too_early(statement), "{statement}");
    }
    assert!(!is_too_early("\tcp.async.cg.shared.global [%r1], [%rd1], 16", true));
    assert!(is_too_early("\tld.global.u32 %r1, [%rd1]", true));
}
