//! Contexts beyond 32k, and block tables at their largest. Many entries of a table are the same few blocks.

use super::{BLOCK_SIZE, device_with_room};
use crate::attention::add;
use crate::support::*;
use pagetide::backend::cpu::CpuBackend;
use pagetide::backend::cuda::CudaBackend;
use pagetide::backend::cuda::device::Device;
use pagetide::backend::{AttentionShape, Backend, Batch, CodeType, DType, KvDType, KvLayout, TensorRole};
use std::rc::Rc;

/// Tokens in the cache, a multiple of the block size.
const PREFIX: usize = 40_000;
/// Blocks that the prefix is made of.
const SHARED: usize = 8;

fn shape(window: Option<usize>) -> AttentionShape {
    AttentionShape { num_heads: 4, num_kv_heads: 1, head_dim: 16, scale: 0.5, softcap: None, window }
}

/// Attention of tokens behind a prefix: `Q`, `K` and `V` of the prefix's blocks and of the new tokens.
struct LongCase {
    dtype: DType,
    codes: Option<CodeType>,
    num_new: usize,
}

impl LongCase {
    fn layout(&self) -> KvLayout {
        let dtype = self.codes.map_or(self.dtype.into(), KvDType::Codes);
        KvLayout { num_layers: 1, num_kv_heads: 1, head_dim: 16, block_size: BLOCK_SIZE, dtype }
    }

    /// Which blocks the prefix has changes along it, so that a result shows which part of it was read.
    fn table(&self) -> Vec<u32> {
        let num_blocks = PREFIX / BLOCK_SIZE;
        let of_prefix = (0..num_blocks).map(|i| ((i * SHARED / num_blocks) ^ (i % 3)) as u32);
        of_prefix.chain(SHARED as u32..(SHARED + self.num_new.div_ceil(BLOCK_SIZE)) as u32).collect()
    }

    /// The batch that fills the shared blocks, and that of the new tokens, with their numbers.
    fn steps(&self) -> [(Batch, Vec<f32>); 2] {
        let (mut shared, mut new) = (Batch::default(), Batch::default());
        add(&mut shared, 0, SHARED * BLOCK_SIZE, &(0..SHARED as u32).collect::<Vec<_>>(), BLOCK_SIZE);
        add(&mut new, PREFIX, self.num_new, &self.table(), BLOCK_SIZE);
        let cols = shape(None).qkv_cols();
        let mut numbers = Random(1).floats(SHARED * BLOCK_SIZE * cols, self.dtype);
        for (i, row) in numbers.chunks_exact_mut(cols).enumerate() {
            let block = i / BLOCK_SIZE;
            // The mean of V differs from block to block, in another way in each column.
            let v = &mut row[cols - 16..];
            let of_block = |d: usize| ((block * (d + 3)) % SHARED) as f32 * 0.5;
            let moved: Vec<f32> = v.iter().enumerate().map(|(d, x)| x * 0.25 + of_block(d)).collect();
            v.copy_from_slice(&round(&moved, self.dtype));
        }
        [(shared, numbers), (new, Random(2).floats(self.num_new * cols, self.dtype))]
    }

    /// The attention of the new tokens.
    fn run<B: Backend>(&self, backend: &mut B, fill: impl Fn(&mut B::Tensor, &[f32])) -> B::Tensor {
        let shape = shape(None);
        backend.allocate_kv(self.layout(), SHARED + self.num_new.div_ceil(BLOCK_SIZE), 0).unwrap();
        let max_rows = self.num_new.max(SHARED * BLOCK_SIZE);
        let mut qkv = backend.tensor(max_rows, shape.qkv_cols(), TensorRole::Activation).unwrap();
        let mut out = backend.tensor(max_rows, 4 * 16, TensorRole::Activation).unwrap();
        for (batch, numbers) in self.steps() {
            fill(&mut qkv, &numbers);
            backend.begin(&batch);
            backend.rope_and_write_kv(&mut qkv, &shape, None, 0);
            if batch.num_rows() == self.num_new {
                backend.attention(&qkv, &shape, 0, &mut out);
            }
            backend.end_step();
            backend.finish_step();
        }
        out
    }

