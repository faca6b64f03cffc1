//! Attention's kernels (`kernels/attention.cu`, `kernels/attention_hopper.cu`, `kernels/attention_rows.cu`) and their
//! launches.
//!
//! - `shared_chunks`: keys that several decodes have in the same blocks.
//! - `tiles`: the sizes of their tiles.
//! - `warp_groups`: the prefill kernel for compute capability 9.0.
//! - `work_list`: which thread block computes what.

mod shared_chunks;
mod tiles;
mod warp_groups;
mod work_list;

use super::device::{
    Device, DeviceBuffer, DeviceInfo, DevicePtr, DeviceResult, Grid, KernelId, ModuleId, ModuleSource, Stream,
};
use super::options::{CudaOptions, head_defines};
use super::rows::BatchRows;
use crate::{AttentionShape, Batch};
use bytemuck::NoUninit;
use std::rc::Rc;
pub use tiles::TileShape;
use tiles::WARPS;
pub use warp_groups::WarpGroupPrefill;
pub use work_list::{
    AttentionItem, AttentionKind, AttentionLaunch, AttentionList, AttentionMember, AttentionPlan, NO_MEMBER,
};
use work_list::{WorkPlanner, WorkRules};

const WARP: usize = 32;
/// Numbers of a chunk's result for a head beside the sums: two maxima and two sums of weights.
const PARTIAL_STATS: usize = 4;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct AttentionParams {
    batch: DevicePtr,
    qkv: DevicePtr,
    pool: DevicePtr,
    out: DevicePtr,
    partials: DevicePtr,
    arrivals: DevicePtr,
    layer: u32,
    window: u32,
    list: u32,
    scale_log2: f32,
    cap_scale: f32,
    padding: u32,
}

/// Dynamic shared memory of the kernel without tensor cores.
pub fn simple_shared_bytes(head_dim: usize) -> usize {
    WARPS * head_dim * 4
}

enum Kernels {
    /// On tensor cores.
    Tiled(Box<TiledKernels>),
    /// One warp for each row and head.
    Simple { rows: KernelId },
}

struct TiledKernels {
    prefill: KernelId,
    prefill_threads: usize,
    prefill_shared_bytes: usize,
    decode: KernelId,
    shape: TileShape,
    planner: WorkPlanner,
    /// Thread blocks of an item of the decode kernel.
    decode_head_tiles: usize,
    /// Thread blocks of the decode kernel that the device runs at the same time.
    resident_decodes: usize,
    /// `[max_partials][num_heads][head_dim + PARTIAL_STATS]` float32: results of chunks.
    partials: DeviceBuffer,
    /// `[max_partials][head tiles][2]`: how many results of a segment and of a tile are there. All 0 between launches.
    arrivals: DeviceBuffer,
}

pub struct AttentionKernels {
    device: Rc<dyn Device>,
    num_heads: usize,
    head_dim: usize,
    softcap: bool,
    kernels: Kernels,
}

/// The sources of [`AttentionKernels`] on this device: one, or two if prompts have a kernel of another module.
pub fn sources(options: &CudaOptions, info: &DeviceInfo) -> Vec<ModuleSource> {
    let warp_groups = WarpGroupPrefill::choose(options, info).ok();
    [source(options, info)].into_iter().chain(warp_groups.map(|kernel| kernel.source(options))).collect()
}

fn source(options: &CudaOptions, info: &DeviceInfo) -> ModuleSource {
    let mut defines = head_defines(options);
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

/// Loads the kernels of these options, whose occupancy [`Device::kernels`] tells then. Returns why prompts are not
/// computed on warp groups, if they are not.
pub fn load(device: &Rc<dyn Device>, options: &CudaOptions) -> DeviceResult<Option<&'static str>> {
    let modules = device.load_modules(&sources(options, device.info()))?;
    AttentionKernels::new(device, options, &modules)?;
    Ok(WarpGroupPrefill::choose(options, device.info()).err())
}

