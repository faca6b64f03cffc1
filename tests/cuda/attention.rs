//! PagedAttention on the device against the CPU backend: every kind of kernel, head size, group, window and block size,
//! over a pool that is NaN where nothing was written.

pub mod hopper;
pub mod shared;

use crate::emulation::ptx::asked_for;
use crate::emulation::{EmulatedDevice, EmulatedOptions};
use crate::support::*;
use pagetide::backend::cpu::CpuBackend;
use pagetide::backend::cuda::CudaBackend;
use pagetide::backend::cuda::device::Device;
use pagetide::backend::{
    AttentionShape, Backend, Batch, BatchSeq, CodeType, DType, KvDType, KvLayout, NO_SOURCE, TensorRole,
};
use pagetide::ids::BlockId;
use std::rc::Rc;

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    shape: AttentionShape,
    block_size: usize,
    /// For each sequence: tokens in the cache, and new tokens.
    seqs: Vec<(usize, usize)>,
    batch_invariant: bool,
    /// The codes of the KV cache. Blocks are then multiples of 8 tokens.
    codes: Option<CodeType>,
    seed: u64,
}

impl Case {
    /// Compiling the kernels takes longest. So what they are compiled for is one of 16 shapes, in which each size and
    /// type occurs.
    fn random(seed: u64) -> Self {
        let (i, random) = ((seed % 16) as usize, &mut Random(seed));
        let dtype = [DType::F16, DType::BF16, DType::BF16, DType::F32][i % 4];
        let head_dim = match dtype {
            DType::F32 => [8, 24, 64, 48][i / 4],
            _ => [8, 16, 32, 48, 64, 72, 80, 96, 112, 128, 192, 256][i / 4 * 3 + i % 4],
        };
        let num_kv_heads = 1 + i / 2 % 2;
        let group = [1, 2, 3, 4, 5, 6, 7, 8, 17][i % 9];
        let block_size = [1, 16, 2, 32, 3, 64, 7, 256, 8, 16, 16, 32, 1][i % 13];
        // Around the edges of blocks, slices, tiles and partitions.
        let edges = [0, 1, 15, 16, 17, 31, 63, 64, 65, 127, 128, 130, block_size - 1, block_size, block_size + 1, 300];
        let most = if head_dim * group > 256 { 70 } else { 300 };
        let len = |random: &mut Random| match random.below(3) {
            0 => random.below(40),
            _ => random.pick(&edges).min(most),
        };
        let seqs = (0..random.range(1, 4))
            .map(|_| (len(random), if random.one_in(2) { 1 } else { random.range(1, 24) }))
            .collect();
        let window = random.one_in(3).then(|| random.range(1, 40));
        let scale = (head_dim as f32).powf(-0.5) * 2.0;
        // Scores exceed it.
        let softcap = (i % 3 == 0).then_some(0.7);
        let shape = AttentionShape { num_heads: num_kv_heads * group, num_kv_heads, head_dim, scale, softcap, window };
        Self { dtype, shape, block_size, seqs, batch_invariant: random.one_in(4), codes: None, seed }
    }

    fn layout(&self) -> KvLayout {
        let AttentionShape { num_kv_heads, head_dim, .. } = self.shape;
        let dtype = self.codes.map_or(self.dtype.into(), KvDType::Codes);
        KvLayout { num_layers: 2, num_kv_heads, head_dim, block_size: self.block_size, dtype }
    }

    fn cols(&self) -> usize {
        (self.shape.num_heads + 2 * self.shape.num_kv_heads) * self.shape.head_dim
    }

    /// The batch of the tokens in the cache, and the batch of the new tokens, over shuffled block tables.
    fn batches(&self) -> (Batch, Batch, usize) {
        let random = &mut Random(self.seed ^ 1);
        let blocks_of = |(before, new): &(usize, usize)| (before + new).div_ceil(self.block_size);
        let needed: usize = self.seqs.iter().map(blocks_of).sum();
        let mut free: Vec<u32> = (0..needed as u32 + 3).collect();
        for i in (1..free.len()).rev() {
            free.swap(i, random.below(i + 1));
        }
        let num_blocks = free.len();
        let (mut before, mut new) = (Batch::default(), Batch::default());
        for seq in &self.seqs {
            let table = free.split_off(free.len() - blocks_of(seq));
            add(&mut before, 0, seq.0, &table, self.block_size);
            add(&mut new, seq.0, seq.1, &table, self.block_size);
        }
        (before, new, num_blocks)
    }

