//! Random shapes in random batches: each row of a product, an attention, a layer of experts or an operation on rows has
//! the same bytes as alone, on every instruction set, and is near a float64 reference.
//!
//! A case depends only on its number, so every run is the same. `KERNEL_CASES=300..400` runs other cases than the few
//! of a usual run. A failure names its case.

use crate::attention::{Pool, Sequence, layout, rope, run, shape, tolerance};
use crate::support::*;
use pagetide_backend::cpu::{CpuBackend, CpuTensor, CpuVector, Isa};
use pagetide_backend::{
    Activation, AttentionShape, Backend, DType, Experts, ExpertsShape, KvDType, Norm, NormKind, Rope, TensorRole,
};
use std::fmt::Debug;
use std::ops::Range;

/// Calls `check` with the numbers of each case of this run.
pub fn for_cases(usual: Range<u64>, check: impl Fn(&mut Numbers)) {
    let cases = match std::env::var("KERNEL_CASES") {
        Ok(text) => {
            let ends = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
            ends.expect("KERNEL_CASES is two numbers, for example 300..400")
        }
        Err(_) => usual,
    };
    for case in cases {
        // Shown if the test fails.
        println!("case {case}");
        check(&mut Numbers::new(0xca5e ^ (case << 16)));
    }
}

/// The number of rows that are computed together: often one, or few.
pub fn company(numbers: &mut Numbers, max: usize) -> usize {
    if numbers.chance(3) { 1 } else { numbers.size(max) }
}

/// The given rows of `x: [_, cols]`, concatenated.
fn pick(x: &[f32], cols: usize, rows: &[usize]) -> Vec<f32> {
    rows.iter().flat_map(|row| &x[row * cols..][..cols]).copied().collect()
}

/// Calls `compute` several times with random rows of `x: [_, cols]` together, and compares each row of the results with
/// the same row of `expected`.
fn check_in_company(
    numbers: &mut Numbers,
    (x, cols): (&[f32], usize),
    (expected, out_cols): (&[f32], usize),
    what: &dyn Debug,
    mut compute: impl FnMut(&[f32]) -> Vec<f32>,
) {
    let num_rows = x.len() / cols;
    for _ in 0..3 {
        let rows: Vec<usize> = (0..company(numbers, num_rows)).map(|_| numbers.below(num_rows)).collect();
        let got = compute(&pick(x, cols, &rows));
        assert_eq!(got.len(), rows.len() * out_cols, "{what:?}");
        for (at, (got, row)) in got.chunks_exact(out_cols).zip(&rows).enumerate() {
            let same = bits(got) == bits(&expected[row * out_cols..][..out_cols]);
            assert!(same, "{what:?}: row {row} has other bytes as row {at} of {}", rows.len());
        }
    }
}

/// Numbers of very different sizes, some of them zero.
pub fn uneven(numbers: &mut Numbers, len: usize) -> Vec<f32> {
    let scale = |numbers: &mut Numbers| if numbers.chance(9) { 0.0 } else { 2f32.powi(numbers.below(8) as i32 - 5) };
    (0..len).map(|_| numbers.next() * scale(numbers)).collect()
}

#[derive(Debug)]
struct Product {
    n: usize,
    k: usize,
    rows: usize,
    stored: DType,
    dtype: DType,
    with_bias: bool,
}

impl Product {
    fn new(numbers: &mut Numbers) -> Self {
        // Sometimes more rows and columns than one task of any kernel computes.
        let (most_n, most_rows, work) = if numbers.chance(6) { (900, 1100, 24_000_000) } else { (400, 140, 4_000_000) };
        let (n, rows) = (numbers.size(most_n), numbers.size(most_rows));
        let k = numbers.size((work / (n * rows)).clamp(8, 2500));
        let [stored, dtype] = [(); 2].map(|()| DTYPES[numbers.below(3)]);
        Self { n, k, rows, stored, dtype, with_bias: numbers.chance(2) }
    }

