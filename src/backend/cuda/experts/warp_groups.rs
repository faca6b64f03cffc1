//! The product of experts on warp groups (`kernels/experts_hopper.cu`): which models have it, for how many rows, and
//! its sizes.

use super::super::device::{DeviceInfo, ModuleSource};
use super::super::options::{CudaOptions, scalar_define};
use super::super::warp_groups;
use crate::ExpertsShape;

/// Threads of a thread block: a warp group that copies, and two that compute.
pub(super) const THREADS: usize = 3 * 128;
pub(super) const TILE_ROWS: usize = 128;
pub(super) const TILE_COLS: usize = 256;
const SLICE_K: usize = 64;
const STAGES: usize = 4;
/// Two barriers of 8 bytes for each stage.
const BARRIERS_BYTES: usize = STAGES * 2 * 8;

/// Dynamic shared memory of a thread block.
pub const SHARED_BYTES: usize = STAGES * (TILE_ROWS + TILE_COLS) * SLICE_K * 2 + BARRIERS_BYTES;

/// Rows of each expert, on average, from which on its product is on warp groups. With 16 rows, a tile of 64 columns
/// reads a fourth more than the weights; one of 256 columns, a sixteenth. With fewer, thread blocks of 64 columns are
/// more, and keep more multiprocessors busy.
const MIN_ROWS: usize = 16;

/// The source of the module, if the device and the model's options allow it.
pub(super) fn source(options: &CudaOptions, info: &DeviceInfo) -> Option<ModuleSource> {
    warp_groups::check(options, info).ok()?;
    Some(ModuleSource { file: "experts_hopper.cu", defines: vec![scalar_define(options.dtype)] })
}

/// Whether a piece of `rows` rows has enough of them for each expert.
pub(super) fn has_enough_rows(rows: usize, shape: &ExpertsShape) -> bool {
    rows * shape.num_chosen >= MIN_ROWS * shape.num_experts
}
