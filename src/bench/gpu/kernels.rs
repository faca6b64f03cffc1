//! Copies, products and attention by themselves.

use super::figures::{Bandwidths, Figure, Goal, Sizes, seconds};
use pagetide_backend::cuda::device::{Copy, Device, DeviceBuffer, DevicePtr, DeviceResult, PinnedBuffer, Stream};
use pagetide_backend::cuda::{CudaBackend, CudaOptions, FewRowsUse};
use pagetide_backend::fp8::{FP8_BLOCK_BYTES, FP8_BLOCK_WEIGHTS, write_block};
use pagetide_backend::{
    AttentionShape, Backend, Batch, BatchSeq, DType, Experts, HostTensor, KvLayout, NO_SOURCE, TensorRole, WeightFormat,
};
use pagetide_base::error::StartError;
use pagetide_base::ids::BlockId;
use std::rc::Rc;

const GB: f64 = 1e9;
/// Layers that attention's launches take in turn: what one has read is out of the cache when its turn comes again.
const NUM_LAYERS: usize = 4;

/// Plain copies: what everything else is held against.
pub(super) fn copies(
    device: &Rc<dyn Device>,
    sizes: &Sizes,
    report: &mut dyn FnMut(Figure),
) -> Result<Bandwidths, StartError> {
    let bytes = sizes.copy_bytes;
    let (a, b) = (DeviceBuffer::new(device, bytes)?, DeviceBuffer::new(device, bytes)?);
    let (out, back) = (PinnedBuffer::new(device, bytes)?, PinnedBuffer::new(device, bytes)?);
    // SAFETY: all four live until everything is done: dropping them waits.
    let copy = |stream, to: DevicePtr, from: DevicePtr| unsafe { device.copy(stream, Copy { to, from, bytes }) };
    for buffer in [&a, &b] {
        // SAFETY: as above.
        unsafe { device.fill(Stream::Compute, buffer.ptr(), 1, bytes)? };
    }
    copy(Stream::CopyOut, back.ptr(), a.ptr())?;
    device.synchronize()?;

    // Over the bus a run takes long enough by itself.
    let few = Sizes { runs: sizes.runs.div_ceil(10), ..sizes.clone() };
    let bytes = bytes as f64;
    let on_device = 2.0 * bytes / seconds(&**device, sizes, || copy(Stream::Compute, b.ptr(), a.ptr()))?;
    let to_host = bytes / seconds(&**device, &few, || copy(Stream::CopyOut, out.ptr(), a.ptr()))?;
    let to_device = bytes / seconds(&**device, &few, || copy(Stream::CopyIn, b.ptr(), back.ptr()))?;
    let both = || {
        copy(Stream::CopyOut, out.ptr(), a.ptr())?;
        copy(Stream::CopyIn, b.ptr(), back.ptr())
    };
    let both_ways = bytes / seconds(&**device, &few, both)?;
    for (measure, value) in [
        ("copy on the device (read and written)", on_device),
        ("copy to the host", to_host),
        ("copy to the device", to_device),
        ("copies both ways, each", both_ways),
    ] {
        report(Figure::new(measure, value / GB, "GB/s"));
    }
    Ok(Bandwidths { device: on_device, to_host, to_device, both_ways })
}

/// The type of all that is measured.
const DTYPE: DType = DType::BF16;

/// The most rows and sequences of a batch, and tokens of a sequence.
#[derive(Clone, Copy)]
struct BatchLimits {
    rows: usize,
    seqs: usize,
    len: usize,
}

/// Which kernels a backend has.
#[derive(Clone, Copy)]
struct KernelChoice {
    batch_invariant: bool,
    fp8_activations: bool,
    few_rows: FewRowsUse,
    experts: bool,
}

const WITHOUT_FEW_ROWS: KernelChoice =
    KernelChoice { batch_invariant: false, fp8_activations: false, few_rows: FewRowsUse::Never, experts: false };

/// A backend with nothing but KV blocks, all random.
struct KernelBench {
    device: Rc<dyn Device>,
    backend: CudaBackend,
    layout: KvLayout,
    num_blocks: usize,
}

