//! The other operations on the device against the CPU backend, on the same numbers.

use crate::support::*;
use pagetide::backend::cpu::{CpuBackend, CpuTensor};
use pagetide::backend::cuda::device::Device;
use pagetide::backend::cuda::{CudaBackend, CudaTensor};
use pagetide::backend::{
    Activation, AttentionShape, Backend, Batch, BatchSeq, DType, HostTensor, KvLayout, NO_SOURCE, Norm, NormKind, Rope,
    TensorRole,
};
use pagetide::ids::BlockId;
use std::rc::Rc;

/// A backend whose memory a test can fill and read.
trait Bench {
    type B: Backend;

    fn backend(&mut self) -> &mut Self::B;
    fn fill(&self, tensor: &mut <Self::B as Backend>::Tensor, values: &[f32]);
    fn values(&self, tensor: &<Self::B as Backend>::Tensor, len: usize) -> Vec<f32>;
    /// Bytes of a block of the device pool.
    fn block(&mut self, block: u32) -> Vec<u8>;
}

struct Cpu(CpuBackend);

impl Bench for Cpu {
    type B = CpuBackend;

    fn backend(&mut self) -> &mut CpuBackend {
        &mut self.0
    }

    fn fill(&self, tensor: &mut CpuTensor, values: &[f32]) {
        tensor.as_mut_slice()[..values.len()].copy_from_slice(values);
    }

    fn values(&self, tensor: &CpuTensor, len: usize) -> Vec<f32> {
        tensor.as_slice()[..len].to_vec()
    }

    fn block(&mut self, block: u32) -> Vec<u8> {
        self.0.device_block(BlockId(block)).to_vec()
    }
}

struct Cuda(CudaBackend, Rc<dyn Device>, usize);

impl Bench for Cuda {
    type B = CudaBackend;

    fn backend(&mut self) -> &mut CudaBackend {
        &mut self.0
    }

    fn fill(&self, tensor: &mut CudaTensor, values: &[f32]) {
        set(&self.1, tensor, values);
    }

    fn values(&self, tensor: &CudaTensor, len: usize) -> Vec<f32> {
        get(&self.1, tensor, len)
    }

    fn block(&mut self, block: u32) -> Vec<u8> {
        let pool = download_bytes(&self.1, self.0.kv_pool().expect("allocated"));
        pool[block as usize * self.2..][..self.2].to_vec()
    }
}

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    rows: usize,
    cols: usize,
    heads: (usize, usize),
    head_dim: usize,
    block_size: usize,
    rotary_dim: usize,
    kind: Activation,
    layer_norm: bool,
    seed: u64,
}

const VOCAB: usize = 50;
const NUM_BLOCKS: usize = 40;
const MAX_ROWS: usize = 64;

impl Case {
    /// Compiling the kernels takes longest, so they are compiled for one of eight shapes.
    fn random(seed: u64) -> Self {
        let (i, random) = ((seed % 8) as usize, &mut Random(seed));
        let head_dim = [8, 16, 24, 64, 80][i % 5];
        let kv_heads = 1 + i % 2;
        let dtype = DTYPES[i % 3];
        // Longer sums of float32 lose more than the check allows.
        let longest = if dtype == DType::F32 { 264 } else { 520 };
        Self {
            dtype,
            rows: random.range(1, 12),
            cols: [8, 24, 40, 72, 129, 256, longest][(seed / 8 % 7) as usize],
            heads: (kv_heads * (1 + i / 2), kv_heads),
            head_dim,
            block_size: [1, 3, 8, 16][(i + i / 4) % 4],
            rotary_dim: random.pick(&[head_dim, head_dim / 2, 4]),
            kind: random.pick(&[Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu]),
            layer_norm: random.one_in(2),
            seed,
        }
    }

    fn layout(&self) -> KvLayout {
        let (block_size, dtype) = (self.block_size, self.dtype.into());
        KvLayout { num_layers: 2, num_kv_heads: self.heads.1, head_dim: self.head_dim, block_size, dtype }
    }

    fn shape(&self) -> AttentionShape {
        let (num_heads, num_kv_heads) = self.heads;
        AttentionShape { num_heads, num_kv_heads, head_dim: self.head_dim, scale: 1.0, softcap: None, window: None }
    }