    fn check(&self, numbers: &mut Numbers) {
        let Self { n, k, rows, .. } = *self;
        let (weights, x) = (uneven(numbers, n * k), uneven(numbers, rows * k));
        let bias = self.with_bias.then(|| numbers.vec(n));
        for isa in isas() {
            let mut alone = self.on(isa, 1, &weights, bias.as_deref());
            let expected: Vec<f32> = x.chunks_exact(k).flat_map(&mut alone).collect();
            for _ in 0..3 {
                let threads = numbers.between(1, 4);
                let what = (isa, threads, self);
                let mut product = self.on(isa, threads, &weights, bias.as_deref());
                assert!(bits(&product(&x)) == bits(&expected), "{what:?}: all rows");
                check_in_company(numbers, (&x, k), (&expected, n), &what, product);
            }
            for _ in 0..100 {
                let (row, column) = (numbers.below(rows), numbers.below(n));
                let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[column]));
                let (sum, size) = self.reference(&x[row * k..][..k], &weights[column * k..][..k]);
                let error = (f64::from(expected[row * n + column]) - sum - bias).abs();
                let most = 1e-5 * (size + bias.abs()) + 1e-30;
                assert!(error <= most, "{isa} {self:?}: [{row}, {column}] is off by {error:e}, by {most:e} at most");
            }
        }
    }

    /// The layer on a backend of its own, as a function of its input.
    fn on(&self, isa: Isa, threads: usize, weights: &[f32], bias: Option<&[f32]>) -> impl FnMut(&[f32]) -> Vec<f32> {
        let Self { n, k, stored, dtype, .. } = *self;
        let mut backend = backend(isa, threads);
        let w = backend.matrix(&[Stored::new(weights, n, stored).tensor()], dtype).unwrap();
        let bias = bias.map(|bias| vector(&backend, bias));
        move |x| {
            let rows = x.len() / k;
            let x = tensor(&backend, x, k);
            let mut out = tensor(&backend, &vec![f32::NAN; rows * n], n);
            backend.begin(&plain_batch(rows));
            backend.linear(&x, &w, bias.as_ref(), &mut out);
            out.as_slice()[..rows * n].to_vec()
        }
    }

    /// `x · w`, and the sum of the products' sizes.
    fn reference(&self, x: &[f32], w: &[f32]) -> (f64, f64) {
        let rounded = |w: f32| f64::from(round(round(w, self.stored), self.dtype));
        let products = x.iter().zip(w).map(|(x, w)| f64::from(round(*x, self.dtype)) * rounded(*w));
        products.fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()))
    }
}

#[test]
fn products() {
    for_cases(0..60, |numbers| Product::new(numbers).check(numbers));
}

#[derive(Debug)]
struct Heads {
    shape: AttentionShape,
    rotary_dim: usize,
    dtype: KvDType,
    lens: Vec<usize>,
}

impl Heads {
    fn new(numbers: &mut Numbers) -> Self {
        let (head_dim, group) = (8 * numbers.between(1, 32), numbers.between(1, 8));
        // Multiply-adds of the scores and the sums of one head of one sequence.
        let products = |len: usize| len * len * head_dim * group;
        let longest = (1..400).rev().find(|len| products(*len) < 8_000_000).unwrap_or(1);
        let num_kv_heads = numbers.between(1, if longest < 150 { 1 } else { 3 });
        let mut lens: Vec<usize> = (0..numbers.between(1, 4)).map(|_| numbers.size(longest)).collect();
        let mut shape = shape(num_kv_heads, group, head_dim, None);
        if numbers.chance(4) {
            // Longer than a partition.
            shape = self::shape(1, numbers.between(1, 3), 8 * numbers.between(1, 2), None);
            lens = vec![numbers.between(1, 40), numbers.between(1020, 1100)];
        }
        shape.window = numbers.chance(3).then(|| numbers.size(500));
        shape.softcap = numbers.chance(4).then(|| 1.5 + numbers.next());
        let rotary_dim = if numbers.chance(3) { 0 } else { 2 * numbers.between(1, shape.head_dim / 2) };
        Self { shape, rotary_dim, dtype: KV_DTYPES[numbers.below(6)], lens }
    }

    fn rope(&self) -> Option<Rope> {
        (self.rotary_dim > 0).then(|| rope(self.rotary_dim, 1.1))
    }

    fn check(&self, numbers: &mut Numbers) {
        let seqs = self.lens.iter().map(|len| Sequence::new(self.shape, self.rope(), *len, numbers.bits()));
        let seqs: Vec<_> = seqs.collect();
        for isa in isas() {
            let alone = |seq: &Sequence| {
                let mut backend = backend(isa, 1);
                let pool = Pool::new(&mut backend, layout(&self.shape, 16, self.dtype), &[seq.len], 1);
                run(&mut backend, &[seq], &pool, &[vec![seq.len]]).remove(0)
            };
            let expected: Vec<Vec<f32>> = seqs.iter().map(alone).collect();
            for _ in 0..2 {
                self.check_in_company(numbers, isa, &seqs, &expected);
            }
            for (seq, expected) in seqs.iter().zip(&expected) {
                let tokens = [0, seq.len - 1, numbers.below(seq.len)];
                let tolerance = tolerance(self.dtype, self.rotary_dim > 0);
                let (cols, reference) = (seq.out_cols(), seq.reference_of(tokens, isa, self.dtype));
                let got = pick(expected, cols, &tokens);
                assert_close(&got, &reference, tolerance, &format!("{isa} {self:?}, {} tokens", seq.len));
            }
        }
    }

