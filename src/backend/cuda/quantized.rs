//! Quantised matrices in device memory, and the modules of `kernels/quantized.cu` that multiply them.

use super::device::{Device, DeviceBuffer, DevicePtr, DeviceResult, KernelId, ModuleSource};
use super::options::scalar_define;
use super::upload::Uploader;
use super::weight_tiles::{TILE_N, WeightTiles};
use crate::{DType, HostTensor, WeightFormat, fp8};
use pagetide_base::error::StartError;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) const FEW_WARPS: usize = 4;
const FEW_STAGES: usize = 4;
pub(super) const TILED_WARPS: usize = 4;
pub(super) const TILED_ROWS: usize = 64;
pub(super) const TILED_COLS: usize = 128;
const TILED_STAGES: usize = 3;

/// Neighbouring rows of a matrix whose formats have the same tiles.
pub(super) struct QuantizedRows {
    pub kernels: Rc<QuantizedKernels>,
    buffer: DeviceBuffer,
    /// The number of rows.
    pub n: usize,
}

impl QuantizedRows {
    /// The address of the weight tiles.
    pub fn ptr(&self) -> DevicePtr {
        self.buffer.ptr()
    }
}

/// The module for one kind of tiles, and its kernels.
pub(super) struct QuantizedKernels {
    pub device: Rc<dyn Device>,
    pub tiles: WeightTiles,
    pub few: KernelId,
    pub tiled: KernelId,
    pub expert: KernelId,
    pub lookup: KernelId,
}

/// The modules that were needed so far.
pub(super) struct QuantizedModules {
    device: Rc<dyn Device>,
    dtype: DType,
    loaded: RefCell<HashMap<WeightTiles, Rc<QuantizedKernels>>>,
}

/// The source of the kernels for a kind of tiles and a type of 16 bits.
pub fn source(tiles: WeightTiles, dtype: DType) -> ModuleSource {
    let mut defines = vec![scalar_define(dtype)];
    defines.extend(tiles.defines());
    ModuleSource { file: "quantized.cu", defines }
}

/// Dynamic shared memory of the product for few rows.
pub fn few_shared_bytes(tiles: WeightTiles) -> usize {
    FEW_WARPS * FEW_STAGES * tiles.tile_bytes()
}

/// Dynamic shared memory of the products for many rows, and of experts.
pub fn tiled_shared_bytes(tiles: WeightTiles) -> usize {
    TILED_STAGES * (TILED_ROWS * (64 + 8) * 2 + TILED_COLS / TILE_N * tiles.tile_bytes())
}

impl QuantizedModules {
    pub fn new(device: &Rc<dyn Device>, dtype: DType) -> Self {
        Self { device: device.clone(), dtype, loaded: RefCell::default() }
    }

    fn kernels(&self, tiles: WeightTiles) -> DeviceResult<Rc<QuantizedKernels>> {
        if let Some(kernels) = self.loaded.borrow().get(&tiles) {
            return Ok(kernels.clone());
        }
        let module = self.device.load_modules(&[source(tiles, self.dtype)])?[0];
        let kernel = |name, bytes: usize| self.device.kernel(module, name, bytes as u32);
        let kernels = Rc::new(QuantizedKernels {
            device: self.device.clone(),
            tiles,
            few: kernel("quantized_product_few", few_shared_bytes(tiles))?,
            tiled: kernel("quantized_product", tiled_shared_bytes(tiles))?,
            expert: kernel("quantized_expert_product", tiled_shared_bytes(tiles))?,
            lookup: kernel("quantized_lookup", 0)?,
        });
        self.loaded.borrow_mut().insert(tiles, kernels.clone());
        Ok(kernels)
    }

    /// Uploads a matrix of `parts` as it is quantised. `None` if it has to be converted: there are no kernels for
    /// float32, and none for a matrix that has plain parts too.
    pub fn upload(
        &self,
        parts: &[HostTensor<'_>],
        uploader: &mut Uploader,
    ) -> Result<Option<Vec<QuantizedRows>>, StartError> {
        let Some(tiles) = self.tiles(parts) else { return Ok(None) };
        let mut rows: Vec<QuantizedRows> = Vec::new();
        let mut first = 0;
        while first < parts.len() {
            let same = tiles[first..].iter().take_while(|kind| **kind == tiles[first]).count();
            let run = first..first + same;
            rows.push(self.upload_rows(tiles[first], &parts[run.clone()], uploader)?);
            first = run.end;
        }
        Ok(Some(rows))
    }

    /// Uploads `count` matrices, each of the same number of parts. `None` as in [`Self::upload`], and if the parts have
    /// tiles of different kinds.
    pub fn upload_experts(
        &self,
        count: usize,
        parts: &[HostTensor<'_>],
        uploader: &mut Uploader,
    ) -> Result<Option<QuantizedRows>, StartError> {
        let Some(tiles) = self.tiles(parts) else { return Ok(None) };
        let rows: usize = parts.iter().map(|part| part.rows).sum();
        // So that the matrices of all experts are one matrix for the upload.
        let is_whole = (rows / count).is_multiple_of(TILE_N);
        if !is_whole || tiles.iter().any(|kind| *kind != tiles[0]) {
            return Ok(None);
        }
        self.upload_rows(tiles[0], parts, uploader).map(Some)
    }

    /// The kind of tiles of each part.
    fn tiles(&self, parts: &[HostTensor<'_>]) -> Option<Vec<WeightTiles>> {
        let tiles = |part: &HostTensor<'_>| WeightTiles::of_weights(part.format);
        if self.dtype == DType::F32 { None } else { parts.iter().map(tiles).collect() }
    }

    fn upload_rows(
        &self,
        tiles: WeightTiles,
        parts: &[HostTensor<'_>],
        uploader: &mut Uploader,
    ) -> Result<QuantizedRows, StartError> {
        let k = parts[0].cols;
        let mut rows: Vec<(WeightFormat, &[u8])> = Vec::new();
        for part in parts {
            let row_bytes = part.bytes.len() / part.rows;
            rows.extend(part.bytes.chunks_exact(row_bytes).map(|row| (part.format, row)));
        }
        let is_finite = AtomicBool::new(true);
        let pack = |piece: usize, out: &mut [u8]| {
            let rows = &rows[piece * TILE_N..rows.len().min((piece + 1) * TILE_N)];
            is_finite.fetch_and(tiles.pack(rows, out), Ordering::Relaxed);
        };
        let (n, row_bytes) = (rows.len(), tiles.row_bytes(k));
        let buffer = uploader.upload_pieces(n.div_ceil(TILE_N), row_bytes, &pack)?;
        if !is_finite.into_inner() {
            return Err(match parts[0].format {
                WeightFormat::Fp8 => fp8::not_finite(n, k),
                format => StartError::new(format!(
                    "a scale of a matrix is not finite in float16, whose largest number is 65504: [{n}, {k}] in {format}"
                )),
            });
        }
        Ok(QuantizedRows { kernels: self.kernels(tiles)?, buffer, n })
    }
}