    /// With codes, K and V of neighbouring tokens have other magnitudes, so that another token's scale is noticed.
    fn numbers(&self, rows: usize, seed: u64) -> Vec<f32> {
        let mut numbers = Random(self.seed ^ seed).floats(rows * self.cols(), self.dtype);
        if self.codes.is_some() {
            for (i, row) in numbers.chunks_exact_mut(self.cols()).enumerate() {
                let factor = 0.5f32.powi(i as i32 % 7);
                row[self.shape.num_heads * self.shape.head_dim..].iter_mut().for_each(|number| *number *= factor);
            }
        }
        numbers
    }

    fn input(&self) -> CaseInput {
        let (before, new, num_blocks) = self.batches();
        let numbers = [self.numbers(before.num_rows(), BEFORE), self.numbers(new.num_rows(), NEW)];
        CaseInput { before, new, num_blocks, numbers }
    }

    /// Numbers with K and V as attention reads them from the cache.
    fn read_numbers(&self, numbers: &[f32]) -> Vec<f32> {
        let mut numbers = numbers.to_vec();
        let AttentionShape { num_heads, head_dim, .. } = self.shape;
        if let Some(codes) = self.codes {
            for row in numbers.chunks_exact_mut(self.cols()) {
                for vector in row[num_heads * head_dim..].chunks_exact_mut(head_dim) {
                    vector.copy_from_slice(&round(&coded(vector, codes), self.dtype));
                }
            }
        }
        numbers
    }
}

/// The steps of a case.
struct CaseInput {
    /// The tokens in the cache, and the new tokens.
    before: Batch,
    new: Batch,
    num_blocks: usize,
    /// Q, K and V of the rows of both.
    numbers: [Vec<f32>; 2],
}

/// Adds a sequence of tokens behind `num_computed` others.
pub fn add(batch: &mut Batch, num_computed: usize, num_rows: usize, table: &[u32], block_size: usize) {
    if num_rows == 0 {
        return;
    }
    batch.seqs.push(BatchSeq {
        first_row: batch.tokens.len(),
        num_rows,
        num_computed,
        first_block: batch.block_tables.len(),
        num_blocks: table.len(),
    });
    batch.block_tables.extend(table);
    for position in num_computed..num_computed + num_rows {
        batch.tokens.push(0);
        batch.token_sources.push(NO_SOURCE);
        batch.positions.push(position as u32);
        batch.slots.push(table[position / block_size] * block_size as u32 + (position % block_size) as u32);
    }
}

/// Seeds of the numbers of the tokens in the cache, which is only written, and of the new tokens.
const BEFORE: u64 = 2;
const NEW: u64 = 3;

/// Layer 1's attention of the new tokens, over a cache without codes. Layer 0 of the pool is never written.
fn on_cpu(case: &Case, input: &CaseInput) -> Vec<f32> {
    let mut backend = CpuBackend::new(Default::default()).unwrap();
    backend.allocate_kv(KvLayout { dtype: case.dtype.into(), ..case.layout() }, input.num_blocks, 0).unwrap();
    let mut out = Vec::new();
    for (batch, numbers) in [&input.before, &input.new].into_iter().zip(&input.numbers) {
        let rows = batch.num_rows().max(1);
        let mut qkv = backend.tensor(rows, case.cols(), TensorRole::Activation).unwrap();
        let cols = case.shape.num_heads * case.shape.head_dim;
        let mut result = backend.tensor(rows, cols, TensorRole::Activation).unwrap();
        let numbers = case.read_numbers(numbers);
        qkv.as_mut_slice()[..numbers.len()].copy_from_slice(&numbers);
        if batch.num_rows() > 0 {
            backend.begin(batch);
            backend.rope_and_write_kv(&mut qkv, &case.shape, None, 1);
            if std::ptr::eq(batch, &input.new) {
                backend.attention(&qkv, &case.shape, 1, &mut result);
            }
            backend.end_step();
            backend.finish_step();
        }
        out = result.as_slice()[..batch.num_rows() * cols].to_vec();
    }
    out
}