    /// Runs all sequences in one batch, in random chunks.
    fn check_in_company(&self, numbers: &mut Numbers, isa: Isa, seqs: &[Sequence], expected: &[Vec<f32>]) {
        let (threads, block_size) = (numbers.between(1, 4), numbers.size(256));
        let mut backend = backend(isa, threads);
        let pool = Pool::new(&mut backend, layout(&self.shape, block_size, self.dtype), &self.lens, numbers.bits());
        let steps = self.steps(numbers);
        let outputs = run(&mut backend, &seqs.iter().collect::<Vec<_>>(), &pool, &steps);
        for (i, (output, expected)) in outputs.iter().zip(expected).enumerate() {
            let cols = seqs[i].out_cols();
            for (token, (got, expected)) in output.chunks_exact(cols).zip(expected.chunks_exact(cols)).enumerate() {
                let how = format!("{isa}, {threads} threads, blocks of {block_size}");
                assert!(bits(got) == bits(expected), "{self:?}, {how}: sequence {i}, token {token} has other bytes");
            }
        }
    }

    /// New tokens of each sequence, step by step: one sequence may decode while another's prompt comes in chunks.
    fn steps(&self, numbers: &mut Numbers) -> Vec<Vec<usize>> {
        let mut left = self.lens.clone();
        let mut steps = Vec::new();
        while left.iter().any(|left| *left > 0) {
            let mut step = Vec::new();
            for left in &mut left {
                let wanted = match numbers.below(4) {
                    0 => 0,
                    1 => numbers.between(1, 3),
                    2 => numbers.size(70),
                    _ => numbers.between(1, 400),
                };
                step.push(wanted.min(*left));
                *left -= wanted.min(*left);
            }
            steps.push(step);
        }
        steps
    }
}

#[test]
fn attention() {
    for_cases(0..60, |numbers| Heads::new(numbers).check(numbers));
}

type Operation = dyn Fn(&mut CpuBackend, &[f32]) -> Vec<f32>;

/// An operation on single rows: `in_cols` numbers of a row become `out_cols` numbers.
struct RowOperation {
    what: String,
    in_cols: usize,
    out_cols: usize,
    run: Box<Operation>,
}

impl RowOperation {
    fn norm(kind: NormKind, cols: usize, numbers: &mut Numbers) -> Self {
        let (weight, bias) = (numbers.vec(cols), numbers.vec(cols));
        // An input row is a row of the residual stream and a row that is added to it. The results are the sum and its
        // norm.
        let run = move |backend: &mut CpuBackend, rows: &[f32]| {
            let (x, delta) = halves(rows, cols);
            let bias = matches!(kind, NormKind::Layer { .. }).then(|| vector(backend, &bias));
            let norm = Norm { kind, weight: vector(backend, &weight), bias };
            let (mut x, delta) = (tensor(backend, &x, cols), tensor(backend, &delta, cols));
            let mut out = blank(backend, rows.len() / (2 * cols), cols);
            backend.add_norm(&mut x, &delta, &norm, &mut out);
            let sums = x.as_slice()[..rows.len() / 2].to_vec();
            backend.norm(&x, &norm, &mut out);
            sums.chunks(cols).zip(out.as_slice().chunks(cols)).flat_map(|(x, out)| [x, out].concat()).collect()
        };
        Self { what: format!("{kind:?} of {cols}"), in_cols: 2 * cols, out_cols: 2 * cols, run: Box::new(run) }
    }

    fn activation(kind: Activation, cols: usize) -> Self {
        let run = move |backend: &mut CpuBackend, rows: &[f32]| {
            let mut x = tensor(backend, rows, cols);
            backend.activation(&mut x, kind);
            x.as_slice()[..rows.len()].to_vec()
        };
        Self { what: format!("{kind:?} of {cols}"), in_cols: cols, out_cols: cols, run: Box::new(run) }
    }

    fn gated_activation(kind: Activation, cols: usize) -> Self {
        let run = move |backend: &mut CpuBackend, rows: &[f32]| {
            let x = tensor(backend, rows, 2 * cols);
            let mut out = blank(backend, rows.len() / (2 * cols), cols);
            backend.gated_activation(&x, kind, &mut out);
            out.as_slice()[..rows.len() / 2].to_vec()
        };
        Self { what: format!("gated {kind:?} of {cols}"), in_cols: 2 * cols, out_cols: cols, run: Box::new(run) }
    }

