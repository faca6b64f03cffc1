//! Runs the kernels of `manifest.json`, which `scripts/peer-kernels.sh` makes, and compares their results. The folder
//! is `PAGETIDE_TEST_PEER_KERNELS`; without it nothing is run.

use super::reference::{self, Tensors};
use ptx_interpreter::findings::{AccessPlace, FindingKind, KernelFinding};
use ptx_interpreter::{GpuOptions, GridLaunch, Module, VirtualGpu};
use serde::Deserialize;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A small problem, and the launches that solve it.
#[derive(Deserialize)]
pub struct PeerCase {
    /// Compute capability times 10.
    arch: u32,
    name: String,
    ptx: String,
    /// Which function of `reference` says what is right.
    reference: String,
    pub numbers: HashMap<String, f64>,
    buffers: Vec<PeerBuffer>,
    launches: Vec<PeerLaunch>,
}

#[derive(Deserialize)]
struct PeerBuffer {
    name: String,
    /// `f16`, `bf16`, `f32` or `i32`
    r#type: String,
    shape: Vec<usize>,
    /// What stands for its address in parameters.
    address: u64,
    content: Content,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Numbers(Vec<f64>),
    /// `random` or `zero`
    Kind(String),
}

#[derive(Deserialize)]
struct PeerLaunch {
    kernel: String,
    grid: [u32; 3],
    block: [u32; 3],
    #[serde(default = "no_cluster")]
    cluster: [u32; 3],
    shared_bytes: u32,
    /// The bytes of each parameter, in hexadecimal.
    params: Vec<String>,
}

fn no_cluster() -> [u32; 3] {
    [1; 3]
}

impl PeerBuffer {
    fn size(&self) -> usize {
        if matches!(&*self.r#type, "f16" | "bf16") { 2 } else { 4 }
    }

    fn encode(&self, value: f64) -> Vec<u8> {
        match &*self.r#type {
            "f16" => half::f16::from_f64(value).to_le_bytes().to_vec(),
            "bf16" => half::bf16::from_f64(value).to_le_bytes().to_vec(),
            "f32" => (value as f32).to_le_bytes().to_vec(),
            "i32" => (value as i32).to_le_bytes().to_vec(),
            other => panic!("a buffer of type {other}"),
        }
    }

    fn decode(&self, bytes: &[u8]) -> Vec<f64> {
        let decode = |bytes: &[u8]| match &*self.r#type {
            "f16" => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
            "bf16" => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
            "f32" => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).into(),
            _ => i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).into(),
        };
        bytes.chunks_exact(self.size()).map(decode).collect()
    }
}

/// SplitMix64, as numbers in [-1, 1).
struct Uniform(u64);

impl Uniform {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// What the interpreter finds in FlashInfer's kernels, although their results are right.
///
/// - Decode and merge: warps that have merged their results all store them, so one store races with itself in global
///   memory, with the same bytes.
/// - All attention: tiles are loaded without filling the rows that do not exist, and such rows are read and dropped.
/// - Prefill: a warp stores its output to shared memory and its other lanes read it without `__syncwarp`.
fn is_known(finding: &KernelFinding) -> bool {
    let is = |name: &str| finding.kernel.contains(name);
    let in_shared = finding.message.contains("shared memory");
    match finding.kind {
        FindingKind::Race if in_shared => {
            let is_own_warp =
                |other: &AccessPlace| other.block == finding.at.block && other.thread / 32 == finding.at.thread / 32;
            is("PrefillWith") && finding.other.as_ref().is_some_and(is_own_warp)
        }
        FindingKind::Race => {
            let is_itself = finding.other.as_ref().is_some_and(|other| other.line == finding.at.line);
            is_itself && finding.at.instruction == "st" && (is("DecodeWith") || is("MergeStates"))
        }
        FindingKind::Uninitialized => in_shared && (is("DecodeWith") || is("MergeStates") || is("PrefillWith")),
        _ => false,
    }
}

fn bytes_of_hex(hex: &str) -> Vec<u8> {
    let byte = |i| u8::from_str_radix(&hex[i..i + 2], 16).expect("hexadecimal");
    (0..hex.len()).step_by(2).map(byte).collect()
}

impl PeerCase {
    /// Replaces the addresses that stand for buffers by those that they have.
    fn relocate(&self, param: &mut [u8], addresses: &[u64]) {
        for word in param.as_chunks_mut::<8>().0 {
            let value = u64::from_le_bytes(*word);
            for (buffer, address) in self.buffers.iter().zip(addresses) {
                let bytes = (buffer.shape.iter().product::<usize>() * buffer.size()) as u64;
                if (buffer.address..buffer.address + bytes).contains(&value) {
                    *word = (value - buffer.address + address).to_le_bytes();
                }
            }
        }
    }