fn on_cuda(case: &Case, device: &Rc<dyn Device>) -> Vec<f32> {
    attention_of(case, &case.input(), device)
}

fn attention_of(case: &Case, input: &CaseInput, device: &Rc<dyn Device>) -> Vec<f32> {
    let max_rows = input.before.num_rows().max(input.new.num_rows()) + 3;
    let mut options = options(case.dtype, case.shape.num_heads, case.layout());
    (options.max_rows, options.batch_invariant) = (max_rows, case.batch_invariant);
    (options.softcap, options.windows) = (case.shape.softcap.is_some(), vec![case.shape.window]);
    let mut backend = CudaBackend::new(device.clone(), options).unwrap();
    backend.allocate_kv(case.layout(), input.num_blocks, 0).unwrap();
    let cols = case.shape.num_heads * case.shape.head_dim;
    let mut qkv = backend.tensor(max_rows, case.cols(), TensorRole::Activation).unwrap();
    let mut out = backend.tensor(max_rows, cols, TensorRole::Activation).unwrap();
    for (batch, numbers) in [&input.before, &input.new].into_iter().zip(&input.numbers) {
        set(device, &qkv, numbers);
        if batch.num_rows() > 0 {
            backend.begin(batch);
            backend.rope_and_write_kv(&mut qkv, &case.shape, None, 1);
            if std::ptr::eq(batch, &input.new) {
                backend.attention(&qkv, &case.shape, 1, &mut out);
            }
            backend.end_step();
            backend.finish_step();
        }
    }
    get(device, &out, input.new.num_rows() * cols)
}

fn check(case: &Case) {
    check_on(case, &device);
}

fn check_on(case: &Case, device: &dyn Fn(u32) -> Rc<dyn Device>) {
    let expected: Vec<f64> = on_cpu(case, &case.input()).into_iter().map(f64::from).collect();
    let mut first: Option<Vec<f32>> = None;
    for order in thread_orders() {
        let found = on_cuda(case, &device(order));
        assert_close(&found, &expected, tolerance(case.dtype), &format!("{case:?}"));
        // A race between threads shows as a result that depends on their order.
        let first = first.get_or_insert_with(|| found.clone());
        assert_eq!(bits(&found), bits(first), "{case:?} under order {order}");
    }
}

#[test]
fn random_cases() {
    parallel(0..40, |seed| check(&Case::random(seed * 7919 + 5)));
}

/// Over K and V that were rounded to codes, attention gives what it gives over the same numbers in a plain cache.
#[test]
fn random_cases_with_codes() {
    parallel(0..12, |seed| {
        let (random, codes) = (&mut Random(seed), [CodeType::Int8, CodeType::Fp8][seed as usize % 2]);
        let block_size = random.pick(&[8, 16, 24, 64, 256]);
        check(&Case { block_size, codes: Some(codes), ..Case::random(seed * 7919 + 6) });
    });
}

