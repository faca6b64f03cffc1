//! Every kernel of the CPU backend at the shapes of a 1B Llama (hidden 2048, 32/8 heads of 64, intermediate 8192,
//! vocabulary 32768) in bfloat16, on each instruction set that the processor has. The group `quantized` has products
//! with quantised weights.
//!
//! `cargo bench --bench kernels [-- FILTER]` runs criterion's measurements, named `kernel/instruction set/case`. With
//! `PAGETIDE_BENCH_ROOFLINE=1` it instead prints a table of the products beside the machine's limits. Other environment
//! variables: `PAGETIDE_BENCH_THREADS` (default: all), `PAGETIDE_BENCH_ISA` (default: each).

use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, measurement::WallTime};
use pagetide_backend::cpu::{CpuBackend, CpuMatrix, CpuOptions, CpuTensor, CpuVector, Isa, MachineLimits};
use pagetide_backend::quant::QuantFormat;
use pagetide_backend::{
    Activation, AttentionShape, Backend, Batch, BatchSeq, DType, Experts, ExpertsShape, HostTensor, KvLayout,
    NO_SOURCE, Norm, NormKind, Rope, TensorRole, WeightFormat,
};
use pagetide_base::ids::BlockId;
use std::time::{Duration, Instant};

const HIDDEN: usize = 2048;
const INTERMEDIATE: usize = 8192;
const QKV: usize = 3072;
/// `(name, n, k)`
const PRODUCTS: [(&str, usize, usize); 5] = [
    ("qkv", QKV, HIDDEN),
    ("attention out", HIDDEN, HIDDEN),
    ("gate+up", 2 * INTERMEDIATE, HIDDEN),
    ("down", HIDDEN, INTERMEDIATE),
    ("vocabulary", 32768, HIDDEN),
];
const ROWS: [usize; 6] = [1, 4, 8, 32, 128, 512];
/// Bytes of the copies of a matrix. They are used in turn, so that the weights come from memory and not from the cache.
const COLD_BYTES: usize = 1 << 30;
const NUM_LAYERS: usize = 16;
const BLOCK_SIZE: usize = 16;
const SHAPE: AttentionShape =
    AttentionShape { num_heads: 32, num_kv_heads: 8, head_dim: 64, scale: 0.125, window: None, softcap: None };

fn backends() -> impl Iterator<Item = CpuBackend> {
    let threads = std::env::var("PAGETIDE_BENCH_THREADS").ok().map(|n| n.parse().expect("a number of threads"));
    let only = std::env::var("PAGETIDE_BENCH_ISA").ok().map(|isa| isa.parse::<Isa>().expect("an instruction set"));
    let chosen = Isa::ALL.into_iter().rev().filter(move |isa| only.is_none_or(|only| only == *isa));
    chosen
        .filter(|isa| isa.is_available())
        .map(move |isa| CpuBackend::new(CpuOptions { threads, isa: Some(isa) }).unwrap())
}

fn batch(rows: usize) -> Batch {
    Batch {
        tokens: vec![0; rows],
        token_sources: vec![NO_SOURCE; rows],
        positions: vec![0; rows],
        slots: vec![0; rows],
        ..Batch::default()
    }
}

fn tensor(backend: &CpuBackend, rows: usize, cols: usize) -> CpuTensor {
    let mut x = backend.tensor(rows, cols, TensorRole::Activation).unwrap();
    x.as_mut_slice().iter_mut().enumerate().for_each(|(i, x)| *x = (i % 17) as f32 / 17.0 - 0.5);
    x
}

fn ones(backend: &CpuBackend, len: usize) -> CpuVector {
    let ones: Vec<u8> = (0..len).flat_map(|_| 1f32.to_le_bytes()).collect();
    backend.vector(&[HostTensor { format: DType::F32.into(), rows: 1, cols: len, bytes: &ones }]).unwrap()
}

fn rms_norm(backend: &CpuBackend, len: usize) -> Norm<CpuVector> {
    Norm { kind: NormKind::Rms { eps: 1e-5 }, weight: ones(backend, len), bias: None }
}

struct Product {
    copies: Vec<CpuMatrix>,
    next: usize,
    x: CpuTensor,
    out: CpuTensor,
}

impl Product {
    fn new(backend: &CpuBackend, n: usize, k: usize) -> Self {
        let num_copies = COLD_BYTES / (2 * n * k) + 1;
        let copy = |seed| backend.random_matrix(n, k, DType::BF16, seed as u64).unwrap();
        Self::of(backend, (0..num_copies).map(copy).collect(), n, k)
    }

