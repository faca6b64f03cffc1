//! From sm_90 on a kernel may start before the one before it has ended. The PTX of every kernel shows that it waits
//! before its first access to memory, in all threads. Weights, which no kernel writes while others run, are exempt.

use crate::emulation::compile::kernels;
use crate::emulation::ptx::{Architecture, PtxCompiler, compiled, nvcc};
use crate::support::{broken_copy, on_gpu, options};
use pagetide::backend::cuda::device::ModuleSource;
use pagetide::backend::cuda::{CudaOptions, FewRowsUse, WeightTiles, module_sources, quantized};
use pagetide::backend::{DType, KvLayout};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

const WAIT: &str = "griddepcontrol.wait;";

/// Modules with all kernels. Those of quantised weights are the last.
fn sources() -> Vec<ModuleSource> {
    let info = Architecture::Sm90a.device_info();
    let of_type = |dtype: DType| {
        let kv = KvLayout { num_layers: 2, num_kv_heads: 2, head_dim: 64, block_size: 16, dtype: dtype.into() };
        let (options, few_rows) = (options(dtype, 8, kv), FewRowsUse::Always);
        let fp8_activations = dtype != DType::F32;
        module_sources(&CudaOptions { experts: true, fp8_activations, few_rows, ..options }, &info)
    };
    let quantised = quantized::source(WeightTiles::ALL[0], DType::BF16);
    of_type(DType::F32).into_iter().chain(of_type(DType::BF16)).chain([quantised]).collect()
}

/// Kernels that load weights before they wait, with the offset of the weights' address among their parameters.
const LOAD_WEIGHTS: [(&str, u64); 4] =
    [("quantized_product_few", 8), ("few_rows_product", 0), ("few_rows_gated", 0), ("few_rows_qkv", 0)];

/// Whether a statement of PTX accesses memory that an earlier kernel may write, or ends the thread.
fn is_too_early(statement: &str) -> bool {
    let opcode = opcode_of(statement);
    let mut parts = opcode.split('.');
    match parts.next().unwrap_or_default() {
        "ld" | "ldu" | "st" => !parts.any(|part| matches!(part, "param" | "shared" | "local")),
        "cp" => !opcode.ends_with("_group") && !opcode.ends_with("_all"),
        "atom" | "red" | "multimem" | "ret" | "exit" | "call" => true,
        _ => false,
    }
}

fn opcode_of(statement: &str) -> &str {
    statement.split_whitespace().find(|word| !word.starts_with(['@', '{', '}'])).unwrap_or_default()
}

/// What is known of the registers before the wait: which of them may hold an address that is a parameter of 64 bits or
/// was computed from such parameters. The offsets of these parameters are kept.
#[derive(Default)]
struct Addresses {
    /// Registers with the parameters' own address, and how far behind the first parameter it is.
    of_params: HashMap<String, i64>,
    from: HashMap<String, BTreeSet<u64>>,
}

impl Addresses {
    /// The parameters that the operand of a copy, its second one, was computed from.
    fn source_of(&self, statement: &str) -> BTreeSet<u64> {
        let source = statement.split('[').nth(2).unwrap_or_default();
        registers(source).flat_map(|register| self.from.get(register).cloned().unwrap_or_default()).collect()
    }

    /// Follows a statement that writes a register.
    fn follow(&mut self, statement: &str) {
        let opcode = opcode_of(statement);
        let Some((_, operands)) = statement.split_once(opcode).filter(|_| !opcode.is_empty()) else { return };
        let mut names = registers(operands);
        let Some(target) = names.next().map(ToString::to_string) else { return };
        let sources: Vec<&str> = names.collect();
        if opcode.starts_with("ld.param") {
            // A load of 32 bits is a size, and no address.
            let offset = opcode.ends_with("64").then(|| self.offset(operands));
            self.from.entry(target).or_default().extend(offset);
            return;
        }
        let number = operands.rsplit(',').next().and_then(|last| last.trim().parse::<i64>().ok());
        let base = sources.first().and_then(|source| self.of_params.get(*source)).copied();
        match (opcode, base, number) {
            ("mov.b64" | "mov.u64", _, _) if operands.contains("_param_0") => {
                self.of_params.insert(target.clone(), 0);
            }
            ("mov.b64" | "mov.u64", Some(base), _) => drop(self.of_params.insert(target.clone(), base)),
            ("add.s64", Some(base), Some(number)) => drop(self.of_params.insert(target.clone(), base + number)),
            _ => {}
        }
        // A register that is written on several paths has what any of them gives it.
        let new = sources.iter().flat_map(|source| self.from.get(*source).cloned().unwrap_or_default());
        let new: Vec<u64> = new.collect();
        self.from.entry(target).or_default().extend(new);
    }

