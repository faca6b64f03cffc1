//! Rotary embedding, the KV write and paged attention.

use crate::support::*;
use pagetide_backend::cpu::{CpuBackend, Isa};
use pagetide_backend::{AttentionShape, Backend, Batch, CodeType, DType, KvDType, KvLayout, Rope};
use pagetide_base::ids::BlockId;
use proptest::prelude::*;

/// One sequence's Q, K and V before rotation: `[len, (num_heads + 2 * num_kv_heads) * head_dim]`.
pub struct Sequence {
    pub shape: AttentionShape,
    pub rope: Option<Rope>,
    pub len: usize,
    pub qkv: Vec<f32>,
}

impl Sequence {
    pub fn new(shape: AttentionShape, rope: Option<Rope>, len: usize, seed: u64) -> Self {
        let cols = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
        let qkv = Numbers::new(seed).vec(len * cols).into_iter().map(|x| 3.0 * x).collect();
        Self { shape, rope, len, qkv }
    }

    /// A sequence whose rotated K has the same codes in the reference and in the backend, whose rotations differ in
    /// rounding. Only codes of 4 bits need it: a single one that is another may change a score by 1.
    fn with_clear_codes(shape: AttentionShape, rope: Option<Rope>, len: usize, seed: u64, dtype: KvDType) -> Self {
        let is_clear = |seq: &Self| {
            if dtype != INT4 || seq.rope.is_none() {
                return true;
            }
            let keys = shape.num_heads..shape.num_heads + shape.num_kv_heads;
            let key = |token, index| seq.head(token, index).iter().map(|x| *x as f32).collect::<Vec<_>>();
            (0..len).all(|token| keys.clone().all(|index| !has_codes_at_an_edge(&key(token, index), CodeType::Int4)))
        };
        let mut seqs = (0..).map(|n| Self::new(shape, rope.clone(), len, seed.wrapping_add(n << 32)));
        seqs.find(is_clear).expect("most sequences are clear")
    }

    fn cols(&self) -> usize {
        self.qkv.len() / self.len
    }

    pub fn out_cols(&self) -> usize {
        self.shape.num_heads * self.shape.head_dim
    }

    /// Head `index` of `[Q | K | V]` of a token, rotated.
    fn head(&self, token: usize, index: usize) -> Vec<f64> {
        let AttentionShape { num_heads, num_kv_heads, head_dim, .. } = self.shape;
        let start = token * self.cols() + index * head_dim;
        let mut head: Vec<f64> = self.qkv[start..][..head_dim].iter().map(|x| f64::from(*x)).collect();
        if let Some(rope) = &self.rope
            && index < num_heads + num_kv_heads
        {
            let half = rope.rotary_dim / 2;
            for i in 0..half {
                let angle = token as f64 * f64::from(rope.inv_freq[i]);
                let factor = f64::from(rope.attention_factor);
                let (sin, cos) = (angle.sin() * factor, angle.cos() * factor);
                let (low, high) = (head[i], head[i + half]);
                head[i] = low * cos - high * sin;
                head[i + half] = high * cos + low * sin;
            }
        }
        head
    }

    /// `[len, num_heads * head_dim]`, with K and V rounded to `dtype`, and Q too if `isa` rounds it.
    fn reference(&self, isa: Isa, dtype: KvDType) -> Vec<f64> {
        self.reference_of(0..self.len, isa, dtype)
    }

