//! Launches of `kernels/few_rows.cu` and `kernels/few_rows_qkv.cu`: products of up to 8 rows with plain matrices,
//! together with what a layer does before and after them. So a decode step of a Llama with few sequences has five
//! launches a layer: QKV with norm, rotary embedding and KV write; attention; output with the addition to the residual
//! stream; gate and up with norm and activation; down with the addition.
//!
//! The rule, for each product by itself: `FewRowsKernels` takes it if
//! - the weights are plain and of 16 bits, and a row of them is a multiple of 16 bytes;
//! - rows of other batches may have other bits (`device.batch_invariant` is off);
//! - its norm, if it begins with one, is an RMS norm without bias over a stream to which nothing is still to be added,
//!   and its heads, if it ends with them, have a multiple of 16 dimensions;
//! - there are up to 8 rows, and for this shape it was not slower than the separate launches when both were timed.
//!
//! All else takes the separate launches.

use super::device::{
    Device, DeviceBuffer, DevicePtr, DeviceResult, Grid, KernelId, Matmul, ModuleId, ModuleSource, Stream,
};
use super::heads::RopeParams;
use super::options::{CudaOptions, FewRowsUse, head_defines, scalar_define};
use super::rows::{BatchRows, FloatOrScalar, RowKernels, activation_number};
use super::tensors::{CudaMatrix, CudaTensor, CudaVector, CudaWeights};
use crate::{Activation, DType, Norm, NormKind};
use bytemuck::NoUninit;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

const MAX_ROWS: usize = 8;
const WARPS: usize = 8;
const THREADS: usize = WARPS * 32;
/// Columns of a thread block.
const TILE_N: usize = 16;
/// Columns of a weight matrix that are loaded at once.
const CHUNK: usize = 8;
/// Numbers of rows that are timed. Others are as the next larger one.
const TIMED_ROWS: [usize; 4] = [1, 2, 4, 8];

