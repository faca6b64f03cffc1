//! Products in FP8 (`device.fp8_activations`): launches of `kernels/fp8.cu`, which quantises activations, and of
//! cuBLASLt.

use super::CudaTensor;
use super::device::{
    Device, DeviceBuffer, DeviceError, DevicePtr, DeviceResult, Fp8Matmul, Fp8Operands, Fp8Scaling, Grid, KernelId,
    ModuleId, ModuleSource,
};
use super::fp8_matrix::{Fp8Kernels, Fp8Matrix, QuantizedActivations};
use super::options::{CudaOptions, scalar_define};
use super::products::{LOOKUP_THREADS, Lookup, LookupParams};
use super::rows::{BatchRows, REDUCE_BYTES};
use crate::DType;
use bytemuck::NoUninit;
use pagetide_base::error::StartError;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

const QUANTIZE_THREADS: u32 = 256;

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct QuantizeParams {
    x: DevicePtr,
    codes: DevicePtr,
    scales: DevicePtr,
    rows: u32,
    cols: u32,
}

#[derive(Clone, Copy, NoUninit)]
#[repr(C)]
struct Fp8LookupParams {
    lookup: LookupParams,
    scales: DevicePtr,
    blocks_of_row: u32,
    padding: u32,
}

/// A product with an [`Fp8Matrix`]: `x: [rows, k]` of the model's type, `out: [rows, n]`.
#[derive(Clone, Copy)]
pub(super) struct Fp8Product {
    pub x: DevicePtr,
    /// `[n]` of the type of `out`, if there is one.
    pub bias: Option<DevicePtr>,
    pub out: (DevicePtr, DType),
    pub rows: usize,
}

/// The source of [`Fp8Kernels`].
pub(super) fn source(options: &CudaOptions) -> ModuleSource {
    ModuleSource { file: "fp8.cu", defines: vec![scalar_define(options.dtype)] }
}

/// Refuses options or a device with which there are no such products.
pub(super) fn check(options: &CudaOptions, device: &dyn Device) -> Result<(), StartError> {
    let why = match options {
        CudaOptions { dtype: DType::F32, .. } => "with --dtype float32 FP8 weights are converted".into(),
        CudaOptions { batch_invariant: true, .. } => "its products depend on the rows of the batch; set \
                                                      device.batch_invariant = false"
            .into(),
        _ => match device.lacks_fp8_products() {
            Some(why) => why,
            None => return Ok(()),
        },
    };
    Err(StartError::new(format!("device.fp8_activations = true: {why}")))
}

impl Fp8Matrix {
    /// Enqueues a product: first the activations are quantised.
    pub fn product(&self, product: &Fp8Product) -> DeviceResult<()> {
        let Fp8Product { x, bias, out: (to, out), rows: m } = *product;
        let &Self { scaling, n, k, .. } = self;
        if m == 0 {
            return Ok(());
        }
        if bias.is_some() && out == DType::F32 {
            return Err(without_products("cuBLASLt adds no bias to an FP8 product in float32"));
        }
        let [codes, scales] = self.kernels.quantize(x, [m, k], scaling)?;
        let matmul = Fp8Matmul { m, n, k, scaling, out, bias: bias.is_some() };
        let operands = Fp8Operands {
            x: codes,
            x_scales: scales,
            w: self.codes.ptr(),
            w_scales: self.scales.ptr(),
            bias: bias.unwrap_or(DevicePtr::NULL),
            out: to,
        };
        // SAFETY: the buffers are as large as the product says. They live as long as the backend, and until enqueued
        // work is done.
        unsafe { self.kernels.device.fp8_matmul(matmul, operands) }.map_err(|error| match error {
            DeviceError::Other(why) => without_products(&why),
            lost => lost,
        })
    }

    /// Rows of a table that is this matrix.
    pub fn look_up(&self, rows: BatchRows, lookup: &Lookup, out: &CudaTensor) -> DeviceResult<()> {
        let blocks_of_row = match self.scaling {
            Fp8Scaling::Rows => 0,
            Fp8Scaling::Blocks => self.scaling.scales_of_row(self.k) as u32,
        };
        let lookup = LookupParams::new(rows, lookup, (self.codes.ptr(), self.n), out);
        let params = Fp8LookupParams { lookup, scales: self.scales.ptr(), blocks_of_row, padding: 0 };
        self.kernels.launch(self.kernels.look_up, rows.num_rows, (LOOKUP_THREADS as u32, 0), &params)
    }
}

fn without_products(why: &str) -> DeviceError {
    DeviceError::Other(format!("{why}: set device.fp8_activations = false"))
}

impl Fp8Kernels {
    pub fn new(device: &Rc<dyn Device>, options: &CudaOptions, module: ModuleId) -> DeviceResult<Self> {
        Ok(Self {
            device: device.clone(),
            quantize_rows: device.kernel(module, "quantize_rows", REDUCE_BYTES)?,
            quantize_row_blocks: device.kernel(module, "quantize_row_blocks", 0)?,
            look_up: device.kernel(module, "fp8_lookup", 0)?,
            max_rows: options.max_rows.max(options.max_seqs).max(options.max_logit_rows),
            activations: RefCell::default(),
            num_matrices: Cell::new(0),
        })
    }

    /// How many matrices were uploaded for these products.
    pub fn num_matrices(&self) -> usize {
        self.num_matrices.get()
    }

    /// Enqueues the quantisation of `x: [rows, cols]`. Returns the addresses of its codes and scales, which are valid
    /// until the next call.
    fn quantize(&self, x: DevicePtr, [rows, cols]: [usize; 2], scaling: Fp8Scaling) -> DeviceResult<[DevicePtr; 2]> {
        let mut held = self.activations.borrow_mut();
        let QuantizedActivations { codes, scales } = &mut *held;
        let most = rows.max(self.max_rows);
        let codes = self.with_room(codes, most * cols)?;
        let scales = self.with_room(scales, most * scaling.scales_of_activations(cols) * size_of::<f32>())?;
        let (kernel, shared_bytes) = match scaling {
            Fp8Scaling::Rows => (self.quantize_rows, REDUCE_BYTES),
            Fp8Scaling::Blocks => (self.quantize_row_blocks, 0),
        };
        let params = QuantizeParams { x, codes, scales, rows: rows as u32, cols: cols as u32 };
        self.launch(kernel, rows, (QUANTIZE_THREADS, shared_bytes), &params)?;
        Ok([codes, scales])
    }

    /// The address of a buffer of at least this size. None is made once a step was recorded: a step is run before it is
    /// recorded, and all steps have rows of the same lengths.
    fn with_room(&self, buffer: &mut Option<DeviceBuffer>, bytes: usize) -> DeviceResult<DevicePtr> {
        if buffer.as_ref().is_none_or(|buffer| buffer.bytes() < bytes) {
            *buffer = None;
        }
        Ok(match buffer {
            Some(buffer) => buffer.ptr(),
            None => buffer.insert(DeviceBuffer::new(&self.device, bytes)?).ptr(),
        })
    }

    fn launch(
        &self,
        kernel: KernelId,
        rows: usize,
        (threads, shared_bytes): (u32, u32),
        params: &impl NoUninit,
    ) -> DeviceResult<()> {
        if rows == 0 {
            return Ok(());
        }
        let grid = Grid { blocks: [rows as u32, 1, 1], threads, shared_bytes };
        // SAFETY: the structs are those that the kernels expect. The callers pass addresses of tensors that live as
        // long as the backend and have the sizes that they state.
        unsafe { self.device.launch(kernel, grid, bytemuck::bytes_of(params)) }
    }
}