    /// `[tokens.len(), num_heads * head_dim]`: the output of these tokens.
    pub fn reference_of(&self, tokens: impl IntoIterator<Item = usize>, isa: Isa, dtype: KvDType) -> Vec<f64> {
        // AVX-512 and AMX multiply bfloat16 with bfloat16.
        let in_pairs = matches!(isa, Isa::Avx512Widened | Isa::Avx512 | Isa::Amx) && dtype == DType::BF16;
        let q_dtype = if in_pairs { dtype } else { DType::F32.into() };
        let q_codes = match dtype {
            KvDType::Codes(CodeType::Int8) if (Isa::Avx2..=Isa::Amx).contains(&isa) => Some(CodeType::Int8),
            KvDType::Codes(CodeType::Int4) => Some(CodeType::Int4),
            _ => None,
        };
        let AttentionShape { num_heads, num_kv_heads, scale, softcap, window, .. } = self.shape;
        let rounded_head = |token: usize, index: usize, dtype: KvDType| -> Vec<f64> {
            round_vector(&self.head(token, index).iter().map(|x| *x as f32).collect::<Vec<_>>(), dtype)
        };
        let rounded =
            |index: usize| -> Vec<Vec<f64>> { (0..self.len).map(|token| rounded_head(token, index, dtype)).collect() };
        let keys: Vec<_> = (0..num_kv_heads).map(|h| rounded(num_heads + h)).collect();
        let values: Vec<_> = (0..num_kv_heads).map(|h| rounded(num_heads + num_kv_heads + h)).collect();
        let mut out = Vec::new();
        for token in tokens {
            for head in 0..num_heads {
                let kv = head / (num_heads / num_kv_heads);
                let q = match q_codes {
                    Some(codes) => {
                        round_query(&self.head(token, head).iter().map(|x| *x as f32).collect::<Vec<_>>(), codes)
                    }
                    None => rounded_head(token, head, q_dtype),
                };
                let from = window.map_or(0, |window| (token + 1).saturating_sub(window));
                let dot = |k: &Vec<f64>| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() * f64::from(scale);
                let cap = |score: f64| softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh());
                let scores: Vec<f64> = keys[kv][from..=token].iter().map(dot).map(cap).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..self.shape.head_dim {
                    let terms = weights.iter().zip(&values[kv][from..=token]).map(|(w, v)| w * v[d]);
                    out.push(terms.sum::<f64>() / sum);
                }
            }
        }
        out
    }
}

pub fn layout(shape: &AttentionShape, block_size: usize, dtype: KvDType) -> KvLayout {
    KvLayout { num_layers: 2, num_kv_heads: shape.num_kv_heads, head_dim: shape.head_dim, block_size, dtype }
}

/// Block tables for sequences of these lengths, shuffled through a pool full of NaN.
pub struct Pool {
    tables: Vec<Vec<u32>>,
    block_size: usize,
}

impl Pool {
    pub fn new(backend: &mut CpuBackend, layout: KvLayout, lens: &[usize], seed: u64) -> Self {
        let needed: usize = lens.iter().map(|len| len.div_ceil(layout.block_size)).sum();
        let mut free: Vec<u32> = (0..needed as u32 + 2).collect();
        let mut numbers = Numbers::new(seed);
        for i in (1..free.len()).rev() {
            free.swap(i, numbers.below(i + 1));
        }
        backend.allocate_kv(layout, free.len(), 0).unwrap();
        poison(backend, layout, free.len());
        let table = |len: &usize| free.split_off(free.len() - len.div_ceil(layout.block_size));
        Self { tables: lens.iter().map(table).collect(), block_size: layout.block_size }
    }
}

/// Fills all slots of the pool with NaN, so that any read that is not masked is visible.
fn poison(backend: &mut CpuBackend, layout: KvLayout, num_blocks: usize) {
    let shape = AttentionShape {
        num_heads: layout.num_kv_heads,
        num_kv_heads: layout.num_kv_heads,
        head_dim: layout.head_dim,
        scale: 1.0,
        softcap: None,
        window: None,
    };
    let slots = num_blocks * layout.block_size;
    let mut batch = plain_batch(slots);
    batch.slots = (0..slots as u32).collect();
    let cols = 3 * layout.num_kv_heads * layout.head_dim;
    let mut nan = tensor(backend, &vec![f32::NAN; slots * cols], cols);
    backend.begin(&batch);
    for layer in 0..layout.num_layers {
        backend.rope_and_write_kv(&mut nan, &shape, None, layer);
    }
}

/// Runs all sequences through layer 1 in steps; `steps[i]` gives each sequence's number of new tokens. Returns each
/// sequence's output.
pub fn run(backend: &mut CpuBackend, seqs: &[&Sequence], pool: &Pool, steps: &[Vec<usize>]) -> Vec<Vec<f32>> {
    let (cols, out_cols) = (seqs[0].cols(), seqs[0].out_cols());
    let rope = seqs[0].rope.as_ref().map(|rope| backend.rope_table(rope).unwrap());
    let mut done = vec![0; seqs.len()];
    let mut outputs = vec![Vec::new(); seqs.len()];
    for step in steps {
        let mut parts: Vec<Part<'_>> = Vec::new();
        let mut qkv = Vec::new();
        let mut members = Vec::new();
        for (i, rows) in step.iter().enumerate().filter(|(_, rows)| **rows > 0) {
            parts.push((done[i], *rows, &pool.tables[i]));
            qkv.extend(&seqs[i].qkv[done[i] * cols..][..rows * cols]);
            members.push((i, *rows));
            done[i] += rows;
        }
        let batch: Batch = batch(&parts, pool.block_size);
        let rows = batch.num_rows();
        let mut qkv = tensor(backend, &qkv, cols);
        let mut out = tensor(backend, &vec![f32::NAN; rows * out_cols], out_cols);
        backend.begin(&batch);
        backend.rope_and_write_kv(&mut qkv, &seqs[0].shape, rope.as_ref(), 1);
        backend.attention(&qkv, &seqs[0].shape, 1, &mut out);
        let mut at = 0;
        for (i, rows) in members {
            outputs[i].extend(&out.as_slice()[at * out_cols..][..rows * out_cols]);
            at += rows;
        }
    }
    for (seq, done) in seqs.iter().zip(done) {
        assert_eq!(seq.len, done, "the test's steps cover the sequence");
    }
    outputs
}