    /// Rows of one sequence each, at random positions and slots.
    fn batch(&self) -> Batch {
        let random = &mut Random(self.seed ^ 11);
        let mut slots: Vec<u32> = (0..(NUM_BLOCKS * self.block_size) as u32).collect();
        for i in (1..slots.len()).rev() {
            slots.swap(i, random.below(i + 1));
        }
        let logit_rows = (0..random.range(1, self.rows)).map(|_| random.below(self.rows) as u32).collect();
        Batch {
            hidden_rows: Vec::new(),
            tokens: (0..self.rows).map(|_| random.below(VOCAB) as u32).collect(),
            token_sources: vec![NO_SOURCE; self.rows],
            positions: (0..self.rows).map(|_| random.below(60) as u32).collect(),
            slots: slots[..self.rows].to_vec(),
            seqs: (0..self.rows)
                .map(|row| BatchSeq { first_row: row, num_rows: 1, num_computed: 0, first_block: row, num_blocks: 1 })
                .collect(),
            block_tables: slots[..self.rows].iter().map(|slot| slot / self.block_size as u32).collect(),
            logit_rows,
        }
    }

    fn numbers(&self, n: usize, seed: u64) -> Vec<f32> {
        let numbers = Random(self.seed ^ (seed << 20)).floats(n, self.dtype);
        round(&numbers.into_iter().map(|x| 3.0 * x).collect::<Vec<_>>(), self.dtype)
    }
}

