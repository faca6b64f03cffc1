//! Launches of `kernels/rows.cu`: the operations of a forward pass on whole rows that are neither matrix products nor
//! attention.

use super::CudaTensor;
use super::device::{Device, DevicePtr, DeviceResult, Grid, KernelId, ModuleId, ModuleSource};
use super::options::{CudaOptions, scalar_define};
use crate::{Activation, DType, NormKind};
use bytemuck::NoUninit;
use std::rc::Rc;

const ROW_THREADS: u32 = 256;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct EmbedParams {
    batch: DevicePtr,
    sampled: DevicePtr,
    table: DevicePtr,
    out: FloatOrScalar,
    cols: u32,
    vocab: u32,
    scale: f32,
    padding: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct PositionParams {
    batch: DevicePtr,
    table: DevicePtr,
    x: DevicePtr,
    cols: u32,
    offset: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct NormParams {
    batch: DevicePtr,
    x: DevicePtr,
    delta: DevicePtr,
    weight: DevicePtr,
    bias: DevicePtr,
    out: FloatOrScalar,
    cols: u32,
    eps: f32,
    kind: u32,
    padding: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct AddParams {
    batch: DevicePtr,
    x: DevicePtr,
    delta: DevicePtr,
    cols: u32,
    padding: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct ActivationParams {
    batch: DevicePtr,
    x: DevicePtr,
    out: DevicePtr,
    cols: u32,
    kind: u32,
    gated: u32,
    padding: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct AddGatedParams {
    batch: DevicePtr,
    x: DevicePtr,
    gate: DevicePtr,
    from: DevicePtr,
    out: DevicePtr,
    x_cols: u32,
    cols: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct GatherParams {
    batch: DevicePtr,
    x: FloatOrScalar,
    out: DevicePtr,
    first: u32,
    cols: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct CapParams {
    x: DevicePtr,
    n: u64,
    cap: f32,
    padding: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct NarrowParams {
    batch: DevicePtr,
    x: DevicePtr,
    out: DevicePtr,
    cols: u32,
    padding: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct RandomParams {
    out: DevicePtr,
    n: u64,
    seed: u64,
    bound: f32,
    padding: u32,
}

/// The address of a tensor, in float32 or in the scalar type. The other field is null.
#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
pub(super) struct FloatOrScalar {
    float: DevicePtr,
    scalar: DevicePtr,
}

impl FloatOrScalar {
    /// If the scalar type is float32, it does not matter which field is set.
    pub(super) fn of(tensor: &CudaTensor) -> Self {
        Self::at(tensor.ptr(), tensor.dtype)
    }

    pub(super) fn at(ptr: DevicePtr, dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self { float: ptr, scalar: DevicePtr::NULL },
            DType::F16 | DType::BF16 => Self { float: DevicePtr::NULL, scalar: ptr },
        }
    }
}

/// A step's batch, as passed to the kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchRows {
    /// Address of the `BatchHeader`.
    pub header: DevicePtr,
    /// Rows to launch for: those of the batch, or more.
    pub num_rows: usize,
    /// Whether the launches may be repeated for another batch, which has up to `num_rows` sequences of one row each.
    pub is_replayed: bool,
}

/// The module, and its kernels.
pub(super) struct RowKernels {
    device: Rc<dyn Device>,
    embed: KernelId,
    add_position: KernelId,
    add_norm: KernelId,
    add: KernelId,
    activation: KernelId,
    add_gated: KernelId,
    gather_rows: KernelId,
    cap_logits: KernelId,
    narrow: KernelId,
    fill_random: KernelId,
}

/// The source of [`RowKernels`].
pub(super) fn source(options: &CudaOptions) -> ModuleSource {
    ModuleSource { file: "rows.cu", defines: vec![scalar_define(options.dtype)] }
}

/// Bytes of shared memory that a block's reductions need.
pub const REDUCE_BYTES: u32 = 32 * 4;

impl RowKernels {
    pub fn new(device: &Rc<dyn Device>, module: ModuleId) -> DeviceResult<Self> {
        let kernel = |name| device.kernel(module, name, REDUCE_BYTES);
        Ok(Self {
            device: device.clone(),
            embed: kernel("embed")?,
            add_position: kernel("add_position")?,
            add_norm: kernel("add_norm")?,
            add: kernel("add")?,
            activation: kernel("activation")?,
            add_gated: kernel("add_gated")?,
            gather_rows: kernel("gather_rows")?,
            cap_logits: kernel("cap_logits")?,
            narrow: kernel("narrow")?,
            fill_random: kernel("fill_random")?,
        })
    }

    fn launch(&self, kernel: KernelId, grid: [usize; 2], threads: u32, params: &impl NoUninit) -> DeviceResult<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let shared_bytes = if kernel == self.add_norm || kernel == self.add_gated { REDUCE_BYTES } else { 0 };
        let grid = Grid { blocks: [grid[0] as u32, grid[1] as u32, 1], threads, shared_bytes };
        // SAFETY: the structs are those that the kernels expect. The callers of the methods pass addresses of tensors
        // that live as long as the backend and have the sizes that the methods state.
        unsafe { self.device.launch(kernel, grid, bytemuck::bytes_of(params)) }
    }

    /// `table: [vocab, cols]`, `out: [rows, cols]`. `sampled` are tokens by the index of the previous step's request.
    pub fn embed(
        &self,
        rows: BatchRows,
        (table, vocab): (DevicePtr, usize),
        scale: f32,
        sampled: DevicePtr,
        out: &CudaTensor,
    ) -> DeviceResult<()> {
        let (cols, vocab) = (out.cols as u32, vocab as u32);
        let out = FloatOrScalar::of(out);
        let params = EmbedParams { batch: rows.header, sampled, table, out, cols, vocab, scale, padding: 0 };
        self.launch(self.embed, [rows.num_rows, 1], ROW_THREADS, &params)
    }

    pub fn add_position(&self, rows: BatchRows, table: DevicePtr, offset: usize, x: &CudaTensor) -> DeviceResult<()> {
        let params =
            PositionParams { batch: rows.header, table, x: x.ptr(), cols: x.cols as u32, offset: offset as u32 };
        self.launch(self.add_position, [rows.num_rows, 1], ROW_THREADS, &params)
    }

    /// `x += delta` if there is a delta, then `out = norm(x)`.
    pub fn add_norm(
        &self,
        rows: BatchRows,
        x: &CudaTensor,
        delta: Option<&CudaTensor>,
        (kind, weight, bias): (NormKind, DevicePtr, DevicePtr),
        out: &CudaTensor,
    ) -> DeviceResult<()> {
        let (kind, eps) = match kind {
            NormKind::Rms { eps } => (0, eps),
            NormKind::Layer { eps } => (1, eps),
        };
        let params = NormParams {
            batch: rows.header,
            x: x.ptr(),
            delta: delta.map_or(DevicePtr::NULL, CudaTensor::ptr),
            weight,
            bias,
            out: FloatOrScalar::of(out),
            cols: x.cols as u32,
            eps,
            kind,
            padding: 0,
        };
        self.launch(self.add_norm, [rows.num_rows, 1], ROW_THREADS, &params)
    }

    /// `x += delta`.
    pub fn add(&self, rows: BatchRows, x: &CudaTensor, delta: &CudaTensor) -> DeviceResult<()> {
        let params = AddParams { batch: rows.header, x: x.ptr(), delta: delta.ptr(), cols: x.cols as u32, padding: 0 };
        self.launch(self.add, [rows.num_rows, 1], ROW_THREADS, &params)
    }

    /// `out = act(x)`, or, if `gated`, `out = act(gate) * up` for `x = [gate | up]`. `out` may be `x` if it is not
    /// gated.
    pub fn activation(
        &self,
        rows: BatchRows,
        x: DevicePtr,
        kind: Activation,
        gated: bool,
        out: &CudaTensor,
    ) -> DeviceResult<()> {
        let kind = activation_number(kind);
        let cols = out.cols as u32;
        let params =
            ActivationParams { batch: rows.header, x, out: out.ptr(), cols, kind, gated: u32::from(gated), padding: 0 };
        let per_block = ROW_THREADS as usize * 16 / out.dtype.size_bytes();
        self.launch(self.activation, [rows.num_rows, out.cols.div_ceil(per_block)], ROW_THREADS, &params)
    }

    /// `out[row] += sigmoid(x[row] · gate) · from[row]`. The gate is `[cols of x]` float32, the others are scalars.
    pub fn add_gated(
        &self,
        rows: BatchRows,
        x: &CudaTensor,
        gate: DevicePtr,
        from: &CudaTensor,
        out: &CudaTensor,
    ) -> DeviceResult<()> {
        let params = AddGatedParams {
            batch: rows.header,
            x: x.ptr(),
            gate,
            from: from.ptr(),
            out: out.ptr(),
            x_cols: x.cols as u32,
            cols: out.cols as u32,
        };
        self.launch(self.add_gated, [rows.num_rows, 1], ROW_THREADS, &params)
    }

    /// `out[i] = x[logit_rows[first + i]]` for `i < num_rows`.
    pub fn gather_rows(
        &self,
        header: DevicePtr,
        x: &CudaTensor,
        first: usize,
        num_rows: usize,
        out: &CudaTensor,
    ) -> DeviceResult<()> {
        let (first, cols) = (first as u32, x.cols as u32);
        let params = GatherParams { batch: header, x: FloatOrScalar::of(x), out: out.ptr(), first, cols };
        self.launch(self.gather_rows, [num_rows, 1], ROW_THREADS, &params)
    }

    /// `x: [n]` float32 becomes `cap * tanh(x / cap)`.
    pub fn cap_logits(&self, x: DevicePtr, n: usize, cap: f32) -> DeviceResult<()> {
        let params = CapParams { x, n: n as u64, cap, padding: 0 };
        self.launch(self.cap_logits, [n.div_ceil(ROW_THREADS as usize), 1], ROW_THREADS, &params)
    }

    /// `out = x`, float32 rounded to the scalar type.
    pub fn narrow(&self, rows: BatchRows, x: &CudaTensor, out: DevicePtr) -> DeviceResult<()> {
        let params = NarrowParams { batch: rows.header, x: x.ptr(), out, cols: x.cols as u32, padding: 0 };
        self.launch(self.narrow, [rows.num_rows, 1], ROW_THREADS, &params)
    }

    /// `n` random numbers of the scalar type, uniform, with standard deviation `deviation`.
    pub fn fill_random(&self, out: DevicePtr, n: usize, seed: u64, deviation: f32) -> DeviceResult<()> {
        let bound = deviation * 3_f32.sqrt();
        let params = RandomParams { out, n: n as u64, seed, bound, padding: 0 };
        let blocks = n.div_ceil(ROW_THREADS as usize).min(4096);
        self.launch(self.fill_random, [blocks, 1], ROW_THREADS, &params)
    }
}

/// The number of an activation in `kernels/include/activation.cuh`.
pub(super) fn activation_number(kind: Activation) -> u32 {
    match kind {
        Activation::Silu => 0,
        Activation::Gelu => 1,
        Activation::GeluTanh => 2,
        Activation::Relu => 3,
    }
}