pub fn rope(rotary_dim: usize, factor: f32) -> Rope {
    let inv_freq = (0..rotary_dim / 2).map(|i| 10_000f32.powf(-2.0 * i as f32 / rotary_dim as f32)).collect();
    Rope { rotary_dim, inv_freq, attention_factor: factor, max_positions: 4096 }
}

pub fn shape(num_kv_heads: usize, group: usize, head_dim: usize, window: Option<usize>) -> AttentionShape {
    let scale = (head_dim as f32).powf(-0.5);
    AttentionShape { num_heads: num_kv_heads * group, num_kv_heads, head_dim, scale, softcap: None, window }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Ragged batches with any block size, chunk by chunk, against the reference.
    #[test]
    fn attention_is_right(
        num_kv_heads in 1usize..4, group in 1usize..6, dims in 1usize..18, block_size in 1usize..70,
        window in proptest::option::of(1usize..90), with_rope: bool, dtype in 0usize..6,
        softcap in proptest::option::of(0.5f32..4.0), lens in proptest::collection::vec(1usize..110, 1..4), threads in 1usize..4, seed: u64,
    ) {
        let shape = AttentionShape { softcap, ..shape(num_kv_heads, group, 8 * dims, window) };
        let dtype = KV_DTYPES[dtype];
        let rope = with_rope.then(|| rope(if dims > 2 { 8 * dims - 10 } else { 8 * dims }, 1.25));
        let seq = |len: &usize| Sequence::with_clear_codes(shape, rope.clone(), *len, seed ^ *len as u64, dtype);
        let seqs: Vec<_> = lens.iter().map(seq).collect();
        let seqs: Vec<_> = seqs.iter().collect();
        let mut numbers = Numbers::new(seed);
        let steps = random_steps(&lens, &mut numbers);
        for isa in isas() {
            let mut backend = backend(isa, threads);
            let pool = Pool::new(&mut backend, layout(&shape, block_size, dtype), &lens, seed);
            let outputs = run(&mut backend, &seqs, &pool, &steps);
            for (seq, output) in seqs.iter().zip(outputs) {
                let tolerance = tolerance(dtype, with_rope);
                assert_close(&output, &seq.reference(isa, dtype), tolerance, &format!("{isa} {shape:?} {block_size}"));
            }
        }
    }
}

/// How far an output may be from the reference. A K halfway between two values of its type may be rounded either way,
/// and on tiles also a Q or a weight. Without a rotation the reference has the same codes.
pub fn tolerance(dtype: KvDType, with_rope: bool) -> f64 {
    match dtype {
        KvDType::Plain(DType::F32) => 2e-5,
        KvDType::Plain(DType::F16) => 2e-3,
        KvDType::Plain(DType::BF16) => 1e-2,
        KvDType::Codes(_) if with_rope => 5e-2,
        KvDType::Codes(_) => 5e-4,
    }
}

/// New tokens per step and sequence, in random chunks.
fn random_steps(lens: &[usize], numbers: &mut Numbers) -> Vec<Vec<usize>> {
    let mut left = lens.to_vec();
    let mut steps = Vec::new();
    while left.iter().any(|left| *left > 0) {
        let step: Vec<usize> = left.iter().map(|left| numbers.below(40).min(*left)).collect();
        left.iter_mut().zip(&step).for_each(|(left, rows)| *left -= rows);
        steps.push(step);
    }
    steps
}