    /// Runs the launches and compares the results; says what is wrong.
    fn run(&self, folder: &Path, modules: &mut HashMap<String, Module>) -> Result<(), String> {
        let what = format!("{} for sm_{}", self.name, self.arch);
        let module = modules.entry(self.ptx.clone()).or_insert_with(|| {
            let text = std::fs::read_to_string(folder.join(&self.ptx)).expect("the manifest's files are there");
            Module::parse(&text).unwrap_or_else(|error| panic!("{}: {error}", self.ptx))
        });
        let mut gpu = VirtualGpu::new(GpuOptions::default());
        let mut uniform = Uniform(self.arch.into());
        let mut before = Tensors::default();
        let mut addresses = Vec::new();
        for buffer in &self.buffers {
            let count = buffer.shape.iter().product();
            let values: Vec<f64> = match &buffer.content {
                Content::Numbers(numbers) => numbers.clone(),
                Content::Kind(kind) if kind == "random" => (0..count).map(|_| uniform.next()).collect(),
                Content::Kind(_) => vec![0.0; count],
            };
            let bytes: Vec<u8> = values.iter().flat_map(|value| buffer.encode(*value)).collect();
            let address = gpu.memory.allocate(bytes.len());
            gpu.memory.write(address, &bytes);
            before.insert(&buffer.name, &buffer.shape, buffer.decode(&bytes));
            addresses.push(address);
        }
        for launch in &self.launches {
            let program = module.entry(&launch.kernel).unwrap();
            let mut params = vec![0; program.param_bytes as usize];
            assert_eq!(program.params.len(), launch.params.len(), "{what}");
            for ((_, offset, bytes), hex) in program.params.iter().zip(&launch.params) {
                let mut param = bytes_of_hex(hex);
                self.relocate(&mut param, &addresses);
                params[*offset as usize..(*offset + *bytes) as usize].copy_from_slice(&param);
            }
            let PeerLaunch { cluster, .. } = *launch;
            let grid = GridLaunch { cluster, ..GridLaunch::new(launch.grid, launch.block, launch.shared_bytes) };
            let report = gpu.launch(module, &launch.kernel, &grid, &params).unwrap_or_else(|e| panic!("{what}: {e}"));
            let unknown: Vec<String> =
                report.findings.iter().filter(|f| !is_known(f)).map(ToString::to_string).collect();
            if !unknown.is_empty() {
                return Err(format!("{what}: {}", unknown.join("\n")));
            }
        }
        let mut after = Tensors::default();
        for (buffer, address) in self.buffers.iter().zip(&addresses) {
            let bytes = buffer.shape.iter().product::<usize>() * buffer.size();
            after.insert(&buffer.name, &buffer.shape, buffer.decode(&gpu.memory.read(*address, bytes)));
        }
        for (name, expected) in reference::results(&self.reference, &self.numbers, &before) {
            let buffer = self.buffers.iter().find(|buffer| buffer.name == name).expect("a buffer of the case");
            let tolerance = match &*buffer.r#type {
                "bf16" => 2e-2,
                "f16" => 3e-3,
                // Products of tf32, which has ten bits.
                "f32" if self.reference == "product" => 3e-3,
                _ => 1e-5,
            };
            for (i, (got, expected)) in after.get(&name).1.iter().zip(&expected).enumerate() {
                let error = (got - expected).abs();
                // A number that is none is wrong, too.
                if error.is_nan() || error > tolerance * expected.abs().max(1.0) {
                    return Err(format!("{what}: {name}[{i}] is {got}, not {expected}"));
                }
            }
        }
        println!("{what}: as the reference");
        Ok(())
    }
}

#[test]
fn kernels_of_peers_compute_what_they_should() {
    #[derive(Deserialize)]
    struct Manifest {
        cases: Vec<PeerCase>,
    }
    let Some(folder) = std::env::var_os("PAGETIDE_TEST_PEER_KERNELS").map(PathBuf::from) else {
        println!("skipped: PAGETIDE_TEST_PEER_KERNELS is not set");
        return;
    };
    let text = std::fs::read_to_string(folder.join("manifest.json")).expect("scripts/peer-kernels.sh wrote it");
    let Manifest { cases } = serde_json::from_str(&text).unwrap();
    for name in ["triton_matmul", "triton_attention", "flashinfer_decode", "flashinfer_prefill", "flashinfer_append"] {
        for arch in [80, 90] {
            assert!(cases.iter().any(|case| case.arch == arch && case.name.starts_with(name)), "{name}, {arch}");
        }
    }
    // Tensor maps of every swizzle, and one that two blocks share.
    for name in ["128", "64", "32", "transposed", "tf32", "multicast"].map(|kind| format!("cutlass_product_{kind}")) {
        assert!(cases.iter().any(|case| case.name == name), "{name}");
    }
    let only = std::env::var("PAGETIDE_TEST_PEER_KERNEL").unwrap_or_default();
    let mut modules = HashMap::new();
    let run = cases.iter().filter(|case| case.name.contains(&only));
    let failures: Vec<String> = run.filter_map(|case| case.run(&folder, &mut modules).err()).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
