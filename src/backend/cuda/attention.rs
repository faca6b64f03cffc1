//! Attention's kernels (`kernels/attention.cu`, `kernels/attention_rows.cu`): which rows go to which kernel, and the
//! launches.

use super::batch::{BatchWork, Tile};
use super::device::{
    Device, DeviceBuffer, DeviceInfo, DevicePtr, DeviceResult, Grid, KernelId, ModuleId, ModuleSource,
};
use super::graphs::bucket;
use super::options::{CudaOptions, scalar_defines};
use super::rows::BatchRows;
use crate::{AttentionShape, Batch, DType, KvDType, KvLayout};
use bytemuck::NoUninit;
use std::cmp::Reverse;
use std::rc::Rc;

const WARP: usize = 32;
/// Tokens that a warp of the decode kernel takes at a time.
const SLICE: usize = 16;
const PREFILL_WARPS: usize = 4;
const MERGE_WARPS: usize = 4;
const SIMPLE_WARPS: usize = 4;
/// The smallest partition: fewer tokens are not worth one of their own.
const MIN_PARTITION: usize = 256;
/// Thread blocks that a decode launch should have for each multiprocessor, so that all multiprocessors stay busy to the
/// end.
const DECODE_BLOCKS_PER_SM: usize = 8;
const MAX_PARTITIONS: usize = 128;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct AttentionParams {
    batch: DevicePtr,
    qkv: DevicePtr,
    pool: DevicePtr,
    out: DevicePtr,
    partials: DevicePtr,
    layer: u32,
    window: u32,
    partitions: u32,
    scale_log2: f32,
    cap_scale: f32,
    padding: u32,
}

/// The tile sizes of the kernels on tensor cores for a model and a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileShape {
    head_dim: usize,
    /// Whether K and V are copied to shared memory as codes, from which tiles are made.
    has_codes: bool,
    /// 16-row tiles of a warp of the prefill kernel.
    pub prefill_row_tiles: usize,
    /// Tokens of K and V that its thread blocks hold.
    pub prefill_kv_tile: usize,
    pub decode_warps: usize,
    pub decode_stages: usize,
}

impl TileShape {
    /// `None` if the kernels cannot run on tensor cores: with float32, or a head size that is not a multiple of 16.
    pub fn choose(dtype: DType, kv: &KvLayout, max_shared_bytes: usize) -> Option<Self> {
        let head_dim = kv.head_dim;
        if dtype == DType::F32 || !head_dim.is_multiple_of(16) {
            return None;
        }
        let wide = head_dim > 128;
        let shape = |decode_warps, decode_stages| Self {
            head_dim,
            has_codes: matches!(kv.dtype, KvDType::Codes(_)),
            prefill_row_tiles: if wide { 1 } else { 2 },
            prefill_kv_tile: if wide { 32 } else { 64 },
            decode_warps,
            decode_stages,
        };
        // `(warps, stages, thread blocks on a multiprocessor)`, best first. More stages (copies in flight) are better,
        // and two thread blocks on a multiprocessor are better than one if that leaves two stages.
        let candidates = [(4, 4, 2), (4, 3, 2), (4, 2, 2), (4, 4, 1), (4, 3, 1), (4, 2, 1), (2, 2, 1)];
        let fits = |(warps, stages, blocks): &(usize, usize, usize)| {
            blocks * (shape(*warps, *stages).decode_shared_bytes() + 1024) <= max_shared_bytes + 1024
        };
        let (warps, stages, _) = candidates.into_iter().find(fits)?;
        Some(shape(warps, stages))
    }

    /// Bytes of `rows` rows of elements in shared memory.
    fn row_bytes(&self, rows: usize) -> usize {
        rows * 2 * (self.head_dim + 8)
    }

    /// Bytes of the codes and scales of `tokens` tokens.
    fn code_bytes(&self, tokens: usize) -> usize {
        tokens * (self.head_dim + 2)
    }

    pub fn prefill_rows(&self) -> usize {
        PREFILL_WARPS * self.prefill_row_tiles * 16
    }

    /// Dynamic shared memory of the kernels' thread blocks.
    pub fn prefill_shared_bytes(&self) -> usize {
        let tiles = 2 * self.prefill_kv_tile;
        self.row_bytes(self.prefill_rows() + tiles) + if self.has_codes { self.code_bytes(tiles) } else { 0 }
    }

    pub fn decode_shared_bytes(&self) -> usize {
        let (slice, stages) = (2 * SLICE, self.decode_stages);
        let of_warp = match self.has_codes {
            true => self.row_bytes(slice) + stages * self.code_bytes(slice),
            false => stages * self.row_bytes(slice),
        };
        self.row_bytes(SLICE) + self.decode_warps * of_warp
    }

