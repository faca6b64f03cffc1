//! Products fused with the operations after them give the same bytes as these operations one after the other, for
//! random shapes, computed one row at a time by one thread.

use crate::attention::{layout, rope, shape};
use crate::random::{blank, company, for_cases, uneven, vector};
use crate::support::*;
use pagetide_backend::cpu::{CpuBackend, CpuMatrix, CpuVector, Isa};
use pagetide_backend::{Activation, AttentionShape, Backend, DType, Heads, KvDType, Norm, NormKind, Rope, TensorRole};
use pagetide_base::ids::BlockId;
use std::ops::Range;

/// The weights of a linear layer.
struct Layer {
    n: usize,
    weights: Vec<f32>,
    bias: Option<Vec<f32>>,
    dtype: DType,
}

impl Layer {
    fn new(n: usize, k: usize, dtype: DType, numbers: &mut Numbers) -> Self {
        let bias = numbers.chance(2).then(|| numbers.vec(n));
        Self { n, weights: uneven(numbers, n * k), bias, dtype }
    }

    fn stored(&self) -> Stored {
        Stored::new(&self.weights, self.n, DType::F32)
    }

    fn matrix(&self, backend: &CpuBackend) -> CpuMatrix {
        backend.matrix(&[self.stored().tensor()], self.dtype).unwrap()
    }

    fn bias(&self, backend: &CpuBackend) -> Option<CpuVector> {
        self.bias.as_ref().map(|bias| vector(backend, bias))
    }
}

/// Random pieces that cover `0..rows` in order.
fn pieces(rows: usize, numbers: &mut Numbers) -> Vec<Range<usize>> {
    let mut pieces = Vec::new();
    let mut start = 0;
    while start < rows {
        let end = start + company(numbers, rows - start);
        pieces.push(start..end);
        start = end;
    }
    pieces
}

fn one_by_one(rows: usize) -> Vec<Range<usize>> {
    (0..rows).map(|row| row..row + 1).collect()
}

/// Compares the results of `fused` in random pieces on random teams with those of `apart` row by row.
fn check<T: PartialEq>(
    rows: usize,
    numbers: &mut Numbers,
    what: &str,
    apart: impl Fn(CpuBackend, &[Range<usize>]) -> T,
    fused: impl Fn(CpuBackend, &[Range<usize>]) -> T,
) {
    for isa in isas() {
        let expected = apart(backend(isa, 1), &one_by_one(rows));
        for threads in [1, numbers.between(2, 4)] {
            let pieces = pieces(rows, numbers);
            let got = fused(backend(isa, threads), &pieces);
            assert!(got == expected, "{isa}, {threads} threads, rows {pieces:?}: {what}");
        }
    }
}

/// A QKV projection of one sequence.
struct Qkv {
    layer: Layer,
    x: Vec<f32>,
    k: usize,
    rows: usize,
    shape: AttentionShape,
    norms: Option<[Vec<f32>; 2]>,
    rope: Option<Rope>,
    block_size: usize,
    kv_dtype: KvDType,
}

impl Qkv {
    fn new(numbers: &mut Numbers) -> Self {
        let shape = shape(numbers.between(1, 3), numbers.between(1, 8), 8 * numbers.between(1, 32), None);
        let n = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
        let rows = company(numbers, 200);
        let k = numbers.size((6_000_000 / (n * rows)).clamp(8, 300));
        let with_rope = numbers.chance(2);
        Self {
            layer: Layer::new(n, k, DTYPES[numbers.below(3)], numbers),
            x: uneven(numbers, rows * k),
            k,
            rows,
            norms: numbers.chance(2).then(|| [(); 2].map(|()| numbers.vec(shape.head_dim))),
            rope: with_rope.then(|| rope(2 * numbers.between(1, shape.head_dim / 2), 1.1)),
            block_size: numbers.size(64),
            kv_dtype: KV_DTYPES[numbers.below(6)],
            shape,
        }
    }