    /// With weight blocks of random bytes. All numbers in float16 are 0.01.
    fn quantized(backend: &CpuBackend, format: QuantFormat, n: usize, k: usize) -> Self {
        let mut bits = 1_u32;
        let byte = |_| {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (bits >> 24) as u8
        };
        let mut bytes: Vec<u8> = (0..n * k / format.block_weights() * format.block_bytes()).map(byte).collect();
        let halves: &[usize] = match format {
            QuantFormat::Q4_K => &[0, 2],
            QuantFormat::Q6_K => &[208],
            _ => &[0],
        };
        for block in bytes.chunks_exact_mut(format.block_bytes()) {
            halves.iter().for_each(|at| block[*at..at + 2].copy_from_slice(&half::f16::from_f32(0.01).to_le_bytes()));
        }
        let weights = HostTensor { format: WeightFormat::Quantized(format), rows: n, cols: k, bytes: &bytes };
        let copies = (0..COLD_BYTES / bytes.len() / 4 + 1).map(|_| backend.matrix(&[weights], DType::BF16).unwrap());
        Self::of(backend, copies.collect(), n, k)
    }

    fn of(backend: &CpuBackend, copies: Vec<CpuMatrix>, n: usize, k: usize) -> Self {
        Self { copies, next: 0, x: tensor(backend, 512, k), out: tensor(backend, 512, n) }
    }

    fn run(&mut self, backend: &mut CpuBackend) {
        self.next = (self.next + 1) % self.copies.len();
        backend.linear(&self.x, &self.copies[self.next], None, &mut self.out);
    }
}

/// The shortest time of several calls: that of a call that nothing else disturbed.
fn time(mut call: impl FnMut()) -> Duration {
    call();
    let start = Instant::now();
    let mut best = Duration::MAX;
    while start.elapsed() < Duration::from_millis(500) {
        let start = Instant::now();
        call();
        best = best.min(start.elapsed());
    }
    best
}

fn print_roofline(backend: &mut CpuBackend) {
    let MachineLimits { read_bytes_per_s, flops_per_s } = backend.measure_limits(DType::BF16).unwrap();
    let (threads, isa) = (backend.num_threads(), backend.isa());
    let (gbs, tflops) = (read_bytes_per_s / 1e9, flops_per_s / 1e12);
    println!("{threads} threads, {isa}: reads {gbs:.1} GB/s, multiplies {tflops:.3} TFLOP/s");
    println!("product        rows       best     GB/s  of reads  TFLOP/s  of peak");
    for (name, n, k) in PRODUCTS {
        let mut product = Product::new(backend, n, k);
        for rows in ROWS {
            backend.begin(&batch(rows));
            let time = time(|| product.run(backend));
            let (bytes, flops) = (2.0 * (n * k) as f64, 2.0 * (n * k * rows) as f64);
            let (bytes_per_s, flops_per_s_here) = (bytes / time.as_secs_f64(), flops / time.as_secs_f64());
            let (gbs, tflops) = (bytes_per_s / 1e9, flops_per_s_here / 1e12);
            let (of_reads, of_peak) = (100.0 * bytes_per_s / read_bytes_per_s, 100.0 * flops_per_s_here / flops_per_s);
            println!("{name:<14} {rows:>4} {time:>10.1?} {gbs:>8.1} {of_reads:>7.0} % {tflops:>8.3} {of_peak:>6.0} %");
        }
    }
}

type Group<'a> = BenchmarkGroup<'a, WallTime>;

/// Only the smallest product and the one with the longest inner dimension, so that slow instruction sets finish too.
fn products(group: &mut Group<'_>, backend: &mut CpuBackend) {
    for (name, n, k) in PRODUCTS.into_iter().filter(|(name, _, _)| ["qkv", "down"].contains(name)) {
        let mut product = Product::new(backend, n, k);
        for rows in ROWS {
            backend.begin(&batch(rows));
            group.throughput(Throughput::Elements((2 * n * k * rows) as u64));
            group.bench_function(BenchmarkId::new(name, rows), |bencher| bencher.iter(|| product.run(backend)));
        }
    }
}

fn quantized(group: &mut Group<'_>, backend: &mut CpuBackend) {
    let (_, n, k) = PRODUCTS[3];
    for format in [QuantFormat::Q4_K, QuantFormat::Q6_K, QuantFormat::Q8_0, QuantFormat::Q4_0] {
        let mut product = Product::quantized(backend, format, n, k);
        for rows in ROWS {
            backend.begin(&batch(rows));
            group.throughput(Throughput::Elements((2 * n * k * rows) as u64));
            group
                .bench_function(BenchmarkId::new(format.name(), rows), |bencher| bencher.iter(|| product.run(backend)));
        }
    }
}