    /// Where `ld.param` reads: `[name+8]`, or `[%rd1+-8]` with the address of a parameter in a register.
    fn offset(&self, operands: &str) -> u64 {
        let place = operands.split_once('[').and_then(|(_, rest)| rest.split_once(']')).expect("an address").0;
        let (base, number) = place.split_once('+').unwrap_or((place, "0"));
        let base = if base.starts_with('%') { self.of_params[base] } else { 0 };
        u64::try_from(base + number.parse::<i64>().expect("an offset")).expect("it is behind the first")
    }
}

/// The registers that a text names.
fn registers(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '%' && c != '_').filter(|word| word.starts_with('%'))
}

/// The first statement before the wait that must come behind it. Asynchronous copies may come before it if their
/// addresses are computed from the parameter at the offset `weights` alone, and from sizes.
fn first_too_early(before: &str, weights: Option<u64>) -> Option<&str> {
    let mut addresses = Addresses::default();
    // Twice, for what a loop hands to its next round.
    let statements = || before.split([';', '\n']);
    statements().chain(statements()).for_each(|statement| addresses.follow(statement));
    statements().find(|statement| {
        let loads_weights = opcode_of(statement).starts_with("cp.async.")
            && weights.is_some_and(|weights| addresses.source_of(statement) == BTreeSet::from([weights]));
        is_too_early(statement) && !loads_weights
    })
}

/// The kernels of a module that do not wait, that may end before they do, or that access memory before.
fn careless(root: &Path, source: &ModuleSource) -> Vec<String> {
    let text =
        std::fs::read_to_string(compiled(root, source, Architecture::Sm90a, PtxCompiler::Nvrtc).unwrap()).unwrap();
    let mut found = Vec::new();
    for entry in text.split(".entry ").skip(1) {
        let (name, code) = entry.split_once('(').expect("parameters");
        let before = code.split_once(WAIT).map(|(before, _)| before);
        let weights = LOAD_WEIGHTS.iter().find(|(kernel, _)| *kernel == name).map(|(_, offset)| *offset);
        let is_careless = |before: &str| first_too_early(before, weights).is_some();
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
        let old = compiled(&kernels(), source, Architecture::Sm80, PtxCompiler::Nvrtc).unwrap();
        let old = std::fs::read_to_string(old).unwrap();
        assert!(!old.contains("griddepcontrol"), "sm_80 has no such instruction");
    }
    let quantised = sources.last().expect("the modules of quantised weights");
    let without = broken_copy("quantized.cu", "    wait_for_earlier_kernels();\n", "");
    assert_eq!(careless(without.path(), quantised), ["quantized_product_few"]);
    // Rows of x are what an earlier kernel writes.
    let few_rows = |file| sources.iter().rfind(|source| source.file == file).expect("it is among them");
    let of_x = broken_copy("include/few_rows.cuh", "p.w + (is_valid ? at : 0)", "p.x + (is_valid ? at : 0)");
    assert_eq!(careless(of_x.path(), few_rows("few_rows.cu")), ["few_rows_product", "few_rows_gated"]);
    assert_eq!(careless(of_x.path(), few_rows("few_rows_qkv.cu")), ["few_rows_qkv"]);
    let late = broken_copy("include/types.cuh", "        first_statement; ", "        ");
    assert!(careless(late.path(), quantised).len() > 1, "no kernel but the one that waits later waits");
}

#[test]
fn accesses_are_told_from_their_neighbours() {
    let too_early = is_too_early;
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
    let code = "\tld.param.u64 %rd1, [k_param_0+8];\n\tld.param.u32 %r1, [k_param_0+16];\n\tmul.wide.u32 %rd2, %r1, 2;\n\
                \tadd.s64 %rd3, %rd1, %rd2;\n\tcp.async.cg.shared.global [%r2], [%rd3], 16, %r3;\n";
    assert_eq!(first_too_early(code, Some(8)), None);
    assert!(first_too_early(code, None).is_some() && first_too_early(code, Some(0)).is_some());
    let other = "\tld.param.u64 %rd4, [k_param_0];\n\tselp.b64 %rd1, %rd1, %rd4, %p1;\n\tadd.s64";
    assert!(first_too_early(&code.replacen("\tadd.s64", other, 1), Some(8)).is_some(), "of two parameters");
    let indirect = "\tmov.b64 %rd9, k_param_0;\n\tadd.s64 %rd8, %rd9, 16;\n\tld.param.u64 %rd1, [%rd8+-8];\n";
    let indirect = code.replacen("\tld.param.u64 %rd1, [k_param_0+8];\n", indirect, 1);
    assert_eq!(first_too_early(&indirect, Some(8)), None);
    assert!(first_too_early("\tld.global.u32 %r1, [%rd1]", Some(8)).is_some());
}