    fn defines(&self) -> [(&'static str, String); 4] {
        [
            ("PREFILL_ROW_TILES", self.prefill_row_tiles.to_string()),
            ("PREFILL_KV_TILE", self.prefill_kv_tile.to_string()),
            ("DECODE_WARPS", self.decode_warps.to_string()),
            ("DECODE_STAGES", self.decode_stages.to_string()),
        ]
    }
}

/// Dynamic shared memory of the kernel without tensor cores.
pub fn simple_shared_bytes(head_dim: usize) -> usize {
    SIMPLE_WARPS * head_dim * 4
}

/// Dynamic shared memory of the kernel that merges partitions.
pub fn merge_shared_bytes(head_dim: usize) -> usize {
    MERGE_WARPS * (head_dim + 1) * 4
}

enum Kernels {
    /// On tensor cores.
    Tiled { shape: TileShape, prefill: KernelId, decode: KernelId, merge: KernelId, partials: DeviceBuffer },
    /// One warp for each row and head.
    Simple { rows: KernelId },
}

/// A step's attention: the work lists that are uploaded with the batch, and the other parameters of the launches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionPlan {
    pub work: BatchWork,
    /// Partitions of a decode's tokens.
    pub partitions: usize,
}

impl AttentionPlan {
    /// A number that differs between steps with the same number of rows if their launches differ. `None` if the
    /// launches depend on more than that.
    pub fn graph_key(&self, batch: &Batch) -> Option<u32> {
        let decodes = batch.seqs.iter().all(|seq| seq.num_rows == 1);
        decodes.then_some(if self.work.decode_seqs.is_empty() { 0 } else { self.partitions as u32 })
    }
}

pub struct AttentionKernels {
    device: Rc<dyn Device>,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    batch_invariant: bool,
    softcap: bool,
    kernels: Kernels,
}

/// The source of [`AttentionKernels`] on this device.
pub fn source(options: &CudaOptions, info: &DeviceInfo) -> ModuleSource {
    let mut defines = scalar_defines(options);
    if options.softcap {
        defines.push(("SOFTCAP", "1".into()));
    }
    match TileShape::choose(options.dtype, &options.kv, info.max_shared_bytes as usize) {
        Some(shape) => {
            defines.extend(shape.defines());
            ModuleSource { file: "attention.cu", defines }
        }
        None => ModuleSource { file: "attention_rows.cu", defines },
    }
}

/// Loads the kernels for heads of this type and shape, whose occupancy [`Device::kernels`] tells then.
pub fn load(device: &Rc<dyn Device>, dtype: DType, num_heads: usize, kv: KvLayout) -> DeviceResult<()> {
    let options = CudaOptions {
        dtype,
        num_heads,
        kv,
        vocab_size: 0,
        max_rows: 0,
        max_seqs: 0,
        max_model_len: 0,
        max_logit_rows: 0,
        graphs: false,
        batch_invariant: false,
        softcap: false,
        experts: false,
    };
    let module = device.load_modules(&[source(&options, device.info())])?[0];
    AttentionKernels::new(device, &options, module).map(drop)
}

/// The number of partitions for decodes over up to `longest` tokens. With one partition they have `blocks` thread
/// blocks, and `wanted` thread blocks keep the device busy. The result is enough for that, at most twice as many, and
/// no partition is too small. It is a power of two, so that few graphs are recorded.
fn partitions(blocks: usize, wanted: usize, longest: usize) -> usize {
    let most = (wanted / blocks.max(1)).next_power_of_two().min(MAX_PARTITIONS);
    longest.div_ceil(MIN_PARTITION).next_power_of_two().min(most)
}

impl AttentionKernels {
    pub fn new(device: &Rc<dyn Device>, options: &CudaOptions, module: ModuleId) -> DeviceResult<Self> {
        let head_dim = options.kv.head_dim;
        let kernel = |name, bytes: usize| device.kernel(module, name, bytes as u32);
        let shape = TileShape::choose(options.dtype, &options.kv, device.info().max_shared_bytes as usize);
        let mut attention = Self {
            device: device.clone(),
            num_heads: options.num_heads,
            num_kv_heads: options.kv.num_kv_heads,
            head_dim,
            batch_invariant: options.batch_invariant,
            softcap: options.softcap,
            kernels: Kernels::Simple { rows: KernelId(0) },
        };
        attention.kernels = match shape {
            None => Kernels::Simple { rows: kernel("attention_rows", simple_shared_bytes(head_dim))? },
            Some(shape) => Kernels::Tiled {
                shape,
                prefill: kernel("attention_prefill", shape.prefill_shared_bytes())?,
                decode: kernel("attention_decode", shape.decode_shared_bytes())?,
                merge: kernel("attention_merge", merge_shared_bytes(head_dim))?,
                partials: DeviceBuffer::new(device, attention.max_partials() * (head_dim + 4) * 4)?,
            },
        };
        Ok(attention)
    }

    fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Thread blocks of the decode kernel for one sequence and partition.
    fn decode_blocks(&self) -> usize {
        self.num_kv_heads * self.group().div_ceil(16)
    }

    fn wanted_decode_blocks(&self) -> usize {
        DECODE_BLOCKS_PER_SM * self.device.info().num_sms as usize
    }

    /// The most results of partitions. See [`partitions`], which at most doubles the wanted number of thread blocks.
    fn max_partials(&self) -> usize {
        2 * self.wanted_decode_blocks() * self.num_heads.div_ceil(self.decode_blocks()).max(1)
    }

    fn partitions(&self, num_seqs: usize, longest: usize) -> usize {
        partitions(bucket(num_seqs, usize::MAX) * self.decode_blocks(), self.wanted_decode_blocks(), longest)
    }

    /// Lengths of sequences, one for each kind of launch that decode steps of `num_seqs` sequences have.
    pub fn decode_lengths(&self, num_seqs: usize, max_len: usize) -> Vec<usize> {
        if !self.decodes_apart() {
            return vec![1];
        }
        // The number of partitions grows where a length exceeds a power of two of partitions.
        let doubled = (0..).map(|i| (MIN_PARTITION << i) + 1).take_while(|len| *len < max_len);
        let mut lengths: Vec<usize> = std::iter::once(1).chain(doubled).chain([max_len]).collect();
        lengths.dedup_by_key(|len| self.partitions(num_seqs, *len));
        lengths
    }

    /// Tokens of a tile of the prefill kernel.
    fn tile_tokens(&self) -> usize {
        match &self.kernels {
            Kernels::Simple { .. } => 1,
            Kernels::Tiled { shape, .. } => (shape.prefill_rows() / self.group()).max(1),
        }
    }

    /// Whether sequences with one row go to the decode kernel.
    fn decodes_apart(&self) -> bool {
        matches!(self.kernels, Kernels::Tiled { .. }) && !self.batch_invariant
    }

    /// Chooses the kernel of each sequence. Sequences with one row go to the decode kernel, except with
    /// `batch_invariant`: then rows must be computed the same way however they are batched.
    pub fn plan(&self, batch: &Batch) -> AttentionPlan {
        let mut work = BatchWork::default();
        let decodes_apart = self.decodes_apart();
        let mut longest = 0;
        for (place, seq) in batch.seqs.iter().enumerate() {
            if seq.num_rows == 1 && decodes_apart {
                work.decode_seqs.push(place as u32);
                longest = longest.max(seq.num_computed + 1);
            } else {
                let tiles = (0..seq.num_rows).step_by(self.tile_tokens());
                work.prefill_tiles.extend(tiles.map(|row| Tile { seq: place as u32, first_row: row as u32 }));
            }
        }
        // Long tiles first, so that the thread blocks that start last have little to do.
        let seen = |tile: &Tile| batch.seqs[tile.seq as usize].num_computed + tile.first_row as usize;
        work.prefill_tiles.sort_by_key(|tile| Reverse(seen(tile)));
        let partitions = self.partitions(work.decode_seqs.len(), longest);
        AttentionPlan { work, partitions }
    }