/// Begins a batch of `seqs` sequences with `rows` new tokens after `computed`, each with its own blocks, which are
/// allocated and filled. There are several layers, so that decoding reads from memory as in a model.
fn sequences(backend: &mut CpuBackend, seqs: usize, computed: usize, rows: usize) {
    let blocks = (computed + rows).div_ceil(BLOCK_SIZE);
    backend.allocate_kv(kv_layout(), seqs * blocks, 0).unwrap();
    // Memory that was never written would all be the same page of zeros.
    let everything = seqs * (computed + rows);
    begin(backend, seqs, 0, computed + rows);
    let mut qkv = tensor(backend, everything, QKV);
    (0..NUM_LAYERS).for_each(|layer| backend.rope_and_write_kv(&mut qkv, &SHAPE, None, layer));
    begin(backend, seqs, computed, rows);
}

fn begin(backend: &mut CpuBackend, seqs: usize, computed: usize, rows: usize) {
    let blocks = (computed + rows).div_ceil(BLOCK_SIZE);
    let mut batch = batch(seqs * rows);
    batch.block_tables = (0..(seqs * blocks) as u32).collect();
    for row in 0..seqs * rows {
        let (seq, position) = (row / rows, computed + row % rows);
        batch.positions[row] = position as u32;
        batch.slots[row] = (seq * blocks * BLOCK_SIZE + position) as u32;
    }
    for seq in 0..seqs {
        let (first_row, first_block) = (seq * rows, seq * blocks);
        batch.seqs.push(BatchSeq {
            first_row,
            num_rows: rows,
            num_computed: computed,
            first_block,
            num_blocks: blocks,
        });
    }
    backend.begin(&batch);
}

fn kv_layout() -> KvLayout {
    KvLayout {
        num_layers: NUM_LAYERS,
        num_kv_heads: 8,
        head_dim: 64,
        block_size: BLOCK_SIZE,
        dtype: DType::BF16.into(),
    }
}

fn attention(group: &mut Group<'_>, backend: &mut CpuBackend) {
    for (name, seqs, computed, rows) in [
        ("decode 1 x 512", 1, 511, 1),
        ("decode 1 x 4096", 1, 4095, 1),
        ("decode 16 x 1024", 16, 1023, 1),
        ("prefill 512", 1, 0, 512),
        ("prefill 512 after 3584", 1, 3584, 512),
    ] {
        sequences(backend, seqs, computed, rows);
        let qkv = tensor(backend, seqs * rows, QKV);
        let mut out = tensor(backend, seqs * rows, HIDDEN);
        let mut layer = 0;
        // Positions read, times K and V, times heads.
        group.throughput(Throughput::Bytes((seqs * (computed + rows) * 2 * 8 * 64 * 2) as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                layer = (layer + 1) % NUM_LAYERS;
                backend.attention(&qkv, &SHAPE, layer, &mut out);
            });
        });
    }
}

fn rope_and_kv(group: &mut Group<'_>, backend: &mut CpuBackend) {
    let inv_freq = (0..32).map(|i| 10_000f32.powf(-(i as f32) / 32.0)).collect();
    let rope = Rope { rotary_dim: 64, inv_freq, attention_factor: 1.0, max_positions: 4096 };
    let rope = backend.rope_table(&rope).unwrap();
    for (name, seqs, computed, rows) in [("decode", 1, 511, 1), ("decode", 32, 511, 1), ("prefill", 1, 0, 512)] {
        sequences(backend, seqs, computed, rows);
        let mut qkv = tensor(backend, seqs * rows, QKV);
        group.throughput(Throughput::Elements((seqs * rows) as u64));
        group.bench_function(BenchmarkId::new(name, seqs * rows), |bencher| {
            bencher.iter(|| backend.rope_and_write_kv(&mut qkv, &SHAPE, Some(&rope), 0));
        });
    }
}