    fn check_on(&self, device: &Rc<dyn Device>) {
        let len = self.num_new * 4 * 16;
        let mut cpu = CpuBackend::new(Default::default()).unwrap();
        let plain = LongCase { codes: None, ..*self };
        let expected =
            plain.run(&mut cpu, |tensor, values| tensor.as_mut_slice()[..values.len()].copy_from_slice(values));
        let expected: Vec<f64> = expected.as_slice()[..len].iter().map(|x| f64::from(*x)).collect();
        let mut options = options(self.dtype, 4, self.layout());
        (options.max_rows, options.max_model_len) = (SHARED * BLOCK_SIZE, 65_536);
        let mut cuda = CudaBackend::new(device.clone(), options).unwrap();
        let out = self.run(&mut cuda, |tensor, values| set(device, tensor, values));
        let tolerance = match (self.codes, self.dtype) {
            // A code is rounded by half of a 127th of its vector's largest element, which is below 4.
            (Some(_), _) => 2e-2,
            // A sum of 40,000 numbers is rounded 40,000 times, by up to 2^-24 of it.
            (None, DType::F32) => 2e-4,
            (None, dtype) => tolerance(dtype),
        };
        let what = format!("{:?}, {:?}, {} new tokens", self.dtype, self.codes, self.num_new);
        assert_close(&get(device, &out, len), &expected, tolerance, &what);
    }
}

/// A decode and a tile of a prompt, on tensor cores and without them.
#[test]
fn tokens_behind_40000_others() {
    let cases =
        [(DType::F16, None, 1), (DType::F16, None, 32), (DType::F16, Some(CodeType::Int8), 1), (DType::F32, None, 2)];
    parallel(0..cases.len() as u64, |i| {
        let (dtype, codes, num_new) = cases[i as usize];
        LongCase { dtype, codes, num_new }.check_on(&device(0));
    });
}

/// The attention, through a window, of the last token of `num_tokens`, whose window has the same numbers whatever their
/// number is. All blocks before the window are the same one.
fn last_of(num_tokens: usize, dtype: DType, device: &Rc<dyn Device>) -> Vec<f32> {
    const BLOCK_SIZE: usize = 256;
    let shape = shape(Some(600));
    let kv = KvLayout { num_layers: 1, num_kv_heads: 1, head_dim: 16, block_size: BLOCK_SIZE, dtype: dtype.into() };
    let mut options = options(dtype, 4, kv);
    (options.max_rows, options.max_seqs, options.max_model_len) = (4 * BLOCK_SIZE, 1, num_tokens);
    options.windows = vec![shape.window];
    let mut backend = CudaBackend::new(device.clone(), options).unwrap();
    backend.allocate_kv(kv, 5, 0).unwrap();
    let mut qkv = backend.tensor(4 * BLOCK_SIZE, shape.qkv_cols(), TensorRole::Activation).unwrap();
    let mut out = backend.tensor(4 * BLOCK_SIZE, 4 * 16, TensorRole::Activation).unwrap();
    let mut table = vec![0; num_tokens / BLOCK_SIZE - 4];
    table.extend(1..5);
    let first = num_tokens - 4 * BLOCK_SIZE;
    for (num_computed, num_rows, seed) in [(first, 4 * BLOCK_SIZE - 1, 1), (num_tokens - 1, 1, 2)] {
        let mut batch = Batch::default();
        add(&mut batch, num_computed, num_rows, &table, BLOCK_SIZE);
        set(device, &qkv, &Random(seed).floats(num_rows * shape.qkv_cols(), dtype));
        backend.begin(&batch);
        backend.rope_and_write_kv(&mut qkv, &shape, None, 0);
        if num_rows == 1 {
            backend.attention(&qkv, &shape, 0, &mut out);
        }
        backend.end_step();
        backend.finish_step();
    }
    get(device, &out, 4 * 16)
}

/// The longest context that `model.max_model_len` allows, 2³¹ tokens: its block table has 32 MiB. Executed PTX, which
/// would need a minute to copy it, takes one of 2²⁴ tokens.
#[test]
fn the_largest_block_table() {
    let longest = if executes_ptx() { 1 << 24 } else { 1 << 31 };
    for dtype in [DType::BF16, DType::F32] {
        let Some(device) = device_with_room(1 << 30) else { return };
        let expected = last_of(1 << 20, dtype, &device);
        assert!(expected.iter().all(|x| x.is_finite()) && expected.iter().any(|x| *x != 0.0));
        assert_eq!(bits(&last_of(longest, dtype, &device)), bits(&expected), "{dtype:?}");
    }
}