impl TiledKernels {
    fn new(
        device: &Rc<dyn Device>,
        options: &CudaOptions,
        modules: &[ModuleId],
        shape: TileShape,
    ) -> DeviceResult<Self> {
        let CudaOptions { num_heads, max_seqs, max_rows, max_model_len, .. } = *options;
        let (num_kv_heads, head_dim) = (options.kv.num_kv_heads, options.kv.head_dim);
        let warp_groups = WarpGroupPrefill::choose(options, device.info());
        let (module, name, prefill_rows, prefill_threads, prefill_shared_bytes) = match &warp_groups {
            Ok(kernel) => {
                (modules[1], "attention_prefill_hopper", kernel.rows(), kernel.threads(), kernel.shared_bytes())
            }
            Err(_) => {
                let shared_bytes = shape.prefill_shared_bytes();
                (modules[0], "attention_prefill", shape.prefill_rows(), WARPS * WARP, shared_bytes)
            }
        };
        tracing::debug!(kernel = name, not_on_warp_groups = warp_groups.err(), "attention of prompts");
        let prefill = device.kernel(module, name, prefill_shared_bytes as u32)?;
        let decode = device.kernel(modules[0], "attention_decode", shape.decode_shared_bytes() as u32)?;
        let group = num_heads / num_kv_heads;
        // As `Tiling` has it.
        let tokens = |rows: usize| (rows / group).max(1);
        let head_tiles = |rows: usize| num_kv_heads * group.div_ceil(rows);
        let mut rules = WorkRules {
            decode_tokens: tokens(shape.decode_rows()),
            prefill_tokens: tokens(prefill_rows),
            kv_tile: shape.kv_tile,
            block_size: options.kv.block_size,
            prefill_head_tiles: head_tiles(prefill_rows),
            resident_prefills: device.resident_blocks(prefill) as usize,
            windows: options.windows.clone(),
            batch_invariant: options.batch_invariant,
            max_partials: 0,
        };
        rules.max_partials = rules.partials_for(max_seqs, max_rows, max_model_len);
        let decode_head_tiles = head_tiles(shape.decode_rows());
        let arrivals_bytes = rules.max_partials * decode_head_tiles * 2 * 4;
        let arrivals = DeviceBuffer::new(device, arrivals_bytes)?;
        if arrivals_bytes > 0 {
            // SAFETY: the memory is ours, and dropping it waits.
            unsafe { device.fill(Stream::Compute, arrivals.ptr(), 0, arrivals_bytes)? };
        }
        Ok(Self {
            prefill,
            prefill_threads,
            prefill_shared_bytes,
            decode,
            shape,
            decode_head_tiles,
            resident_decodes: device.resident_blocks(decode) as usize,
            partials: DeviceBuffer::new(device, rules.max_partials * num_heads * (head_dim + PARTIAL_STATS) * 4)?,
            arrivals,
            planner: WorkPlanner::new(rules),
        })
    }
}

impl AttentionKernels {
    /// `modules` are those of [`sources`].
    pub fn new(device: &Rc<dyn Device>, options: &CudaOptions, modules: &[ModuleId]) -> DeviceResult<Self> {
        let head_dim = options.kv.head_dim;
        let kernels = match TileShape::choose(options.dtype, &options.kv, device.info().max_shared_bytes as usize) {
            Some(shape) => Kernels::Tiled(Box::new(TiledKernels::new(device, options, modules, shape)?)),
            None => {
                let shared_bytes = simple_shared_bytes(head_dim) as u32;
                Kernels::Simple { rows: device.kernel(modules[0], "attention_rows", shared_bytes)? }
            }
        };
        let (num_heads, softcap) = (options.num_heads, options.softcap);
        Ok(Self { device: device.clone(), num_heads, head_dim, softcap, kernels })
    }

    /// Words that the work lists of a step may have.
    pub fn max_words(&self, options: &CudaOptions) -> usize {
        let CudaOptions { max_seqs, max_rows, max_model_len, .. } = *options;
        let items = match &self.kernels {
            Kernels::Tiled(tiled) => tiled.planner.rules().max_items(max_seqs, max_rows, max_model_len),
            Kernels::Simple { .. } => max_rows.max(max_seqs),
        };
        let members = match &self.kernels {
            Kernels::Tiled(tiled) => tiled.planner.rules().windows.len() * max_seqs,
            Kernels::Simple { .. } => 0,
        };
        let bytes = items * size_of::<AttentionItem>() + members * size_of::<AttentionMember>();
        bytes / 4 + 2 * items.min(max_rows)
    }