/// Tokens that see only themselves have their V as the result: each code times its scale, rounded once. All codes
/// occur, with the smallest and the largest scales.
#[test]
fn elements_of_codes_are_exact() {
    let kinds = [(DType::BF16, CodeType::Int8), (DType::BF16, CodeType::Fp8), (DType::F16, CodeType::Int8)];
    // Other kernels have few tokens, and many that are batch-invariant.
    let uses = [(1, false), (40, true), (40, false)];
    parallel(0..(kinds.len() * uses.len()) as u64, |i| {
        let ((dtype, codes), (num_tokens, batch_invariant)) = (kinds[i as usize % 3], uses[i as usize / 3]);
        let shape = AttentionShape { window: Some(1), ..shape(1, 1, 256) };
        let (seqs, codes) = (vec![(0, num_tokens); 3], Some(codes));
        let case = Case { dtype, shape, block_size: 16, seqs, batch_invariant, codes, seed: i };
        let mut input = case.input();
        let exponents = if dtype == DType::F16 { [-24, -14, 0, 8] } else { [-133, -126, 3, 119] };
        for (token, row) in input.numbers[1].chunks_exact_mut(3 * 256).enumerate() {
            let scale = (1.0 + (token / 4 % 16) as f32 / 16.0) * 2_f32.powi(exponents[token % 4]);
            let steps = (0..256).map(|step: i32| (step - 127).min(127) as f32 * scale).collect::<Vec<_>>();
            row[512..].copy_from_slice(&round(&steps, dtype));
        }
        let found = attention_of(&case, &input, &device(0));
        let read = case.read_numbers(&input.numbers[1]);
        let expected: Vec<f32> = read.chunks_exact(3 * 256).flat_map(|row| row[512..].to_vec()).collect();
        assert!(expected.iter().all(|x| x.is_finite()));
        assert_eq!(bits(&found), bits(&expected), "{case:?}");
    });
}

fn shape(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape {
        num_heads,
        num_kv_heads,
        head_dim,
        scale: (head_dim as f32).powf(-0.5),
        softcap: None,
        window: None,
    }
}

#[test]
fn every_head_size_and_type() {
    let head_dims = [64, 80, 96, 128, 256];
    parallel(0..head_dims.len() as u64 * 3, |i| {
        let (dtype, head_dim) = (DTYPES[i as usize % 3], head_dims[i as usize / 3]);
        let seqs = vec![(20, 1), (3, 18), (0, 5)];
        let shape = shape(4, 2, head_dim);
        let case = Case { dtype, shape, block_size: 16, seqs, batch_invariant: false, codes: None, seed: i };
        check(&case);
        if dtype != DType::F32 && [64, 128].contains(&head_dim) {
            // Otherwise Hopper has another kernel for these prompts.
            check(&Case { batch_invariant: true, ..case });
        }
    });
}

/// Lengths around the edges of chunks of keys, and more of them than a segment of the merge has.
#[test]
fn chunks_are_merged() {
    let lens = [511, 512, 513, 575, 576, 577, 1023, 1024, 1025, 1100, 4096, 4097, 4700];
    parallel(0..lens.len() as u64 + 2, |i| {
        let len = lens.get(i as usize).copied().unwrap_or(2000);
        let window = [None, Some(700), Some(64)][(i as usize + 2).saturating_sub(lens.len() + 1)];
        let shape = AttentionShape { window, ..shape(2, 1, 16) };
        // `len` tokens, including the new ones.
        let seqs = vec![(len - 1, 1), (5, 1), (256, 1), (len - 35, 35)];
        check(&Case { dtype: DType::BF16, shape, block_size: 16, seqs, batch_invariant: false, codes: None, seed: i });
    });
}

/// A long sequence among short ones, of which some have several new tokens.
#[test]
fn mixtures_of_lengths() {
    let head_dims = [16, 80, 256];
    parallel(0..head_dims.len() as u64 * 2, |i| {
        let shape = shape(5, 1, head_dims[i as usize % head_dims.len()]);
        let seqs = vec![(40, 1), (5200, 1), (0, 9), (1500, 33), (700, 2), (513, 1)];
        let (codes, batch_invariant) = ((i == 3).then_some(CodeType::Fp8), i >= 3);
        check(&Case { dtype: DType::BF16, shape, block_size: 16, seqs, batch_invariant, codes, seed: i });
    });
}