    fn qk_norm(numbers: &mut Numbers) -> Self {
        let shape = shape(numbers.between(1, 3), numbers.between(1, 8), 8 * numbers.between(1, 32), None);
        let cols = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
        let [q, k] = [(); 2].map(|()| numbers.vec(shape.head_dim));
        let run = move |backend: &mut CpuBackend, rows: &[f32]| {
            let norm = |weight: &[f32]| Norm {
                kind: NormKind::Rms { eps: 1e-6 },
                weight: vector(backend, weight),
                bias: None,
            };
            let (q, k) = (norm(&q), norm(&k));
            let mut qkv = tensor(backend, rows, cols);
            backend.qk_norm(&mut qkv, &shape, &q, &k);
            qkv.as_slice()[..rows.len()].to_vec()
        };
        Self { what: format!("qk_norm {shape:?}"), in_cols: cols, out_cols: cols, run: Box::new(run) }
    }

    fn experts(numbers: &mut Numbers) -> Self {
        let num_experts = numbers.between(1, 12);
        let shape = ExpertsShape {
            num_experts,
            num_chosen: numbers.between(1, num_experts.min(4)),
            hidden_size: numbers.size(150),
            intermediate_size: numbers.size(150),
            activation: Activation::Silu,
            renormalize: numbers.chance(2),
        };
        let (hidden, width, dtype) = (shape.hidden_size, shape.intermediate_size, DTYPES[numbers.below(3)]);
        let mut stored = |rows: usize, cols: usize| Stored::new(&numbers.vec(rows * cols), rows, dtype);
        let router = stored(num_experts, hidden);
        let up: Vec<_> = (0..num_experts).map(|_| stored(2 * width, hidden)).collect();
        let down: Vec<_> = (0..num_experts).map(|_| stored(hidden, width)).collect();
        let run = move |backend: &mut CpuBackend, rows: &[f32]| {
            let tensors = |stored: &[Stored]| -> CpuMatrices {
                let parts: Vec<_> = stored.iter().map(Stored::tensor).collect();
                backend.matrices(num_experts, &parts, dtype).unwrap()
            };
            let router = backend.matrix(&[router.tensor()], dtype).unwrap();
            let experts = Experts { router, up: tensors(&up), down: tensors(&down) };
            let num_rows = rows.len() / hidden;
            let mut work = backend.experts_workspace(num_rows, &shape).unwrap();
            let x = tensor(backend, rows, hidden);
            let mut out = blank(backend, num_rows, hidden);
            backend.mix_experts(&x, &experts, &shape, &mut work, &mut out);
            out.as_slice()[..rows.len()].to_vec()
        };
        Self { what: format!("{shape:?} {dtype:?}"), in_cols: hidden, out_cols: hidden, run: Box::new(run) }
    }

    fn check(&self, numbers: &mut Numbers) {
        let num_rows = company(numbers, 150);
        let x = uneven(numbers, num_rows * self.in_cols);
        let run = |backend: &mut CpuBackend, x: &[f32]| {
            backend.begin(&plain_batch(x.len() / self.in_cols));
            (self.run)(backend, x)
        };
        for isa in isas() {
            let mut alone = backend(isa, 1);
            let expected: Vec<f32> = x.chunks_exact(self.in_cols).flat_map(|row| run(&mut alone, row)).collect();
            for threads in [1, numbers.between(2, 4)] {
                let what = (isa, threads, &self.what);
                let mut backend = backend(isa, threads);
                assert!(bits(&run(&mut backend, &x)) == bits(&expected), "{what:?}: all rows");
                let compute = |x: &[f32]| run(&mut backend, x);
                check_in_company(numbers, (&x, self.in_cols), (&expected, self.out_cols), &what, compute);
            }
        }
    }
}

type CpuMatrices = <CpuBackend as Backend>::Matrices;

pub fn vector(backend: &CpuBackend, values: &[f32]) -> CpuVector {
    backend.vector(&[Stored::new(values, 1, DType::F32).tensor()]).unwrap()
}

pub fn blank(backend: &CpuBackend, rows: usize, cols: usize) -> CpuTensor {
    backend.tensor(rows, cols, TensorRole::Activation).unwrap()
}

/// The left and the right halves of rows of `2 * cols`.
fn halves(rows: &[f32], cols: usize) -> (Vec<f32>, Vec<f32>) {
    let half = |first: usize| rows.chunks(cols).skip(first).step_by(2).flatten().copied().collect();
    (half(0), half(1))
}

#[test]
fn operations_on_rows() {
    for_cases(0..30, |numbers| {
        let cols = numbers.size(1000);
        let kinds = [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu];
        for operation in [
            RowOperation::norm(NormKind::Rms { eps: 1e-6 }, cols, numbers),
            RowOperation::norm(NormKind::Layer { eps: 1e-5 }, cols, numbers),
            RowOperation::activation(kinds[numbers.below(4)], cols),
            RowOperation::gated_activation(kinds[numbers.below(4)], cols),
            RowOperation::qk_norm(numbers),
            RowOperation::experts(numbers),
        ] {
            operation.check(numbers);
        }
    });
}