impl KernelBench {
    fn new(
        device: &Rc<dyn Device>,
        sizes: &Sizes,
        layout: KvLayout,
        limits: BatchLimits,
        (num_blocks, num_swap_blocks): (usize, usize),
        KernelChoice { batch_invariant, fp8_activations, few_rows, experts }: KernelChoice,
    ) -> Result<Self, StartError> {
        let options = CudaOptions {
            dtype: DTYPE,
            num_heads: sizes.heads.0,
            kv: layout,
            vocab_size: 64,
            max_rows: limits.rows,
            max_seqs: limits.seqs,
            max_model_len: limits.len,
            max_logit_rows: 8,
            graphs: false,
            batch_invariant,
            fp8_activations,
            few_rows,
            softcap: false,
            experts,
            windows: vec![None],
        };
        let mut backend = CudaBackend::new(device.clone(), options)?;
        backend.allocate_kv(layout, num_blocks, num_swap_blocks)?;
        let bench = Self { device: device.clone(), backend, layout, num_blocks };
        let pool = bench.backend.kv_pool().expect("it was just allocated");
        bench.randomize(pool.ptr(), pool.bytes())?;
        Ok(bench)
    }

    /// Fills memory with numbers as activations have them.
    fn randomize(&self, to: DevicePtr, bytes: usize) -> Result<(), StartError> {
        let piece = bytes.min(64 << 20);
        let random = self.backend.random_matrix(1, piece / DTYPE.size_bytes(), DTYPE, 1)?;
        for start in (0..bytes).step_by(piece) {
            let copy = Copy { to: to + start, from: random.buffer().ptr(), bytes: piece.min(bytes - start) };
            // SAFETY: both live until it is done: dropping them waits.
            unsafe { self.device.copy(Stream::Compute, copy)? };
        }
        Ok(())
    }

    /// One attention's time, over the layers in turn. All sequences' last rows are new. The whole blocks of the first
    /// `prefix` tokens are those of the first sequence.
    fn attention(&mut self, sizes: &Sizes, seqs: &[(usize, usize)], prefix: usize) -> Result<f64, StartError> {
        let (num_heads, num_kv_heads, head_dim) = sizes.heads;
        let shape = AttentionShape {
            num_heads,
            num_kv_heads,
            head_dim,
            scale: (head_dim as f32).powf(-0.5),
            softcap: None,
            window: None,
        };
        let mut batch = self.batch(seqs);
        for seq in &batch.seqs {
            let shared = (prefix / self.layout.block_size).min(seq.num_blocks);
            batch.block_tables.copy_within(..shared, seq.first_block);
        }
        let rows = batch.num_rows();
        let tensor = |cols| self.backend.tensor(rows, cols, TensorRole::Activation);
        let (qkv, mut out) = (tensor((num_heads + 2 * num_kv_heads) * head_dim)?, tensor(num_heads * head_dim)?);
        self.randomize(qkv.buffer().ptr(), qkv.buffer().bytes())?;
        self.backend.begin(&batch);
        let (device, mut layer) = (self.device.clone(), 0);
        let time = seconds(&*device, sizes, || {
            layer = (layer + 1) % NUM_LAYERS;
            self.backend.attention(&qkv, &shape, layer, &mut out);
            Ok(())
        })?;
        self.backend.end_step();
        self.backend.finish_step();
        Ok(time)
    }

    /// Sequences of `(num_computed, num_rows)` over blocks all over the pool.
    fn batch(&self, seqs: &[(usize, usize)]) -> Batch {
        let block_size = self.layout.block_size;
        let mut blocks = scattered(self.num_blocks).into_iter();
        let mut batch = Batch::default();
        for (num_computed, num_rows) in seqs {
            let num_blocks = (num_computed + num_rows).div_ceil(block_size);
            let table: Vec<u32> = blocks.by_ref().take(num_blocks).collect();
            batch.seqs.push(BatchSeq {
                first_row: batch.tokens.len(),
                num_rows: *num_rows,
                num_computed: *num_computed,
                first_block: batch.block_tables.len(),
                num_blocks,
            });
            for position in *num_computed..num_computed + num_rows {
                batch.slots.push(table[position / block_size] * block_size as u32 + (position % block_size) as u32);
                batch.positions.push(position as u32);
            }
            batch.block_tables.extend(table);
            batch.tokens.resize(batch.positions.len(), 0);
            batch.token_sources.resize(batch.positions.len(), NO_SOURCE);
        }
        batch
    }
}