/// The attention of a sequence's tokens behind the first `steps[0]`, computed in steps of the other numbers of tokens.
fn in_steps(
    device: &Rc<dyn Device>,
    (shape, codes): (AttentionShape, Option<CodeType>),
    numbers: &[f32],
    steps: &[usize],
) -> Vec<f32> {
    let (dtype, block_size) = (DType::BF16, 16);
    let AttentionShape { num_heads, num_kv_heads, head_dim, .. } = shape;
    let kv_dtype = codes.map_or(dtype.into(), KvDType::Codes);
    let kv = KvLayout { num_layers: 1, num_kv_heads, head_dim, block_size, dtype: kv_dtype };
    let cols = (num_heads + 2 * num_kv_heads) * head_dim;
    let num_tokens: usize = steps.iter().sum();
    let mut options = options(dtype, num_heads, kv);
    (options.max_rows, options.batch_invariant, options.windows) = (num_tokens, true, vec![shape.window]);
    (options.softcap, options.max_model_len) = (shape.softcap.is_some(), num_tokens.max(4096));
    let mut backend = CudaBackend::new(device.clone(), options).unwrap();
    let table: Vec<u32> = (0..num_tokens.div_ceil(block_size) as u32).collect();
    backend.allocate_kv(kv, table.len(), 0).unwrap();
    let mut qkv = backend.tensor(num_tokens, cols, TensorRole::Activation).unwrap();
    let mut out = backend.tensor(num_tokens, num_heads * head_dim, TensorRole::Activation).unwrap();
    let (mut all, mut done) = (Vec::new(), 0);
    for rows in steps {
        let mut batch = Batch::default();
        add(&mut batch, done, *rows, &table, block_size);
        set(device, &qkv, &numbers[done * cols..(done + rows) * cols]);
        backend.begin(&batch);
        backend.rope_and_write_kv(&mut qkv, &shape, None, 0);
        if done > 0 {
            backend.attention(&qkv, &shape, 0, &mut out);
        }
        backend.end_step();
        backend.finish_step();
        if done > 0 {
            all.extend(get(device, &out, rows * num_heads * head_dim));
        }
        done += rows;
    }
    let arrivals = backend.attention_arrivals().expect("kernels on tensor cores");
    assert!(download_bytes(device, arrivals).iter().all(|byte| *byte == 0), "counters of results that are there");
    all
}

/// With `batch_invariant`, both kernels give a token the same bits, on a device of any size, whatever the order of the
/// thread blocks, and however a prompt is cut into steps. The counters of results are back at 0.
#[test]
fn both_kernels_give_the_same_bits() {
    // Around the edges of chunks (512), of a segment (4,096), and of a tile of each kernel.
    let prefix = 4090;
    let cases = [
        (shape(4, 1, 16), None),
        (AttentionShape { window: Some(600), ..shape(4, 1, 16) }, None),
        (AttentionShape { softcap: Some(0.5), ..shape(1, 1, 32) }, None),
        (shape(17, 1, 16), None),
        (shape(3, 1, 192), None),
        (shape(4, 2, 48), Some(CodeType::Int8)),
    ];
    parallel(0..cases.len() as u64, |i| {
        let (shape, codes) = cases[i as usize];
        // The interpreter of PTX is slow: it gets a long prefix once without codes and once with them, and just the
        // steps that cross the edge of the segment.
        let is_short = shape.head_dim > 128 || executes_ptx() && i > 0 && codes.is_none();
        let prefix = if is_short { 1018 } else { prefix };
        let cols = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
        let numbers = Random(i).floats((prefix + 24) * cols, DType::BF16);
        let run = |device: Rc<dyn Device>, steps: &[usize]| {
            bits(&in_steps(&device, (shape, codes), &numbers, &[&[prefix], steps].concat()))
        };
        let whole = run(device(0), &[24]);
        let [by_token, mixed, few] = [vec![1; 24], vec![4, 1, 16, 3], vec![4, 1, 1, 1, 17]];
        for steps in if executes_ptx() { vec![few] } else { vec![by_token, mixed] } {
            assert_eq!(run(device(0), &steps), whole, "{shape:?} in steps of {steps:?}");
        }
        if on_gpu() || executes_ptx() {
            return;
        }
        for (num_sms, thread_order) in [(1, 2), (132, 1)] {
            let options = EmulatedOptions { num_sms, thread_order, ..EmulatedOptions::default() };
            let device = || Rc::new(EmulatedDevice::new(options.clone())) as Rc<dyn Device>;
            assert_eq!(run(device(), &[24]), whole, "{shape:?} on {num_sms} multiprocessors");
            assert_eq!(run(device(), &[1; 24]), whole, "{shape:?} on {num_sms} multiprocessors, token by token");
        }
    });
}