/// The results of every operation, with its name.
fn run<H: Bench>(bench: &mut H, case: &Case) -> Vec<(&'static str, Vec<f32>)> {
    let Case { dtype, rows, cols, .. } = *case;
    let mut results = Vec::new();
    let batch = case.batch();
    bench.backend().allocate_kv(case.layout(), NUM_BLOCKS, 0).unwrap();
    let stored = |values: &[f32]| dtype.encode(values);
    let matrix = |bench: &mut H, n: usize, k: usize, seed: u64| {
        let bytes = stored(&case.numbers(n * k, seed));
        bench.backend().matrix(&[HostTensor { format: dtype.into(), rows: n, cols: k, bytes: &bytes }], dtype).unwrap()
    };
    let vector = |bench: &mut H, n: usize, seed: u64| {
        let bytes = stored(&case.numbers(n, seed));
        bench.backend().vector(&[HostTensor { format: dtype.into(), rows: 1, cols: n, bytes: &bytes }]).unwrap()
    };
    let tensor = |bench: &mut H, cols: usize, role, seed: u64| {
        let mut tensor = bench.backend().tensor(MAX_ROWS, cols, role).unwrap();
        bench.fill(&mut tensor, &case.numbers(rows * cols, seed));
        tensor
    };
    bench.backend().begin(&batch);

    let table = matrix(bench, VOCAB, cols, 1);
    for (name, role) in [("embed", TensorRole::Residual), ("embed, narrow", TensorRole::Activation)] {
        let mut out = tensor(bench, cols, role, 2);
        bench.backend().embed(&table, 1.75, &mut out);
        results.push((name, bench.values(&out, rows * cols)));
    }
    let mut x = tensor(bench, cols, TensorRole::Residual, 3);
    let positions = matrix(bench, 64, cols, 4);
    bench.backend().add_position_embedding(&positions, 2, &mut x);
    results.push(("add_position_embedding", bench.values(&x, rows * cols)));

    let kind = match case.layer_norm {
        true => NormKind::Layer { eps: 1e-5 },
        false => NormKind::Rms { eps: 1e-6 },
    };
    let bias = case.layer_norm.then(|| vector(bench, cols, 6));
    let norm = Norm { kind, weight: vector(bench, cols, 5), bias };
    for role in [TensorRole::Activation, TensorRole::Residual] {
        let mut out = tensor(bench, cols, role, 7);
        bench.backend().norm(&x, &norm, &mut out);
        results.push(("norm", bench.values(&out, rows * cols)));
        let delta = tensor(bench, cols, TensorRole::Activation, 8);
        bench.backend().add_norm(&mut x, &delta, &norm, &mut out);
        results.push(("add_norm", bench.values(&out, rows * cols)));
        bench.backend().add(&mut x, &delta);
        results.push(("the sum of add and add_norm", bench.values(&x, rows * cols)));
    }

    // A width that products support: a multiple of 8.
    let (n, k) = (24, cols.next_multiple_of(8));
    let weights = matrix(bench, n, k, 9);
    let bias = vector(bench, n, 10);
    for (name, role) in [("linear", TensorRole::Activation), ("linear of float32", TensorRole::Residual)] {
        let input = tensor(bench, k, role, 11);
        for bias in [None, Some(&bias)] {
            let mut out = tensor(bench, n, TensorRole::Activation, 12);
            bench.backend().linear(&input, &weights, bias, &mut out);
            results.push((name, bench.values(&out, rows * n)));
        }
        let num_logit_rows = batch.logit_rows.len().min(3);
        let mut gathered = tensor(bench, k, TensorRole::Activation, 13);
        let first = batch.logit_rows.len() - num_logit_rows;
        bench.backend().gather_rows(&input, first, num_logit_rows, &mut gathered);
        results.push(("gather_rows", bench.values(&gathered, num_logit_rows * k)));
    }

    let head = matrix(bench, VOCAB, k, 19);
    let input = tensor(bench, k, TensorRole::Activation, 20);
    let num_logit_rows = rows.min(8);
    bench.backend().logits(&input, num_logit_rows, &head, None);
    results.push(("logits", bench.backend().read_logits()));
    bench.backend().cap_logits(20.0);
    results.push(("capped logits", bench.backend().read_logits()));

    for (name, gated) in [("activation", false), ("gated_activation", true)] {
        let mut x = tensor(bench, if gated { 2 * cols } else { cols }, TensorRole::Activation, 14);
        let mut out = tensor(bench, cols, TensorRole::Activation, 15);
        match gated {
            true => bench.backend().gated_activation(&x, case.kind, &mut out),
            false => bench.backend().activation(&mut x, case.kind),
        }
        results.push((name, bench.values(if gated { &out } else { &x }, rows * cols)));
    }

    let gate = vector(bench, cols, 21);
    let [x, from] = [22, 23].map(|seed| tensor(bench, cols, TensorRole::Activation, seed));
    let mut out = tensor(bench, cols, TensorRole::Activation, 24);
    bench.backend().add_gated(&x, &gate, &from, &mut out);
    results.push(("add_gated", bench.values(&out, rows * cols)));

    let shape = case.shape();
    let qkv_cols = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
    let mut qkv = tensor(bench, qkv_cols, TensorRole::Activation, 16);
    let head_norm = |bench: &mut H, seed| Norm {
        kind: NormKind::Rms { eps: 1e-6 },
        weight: vector(bench, shape.head_dim, seed),
        bias: None,
    };
    let (q, k) = (head_norm(bench, 17), head_norm(bench, 18));
    bench.backend().qk_norm(&mut qkv, &shape, &q, &k);
    results.push(("qk_norm", bench.values(&qkv, rows * qkv_cols)));
    // Rounded again, so that the next operation is compared separately.
    let rounded = round(&bench.values(&qkv, rows * qkv_cols), DType::F16);
    bench.fill(&mut qkv, &rounded);

    let rope = Rope {
        rotary_dim: case.rotary_dim,
        inv_freq: (0..case.rotary_dim / 2).map(|i| 0.5_f32.powi(i as i32)).collect(),
        attention_factor: 1.1,
        max_positions: 60,
    };
    let rope = bench.backend().rope_table(&rope).unwrap();
    // After this operation K in the tensor is undefined.
    bench.backend().rope_and_write_kv(&mut qkv, &shape, None, 0);
    bench.backend().rope_and_write_kv(&mut qkv, &shape, Some(&rope), 1);
    let q_cols = shape.num_heads * shape.head_dim;
    let values = bench.values(&qkv, rows * qkv_cols);
    results.push(("rotated Q", values.chunks_exact(qkv_cols).flat_map(|row| row[..q_cols].to_vec()).collect()));
    // Copies of a written block to an unwritten one, and from there to another.
    let first = batch.slots[0] / case.block_size as u32;
    let spare: Vec<u32> = (0..NUM_BLOCKS as u32).filter(|block| !batch.block_tables.contains(block)).collect();
    let [a, b] = [spare[0], spare[1]];
    bench.backend().copy_blocks(&[(BlockId(first), BlockId(a)), (BlockId(a), BlockId(b))]);
    bench.backend().end_step();
    bench.backend().finish_step();
    assert_eq!(bench.block(first), bench.block(b), "a copy of a copy");
    results.push(("written K and V", written(bench, case, &batch)));
    results
}