    /// Returns Q of all rows, and all blocks of the pool.
    fn run(&self, mut backend: CpuBackend, pieces: &[Range<usize>], fused: bool) -> (Vec<u32>, Vec<Vec<u8>>) {
        let num_blocks = self.rows.div_ceil(self.block_size) as u32;
        backend.allocate_kv(layout(&self.shape, self.block_size, self.kv_dtype), num_blocks as usize, 0).unwrap();
        let table: Vec<u32> = (0..num_blocks).rev().collect();
        let (w, bias) = (self.layer.matrix(&backend), self.layer.bias(&backend));
        let norm = |weight: &Vec<f32>| Norm {
            kind: NormKind::Rms { eps: 1e-6 },
            weight: vector(&backend, weight),
            bias: None,
        };
        let norms = self.norms.as_ref().map(|[q, k]| (norm(q), norm(k)));
        let rope = self.rope.as_ref().map(|rope| backend.rope_table(rope).unwrap());
        let (n, mut q) = (self.layer.n, Vec::new());
        for piece in pieces {
            let x = tensor(&backend, &self.x[piece.start * self.k..piece.end * self.k], self.k);
            let mut qkv = blank(&backend, piece.len(), n);
            backend.begin(&batch(&[(piece.start, piece.len(), &table)], self.block_size));
            let norms = norms.as_ref().map(|(q, k)| [q, k]);
            if fused {
                let heads = Heads { shape: &self.shape, norms, rope: rope.as_ref(), layer: 1 };
                backend.qkv_linear(&x, &w, bias.as_ref(), &heads, &mut qkv);
            } else {
                backend.linear(&x, &w, bias.as_ref(), &mut qkv);
                if let Some([q, k]) = norms {
                    backend.qk_norm(&mut qkv, &self.shape, q, k);
                }
                backend.rope_and_write_kv(&mut qkv, &self.shape, rope.as_ref(), 1);
            }
            let of_q = self.shape.num_heads * self.shape.head_dim;
            q.extend(qkv.as_slice().chunks_exact(n).flat_map(|row| bits(&row[..of_q])));
        }
        (q, (0..num_blocks).map(|block| backend.device_block(BlockId(block)).to_vec()).collect())
    }
}

#[test]
fn heads_are_those_of_a_plain_product() {
    for_cases(0..60, |numbers| {
        let case = Qkv::new(numbers);
        let what = format!("{:?}, {} in, {}, KV {}", case.shape, case.k, case.layer.dtype.name(), case.kv_dtype.name());
        let (apart, fused) = (|b, p: &[_]| case.run(b, p, false), |b, p: &[_]| case.run(b, p, true));
        check(case.rows, numbers, &what, apart, fused);
    });
}

#[test]
fn gated_products_are_a_product_and_an_activation() {
    const KINDS: [Activation; 4] = [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu];
    for_cases(0..30, |numbers| {
        let (width, rows, n, kind) =
            (numbers.size(500), company(numbers, 200), numbers.size(60), KINDS[numbers.below(4)]);
        let k = numbers.size((3_000_000 / (width * rows)).clamp(8, 600));
        let dtype = DTYPES[numbers.below(3)];
        let (up, down) = (Layer::new(2 * width, k, dtype, numbers), Layer::new(n, width, dtype, numbers));
        let all = uneven(numbers, rows * k);
        let run = |mut backend: CpuBackend, pieces: &[Range<usize>], fused: bool| -> Vec<u32> {
            let w = if fused {
                backend.gate_up_matrix(&[up.stored().tensor()], dtype).unwrap()
            } else {
                up.matrix(&backend)
            };
            let (bias, down) = (up.bias(&backend), down.matrix(&backend));
            let mut results = Vec::new();
            for piece in pieces {
                let x = tensor(&backend, &all[piece.start * k..piece.end * k], k);
                let tensor = |role, cols| backend.tensor(piece.len(), cols, role).unwrap();
                let mut out = blank(&backend, piece.len(), n);
                let (mut unfused, mut operand) =
                    (tensor(TensorRole::Unfused, 2 * width), tensor(TensorRole::Operand(dtype), width));
                let (mut gate_up, mut activated) =
                    (tensor(TensorRole::Activation, 2 * width), tensor(TensorRole::Activation, width));
                backend.begin(&plain_batch(piece.len()));
                if fused {
                    backend.gated_linear(&x, &w, bias.as_ref(), kind, &mut unfused, &mut operand);
                    backend.linear(&operand, &down, None, &mut out);
                } else {
                    backend.linear(&x, &w, bias.as_ref(), &mut gate_up);
                    backend.gated_activation(&gate_up, kind, &mut activated);
                    backend.linear(&activated, &down, None, &mut out);
                }
                results.extend(bits(out.as_slice()));
            }
            results
        };
        let what = format!("{kind:?} of {k} to {width} in {}", dtype.name());
        check(rows, numbers, &what, |b, p| run(b, p, false), |b, p| run(b, p, true));
    });
}

