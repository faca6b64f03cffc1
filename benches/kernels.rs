//! The CPU kernels at the shapes of a 1B Llama (hidden 2048, 32/8 heads of 64, intermediate 8192, vocabulary 32768),
//! in bfloat16, beside what the machine can do.
//!
//! `cargo bench --bench kernels` runs criterion's measurements; before them a table sets each product against the
//! measured read bandwidth and the peak of its instruction set. Environment: `PAGETIDE_BENCH_THREADS` (default: all),
//! `PAGETIDE_BENCH_ISA` (default: the best).

use criterion::{BenchmarkId, Criterion, Throughput};
use pagetide::backend::cpu::{CpuBackend, CpuMatrix, CpuOptions, CpuTensor};
use pagetide::backend::{
    Activation, AttentionShape, Backend, Batch, BatchSeq, DType, HostTensor, KvLayout, NO_SOURCE, Norm, NormKind,
    TensorRole,
};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// `(name, n, k)`
const PRODUCTS: [(&str, usize, usize); 5] = [
    ("qkv", 3072, 2048),
    ("attention out", 2048, 2048),
    ("gate+up", 16384, 2048),
    ("down", 2048, 8192),
    ("vocabulary", 32768, 2048),
];
const ROWS: [usize; 6] = [1, 4, 8, 32, 128, 512];
/// Copies of a matrix, used in turn, so that the weights come from memory and not from the cache.
const COLD_BYTES: usize = 512 << 20;

fn backend() -> CpuBackend {
    let threads = std::env::var("PAGETIDE_BENCH_THREADS").ok().map(|n| n.parse().expect("a number of threads"));
    let isa = std::env::var("PAGETIDE_BENCH_ISA").ok().map(|isa| isa.parse().expect("an instruction set"));
    CpuBackend::new(CpuOptions { threads, isa }).unwrap()
}

/// Bytes of small bfloat16 numbers.
fn weights(len: usize) -> Vec<u8> {
    let bits = |i: usize| half::bf16::from_f32((i * 2_654_435_761 % 1009) as f32 / 1009.0 - 0.5).to_le_bytes();
    (0..len).flat_map(bits).collect()
}

fn batch(rows: usize) -> Batch {
    let token_sources = vec![NO_SOURCE; rows];
    Batch { tokens: vec![0; rows], token_sources, positions: vec![0; rows], slots: vec![0; rows], ..Batch::default() }
}

struct Product {
    copies: Vec<CpuMatrix>,
    next: usize,
    x: CpuTensor,
    out: CpuTensor,
}

impl Product {
    fn new(backend: &CpuBackend, n: usize, k: usize) -> Self {
        let bytes = weights(n * k);
        let stored = HostTensor { dtype: DType::BF16, rows: n, cols: k, bytes: &bytes };
        let num_copies = COLD_BYTES / bytes.len() + 1;
        let mut x = backend.tensor(512, k, TensorRole::Activation).unwrap();
        x.as_mut_slice().iter_mut().enumerate().for_each(|(i, x)| *x = (i % 17) as f32 / 17.0 - 0.5);
        Self {
            copies: (0..num_copies).map(|_| backend.matrix(&[stored], DType::BF16).unwrap()).collect(),
            next: 0,
            x,
            out: backend.tensor(512, n, TensorRole::Activation).unwrap(),
        }
    }

    fn run(&mut self, backend: &mut CpuBackend) {
        self.next = (self.next + 1) % self.copies.len();
        backend.linear(&self.x, &self.copies[self.next], None, &mut self.out);
    }
}

/// Shortest time of a call: what the machine can do when nobody else wants it.
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