/// All numbers below `n`, neighbours far apart.
fn scattered(n: usize) -> Vec<u32> {
    let gcd = |mut a: usize, mut b: usize| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    // Near the golden ratio, and without a common factor.
    let step = (n * 618 / 1000..).find(|step| gcd(*step, n) == 1).unwrap_or(1);
    (0..n).map(|i| (i * step % n) as u32).collect()
}

/// Products of 1 and 8 rows, with the kernels for few rows and with cuBLASLt: the bytes of the weights a second.
pub(super) fn products(
    device: &Rc<dyn Device>,
    sizes: &Sizes,
    bandwidths: &Bandwidths,
    report: &mut dyn FnMut(Figure),
) -> Result<(), StartError> {
    const MAX_ROWS: usize = 8;
    let (_, num_kv_heads, head_dim) = sizes.heads;
    let layout = KvLayout { num_layers: 1, num_kv_heads, head_dim, block_size: 16, dtype: DTYPE.into() };
    let limits = BatchLimits { rows: MAX_ROWS, seqs: MAX_ROWS, len: 16 };
    for (n, k) in &sizes.products {
        let bytes = n * k * DTYPE.size_bytes();
        // Matrices that take turns are out of the cache when their turn comes again.
        let count = (sizes.copy_bytes / 4).div_ceil(bytes).max(2) as u64;
        for (few_rows, kernels) in [(FewRowsUse::Always, "kernels for few rows"), (FewRowsUse::Never, "cuBLASLt")] {
            let choice = KernelChoice { few_rows, ..WITHOUT_FEW_ROWS };
            let mut bench = KernelBench::new(device, sizes, layout, limits, (MAX_ROWS, 0), choice)?;
            let matrices = (0..count).map(|seed| bench.backend.random_matrix(*n, *k, DTYPE, seed));
            let matrices = matrices.collect::<Result<Vec<_>, _>>()?;
            let tensor = |cols| bench.backend.tensor(MAX_ROWS, cols, TensorRole::Activation);
            let (x, mut out) = (tensor(*k)?, tensor(*n)?);
            bench.randomize(x.buffer().ptr(), x.buffer().bytes())?;
            for rows in [1, MAX_ROWS] {
                bench.backend.begin(&bench.batch(&vec![(0, 1); rows]));
                let mut turn = matrices.iter().cycle();
                let time = seconds(&**device, sizes, || {
                    let w = turn.next().expect("there are matrices, in a cycle");
                    bench.backend.linear(&x, w, None, &mut out);
                    Ok(())
                })?;
                bench.backend.end_step();
                bench.backend.finish_step();
                let measure = format!("product, {rows} x {n} x {k}, {kernels}");
                report(Figure::new(measure, bytes as f64 / time / GB, "GB/s").out_of(bandwidths.device / GB, None));
            }
        }
    }
    Ok(())
}