/// The K and V at the batch's slots. Only these are written.
fn written<H: Bench>(bench: &mut H, case: &Case, batch: &Batch) -> Vec<f32> {
    let KvLayout { num_layers, num_kv_heads, head_dim, block_size, .. } = case.layout();
    let mut values = Vec::new();
    for slot in &batch.slots {
        let block = case.dtype.decode(&bench.block(slot / block_size as u32));
        for head in 0..num_layers * 2 * num_kv_heads {
            let start = (head * block_size + *slot as usize % block_size) * head_dim;
            values.extend(&block[start..start + head_dim]);
        }
    }
    values
}

fn check(seed: u64) {
    check_on(seed, &device);
}

pub fn check_on(seed: u64, device: &dyn Fn(u32) -> Rc<dyn Device>) {
    let case = Case::random(seed);
    let expected = run(&mut Cpu(CpuBackend::new(Default::default()).unwrap()), &case);
    let mut first: Option<Vec<(&str, Vec<f32>)>> = None;
    for order in thread_orders() {
        let device = device(order);
        let mut options = options(case.dtype, case.heads.0, case.layout());
        (options.vocab_size, options.max_rows) = (VOCAB, MAX_ROWS);
        let backend = CudaBackend::new(device.clone(), options).unwrap();
        let found = run(&mut Cuda(backend, device, case.layout().block_bytes()), &case);
        for ((name, found), (_, expected)) in found.iter().zip(&expected) {
            let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
            // Sums of many numbers, some of them rounded.
            let tolerance = 2.0 * tolerance(case.dtype).max(1e-5);
            assert_close(found, &expected, tolerance, &format!("{name}, {case:?}"));
        }
        let first = first.get_or_insert_with(|| found.clone());
        for ((name, found), (_, first)) in found.iter().zip(first.iter()) {
            assert_eq!(bits(found), bits(first), "{name}, {case:?} under order {order}");
        }
    }
}

#[test]
fn same_numbers_as_on_the_cpu() {
    parallel(0..24, |seed| check(seed * 97 + 4));
}

/// Random weights are the same for the same seed, differ for another seed, and have the right deviation.
#[test]
fn random_matrices() {
    for dtype in DTYPES {
        let device = device(0);
        let kv = KvLayout { num_layers: 1, num_kv_heads: 1, head_dim: 8, block_size: 1, dtype: dtype.into() };
        let backend = CudaBackend::new(device.clone(), options(dtype, 1, kv)).unwrap();
        let matrix = |seed| {
            let matrix = backend.random_matrix(50, 120, dtype, seed).unwrap();
            download(&device, matrix.buffer(), dtype)
        };
        let values = matrix(1);
        assert_eq!(bits(&values), bits(&matrix(1)));
        assert_ne!(bits(&values), bits(&matrix(2)));
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let deviation = (values.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt();
        assert!(mean.abs() < 0.001 && (deviation - 0.02).abs() < 0.0005, "{dtype:?}: {mean}, {deviation}");
    }
}

#[test]
fn broken_kernels_are_noticed() {
    if !on_emulation() {
        return;
    }
    let breakages = [
        ("rows.cu", "(v.at[j] - mean) * factor", "v.at[j] * factor"),
        ("rows.cu", "p.offset) * p.cols", "0) * p.cols"),
        ("rows.cu", "to_float(from[i]) * p.scale;", "to_float(from[i]);"),
        ("rows.cu", "p.cap * tanhf", "tanhf"),
        ("include/heads.cuh", "b * cos.at[j] + a * sin.at[j]", "b * cos.at[j] - a * sin.at[j]"),
        ("include/heads.cuh", "i = turned + threadIdx.x", "i = threadIdx.x"),
        ("include/heads.cuh", "slot % BLOCK_SIZE * HEAD_DIM", "slot % (BLOCK_SIZE + 1) * HEAD_DIM"),
        ("include/activation.cuh", "x + cols + i", "x + i"),
        ("rows.cu", "[p.first + blockIdx.x];", "[blockIdx.x];"),
        ("include/activation.cuh", "0.044715f", "0.04f"),
        ("heads.cu", "p.pairs[2 * blockIdx.y + 1]", "p.pairs[2 * blockIdx.y]"),
        ("include/reduce.cuh", "    __syncthreads();\n    return result;", "    return result;"),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (file, from, to) = breakages[i as usize];
        breaks(file, from, to, |device| (0..24).for_each(|seed| check_on(seed * 97 + 4, device)));
    });
}