/// GB/s at which `threads` threads sum up memory, in huge pages where there are any.
fn read_bandwidth(threads: usize) -> f64 {
    let mut data = memmap2::MmapMut::map_anon(COLD_BYTES).unwrap();
    #[cfg(target_os = "linux")]
    data.advise(memmap2::Advice::HugePage).ok();
    data.fill(1);
    // Four streams each, as the kernels have.
    let sum = |part: &[u8]| {
        let mut sums = [0u64; 4];
        let mut streams = part.chunks(part.len() / 4).map(|stream| stream.chunks_exact(256));
        let mut streams: [_; 4] = std::array::from_fn(|_| streams.next().unwrap());
        while let [Some(a), Some(b), Some(c), Some(d)] = streams.each_mut().map(|stream| stream.next()) {
            for (sum, chunk) in sums.iter_mut().zip([a, b, c, d]) {
                let (words, _) = chunk.as_chunks();
                *sum = words.iter().fold(*sum, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
            }
        }
        black_box(sums);
    };
    let pass = || {
        std::thread::scope(|scope| {
            data.chunks(data.len() / threads).for_each(|part| {
                scope.spawn(move || part.chunks(1 << 20).for_each(sum));
            });
        });
    };
    COLD_BYTES as f64 / time(pass).as_secs_f64() / 1e9
}

fn print_roofline(backend: &mut CpuBackend) {
    let bandwidth = read_bandwidth(backend.num_threads());
    println!("{} threads, {}; memory reads at {bandwidth:.1} GB/s", backend.num_threads(), backend.isa());
    println!("{:<14} {:>5} {:>10} {:>8} {:>10} {:>9}", "product", "rows", "best", "GB/s", "of memory", "TFLOP/s");
    for (name, n, k) in PRODUCTS {
        let mut product = Product::new(backend, n, k);
        for rows in ROWS {
            backend.begin(&batch(rows));
            let time = time(|| product.run(backend));
            let gbs = (2 * n * k) as f64 / time.as_secs_f64() / 1e9;
            let tflops = (2 * n * k * rows) as f64 / time.as_secs_f64() / 1e12;
            let share = 100.0 * gbs / bandwidth;
            println!("{name:<14} {rows:>5} {time:>10.1?} {gbs:>8.1} {share:>9.0}% {tflops:>9.3}");
        }
    }
}

fn products(criterion: &mut Criterion, backend: &mut CpuBackend) {
    let mut group = criterion.benchmark_group("product");
    for (name, n, k) in PRODUCTS {
        let mut product = Product::new(backend, n, k);
        for rows in [1, 8, 32, 512] {
            backend.begin(&batch(rows));
            group.throughput(Throughput::Elements((2 * n * k * rows) as u64));
            group.bench_function(BenchmarkId::new(name, rows), |bencher| bencher.iter(|| product.run(backend)));
        }
    }
    group.finish();
}

const SHAPE: AttentionShape =
    AttentionShape { num_heads: 32, num_kv_heads: 8, head_dim: 64, scale: 0.125, window: None, softcap: None };

/// Attention of `seqs` sequences with `rows` new tokens after `computed`.
fn attention(criterion: &mut Criterion, backend: &mut CpuBackend) {
    let mut group = criterion.benchmark_group("attention");
    for (name, seqs, computed, rows) in [
        ("decode 1 x 512", 1, 511, 1),
        ("decode 1 x 4096", 1, 4095, 1),
        ("decode 16 x 1024", 16, 1023, 1),
        ("prefill 512", 1, 0, 512),
        ("prefill 512 after 3584", 1, 3584, 512),
    ] {
        let blocks = (computed + rows as usize).div_ceil(16);
        // Several layers, so that decode reads from memory as it does in a model.
        let layout = KvLayout { num_layers: 16, num_kv_heads: 8, head_dim: 64, block_size: 16, dtype: DType::BF16 };
        backend.allocate_kv(layout, seqs * blocks, 0).unwrap();
        let mut batch = batch(seqs * rows as usize);
        for seq in 0..seqs {
            batch.seqs.push(BatchSeq {
                first_row: seq * rows as usize,
                num_rows: rows as usize,
                num_computed: computed,
                first_block: seq * blocks,
                num_blocks: blocks,
            });
        }
        batch.block_tables = (0..(seqs * blocks) as u32).collect();
        backend.begin(&batch);
        let qkv = backend.tensor(seqs * rows as usize, 3072, TensorRole::Activation).unwrap();
        let mut out = backend.tensor(seqs * rows as usize, 2048, TensorRole::Activation).unwrap();
        let mut layer = 0;
        // Positions read, times K and V, times heads.
        group.throughput(Throughput::Bytes((seqs * (computed + rows as usize) * 2 * 8 * 64 * 2) as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                layer = (layer + 1) % 16;
                backend.attention(&qkv, &SHAPE, layer, &mut out);
            });
        });
    }
    group.finish();
}

fn rows(criterion: &mut Criterion, backend: &mut CpuBackend) {
    let mut group = criterion.benchmark_group("rows");
    let ones: Vec<u8> = (0..2048).flat_map(|_| 1f32.to_le_bytes()).collect();
    let weight = backend.vector(&[HostTensor { dtype: DType::F32, rows: 1, cols: 2048, bytes: &ones }]).unwrap();
    let norm = Norm { kind: NormKind::Rms { eps: 1e-5 }, weight, bias: None };
    for rows in [1, 512] {
        backend.begin(&batch(rows));
        let mut x = backend.tensor(rows, 2048, TensorRole::Activation).unwrap();
        let delta = backend.tensor(rows, 2048, TensorRole::Activation).unwrap();
        let mut out = backend.tensor(rows, 2048, TensorRole::Activation).unwrap();
        group.bench_function(BenchmarkId::new("add_norm", rows), |bencher| {
            bencher.iter(|| backend.add_norm(&mut x, &delta, &norm, &mut out));
        });
        let gate_up = backend.tensor(rows, 16384, TensorRole::Activation).unwrap();
        let mut out = backend.tensor(rows, 8192, TensorRole::Activation).unwrap();
        group.bench_function(BenchmarkId::new("silu", rows), |bencher| {
            bencher.iter(|| backend.gated_activation(&gate_up, Activation::Silu, &mut out));
        });
    }
    group.finish();
}

fn main() {
    let mut backend = backend();
    print_roofline(&mut backend);
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .configure_from_args();
    products(&mut criterion, &mut backend);
    attention(&mut criterion, &mut backend);
    rows(&mut criterion, &mut backend);
    criterion.final_summary();
}