#[test]
fn residual_products_are_a_product_and_a_sum() {
    for_cases(0..30, |numbers| {
        let (n, rows) = (numbers.size(700), company(numbers, 200));
        let k = numbers.size((4_000_000 / (n * rows)).clamp(8, 900));
        let layer = Layer::new(n, k, DTYPES[numbers.below(3)], numbers);
        let (all, stream) = (uneven(numbers, rows * k), uneven(numbers, rows * n));
        let run = |mut backend: CpuBackend, pieces: &[Range<usize>], fused: bool| -> Vec<u32> {
            let (w, bias) = (layer.matrix(&backend), layer.bias(&backend));
            let mut results = Vec::new();
            for piece in pieces {
                let x = tensor(&backend, &all[piece.start * k..piece.end * k], k);
                let mut stream = tensor(&backend, &stream[piece.start * n..piece.end * n], n);
                let mut delta = blank(&backend, piece.len(), n);
                backend.begin(&plain_batch(piece.len()));
                let to_add = if fused {
                    backend.residual_linear(&x, &w, bias.as_ref(), &mut stream, &mut delta)
                } else {
                    backend.linear(&x, &w, bias.as_ref(), &mut delta);
                    true
                };
                if to_add {
                    backend.add(&mut stream, &delta);
                }
                results.extend(bits(&stream.as_slice()[..piece.len() * n]));
            }
            results
        };
        let what = format!("{k} to {n} in {}", layer.dtype.name());
        // On tiles a chain of sums starts with the previous contents. This rounds differently, but equally in any
        // batch.
        let on_tiles = |backend: &CpuBackend| backend.isa() == Isa::Amx && layer.dtype == DType::BF16;
        let expected = |backend: CpuBackend, pieces: &[Range<usize>]| {
            let fused = on_tiles(&backend);
            let results = run(backend, pieces, fused);
            if fused {
                let apart = run(crate::support::backend(Isa::Amx, 1), pieces, false);
                let scale = apart.iter().map(|x| f32::from_bits(*x).abs()).fold(0.0, f32::max);
                let near = |(x, y): (&u32, &u32)| (f32::from_bits(*x) - f32::from_bits(*y)).abs() <= 1e-5 * scale;
                assert!(results.iter().zip(&apart).all(near), "{what}: not the sum");
            }
            results
        };
        check(rows, numbers, &what, expected, |b, p| run(b, p, true));
    });
}

/// Chains that are longer than a block of the inner dimension, for numbers of rows that leave few for the last block.
#[test]
fn long_chains_go_on_where_they_stopped() {
    const K: usize = 2 * 2048 + 40;
    const N: usize = 70;
    let mut numbers = Numbers::new(11);
    for (rows, has_bias) in [(65, false), (80, true), (82, false), (97, false)] {
        let layer = Layer { bias: has_bias.then(|| numbers.vec(N)), ..Layer::new(N, K, DType::BF16, &mut numbers) };
        let (all, stream) = (uneven(&mut numbers, rows * K), uneven(&mut numbers, rows * N));
        let run = |mut backend: CpuBackend, pieces: &[Range<usize>]| -> Vec<u32> {
            let (w, bias) = (layer.matrix(&backend), layer.bias(&backend));
            let mut results = Vec::new();
            for piece in pieces {
                let x = tensor(&backend, &all[piece.start * K..piece.end * K], K);
                let mut sum = tensor(&backend, &stream[piece.start * N..piece.end * N], N);
                let (mut out, mut delta) = (blank(&backend, piece.len(), N), blank(&backend, piece.len(), N));
                backend.begin(&plain_batch(piece.len()));
                backend.linear(&x, &w, bias.as_ref(), &mut out);
                if backend.residual_linear(&x, &w, bias.as_ref(), &mut sum, &mut delta) {
                    backend.add(&mut sum, &delta);
                }
                for row in 0..piece.len() {
                    results.extend(bits(&out.as_slice()[row * N..][..N]));
                    results.extend(bits(&sum.as_slice()[row * N..][..N]));
                }
            }
            results
        };
        for isa in isas() {
            let expected = run(backend(isa, 1), &one_by_one(rows));
            let whole = run(backend(isa, 3), std::slice::from_ref(&(0..rows)));
            assert!(whole == expected, "{isa}, {rows} rows");
        }
    }
}
