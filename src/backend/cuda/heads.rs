//! Launches of `kernels/heads.cu`: the operations on the heads of Q, K and V and on KV blocks.

use super::CudaTensor;
use super::device::{Device, DevicePtr, DeviceResult, Grid, KernelId, ModuleId, ModuleSource};
use super::options::{CudaOptions, head_defines};
use super::rows::BatchRows;
use crate::{AttentionShape, KvDType, NormKind};
use bytemuck::NoUninit;
use std::rc::Rc;

const WARPS_PER_BLOCK: u32 = 4;
const COPY_THREADS: u32 = 256;
const COPY_BYTES_PER_BLOCK: usize = 16384;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct HeadNormParams {
    batch: DevicePtr,
    qkv: DevicePtr,
    q_weight: DevicePtr,
    k_weight: DevicePtr,
    eps: f32,
    padding: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
pub(super) struct RopeParams {
    batch: DevicePtr,
    qkv: DevicePtr,
    table: DevicePtr,
    pool: DevicePtr,
    layer: u32,
    rotary_dim: u32,
}

impl RopeParams {
    /// `qkv` holds rows of Q, K and V of the batch. `table: [positions][cos, sin][rotary_dim / 2]` float32, or null.
    pub(super) fn new(
        batch: BatchRows,
        qkv: &CudaTensor,
        (table, rotary_dim): (DevicePtr, usize),
        pool: DevicePtr,
        layer: usize,
    ) -> Self {
        let [layer, rotary_dim] = [layer, rotary_dim].map(|size| size as u32);
        Self { batch: batch.header, qkv: qkv.ptr(), table, pool, layer, rotary_dim }
    }
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct CopyBlocksParams {
    pool: DevicePtr,
    pairs: DevicePtr,
}

/// The module, and its kernels.
pub(super) struct HeadKernels {
    device: Rc<dyn Device>,
    num_heads: u32,
    num_kv_heads: u32,
    block_bytes: usize,
    /// Shared memory of `rope_and_write_kv`: the vectors that become codes.
    vectors_bytes: u32,
    head_norm: KernelId,
    rope_and_write_kv: KernelId,
    copy_blocks: KernelId,
}

/// The source of [`HeadKernels`].
pub(super) fn source(options: &CudaOptions) -> ModuleSource {
    ModuleSource { file: "heads.cu", defines: head_defines(options) }
}

impl HeadKernels {
    pub fn new(device: &Rc<dyn Device>, options: &CudaOptions, module: ModuleId) -> DeviceResult<Self> {
        let vectors_bytes = match options.kv.dtype {
            KvDType::Plain(_) => 0,
            KvDType::Codes(_) => WARPS_PER_BLOCK * options.kv.head_dim as u32 * 4,
        };
        Ok(Self {
            device: device.clone(),
            num_heads: options.num_heads as u32,
            num_kv_heads: options.kv.num_kv_heads as u32,
            block_bytes: options.kv.block_bytes(),
            vectors_bytes,
            head_norm: device.kernel(module, "head_norm", 0)?,
            rope_and_write_kv: device.kernel(module, "rope_and_write_kv", vectors_bytes)?,
            copy_blocks: device.kernel(module, "copy_blocks", 0)?,
        })
    }

    fn launch(&self, kernel: KernelId, grid: [usize; 2], threads: u32, params: &impl NoUninit) -> DeviceResult<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let shared_bytes = if kernel == self.rope_and_write_kv { self.vectors_bytes } else { 0 };
        let grid = Grid { blocks: [grid[0] as u32, grid[1] as u32, 1], threads, shared_bytes };
        // SAFETY: the structs are those that the kernels expect. The callers of the methods pass addresses of tensors
        // that live as long as the backend and have the sizes that the methods state.
        unsafe { self.device.launch(kernel, grid, bytemuck::bytes_of(params)) }
    }

    /// Normalises each head of Q and K. The weights are `[head_dim]` float32.
    pub fn head_norm(
        &self,
        rows: BatchRows,
        qkv: &CudaTensor,
        eps: f32,
        q_weight: DevicePtr,
        k_weight: DevicePtr,
    ) -> DeviceResult<()> {
        let params = HeadNormParams { batch: rows.header, qkv: qkv.ptr(), q_weight, k_weight, eps, padding: 0 };
        let heads = (self.num_heads + self.num_kv_heads).div_ceil(WARPS_PER_BLOCK) as usize;
        self.launch(self.head_norm, [rows.num_rows, heads], WARPS_PER_BLOCK * 32, &params)
    }

    pub fn rope_and_write_kv(&self, rows: BatchRows, params: RopeParams) -> DeviceResult<()> {
        let heads = (self.num_heads + 2 * self.num_kv_heads).div_ceil(WARPS_PER_BLOCK) as usize;
        self.launch(self.rope_and_write_kv, [rows.num_rows, heads], WARPS_PER_BLOCK * 32, &params)
    }

    /// Copies blocks of the pool; `pairs: [num_pairs][from, to]` on the device. No block is both read and written.
    pub fn copy_blocks(&self, pool: DevicePtr, pairs: DevicePtr, num_pairs: usize) -> DeviceResult<()> {
        let parts = self.block_bytes.div_ceil(COPY_BYTES_PER_BLOCK);
        self.launch(self.copy_blocks, [parts, num_pairs], COPY_THREADS, &CopyBlocksParams { pool, pairs })
    }
}

/// Checks that one kernel can normalise both Q and K, and returns its epsilon.
pub(super) fn head_norm_eps(q: NormKind, k: NormKind) -> f32 {
    match (q, k) {
        (NormKind::Rms { eps }, NormKind::Rms { eps: other }) if eps == other => eps,
        _ => panic!("heads are normed by their root mean square"),
    }
}

/// Checks that the shape is the one that the kernels were compiled for.
pub(super) fn check_shape(options: &CudaOptions, shape: &AttentionShape) {
    let compiled = (options.num_heads, options.kv.num_kv_heads, options.kv.head_dim);
    assert_eq!((shape.num_heads, shape.num_kv_heads, shape.head_dim), compiled, "kernels are made for one shape");
}