/// The contract: the same bytes alone or in a batch, in any chunks, with any block size and team.
#[test]
fn a_query_does_not_see_how_it_is_served() {
    for isa in isas() {
        // A head of 64 may be read directly from the cache if the block size allows it.
        for (head_dim, window, dtype) in [
            (40, None, DType::BF16.into()),
            (64, Some(75), DType::BF16.into()),
            (40, Some(75), DType::F16.into()),
            (40, None, DType::F32.into()),
            (40, Some(75), INT8),
            (64, None, INT8),
            (40, None, FP8),
            (40, Some(75), INT4),
            (64, None, INT4),
            (80, None, INT4),
        ] {
            let (shape, rope) = (shape(2, 3, head_dim, window), Some(rope(40, 1.0)));
            let lens = [150, 1, 67];
            let seqs: Vec<_> = lens.iter().map(|len| Sequence::new(shape, rope.clone(), *len, *len as u64)).collect();
            let expected: Vec<Vec<f32>> = seqs
                .iter()
                .map(|seq| {
                    let mut backend = backend(isa, 1);
                    let pool = Pool::new(&mut backend, layout(&shape, 16, dtype), &[seq.len], 1);
                    run(&mut backend, &[seq], &pool, &[vec![seq.len]]).remove(0)
                })
                .collect();
            for (trial, block_size) in [1, 3, 16, 31, 64, 256].into_iter().enumerate() {
                let mut backend = backend(isa, 1 + trial % 4);
                let pool = Pool::new(&mut backend, layout(&shape, block_size, dtype), &lens, trial as u64);
                let steps = if trial == 2 {
                    // Token by token, all sequences side by side.
                    (0..150).map(|i| lens.iter().map(|len| usize::from(i < *len)).collect()).collect()
                } else {
                    random_steps(&lens, &mut Numbers::new(trial as u64))
                };
                let outputs = run(&mut backend, &seqs.iter().collect::<Vec<_>>(), &pool, &steps);
                for (output, expected) in outputs.iter().zip(&expected) {
                    assert!(bits(output) == bits(expected), "{isa} {dtype:?} block size {block_size}");
                }
            }
        }
    }
}

/// Contexts longer than a partition: the team shares a decode's partitions, and a prefill computes them one after the
/// other.
#[test]
fn long_contexts_are_the_same_in_decode_and_prefill() {
    const LEN: usize = 2100;
    // Token by token where the context, and where a window of 20, leaves a partition of 1,024 tokens, and where a
    // window of 1,100 begins to move. Between these, every 37th token is alone.
    let singles = |num| std::iter::repeat_n(1, num);
    let between = (0..25).flat_map(|_| [36, 1]);
    let steps: Vec<usize> =
        [1000].into_iter().chain(singles(110)).chain(between).chain(singles(60)).chain([5]).collect();
    assert_eq!(steps.iter().sum::<usize>(), LEN);
    let [f32, bf16]: [KvDType; 2] = [DType::F32.into(), DType::BF16.into()];
    let cases = [
        (f32, None),
        (f32, Some(1100)),
        (f32, Some(20)),
        (bf16, Some(1100)),
        (INT8, Some(1100)),
        (FP8, None),
        (INT4, Some(1100)),
    ];
    for (dtype, window) in cases {
        // A bfloat16 head of 32 is read directly from the cache if the block size allows it. With AVX-512, 4-bit codes
        // of such a head are products of bytes.
        let shape = shape(1, 2, if dtype == DType::BF16 || dtype == INT4 { 32 } else { 16 }, window);
        let seq = Sequence::new(shape, None, LEN, 9);
        for isa in isas() {
            let whole = {
                let mut backend = backend(isa, 2);
                let pool = Pool::new(&mut backend, layout(&shape, 16, dtype), &[LEN], 1);
                run(&mut backend, &[&seq], &pool, &[vec![LEN]]).remove(0)
            };
            if isa == Isa::detect() {
                assert_close(&whole, &seq.reference(isa, dtype), tolerance(dtype, false), "long context");
            }
            for threads in [1, 4] {
                let mut backend = backend(isa, threads);
                let pool = Pool::new(&mut backend, layout(&shape, 100, dtype), &[LEN], 2);
                let steps: Vec<_> = steps.iter().map(|rows| vec![*rows]).collect();
                let decoded = run(&mut backend, &[&seq], &pool, &steps).remove(0);
                assert!(bits(&decoded) == bits(&whole), "{isa}, {dtype:?}, {threads} threads, window {window:?}");
            }
        }
    }
}