/// Norms, activations, embeddings: operations that work row by row.
fn rows(group: &mut Group<'_>, backend: &mut CpuBackend) {
    let (norm, head_norm) = (rms_norm(backend, HIDDEN), rms_norm(backend, 64));
    let table = backend.random_matrix(32768, HIDDEN, DType::BF16, 1).unwrap();
    for rows in [1, 32, 512] {
        let mut batch = batch(rows);
        batch.tokens = (0..rows as u32).map(|row| row * 7919 % 32768).collect();
        backend.begin(&batch);
        group.throughput(Throughput::Elements(rows as u64));
        let (mut x, delta) = (tensor(backend, rows, HIDDEN), tensor(backend, rows, HIDDEN));
        let mut out = tensor(backend, rows, HIDDEN);
        group.bench_function(BenchmarkId::new("embed", rows), |bencher| {
            bencher.iter(|| backend.embed(&table, 1.0, &mut out));
        });
        group.bench_function(BenchmarkId::new("norm", rows), |bencher| {
            bencher.iter(|| backend.norm(&x, &norm, &mut out));
        });
        group.bench_function(BenchmarkId::new("add_norm", rows), |bencher| {
            bencher.iter(|| backend.add_norm(&mut x, &delta, &norm, &mut out));
        });
        let mut qkv = tensor(backend, rows, QKV);
        group.bench_function(BenchmarkId::new("qk_norm", rows), |bencher| {
            bencher.iter(|| backend.qk_norm(&mut qkv, &SHAPE, &head_norm, &head_norm));
        });
        let gate_up = tensor(backend, rows, 2 * INTERMEDIATE);
        let mut out = tensor(backend, rows, INTERMEDIATE);
        group.bench_function(BenchmarkId::new("silu", rows), |bencher| {
            bencher.iter(|| backend.gated_activation(&gate_up, Activation::Silu, &mut out));
        });
        group.bench_function(BenchmarkId::new("gelu", rows), |bencher| {
            bencher.iter(|| backend.activation(&mut out, Activation::Gelu));
        });
    }
}

/// Two of eight experts of an eighth of the width.
fn experts(group: &mut Group<'_>, backend: &mut CpuBackend) {
    let shape = ExpertsShape {
        num_experts: 8,
        num_chosen: 2,
        hidden_size: HIDDEN,
        intermediate_size: INTERMEDIATE / 8,
        activation: Activation::Silu,
        renormalize: true,
    };
    let ExpertsShape { num_experts, hidden_size, intermediate_size, .. } = shape;
    let matrices = |n, k, seed| backend.random_matrices(num_experts, n, k, DType::BF16, seed).unwrap();
    let weights = Experts {
        router: backend.random_matrix(num_experts, hidden_size, DType::BF16, 1).unwrap(),
        up: matrices(2 * intermediate_size, hidden_size, 2),
        down: matrices(hidden_size, intermediate_size, 3),
    };
    for rows in ROWS {
        backend.begin(&batch(rows));
        let mut work = backend.experts_workspace(rows, &shape).unwrap();
        let (x, mut out) = (tensor(backend, rows, HIDDEN), tensor(backend, rows, HIDDEN));
        group.throughput(Throughput::Elements(rows as u64));
        group.bench_function(BenchmarkId::new("2 of 8", rows), |bencher| {
            bencher.iter(|| backend.mix_experts(&x, &weights, &shape, &mut work, &mut out));
        });
    }
}

fn copies(group: &mut Group<'_>, backend: &mut CpuBackend) {
    let layout = kv_layout();
    for blocks in [1, 64] {
        backend.allocate_kv(layout, 2 * blocks, blocks).unwrap();
        let pairs = |to: usize| -> Vec<_> {
            (0..blocks).map(|block| (BlockId(block as u32), BlockId((to + block) as u32))).collect()
        };
        group.throughput(Throughput::Bytes((blocks * layout.block_bytes()) as u64));
        group.bench_function(BenchmarkId::new("copy", blocks), |bencher| {
            bencher.iter(|| backend.copy_blocks(&pairs(blocks)));
        });
        group.bench_function(BenchmarkId::new("swap_out", blocks), |bencher| {
            bencher.iter(|| {
                backend.swap_out(&pairs(0));
                wait_for_copies(backend);
            });
        });
        group.bench_function(BenchmarkId::new("swap_in", blocks), |bencher| {
            bencher.iter(|| {
                backend.swap_in(&pairs(0));
                wait_for_copies(backend);
            });
        });
    }
}

fn wait_for_copies(backend: &mut CpuBackend) {
    while backend.finished_copies().is_empty() {
        std::thread::yield_now();
    }
}

fn main() {
    if std::env::var_os("PAGETIDE_BENCH_ROOFLINE").is_some() {
        return backends().for_each(|mut backend| print_roofline(&mut backend));
    }
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .configure_from_args();
    for mut backend in backends() {
        let isa = backend.isa();
        let mut run = |name: &str, benches: fn(&mut Group<'_>, &mut CpuBackend)| {
            let mut group = criterion.benchmark_group(format!("{name}/{isa}"));
            benches(&mut group, &mut backend);
            group.finish();
        };
        run("product", products);
        run("quantized", quantized);
        run("attention", attention);
        run("rope_and_kv", rope_and_kv);
        run("rows", rows);
        run("experts", experts);
        run("blocks", copies);
    }
    criterion.final_summary();
}
