//! Launches of `kernels/quantized.cu`: products with quantised matrices, and rows of quantised tables.

use super::CudaTensor;
use super::device::{DevicePtr, DeviceResult, Grid, KernelId};
use super::quantized::{
    FEW_WARPS, QuantizedRows, TILED_COLS, TILED_ROWS, TILED_WARPS, few_shared_bytes, tiled_shared_bytes,
};
use super::rows::{BatchRows, FloatOrScalar};
use super::weight_tiles::TILE_N;
use bytemuck::NoUninit;

const WARP: usize = 32;
const FEW_ROWS: usize = 8;
pub(super) const LOOKUP_THREADS: usize = 256;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct QuantizedParams {
    x: DevicePtr,
    w: DevicePtr,
    bias: DevicePtr,
    out: FloatOrScalar,
    rows: u32,
    n: u32,
    k: u32,
    first_column: u32,
    out_cols: u32,
    padding: u32,
}

/// Of `kernels/include/lookup.cuh`.
#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
pub(super) struct LookupParams {
    batch: DevicePtr,
    sampled: DevicePtr,
    table: DevicePtr,
    out: FloatOrScalar,
    cols: u32,
    table_rows: u32,
    scale: f32,
    offset: u32,
    adds_positions: u32,
    padding: u32,
}

/// Where the rows of a table are taken from, and what is done with them.
pub(super) enum Lookup {
    /// `out = table[token] * scale`; `sampled` are tokens by the index of the previous step's request.
    Tokens { scale: f32, sampled: DevicePtr },
    /// `out += table[position + offset]`
    Positions { offset: usize },
}

impl LookupParams {
    /// `table` has `table_rows` rows, and as many columns as `out`.
    pub fn new(rows: BatchRows, lookup: &Lookup, (table, table_rows): (DevicePtr, usize), out: &CudaTensor) -> Self {
        let (scale, sampled, offset, adds_positions) = match *lookup {
            Lookup::Tokens { scale, sampled } => (scale, sampled, 0, 0),
            Lookup::Positions { offset } => (1.0, DevicePtr::NULL, offset as u32, 1),
        };
        Self {
            batch: rows.header,
            sampled,
            table,
            out: FloatOrScalar::of(out),
            cols: out.cols as u32,
            table_rows: table_rows as u32,
            scale,
            offset,
            adds_positions,
            padding: 0,
        }
    }
}

/// A product with a quantised matrix: `x: [rows, k]` of the model's type, `out: [rows, n]`.
#[derive(Clone, Copy)]
pub(super) struct QuantizedProduct {
    pub x: DevicePtr,
    /// Float32, or null.
    pub bias: DevicePtr,
    pub out: FloatOrScalar,
    pub rows: usize,
    pub k: usize,
    /// Whether a row's sums must have the same order whatever the number of rows is.
    pub batch_invariant: bool,
}

/// Enqueues a product with all rows of a matrix.
pub(super) fn product(parts: &[QuantizedRows], product: &QuantizedProduct) -> DeviceResult<()> {
    let out_cols: usize = parts.iter().map(|part| part.n).sum();
    let mut first_column = 0;
    for part in parts {
        part.product(product, first_column, out_cols)?;
        first_column += part.n;
    }
    Ok(())
}

impl QuantizedRows {
    fn product(&self, product: &QuantizedProduct, first_column: usize, out_cols: usize) -> DeviceResult<()> {
        let QuantizedProduct { x, bias, out, rows, k, batch_invariant } = *product;
        if rows == 0 {
            return Ok(());
        }
        let [num_rows, n, k, first_column, out_cols] =
            [rows, self.n, k, first_column, out_cols].map(|size| size as u32);
        let w = self.ptr();
        let params = QuantizedParams { x, w, bias, out, rows: num_rows, n, k, first_column, out_cols, padding: 0 };
        let (kernel, blocks, threads, shared_bytes) = if rows <= FEW_ROWS && !batch_invariant {
            let blocks = [self.n.div_ceil(TILE_N), 1];
            (self.kernels.few, blocks, FEW_WARPS * WARP, few_shared_bytes(self.kernels.tiles))
        } else {
            let blocks = [rows.div_ceil(TILED_ROWS), self.n.div_ceil(TILED_COLS)];
            (self.kernels.tiled, blocks, TILED_WARPS * WARP, tiled_shared_bytes(self.kernels.tiles))
        };
        self.launch(kernel, blocks, (threads, shared_bytes), &params)
    }

    /// Enqueues one of the products of experts for up to `tiles` tiles of rows. `params` are those of
    /// `kernels/experts.cu`, with [`QuantizedRows::ptr`] as the weights.
    pub fn expert_product(&self, params: &impl NoUninit, tiles: usize, n: usize) -> DeviceResult<()> {
        let shared_bytes = tiled_shared_bytes(self.kernels.tiles);
        let blocks = [tiles, n.div_ceil(TILED_COLS)];
        self.launch(self.kernels.expert, blocks, (TILED_WARPS * WARP, shared_bytes), params)
    }

    /// Rows of a table that is this matrix.
    pub fn look_up(&self, rows: BatchRows, lookup: &Lookup, out: &CudaTensor) -> DeviceResult<()> {
        let params = LookupParams::new(rows, lookup, (self.ptr(), self.n), out);
        if rows.num_rows == 0 {
            return Ok(());
        }
        self.launch(self.kernels.lookup, [rows.num_rows, 1], (LOOKUP_THREADS, 0), &params)
    }

    fn launch(
        &self,
        kernel: KernelId,
        blocks: [usize; 2],
        (threads, shared_bytes): (usize, usize),
        params: &impl NoUninit,
    ) -> DeviceResult<()> {
        let blocks = [blocks[0] as u32, blocks[1] as u32, 1];
        let grid = Grid { blocks, threads: threads as u32, shared_bytes: shared_bytes as u32 };
        // SAFETY: the structs are those that the kernels expect. The callers pass addresses of tensors that live as
        // long as the backend and have the sizes that they state.
        unsafe { self.kernels.device.launch(kernel, grid, bytemuck::bytes_of(params)) }
    }
}