#[test]
fn kv_is_rounded_and_laid_out_as_said() {
    let shape = shape(2, 1, 8, None);
    let mut backend = backend(Isa::detect(), 2);
    let layout = layout(&shape, 4, DType::BF16.into());
    backend.allocate_kv(layout, 3, 0).unwrap();
    let qkv: Vec<f32> = (0..48).map(|i| i as f32 + 0.001).collect();
    let mut qkv_tensor = tensor(&backend, &qkv, 48);
    let mut batch = plain_batch(1);
    batch.slots = vec![2 * 4 + 3];
    backend.begin(&batch);
    backend.rope_and_write_kv(&mut qkv_tensor, &shape, None, 1);
    let block = backend.device_block(BlockId(2));
    let at = |layer: usize, value: usize, head: usize, slot: usize, d: usize| {
        let i = 2 * ((((layer * 2 + value) * 2 + head) * 4 + slot) * 8 + d);
        half::bf16::from_ne_bytes([block[i], block[i + 1]]).to_f32()
    };
    for value in 0..2 {
        for head in 0..2 {
            for d in 0..8 {
                assert_eq!(at(1, value, head, 3, d), round(qkv[16 + value * 16 + head * 8 + d], DType::BF16));
                assert_eq!((at(0, value, head, 3, d), at(1, value, head, 2, d)), (0.0, 0.0));
            }
        }
    }
}

/// A token's codes and scales depend on nothing but its own K and V: not on the instruction set, nor on what lies
/// beside them or was written with them.
#[test]
fn the_codes_of_a_token_are_its_own() {
    const SLOTS: usize = 96;
    const COLS: usize = 3 * 2 * 24;
    let shape = shape(2, 1, 24, None);
    let qkv = Numbers::new(3).vec(SLOTS * COLS);
    // The bytes of all blocks. Each step writes its tokens backwards.
    let blocks = |isa: Isa, layout: KvLayout, steps: &[usize]| -> Vec<Vec<u8>> {
        let num_blocks = SLOTS / layout.block_size;
        let mut backend = backend(isa, 2);
        backend.allocate_kv(layout, num_blocks, 0).unwrap();
        let mut first = 0;
        for rows in steps {
            let slots: Vec<usize> = (first..first + rows).rev().collect();
            let rows: Vec<f32> = slots.iter().flat_map(|slot| &qkv[slot * COLS..][..COLS]).copied().collect();
            let mut batch = plain_batch(slots.len());
            batch.slots = slots.iter().map(|slot| *slot as u32).collect();
            let mut rows = tensor(&backend, &rows, COLS);
            backend.begin(&batch);
            (0..2).for_each(|layer| backend.rope_and_write_kv(&mut rows, &shape, None, layer));
            first += slots.len();
        }
        (0..num_blocks as u32).map(|block| backend.device_block(BlockId(block)).to_vec()).collect()
    };
    for (dtype, block_size) in [INT8, FP8, INT4].into_iter().flat_map(|dtype| [16, 32, 6].map(|size| (dtype, size))) {
        let layout = layout(&shape, block_size, dtype);
        let whole = blocks(Isa::Portable, layout, &[SLOTS]);
        let code_bytes = if dtype == INT4 { 12 } else { 24 };
        assert_eq!(whole[0].len(), 2 * 2 * 2 * block_size * (code_bytes + 2));
        for isa in isas() {
            assert!(blocks(isa, layout, &[1, 30, 2, 63]) == whole, "{isa} {dtype}, blocks of {block_size}");
        }
    }
}

/// K and V that are not finite make the outputs of their own sequence NaN from their token on, and no others.
#[test]
fn numbers_that_are_not_finite_stay_in_their_sequence() {
    let shape = shape(1, 2, 16, None);
    for (isa, dtype) in isas().flat_map(|isa| [(isa, INT8), (isa, FP8), (isa, INT4)]) {
        let good = Sequence::new(shape, None, 60, 1);
        let mut bad = Sequence::new(shape, None, 60, 2);
        let cols = bad.cols();
        // The V of token 37, and the query of token 12.
        bad.qkv[37 * cols + 3 * 16 + 5] = f32::INFINITY;
        bad.qkv[12 * cols + 2] = f32::NAN;
        let mut backend = backend(isa, 2);
        let mut outputs = |seqs: &[&Sequence], steps: &[Vec<usize>]| {
            let lens: Vec<usize> = seqs.iter().map(|seq| seq.len).collect();
            let pool = Pool::new(&mut backend, layout(&shape, 16, dtype), &lens, 1);
            run(&mut backend, seqs, &pool, steps)
        };
        let alone = outputs(&[&good], &[vec![60]]).remove(0);
        let both = outputs(&[&good, &bad], &[vec![30, 45], vec![30, 15]]);
        assert!(bits(&both[0]) == bits(&alone), "{isa} {dtype}");
        for (token, out) in both[1].chunks_exact(2 * 16).enumerate() {
            let nan = out.iter().any(|x| x.is_nan());
            assert_eq!(nan, token == 12 || token >= 37, "{isa} {dtype}: token {token}");
        }
    }
}