/// With `batch_invariant`, a token's attention has the same bytes alone, in a chunk, and beside other sequences.
#[test]
fn batch_invariant_attention() {
    for (dtype, codes) in [(DType::F32, None), (DType::BF16, None), (DType::BF16, Some(CodeType::Int8))] {
        let case = |seqs: &[(usize, usize)], seed| Case {
            dtype,
            shape: shape(4, 2, 32),
            block_size: 8,
            seqs: seqs.to_vec(),
            batch_invariant: true,
            codes,
            seed,
        };
        // Sequence 0 has the same tokens in each of these.
        let whole = on_cuda(&case(&[(0, 90)], 4), &device(0));
        let (chunked, row) = (on_cuda(&case(&[(0, 90), (0, 1), (40, 30)], 4), &device(0)), 4 * 32);
        assert_eq!(bits(&whole), bits(&chunked[..90 * row]), "{dtype:?}: in company");
    }
}

/// Tokens behind `num_tokens - num_rows` others that all have the same key, for which one V is 1 in the first half of
/// the keys of a chunk and 0 in the second half. All blocks of a half are the same block. The last token's result.
fn mean_of_halves(
    (dtype, num_heads, num_rows): (DType, usize, usize),
    num_tokens: usize,
    chunk: usize,
    device: &Rc<dyn Device>,
) -> Vec<f32> {
    const BLOCK_SIZE: usize = 256;
    const HEAD_DIM: usize = 16;
    // The product of the score and log2(e) is rounded by nearly as much as numbers of its size can be.
    const QUERY: f32 = 2.3125;
    const KEY: f32 = 2.421875;
    let kv = KvLayout {
        num_layers: 1,
        num_kv_heads: num_heads,
        head_dim: HEAD_DIM,
        block_size: BLOCK_SIZE,
        dtype: dtype.into(),
    };
    let mut options = options(dtype, num_heads, kv);
    (options.max_rows, options.max_model_len) = (num_rows, num_tokens);
    let mut backend = CudaBackend::new(device.clone(), options).unwrap();
    backend.allocate_kv(kv, num_tokens / BLOCK_SIZE, 0).unwrap();
    for (block, value) in [(0, 1.0), (1, 0.0)] {
        let content = [vec![KEY; num_heads * BLOCK_SIZE * HEAD_DIM], vec![value; num_heads * BLOCK_SIZE * HEAD_DIM]];
        backend.write_blocks(&[BlockId(block)], &dtype.encode(&content.concat()));
    }
    let mut batch = Batch::default();
    let table: Vec<u32> =
        (0..num_tokens).step_by(BLOCK_SIZE).map(|token| u32::from(token % chunk >= chunk / 2)).collect();
    add(&mut batch, num_tokens - num_rows, num_rows, &table, BLOCK_SIZE);
    let qkv = backend.tensor(num_rows, 3 * num_heads * HEAD_DIM, TensorRole::Activation).unwrap();
    let mut out = backend.tensor(num_rows, num_heads * HEAD_DIM, TensorRole::Activation).unwrap();
    set(device, &qkv, &vec![QUERY; num_rows * 3 * num_heads * HEAD_DIM]);
    backend.begin(&batch);
    backend.attention(&qkv, &AttentionShape { scale: 1.0, ..shape(num_heads, num_heads, HEAD_DIM) }, 0, &mut out);
    backend.end_step();
    backend.finish_step();
    get(device, &out, num_rows * num_heads * HEAD_DIM)[(num_rows - 1) * num_heads * HEAD_DIM..].to_vec()
}