    /// `qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim]`, `out: [rows, num_heads * head_dim]`.
    pub(super) fn launch(
        &self,
        rows: BatchRows,
        plan: &AttentionPlan,
        shape: &AttentionShape,
        (pool, layer): (DevicePtr, usize),
        qkv: DevicePtr,
        out: DevicePtr,
    ) -> DeviceResult<()> {
        let partials = match &self.kernels {
            Kernels::Tiled { partials, .. } => partials.ptr(),
            Kernels::Simple { .. } => DevicePtr::NULL,
        };
        assert_eq!(shape.softcap.is_some(), self.softcap, "kernels are made with capped scores or without");
        // With a cap, the kernel first computes tanh(score / cap), and the factor on that is the cap.
        let (scale, cap_scale) = shape.softcap.map_or((shape.scale, 0.0), |cap| (cap, shape.scale / cap));
        let params = AttentionParams {
            batch: rows.header,
            qkv,
            pool,
            out,
            partials,
            layer: layer as u32,
            window: shape.window.unwrap_or(0) as u32,
            partitions: plan.partitions as u32,
            scale_log2: scale * std::f32::consts::LOG2_E,
            cap_scale,
            padding: 0,
        };
        let launch = |kernel, blocks: [usize; 3], warps: usize, shared_bytes: usize| {
            let blocks = blocks.map(|blocks| blocks as u32);
            let grid = Grid { blocks, threads: (warps * WARP) as u32, shared_bytes: shared_bytes as u32 };
            // SAFETY: the struct is the one that the kernels expect. The caller's tensors, the pool and the partials
            // live as long as the backend and are large enough for the plan's work.
            unsafe { self.device.launch(kernel, grid, bytemuck::bytes_of(&params)) }
        };
        // A replayed step has launches for all rows of its bucket, each of another sequence.
        let padded = |len: usize| if rows.is_replayed && len > 0 { rows.num_rows } else { len };
        let (num_tiles, num_decodes) = (padded(plan.work.prefill_tiles.len()), padded(plan.work.decode_seqs.len()));
        match &self.kernels {
            Kernels::Simple { rows: kernel } => {
                let heads = self.num_heads.div_ceil(SIMPLE_WARPS);
                if num_tiles > 0 {
                    launch(*kernel, [num_tiles, heads, 1], SIMPLE_WARPS, simple_shared_bytes(self.head_dim))?;
                }
            }
            Kernels::Tiled { shape, prefill, decode, merge, .. } => {
                if num_tiles > 0 {
                    let heads = self.num_kv_heads * self.group().div_ceil(self.group().min(shape.prefill_rows()));
                    let shared = shape.prefill_shared_bytes();
                    launch(*prefill, [num_tiles * heads, 1, 1], PREFILL_WARPS, shared)?;
                }
                if num_decodes > 0 {
                    let shared = shape.decode_shared_bytes();
                    let blocks = [num_decodes, self.decode_blocks(), plan.partitions];
                    launch(*decode, blocks, shape.decode_warps, shared)?;
                    if plan.partitions > 1 {
                        let shared = merge_shared_bytes(self.head_dim);
                        launch(*merge, [num_decodes, self.num_heads, 1], MERGE_WARPS, shared)?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CodeType;

    #[test]
    fn long_contexts_are_cut_where_the_batch_does_not_fill_the_device() {
        // 8 KV heads on 132 multiprocessors, which want 8 thread blocks each.
        let rule = |num_seqs, longest| partitions(num_seqs * 8, 132 * DECODE_BLOCKS_PER_SM, longest);
        assert_eq!(rule(1, 200), 1, "short: in one pass");
        assert_eq!(rule(1, 1024), 4);
        assert_eq!(rule(1, 32_768), 128);
        assert_eq!(rule(1, 1 << 20), 128);
        assert_eq!(rule(8, 32_768), 16);
        assert_eq!(rule(64, 4096), 2);
        assert_eq!(rule(256, 4096), 1, "the batch is enough");
        for num_seqs in 1..300 {
            let cut = rule(num_seqs, 1 << 20);
            assert!(cut == 1 || cut * num_seqs * 8 < 2 * 132 * DECODE_BLOCKS_PER_SM + 8 * num_seqs);
        }
    }

    fn kv(head_dim: usize, dtype: impl Into<KvDType>) -> KvLayout {
        KvLayout { num_layers: 1, num_kv_heads: 1, head_dim, block_size: 16, dtype: dtype.into() }
    }

    #[test]
    fn tiles_fit_into_every_device() {
        // sm_80, sm_86 and sm_89, sm_90.
        for max_shared in [163 << 10, 99 << 10, 227 << 10] {
            for head_dim in (16..=256).step_by(16) {
                for dtype in [KvDType::Plain(DType::BF16), KvDType::Codes(CodeType::Int8)] {
                    let kv = kv(head_dim, dtype);
                    let shape = TileShape::choose(DType::BF16, &kv, max_shared).expect("all of these are supported");
                    assert!(shape.prefill_shared_bytes() <= max_shared, "prefill, {kv:?}");
                    assert!(shape.decode_shared_bytes() <= max_shared, "decode, {kv:?}");
                    assert!(shape.decode_stages >= 2, "a copy runs while another one's slice is read");
                }
            }
        }
        assert_eq!(TileShape::choose(DType::F32, &kv(128, DType::F32), 227 << 10), None);
        assert_eq!(TileShape::choose(DType::F16, &kv(24, DType::F16), 227 << 10), None);
        let h100 = TileShape::choose(DType::BF16, &kv(128, DType::BF16), 227 << 10).expect("supported");
        assert_eq!((h100.decode_warps, h100.decode_stages), (4, 3));
    }
}