/// Products with a plain matrix, and with an FP8 matrix: with activations of the model's type, and with FP8 activations
/// where the device has such products. The matrix is larger than the caches.
pub(super) fn fp8_products(
    device: &Rc<dyn Device>,
    sizes: &Sizes,
    report: &mut dyn FnMut(Figure),
) -> Result<(), StartError> {
    let ((n, k), row_counts) = &sizes.fp8_product;
    let (n, k) = (*n, *k);
    let max_rows = row_counts.iter().copied().max().unwrap_or(1);
    let (_, num_kv_heads, head_dim) = sizes.heads;
    let layout = KvLayout { num_layers: 1, num_kv_heads, head_dim, block_size: 16, dtype: DTYPE.into() };
    let limits = BatchLimits { rows: max_rows, seqs: 1, len: max_rows };
    let num_blocks = max_rows.div_ceil(layout.block_size);
    let blocks = fp8_blocks(n * k);
    let with_fp8 = device.lacks_fp8_products().is_none().then_some(("FP8 weights and activations", true, true));
    let kinds = [("plain", false, false), ("FP8 weights", true, false)].into_iter().chain(with_fp8);
    for (kind, is_fp8, fp8_activations) in kinds {
        let choice = KernelChoice { fp8_activations, ..WITHOUT_FEW_ROWS };
        let mut bench = KernelBench::new(device, sizes, layout, limits, (num_blocks, 0), choice)?;
        let w = match is_fp8 {
            true => {
                let tensor = HostTensor { format: WeightFormat::Fp8, rows: n, cols: k, bytes: &blocks };
                bench.backend.matrix(&[tensor], DTYPE)?
            }
            false => bench.backend.random_matrix(n, k, DTYPE, 1)?,
        };
        let tensor = |cols| bench.backend.tensor(max_rows, cols, TensorRole::Activation);
        let (x, mut out) = (tensor(k)?, tensor(n)?);
        bench.randomize(x.buffer().ptr(), x.buffer().bytes())?;
        for rows in row_counts {
            bench.backend.begin(&bench.batch(&[(0, *rows)]));
            let time = seconds(&**device, sizes, || {
                bench.backend.linear(&x, &w, None, &mut out);
                Ok(())
            })?;
            bench.backend.end_step();
            bench.backend.finish_step();
            let measure = format!("product, {rows} x {n} x {k}, {kind}");
            report(Figure::new(measure, (2 * rows * n * k) as f64 / time / 1e12, "TFLOP/s"));
        }
    }
    Ok(())
}

/// Blocks of FP8 with all codes but NaN, and one scale.
fn fp8_blocks(weights: usize) -> Vec<u8> {
    let mut bytes = vec![0; weights / FP8_BLOCK_WEIGHTS * FP8_BLOCK_BYTES];
    for (index, block) in bytes.chunks_exact_mut(FP8_BLOCK_BYTES).enumerate() {
        let code = |i| ((index * 61 + i * 37) % 127) as u8 | ((index + i) % 2 * 128) as u8;
        let codes: [u8; FP8_BLOCK_WEIGHTS] = std::array::from_fn(code);
        write_block(1e-4, &codes, block);
    }
    bytes
}

/// A layer of experts, with random choices. Its matrices are larger than the caches. On Hopper, many rows have another
/// kernel, but not if they are batch-invariant.
pub(super) fn experts(
    device: &Rc<dyn Device>,
    sizes: &Sizes,
    report: &mut dyn FnMut(Figure),
) -> Result<(), StartError> {
    let (shape, row_counts) = &sizes.experts;
    let (count, hidden, width) = (shape.num_experts, shape.hidden_size, shape.intermediate_size);
    let max_rows = row_counts.iter().copied().max().unwrap_or(1);
    let (_, num_kv_heads, head_dim) = sizes.heads;
    let layout = KvLayout { num_layers: 1, num_kv_heads, head_dim, block_size: 16, dtype: DTYPE.into() };
    let limits = BatchLimits { rows: max_rows, seqs: 1, len: max_rows };
    let num_blocks = max_rows.div_ceil(layout.block_size);
    for (batch_invariant, how) in [(false, ""), (true, ", batch-invariant")] {
        let choice = KernelChoice { batch_invariant, experts: true, ..WITHOUT_FEW_ROWS };
        let mut bench = KernelBench::new(device, sizes, layout, limits, (num_blocks, 0), choice)?;
        let experts = Experts {
            router: bench.backend.random_matrix(count, hidden, DTYPE, 1)?,
            up: bench.backend.random_matrices(count, 2 * width, hidden, DTYPE, 2)?,
            down: bench.backend.random_matrices(count, hidden, width, DTYPE, 3)?,
        };
        let mut work = bench.backend.experts_workspace(max_rows, shape)?;
        let tensor = || bench.backend.tensor(max_rows, hidden, TensorRole::Activation);
        let (x, mut out) = (tensor()?, tensor()?);
        bench.randomize(x.buffer().ptr(), x.buffer().bytes())?;
        for rows in row_counts {
            bench.backend.begin(&bench.batch(&[(0, *rows)]));
            let time = seconds(&**device, sizes, || {
                bench.backend.mix_experts(&x, &experts, shape, &mut work, &mut out);
                Ok(())
            })?;
            bench.backend.end_step();
            bench.backend.finish_step();
            // Three products of a row with each of its experts.
            let flops = (rows * shape.num_chosen * 3 * 2 * hidden * width) as f64;
            let measure = format!("experts, {rows} rows, {} of {count}, {hidden} x {width}{how}", shape.num_chosen);
            report(Figure::new(measure, flops / time / 1e12, "TFLOP/s"));
        }
    }
    Ok(())
}