/// Dynamic shared memory of a kernel for `matrices` matrices at once.
pub const fn shared_bytes(matrices: usize) -> usize {
    let stages = if matrices == 1 { 4 } else { 3 };
    WARPS * stages * matrices * TILE_N * 64 * 2 + MAX_ROWS * WARPS * 4
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct FewRowsInput {
    w: DevicePtr,
    x: DevicePtr,
    stream: DevicePtr,
    norm: DevicePtr,
    rows: u32,
    columns: u32,
    k: u32,
    eps: f32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct FewRowsParams {
    input: FewRowsInput,
    bias: DevicePtr,
    out: FloatOrScalar,
    adds: u32,
    padding: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct FewRowsGatedParams {
    input: FewRowsInput,
    bias: DevicePtr,
    out: DevicePtr,
    kind: u32,
    padding: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct FewRowsQkvParams {
    input: FewRowsInput,
    bias: DevicePtr,
    q_norm: DevicePtr,
    k_norm: DevicePtr,
    arrivals: DevicePtr,
    rope: RopeParams,
    head_eps: f32,
    padding: u32,
}

/// The left operand of a product.
#[derive(Clone, Copy)]
pub(super) enum FewRowsOperand<'a> {
    /// `[rows, k]` as it is.
    Plain(&'a CudaTensor),
    /// The norm of the residual stream `[rows, k]`, to which nothing is still to be added if `is_complete`.
    Norm { stream: &'a CudaTensor, norm: &'a Norm<CudaVector>, is_complete: bool },
}

/// A product, and how the separate launches would be made.
#[derive(Clone, Copy)]
pub(super) struct FewRowsProduct<'a> {
    pub x: FewRowsOperand<'a>,
    pub w: &'a CudaMatrix,
    pub bias: Option<&'a CudaVector>,
    /// The batch, with the rows of this product.
    pub rows: BatchRows,
    pub row_kernels: &'a RowKernels,
}

/// What is done with a result.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum FewRowsResult {
    Stored(DType),
    /// Added to the residual stream.
    Added,
    /// `[gate | up]` becomes `act(gate) * up`.
    Gated,
}

/// Products that take the same time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct FewRowsShape {
    n: usize,
    k: usize,
    normed: bool,
    result: FewRowsResult,
}

/// The modules, and their kernels.
pub(super) struct FewRowsKernels {
    device: Rc<dyn Device>,
    dtype: DType,
    head_dim: usize,
    /// Whether the separate launches may be chosen.
    is_timed: bool,
    product: KernelId,
    gated: KernelId,
    qkv: KernelId,
    /// How many thread blocks of each head of Q, K and V have finished: `u32`, all 0 between launches.
    arrivals: DeviceBuffer,
    /// Milliseconds by shape and rows: of one launch, and of the separate ones.
    timed: RefCell<HashMap<(FewRowsShape, usize), [f32; 2]>>,
}

/// Whether a backend with these options has the kernels.
pub(super) fn is_used(options: &CudaOptions) -> bool {
    options.dtype != DType::F32 && !options.batch_invariant && options.few_rows != FewRowsUse::Never
}

/// The sources of [`FewRowsKernels`].
pub(super) fn sources(options: &CudaOptions) -> [ModuleSource; 2] {
    [
        ModuleSource { file: "few_rows.cu", defines: vec![scalar_define(options.dtype)] },
        ModuleSource { file: "few_rows_qkv.cu", defines: head_defines(options) },
    ]
}

impl FewRowsKernels {
    /// `modules` are those of [`sources`].
    pub fn new(device: &Rc<dyn Device>, options: &CudaOptions, modules: [ModuleId; 2]) -> DeviceResult<Self> {
        let kernel = |module, name, matrices| device.kernel(module, name, shared_bytes(matrices) as u32);
        let num_heads = options.num_heads + 2 * options.kv.num_kv_heads;
        Ok(Self {
            device: device.clone(),
            dtype: options.dtype,
            head_dim: options.kv.head_dim,
            is_timed: options.few_rows == FewRowsUse::Timed,
            product: kernel(modules[0], "few_rows_product", 1)?,
            gated: kernel(modules[0], "few_rows_gated", 2)?,
            qkv: kernel(modules[1], "few_rows_qkv", 1)?,
            arrivals: zeros(device, num_heads * 4)?,
            timed: RefCell::default(),
        })
    }

    /// `out = x · wᵀ + bias`, `out: [rows, n]`. Returns false if the separate launches are to be made.
    pub fn store(&self, product: &FewRowsProduct<'_>, (out, dtype): (DevicePtr, DType)) -> DeviceResult<bool> {
        let Some(input) = self.input(product, FewRowsResult::Stored(dtype))? else { return Ok(false) };
        self.launch_product(product, input, FloatOrScalar::at(out, dtype), false).map(|()| true)
    }

    /// `stream += x · wᵀ + bias`. Returns as [`Self::store`].
    pub fn add(&self, product: &FewRowsProduct<'_>, stream: &CudaTensor) -> DeviceResult<bool> {
        let Some(input) = self.input(product, FewRowsResult::Added)? else { return Ok(false) };
        self.launch_product(product, input, FloatOrScalar::at(stream.ptr(), DType::F32), true).map(|()| true)
    }

    /// `out = act(gate) * up` for `[gate | up] = x · wᵀ + bias`. Returns as [`Self::store`].
    pub fn gated(&self, product: &FewRowsProduct<'_>, kind: Activation, out: &CudaTensor) -> DeviceResult<bool> {
        let Some(input) = self.input(product, FewRowsResult::Gated)? else { return Ok(false) };
        self.launch_gated(product, input, kind, out.ptr()).map(|()| true)
    }

    /// The QKV product, with what follows it in the heads: see [`crate::Backend::qkv_linear`]. `norms` are the weights
    /// of the norms of the heads of Q and of K, and their epsilon; `rope.qkv` takes the product. Returns as
    /// [`Self::store`].
    pub fn qkv(
        &self,
        product: &FewRowsProduct<'_>,
        norms: Option<([DevicePtr; 2], f32)>,
        rope: RopeParams,
    ) -> DeviceResult<bool> {
        if !self.head_dim.is_multiple_of(TILE_N) {
            return Ok(false);
        }
        // The work on the heads is the same in both, and is not timed.
        let Some(input) = self.input(product, FewRowsResult::Stored(self.dtype))? else { return Ok(false) };
        let ([q_norm, k_norm], head_eps) = norms.unwrap_or(([DevicePtr::NULL; 2], 0.0));
        let (bias, arrivals) = (bias_of(product), self.arrivals.ptr());
        let params = FewRowsQkvParams { input, bias, q_norm, k_norm, arrivals, rope, head_eps, padding: 0 };
        self.launch(self.qkv, product.w.n, 1, &params).map(|()| true)
    }

    /// The input of a launch; `None` if the separate launches are to be made.
    fn input(&self, product: &FewRowsProduct<'_>, result: FewRowsResult) -> DeviceResult<Option<FewRowsInput>> {
        let FewRowsProduct { x, w, rows, .. } = *product;
        let CudaWeights::Plain(weights) = &w.weights else { return Ok(None) };
        let is_complete = match x {
            FewRowsOperand::Plain(x) => x.dtype == self.dtype,
            FewRowsOperand::Norm { is_complete, .. } => is_complete,
        };
        let (normed, norm, eps, [x, stream]) = match x {
            FewRowsOperand::Plain(x) => (false, DevicePtr::NULL, 0.0, [x.ptr(), DevicePtr::NULL]),
            FewRowsOperand::Norm { stream, norm, .. } => {
                let (NormKind::Rms { eps }, None) = (norm.kind, &norm.bias) else { return Ok(None) };
                (true, norm.weight.float.ptr(), eps, [DevicePtr::NULL, stream.ptr()])
            }
        };
        if !w.k.is_multiple_of(CHUNK) || w.dtype != self.dtype {
            return Ok(None);
        }
        let shape = FewRowsShape { n: w.n, k: w.k, normed, result };
        // Timed by whatever step comes first, so that the start, whose step is the largest, times everything.
        self.time(shape, weights.ptr(), product)?;
        if rows.num_rows == 0 || rows.num_rows > MAX_ROWS || !is_complete || !self.is_faster(shape, rows.num_rows) {
            return Ok(None);
        }
        let columns = if result == FewRowsResult::Gated { w.n / 2 } else { w.n };
        let [rows, columns, k] = [rows.num_rows, columns, w.k].map(|size| size as u32);
        Ok(Some(FewRowsInput { w: weights.ptr(), x, stream, norm, rows, columns, k, eps }))
    }

    /// Whether one launch is not slower than the separate ones. A device that does not tell times has the launch.
    fn is_faster(&self, shape: FewRowsShape, rows: usize) -> bool {
        self.timed.borrow().get(&(shape, rows.next_power_of_two())).is_none_or(|[one, separate]| one <= separate)
    }

    /// Times both ways for this shape, if that has not been done.
    fn time(&self, shape: FewRowsShape, w: DevicePtr, product: &FewRowsProduct<'_>) -> DeviceResult<()> {
        let is_known = |rows: &usize| self.timed.borrow().contains_key(&(shape, *rows));
        if !self.is_timed || TIMED_ROWS.iter().all(is_known) || !self.device.can_time() {
            return Ok(());
        }
        let FewRowsShape { n, k, normed, result } = shape;
        let tensor = |cols: usize, dtype: DType| -> DeviceResult<CudaTensor> {
            let buffer = zeros(&self.device, MAX_ROWS * cols * dtype.size_bytes())?;
            Ok(CudaTensor { buffer, max_rows: MAX_ROWS, cols, dtype })
        };
        let (x, stream, out) = (tensor(k, self.dtype)?, tensor(k, DType::F32)?, tensor(n, DType::F32)?);
        let activated = tensor(n / 2, self.dtype)?;
        let bytes = n * k * self.dtype.size_bytes();
        let eps = 1e-5;
        let norm = normed.then(|| zeros(&self.device, k * 4)).transpose()?;
        for num_rows in TIMED_ROWS {
            let one = |w: DevicePtr| {
                let columns = if result == FewRowsResult::Gated { n / 2 } else { n };
                let [rows, columns, k] = [num_rows, columns, k].map(|size| size as u32);
                let (x, stream, norm) = match &norm {
                    Some(norm) => (DevicePtr::NULL, stream.ptr(), norm.ptr()),
                    None => (x.ptr(), DevicePtr::NULL, DevicePtr::NULL),
                };
                let input = FewRowsInput { w, x, stream, norm, rows, columns, k, eps };
                let product = FewRowsProduct { bias: None, ..*product };
                match result {
                    FewRowsResult::Stored(dtype) => {
                        self.launch_product(&product, input, FloatOrScalar::at(out.ptr(), dtype), false)
                    }
                    FewRowsResult::Added => {
                        self.launch_product(&product, input, FloatOrScalar::at(out.ptr(), DType::F32), true)
                    }
                    FewRowsResult::Gated => self.launch_gated(&product, input, Activation::Silu, activated.ptr()),
                }
            };
            let separate = |w: DevicePtr| {
                let rows = BatchRows { num_rows, ..product.rows };
                if let Some(norm) = &norm {
                    let norm = (NormKind::Rms { eps }, norm.ptr(), DevicePtr::NULL);
                    product.row_kernels.add_norm(rows, &stream, None, norm, &x)?;
                }
                let dtype = if let FewRowsResult::Stored(dtype) = result { dtype } else { self.dtype };
                let matmul = Matmul { m: num_rows, n, k, dtype: self.dtype, out: dtype, bias: false };
                // SAFETY: the tensors have these sizes, and `w` those of the matrix.
                unsafe { self.device.matmul(matmul, x.ptr(), w, DevicePtr::NULL, out.ptr())? };
                if result == FewRowsResult::Gated {
                    product.row_kernels.activation(rows, out.ptr(), Activation::Silu, true, &activated)?;
                }
                Ok(())
            };
            // SAFETY: the matrix and the tensors live until the device is done.
            let (one, separate) =
                unsafe { (self.device.time_cold(w, bytes, &one)?, self.device.time_cold(w, bytes, &separate)?) };
            tracing::debug!(?shape, num_rows, one_ms = one, separate_ms = separate, "a product of few rows was timed");
            self.timed.borrow_mut().insert((shape, num_rows), [one, separate]);
        }
        Ok(())
    }

    fn launch_product(
        &self,
        product: &FewRowsProduct<'_>,
        input: FewRowsInput,
        out: FloatOrScalar,
        adds: bool,
    ) -> DeviceResult<()> {
        let params = FewRowsParams { input, bias: bias_of(product), out, adds: u32::from(adds), padding: 0 };
        self.launch(self.product, input.columns as usize, 1, &params)
    }

    fn launch_gated(
        &self,
        product: &FewRowsProduct<'_>,
        input: FewRowsInput,
        kind: Activation,
        out: DevicePtr,
    ) -> DeviceResult<()> {
        let kind = activation_number(kind);
        let params = FewRowsGatedParams { input, bias: bias_of(product), out, kind, padding: 0 };
        self.launch(self.gated, input.columns as usize, 2, &params)
    }

    fn launch(&self, kernel: KernelId, columns: usize, matrices: usize, params: &impl NoUninit) -> DeviceResult<()> {
        let (blocks, shared_bytes) = ([columns.div_ceil(TILE_N) as u32, 1, 1], shared_bytes(matrices) as u32);
        let grid = Grid { blocks, threads: THREADS as u32, shared_bytes };
        // SAFETY: the structs are those that the kernels expect. The callers pass tensors and matrices that live as
        // long as the backend and whose sizes were checked.
        unsafe { self.device.launch(kernel, grid, bytemuck::bytes_of(params)) }
    }
}

fn bias_of(product: &FewRowsProduct<'_>) -> DevicePtr {
    product.bias.map_or(DevicePtr::NULL, |bias| bias.float.ptr())
}

fn zeros(device: &Rc<dyn Device>, bytes: usize) -> DeviceResult<DeviceBuffer> {
    let buffer = DeviceBuffer::new(device, bytes)?;
    // SAFETY: the memory is ours, and dropping it waits.
    unsafe { device.fill(Stream::Compute, buffer.ptr(), 0, bytes)? };
    Ok(buffer)
}