/// While the maximum of the scores stays, what was added up is rescaled by exactly 1. Otherwise the first half of the
/// tokens would count less (or more) than the second.
#[test]
fn sums_do_not_drift_over_many_tiles() {
    const NUM_TILES: usize = 2048;
    // A large tile of each of 4 heads is enough for a device that runs one thread block at a time, so the prefill
    // kernel takes all keys in one chunk, 64 at a time. The kernel without tensor cores takes 32 keys at a time, and
    // the decode kernel a 32nd of all in a chunk.
    let (prefill, rows, decode) = ((DType::F16, 4, 17), (DType::F32, 1, 1), (DType::F16, 1, 1));
    let kernels = [(prefill, 64, 1), (rows, 32, 1), (decode, 64, 32)];
    let check = |device: &Rc<dyn Device>, (kernel, tile, chunks): ((DType, usize, usize), usize, usize)| {
        let num_tokens = NUM_TILES * tile;
        let found = mean_of_halves(kernel, num_tokens, num_tokens / chunks, device);
        assert_eq!(found, vec![0.5; 16 * kernel.1], "{kernel:?}");
    };
    if on_gpu() {
        return kernels[1..].iter().for_each(|kernel| check(&device(0), *kernel));
    }
    let small = |ptx| EmulatedOptions { ptx, resident_blocks: Some(1), ..EmulatedOptions::default() };
    if on_emulation() {
        // This is what ptxas makes of the difference of two products.
        let (exact, fused) =
            ("(rows.max[half] - seen) * scale_log2", "fmaf(rows.max[half], scale_log2, -__fmul_rn(seen, scale_log2))");
        let drifts = |device: &dyn Fn(u32) -> Rc<dyn Device>| check(&device(0), kernels[0]);
        let failure = failure_of_broken("include/attention.cuh", exact, fused, &small(None), drifts);
        assert!(failure.is_some_and(|failure| failure.contains("0.5")), "the sums drift");
    }
    parallel(0..kernels.len() as u64, |i| {
        let device: Rc<dyn Device> = Rc::new(EmulatedDevice::new(small(asked_for())));
        check(&device, kernels[i as usize]);
    });
}

/// Prompts and decodes on tensor cores.
fn tiled() -> Case {
    Case {
        dtype: DType::BF16,
        shape: AttentionShape { window: Some(50), ..shape(6, 2, 32) },
        block_size: 8,
        seqs: vec![(70, 30), (100, 1), (0, 5), (300, 1)],
        batch_invariant: false,
        codes: None,
        seed: 1,
    }
}

/// Decodes over many tokens, in chunks.
fn long() -> Case {
    Case { shape: shape(8, 4, 16), seqs: vec![(1100, 1), (700, 1), (300, 1), (200, 1)], ..tiled() }
}

/// Computes one sequence's attention in bfloat16, first of the tokens in the cache: `(query heads, KV heads, head
/// size)`, `(tokens in the cache, new tokens)`.
pub fn attend(device: &Rc<dyn Device>, heads: (usize, usize, usize), seq: (usize, usize)) {
    attend_as(device, heads, seq, false, None);
}

/// The same, perhaps with `batch_invariant`, and perhaps over a cache of codes.
pub fn attend_as(
    device: &Rc<dyn Device>,
    (num_heads, num_kv_heads, head_dim): (usize, usize, usize),
    seq: (usize, usize),
    batch_invariant: bool,
    codes: Option<CodeType>,
) {
    let shape = shape(num_heads, num_kv_heads, head_dim);
    on_cuda(&Case { shape, block_size: 16, seqs: vec![seq], batch_invariant, codes, ..tiled() }, device);
}

/// Checks prompts and decodes on tensor cores.
pub fn check_tiles(device: &dyn Fn(u32) -> Rc<dyn Device>) {
    check_on(&tiled(), device);
}

fn fp8_tiles() -> Case {
    Case { codes: Some(CodeType::Fp8), block_size: 16, ..tiled() }
}

/// Checks prompts and decodes on tensor cores over a cache of FP8.
pub fn check_fp8_tiles(device: &dyn Fn(u32) -> Rc<dyn Device>) {
    check_on(&fp8_tiles(), device);
}

/// Checks decodes over many tokens.
pub fn check_long(device: &dyn Fn(u32) -> Rc<dyn Device>) {
    check_on(&long(), device);
}