    /// Replaces `plan` by the work lists of a batch. Those of a batch in which each sequence has one row have the same
    /// launches whatever the sequences' lengths, and whatever they share.
    pub fn plan(&mut self, batch: &Batch, plan: &mut AttentionPlan) {
        match &mut self.kernels {
            Kernels::Tiled(tiled) => tiled.planner.plan(batch, plan),
            Kernels::Simple { .. } => work_list::plan_rows(batch, plan),
        }
    }

    /// The counters of results of chunks.
    pub fn arrivals(&self) -> Option<&DeviceBuffer> {
        match &self.kernels {
            Kernels::Tiled(tiled) => Some(&tiled.arrivals),
            Kernels::Simple { .. } => None,
        }
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
        assert_eq!(shape.softcap.is_some(), self.softcap, "kernels are made with capped scores or without");
        // With a cap, the kernel first computes tanh(score / cap), and the factor on that is the cap.
        let (scale, cap_scale) = shape.softcap.map_or((shape.scale, 0.0), |cap| (cap, shape.scale / cap));
        let (partials, arrivals, window) = match &self.kernels {
            Kernels::Tiled(tiled) => {
                let window = tiled.planner.rules().windows.iter().position(|window| *window == shape.window);
                let window = window.unwrap_or_else(|| panic!("the options name no window of {:?}", shape.window));
                (tiled.partials.ptr(), tiled.arrivals.ptr(), window)
            }
            Kernels::Simple { .. } => (DevicePtr::NULL, DevicePtr::NULL, 0),
        };
        for AttentionLaunch { kind, list, .. } in plan.launches.iter().filter(|launch| launch.window == window) {
            let params = AttentionParams {
                batch: rows.header,
                qkv,
                pool,
                out,
                partials,
                arrivals,
                layer: layer as u32,
                // Positions have 32 bits, so a larger window is none.
                window: shape.window.map_or(0, |window| u32::try_from(window).unwrap_or(0)),
                list: *list as u32,
                scale_log2: scale * std::f32::consts::LOG2_E,
                cap_scale,
                padding: 0,
            };
            let num_items = plan.lists[*list].num_items as usize;
            let (kernel, blocks, threads, shared_bytes) = match (&self.kernels, kind) {
                (Kernels::Simple { rows: kernel }, _) => {
                    // A replayed step has a thread block for each row of its bucket.
                    let num_rows = if rows.is_replayed { rows.num_rows } else { num_items };
                    let heads = self.num_heads.div_ceil(WARPS);
                    (*kernel, [num_rows, heads, 1], WARPS * WARP, simple_shared_bytes(self.head_dim))
                }
                (Kernels::Tiled(tiled), AttentionKind::Prefill) => {
                    let blocks = num_items * tiled.planner.rules().prefill_head_tiles;
                    (tiled.prefill, [blocks, 1, 1], tiled.prefill_threads, tiled.prefill_shared_bytes)
                }
                (Kernels::Tiled(tiled), AttentionKind::Decode) => {
                    let units = if rows.is_replayed { usize::MAX } else { num_items * tiled.decode_head_tiles };
                    let blocks = [tiled.resident_decodes.min(units), 1, 1];
                    (tiled.decode, blocks, WARPS * WARP, tiled.shape.decode_shared_bytes())
                }
            };
            let blocks = blocks.map(|blocks| blocks as u32);
            let grid = Grid { blocks, threads: threads as u32, shared_bytes: shared_bytes as u32 };
            // SAFETY: the struct is the one that the kernels expect. The caller's tensors, the pool, the partials and
            // their counters live as long as the backend and are large enough for the plan's work.
            unsafe { self.device.launch(kernel, grid, bytemuck::bytes_of(&params))? };
        }
        Ok(())
    }
}