/// Decode and prefill attention.
pub(super) fn attention(
    device: &Rc<dyn Device>,
    sizes: &Sizes,
    block_size: usize,
    bandwidths: &Bandwidths,
    report: &mut dyn FnMut(Figure),
) -> Result<(), StartError> {
    let (num_heads, num_kv_heads, head_dim) = sizes.heads;
    let layout = KvLayout { num_layers: NUM_LAYERS, num_kv_heads, head_dim, block_size, dtype: DTYPE.into() };
    let blocks = |(batch, tokens): (usize, usize)| batch * tokens.div_ceil(block_size);
    let on_prefixes = sizes.on_prefixes.iter().map(|(prefix, rows)| (1, prefix + rows));
    let shared_prefixes = sizes.shared_prefixes.iter().map(|(batch, tokens, _)| (*batch, *tokens));
    let works = sizes.decodes.iter().copied().chain([(1, sizes.prefill)]).chain(on_prefixes).chain(shared_prefixes);
    let num_blocks = works.clone().map(blocks).max().unwrap_or(1);
    let seqs = works.clone().map(|(batch, _)| batch).max().unwrap_or(1);
    let prompts = sizes.on_prefixes.iter().map(|(_, rows)| *rows).chain([sizes.prefill]);
    let limits = BatchLimits {
        rows: prompts.max().unwrap_or(1).max(seqs),
        seqs,
        len: works.map(|(_, tokens)| tokens).max().unwrap_or(1),
    };
    let mut bench = KernelBench::new(device, sizes, layout, limits, (num_blocks, 0), WITHOUT_FEW_ROWS)?;

    for (batch, tokens) in &sizes.decodes {
        let time = bench.attention(sizes, &vec![(tokens - 1, 1); *batch], 0)?;
        let bytes = 2 * batch * tokens * num_kv_heads * head_dim * DTYPE.size_bytes();
        // 32,768 tokens are 134 MB, and fewer of them leave some multiprocessors idle.
        let goal = if batch * tokens < 32_768 { 0.75 } else { 0.85 };
        report(
            Figure::new(format!("decode attention, {batch} x {tokens}"), bytes as f64 / time / GB, "GB/s")
                .of_block_size(block_size)
                .out_of(bandwidths.device / GB, Some(goal)),
        );
    }
    for (batch, tokens, prefix) in &sizes.shared_prefixes {
        let mut time = |prefix| bench.attention(sizes, &vec![(tokens - 1, 1); *batch], prefix);
        let (alone, shared) = (time(0)?, time(*prefix)?);
        let name = format!("decode attention, {batch} x {tokens}");
        let figure = |how: &str, time: f64| Figure::new(format!("{name}{how}"), time * 1e6, "us");
        report(figure(", blocks of their own", alone).of_block_size(block_size));
        let shared = figure(&format!(", a common prefix of {prefix}"), shared).of_block_size(block_size);
        report(shared.with_goal(Goal::AtMost(alone * 1e6)));
    }
    for (prefix, rows) in &sizes.on_prefixes {
        let time = bench.attention(sizes, &[(*prefix, *rows)], 0)?;
        let bytes = (2 * (prefix + rows) * num_kv_heads * head_dim * DTYPE.size_bytes()) as f64;
        // At the least, the prefix is read once.
        let floor = bytes / bandwidths.device * 1e6;
        report(
            Figure::new(format!("attention of {rows} tokens on a prefix of {prefix}"), time * 1e6, "us")
                .of_block_size(block_size)
                .with_goal(Goal::AtMost(2.0 * floor)),
        );
    }
    // Two products over half of a square, each a multiplication and an addition.
    let flops = 2.0 * (num_heads * head_dim) as f64 * sizes.prefill as f64 * (sizes.prefill + 1) as f64;
    let mut prefill = |bench: &mut KernelBench, how: &str, goal: f64| -> Result<(), StartError> {
        let time = bench.attention(sizes, &[(0, sizes.prefill)], 0)?;
        report(
            Figure::new(format!("prefill attention, {} tokens{how}", sizes.prefill), flops / time / 1e12, "TFLOP/s")
                .of_block_size(block_size)
                .with_goal(Goal::AtLeast(goal)),
        );
        Ok(())
    };
    prefill(&mut bench, "", 350.0)?;
    // Its memory is free before the next one's is taken.
    drop(bench);
    // On Hopper this is another kernel.
    let blocks = (blocks((1, sizes.prefill)), 0);
    let limits = BatchLimits { rows: sizes.prefill, seqs: 1, len: sizes.prefill };
    let choice = KernelChoice { batch_invariant: true, ..WITHOUT_FEW_ROWS };
    prefill(&mut KernelBench::new(device, sizes, layout, limits, blocks, choice)?, ", batch-invariant", 250.0)
}