#[test]
fn broken_kernels_are_noticed() {
    if !on_emulation() {
        return;
    }
    let tiled = tiled();
    let long = long();
    let simple = Case { dtype: DType::F32, ..tiled.clone() };
    let capped = |case: &Case| Case { shape: AttentionShape { softcap: Some(0.5), ..case.shape }, ..case.clone() };
    let (capped_tiles, capped_rows) = (capped(&tiled), capped(&simple));
    let coded = |case: &Case, codes| Case { codes: Some(codes), block_size: 16, ..case.clone() };
    let (int8, fp8, coded_rows) = (coded(&tiled, CodeType::Int8), fp8_tiles(), coded(&simple, CodeType::Int8));
    let breakages: [(&Case, &str, &str, &str); 27] = [
        (&int8, "include/attention.cuh", "first + token < end ?", "first <= end ?"),
        (&int8, "attention.cu", "__syncthreads();  // the elements of K", "// the elements of K"),
        (&int8, "attention.cu", "__syncthreads();  // the elements of V", "// the elements of V"),
        (&fp8, "include/kv_codes.cuh", "UNIT = 256.0f", "UNIT = 128.0f"),
        (&fp8, "include/kv_codes.cuh", "magnitude + 0x7ffff", "magnitude + 0x3ffff"),
        (&coded_rows, "attention_rows.cu", "of_token * v.scale", "of_token"),
        (&capped_tiles, "include/attention.cuh", "1.0f - 2.0f / (1.0f +", "1.0f - 2.0f / (1.1f +"),
        (&capped_tiles, "attention.cu", "        cap_scores<SLICE>(s[0], p.cap_scale);\n", ""),
        (&capped_rows, "attention_rows.cu", "tanhf(score * p.cap_scale)", "score * p.cap_scale"),
        (&tiled, "include/attention.cuh", "position >= keys.to[i / 2]", "position > keys.to[i / 2]"),
        (&tiled, "include/attention.cuh", "position < keys.from[i / 2]", "position + 1 < keys.from[i / 2]"),
        (&tiled, "include/attention.cuh", "rows.sum[half], scaling.factor", "rows.sum[half], 1.0f"),
        (&tiled, "attention.cu", "rows.sum[half], factors[half]", "rows.sum[half], 1.0f"),
        (&tiled, "include/attention.cuh", "position % BLOCK_SIZE * HEAD_DIM", "position % 4 * HEAD_DIM"),
        (&tiled, "attention.cu", "copy_async_wait<0>();\n        __syncthreads();  // K is there", "// K is there"),
        (&tiled, "attention.cu", "copy_async_wait<0>();\n        __syncthreads();  // V is there", "// V is there"),
        (&long, "attention.cu", "copy_async_wait<DECODE_STAGES - 2>();", ""),
        (&long, "attention.cu", "__syncthreads();  // the tile is there", "__syncwarp();  // the tile is there"),
        (&tiled, "attention.cu", "__syncthreads();  // the maxima", "// the maxima"),
        (&tiled, "attention.cu", "__syncthreads();  // the weights", "// the weights"),
        (&long, "attention.cu", "__syncthreads();  // no thread reads", "// no thread reads"),
        (&long, "include/attention_merge.cuh", "is_there && next.max", "next.max"),
        (&long, "include/attention_merge.cuh", "__fmaf_rn(row.sum, factor", "__fmaf_rn(0.0f, factor"),
        (&tiled, "attention.cu", "first < all_see_from || first + KV_TILE", "first + KV_TILE"),
        (&long, "include/attention_merge.cuh", "== expected - 1;", "== expected;"),
        (&simple, "attention_rows.cu", "mine <= position", "mine < position"),
        (&tiled, "include/heads.cuh", "slot / BLOCK_SIZE", "slot % BLOCK_SIZE"),
    ];
    parallel(0..breakages.len() as u64, |i| {
        let (case, file, from, to) = breakages[i as usize];
        breaks(file, from, to, |device| check_on(case, device));
    });
    let (shape, numbers) = (shape(1, 1, 16), Random(1).floats(1200 * 3 * 16, DType::BF16));
    let counters =
        |device: &dyn Fn(u32) -> Rc<dyn Device>| drop(in_steps(&device(0), (shape, None), &numbers, &[1199, 1]));
    breaks("include/attention_merge.cuh", "atomicInc(counter, expected - 1)", "atomicAdd(counter, 1u)", counters);
}