/// Swap copies of blocks all over both pools: each way, and both ways at once.
pub(super) fn swap(
    device: &Rc<dyn Device>,
    sizes: &Sizes,
    block_size: usize,
    bandwidths: &Bandwidths,
    report: &mut dyn FnMut(Figure),
) -> Result<(), StartError> {
    let (_, num_kv_heads, head_dim) = sizes.heads;
    let layout = KvLayout { num_layers: 32, num_kv_heads, head_dim, block_size, dtype: DTYPE.into() };
    let num_blocks = (sizes.copy_bytes / layout.block_bytes()).max(2);
    let limits = BatchLimits { rows: 8, seqs: 8, len: block_size };
    let blocks = (2 * num_blocks, 2 * num_blocks);
    let mut bench = KernelBench::new(device, sizes, layout, limits, blocks, WITHOUT_FEW_ROWS)?;
    let few = Sizes { runs: sizes.runs.div_ceil(10), ..sizes.clone() };
    // Sequences' blocks come and go: runs of a few neighbours, here of four.
    let runs_of_four = |blocks: Vec<u32>, from: usize| -> Vec<BlockId> {
        let in_run = |run: u32| (0..4).map(move |i| 4 * run + i);
        let all: Vec<u32> =
            blocks.into_iter().flat_map(in_run).filter(|block| (*block as usize) < num_blocks).collect();
        all.into_iter().map(|block| BlockId(block + from as u32)).collect()
    };
    let blocks = |from| runs_of_four(scattered(num_blocks.div_ceil(4)), from);
    let out: Vec<(BlockId, BlockId)> = blocks(0).into_iter().zip(blocks(0).into_iter().rev()).collect();
    let back: Vec<(BlockId, BlockId)> = blocks(num_blocks).into_iter().rev().zip(blocks(num_blocks)).collect();
    // The pool that is swapped in must have been written.
    let forth: Vec<_> = back.iter().map(|(swap, device)| (*device, *swap)).collect();
    bench.backend.swap_out(&forth);
    device.synchronize()?;

    let bytes = (out.len() * layout.block_bytes()) as f64;
    let mut measure = |name: &str, most: f64, goal, run: &mut dyn FnMut(&mut CudaBackend)| {
        let backend = &mut bench.backend;
        let time = seconds(&**device, &few, || {
            run(backend);
            DeviceResult::Ok(())
        })?;
        let figure = Figure::new(name, bytes / time / GB, "GB/s").of_block_size(block_size);
        report(figure.out_of(most / GB, goal));
        Ok::<_, StartError>(())
    };
    measure("swap out", bandwidths.to_host, Some(0.9), &mut |backend| {
        backend.swap_out(&out);
    })?;
    measure("swap in", bandwidths.to_device, Some(0.9), &mut |backend| {
        backend.swap_in(&back);
    })?;
    measure("swap both ways, each", bandwidths.both_ways, Some(0.9), &mut |backend| {
        backend.swap_out(&out);
        backend.swap_in(&back);
    })
}
