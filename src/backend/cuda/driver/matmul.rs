//! Matrix products with cuBLASLt.
//!
//! cuBLASLt works on column-major matrices. The row-major product `out[m, n] = x[m, k] · w[n, k]ᵀ` is the column-major
//! product `D[n, m] = Wᵀ · X` with `W: [k, n]` and `X: [k, m]`.
//!
//! The fastest of its algorithms is measured, for each product and for each number of rows that is a power of two, with
//! weights that are not in the cache (`cold_weights`). When a product first has that many rows, all smaller powers of
//! two are measured too. So the start, which runs a step of the largest size, measures everything.

use super::super::device::{DeviceError, DevicePtr, DeviceResult, Fp8Matmul, Fp8Operands, Matmul, Stream};
use super::cold_weights::ColdWeights;
use super::context::Context;
use super::descriptors::{Descriptor, MatrixLayout, OperandKind, Preference, WORKSPACE_BYTES, data_type};
use super::invariant_algorithms::InvariantAlgorithms;
use crate::DType;
use cudarc::cublaslt::sys::{self as lt, cublasStatus_t};
use cudarc::driver::sys;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::rc::Rc;

/// The most algorithms that are compared.
const MAX_CANDIDATES: usize = 8;

/// All products of a device.
pub struct Matmuls {
    context: Rc<Context>,
    handle: lt::cublasLtHandle_t,
    workspace: sys::CUdeviceptr,
    /// Bytes of the device's L2 cache.
    l2_bytes: usize,
    batch_invariant: bool,
    products: HashMap<Shape, PlannedProduct>,
}

/// A product of any number of rows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Shape {
    n: usize,
    k: usize,
    operands: OperandKind,
    out: DType,
    bias: bool,
}

/// A product's descriptors, and the algorithms chosen so far.
pub(super) struct PlannedProduct {
    shape: Shape,
    descriptor: Descriptor,
    w: MatrixLayout,
    x: MatrixLayout,
    out: MatrixLayout,
    /// The number of rows that the layouts of `x` and `out` are set to.
    num_rows: usize,
    /// The fastest algorithm by number of rows, a power of two.
    measured: BTreeMap<usize, lt::cublasLtMatmulAlgo_t>,
    /// The algorithms in use, by number of rows.
    chosen: HashMap<usize, lt::cublasLtMatmulAlgo_t>,
    /// Those of a batch-invariant product.
    pub(super) invariant: InvariantAlgorithms,
}

/// `x`, `w`, `bias` and `out` of a product.
pub(super) type Operands = [DevicePtr; 4];

impl Matmuls {
    pub fn new(context: Rc<Context>, l2_bytes: usize, batch_invariant: bool) -> DeviceResult<Self> {
        let (handle, workspace, products) = (std::ptr::null_mut(), 0, HashMap::new());
        let mut all = Self { context, handle, workspace, l2_bytes, batch_invariant, products };
        // SAFETY: the handle is ours to write; the context is current.
        let created = unsafe { lt::cublasLtCreate(&mut all.handle) };
        all.context.check_cublas(created, "cublasLtCreate")?;
        // SAFETY: the address is ours to write.
        let allocated = unsafe { sys::cuMemAlloc_v2(&mut all.workspace, WORKSPACE_BYTES) };
        all.context.check(allocated, "the workspace of matrix products: cuMemAlloc")?;
        Ok(all)
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// Enqueues a product. Algorithms are measured only if `may_measure`, because that takes a while and enqueues the
    /// product many times.
    ///
    /// # Safety
    /// The operands are as `matmul` says, 16-byte aligned, and stay valid until it is done. `out` does not overlap the
    /// others.
    pub unsafe fn enqueue(&mut self, matmul: Matmul, operands: Operands, may_measure: bool) -> DeviceResult<()> {
        let Matmul { m, n, k, dtype, out, bias } = matmul;
        let shape = Shape { n, k, operands: OperandKind::Plain(dtype), out, bias };
        self.with_product(shape, m, |all, product| {
            product.set_bias(&all.context, operands[2])?;
            if all.batch_invariant {
                // SAFETY: the caller's promise.
                return unsafe { all.enqueue_invariant(product, matmul, operands, may_measure) };
            }
            // SAFETY: the caller's promise.
            unsafe { all.enqueue_fastest(product, m, operands, may_measure) }
        })
    }

    /// Enqueues an FP8 product, as [`Self::enqueue`] does. It is never batch-invariant.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    pub unsafe fn enqueue_fp8(
        &mut self,
        matmul: Fp8Matmul,
        operands: Fp8Operands,
        may_measure: bool,
    ) -> DeviceResult<()> {
        let Fp8Matmul { m, n, k, scaling, out, bias } = matmul;
        let Fp8Operands { x, x_scales, w, w_scales, bias: bias_ptr, out: to } = operands;
        let shape = Shape { n, k, operands: OperandKind::Fp8(scaling), out, bias };
        self.with_product(shape, m, |all, product| {
            product.set_bias(&all.context, bias_ptr)?;
            product.descriptor.set_scales(&all.context, [w_scales, x_scales])?;
            // SAFETY: the caller's promise.
            unsafe { all.enqueue_fastest(product, m, [x, w, bias_ptr, to], may_measure) }
        })
    }

    /// Calls `enqueue` with the product of this shape, unless it has no rows. Its errors get the shape.
    fn with_product(
        &mut self,
        shape: Shape,
        num_rows: usize,
        enqueue: impl FnOnce(&Self, &mut PlannedProduct) -> DeviceResult<()>,
    ) -> DeviceResult<()> {
        if num_rows == 0 {
            return Ok(());
        }
        let mut product = match self.products.remove(&shape) {
            Some(product) => product,
            None => PlannedProduct::new(&self.context, shape)?,
        };
        let done = enqueue(self, &mut product);
        self.products.insert(shape, product);
        done.map_err(|error| match error {
            DeviceError::Other(why) => DeviceError::Other(format!("{shape:?} with {num_rows} rows: {why}")),
            lost => lost,
        })
    }

    /// Enqueues a product with the fastest algorithm for its number of rows.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn enqueue_fastest(
        &self,
        product: &mut PlannedProduct,
        num_rows: usize,
        operands: Operands,
        may_measure: bool,
    ) -> DeviceResult<()> {
        // SAFETY: the caller's promise.
        let algorithm = unsafe { self.algorithm(product, num_rows, operands, may_measure)? };
        product.set_rows(&self.context, num_rows)?;
        // SAFETY: the caller's promise.
        let status = unsafe { self.launch(product, operands, &algorithm) };
        self.context.check_cublas(status, "cublasLtMatmul")
    }

    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn algorithm(
        &self,
        product: &mut PlannedProduct,
        m: usize,
        operands: Operands,
        may_measure: bool,
    ) -> DeviceResult<lt::cublasLtMatmulAlgo_t> {
        if let Some(algorithm) = product.chosen.get(&m) {
            return Ok(*algorithm);
        }
        if may_measure {
            // SAFETY: the caller's promise, which covers fewer rows too.
            unsafe { self.measure(product, m, operands)? };
        }
        product.set_rows(&self.context, m)?;
        let measured = product.measured.get(&m.next_power_of_two()).copied();
        match measured.filter(|algorithm| self.can_run(product, algorithm)) {
            Some(algorithm) => {
                product.chosen.insert(m, algorithm);
                Ok(algorithm)
            }
            // Not measured, or not usable for this number of rows.
            None => {
                let best = self.candidates(product)?[0];
                if may_measure {
                    product.chosen.insert(m, best);
                }
                Ok(best)
            }
        }
    }

    /// Measures the candidates for `m` rows, and for all smaller powers of two that have not been measured.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn measure(&self, product: &mut PlannedProduct, m: usize, operands: Operands) -> DeviceResult<()> {
        let powers = (0..usize::BITS).map(|i| 1usize << i).take_while(|power| *power <= m.next_power_of_two());
        let powers: Vec<usize> = powers.filter(|power| !product.measured.contains_key(power)).collect();
        if powers.is_empty() {
            return Ok(());
        }
        let [x, w, bias, out] = operands;
        let Shape { n, k, operands, .. } = product.shape;
        // SAFETY: the caller's promise.
        let weights = unsafe { ColdWeights::new(&self.context, w, n * k * operands.size_bytes(), self.l2_bytes)? };
        for power in powers {
            product.set_rows(&self.context, power.min(m))?;
            let mut best: Option<(f32, lt::cublasLtMatmulAlgo_t)> = None;
            for algorithm in self.candidates(product)? {
                let run = |w| {
                    // SAFETY: the caller's promise. The weights are `w` or a copy.
                    let status = unsafe { self.launch(product, [x, w, bias, out], &algorithm) };
                    self.context.check_cublas(status, "cublasLtMatmul")
                };
                // SAFETY: the caller's promise.
                let time = unsafe { weights.time(|| {}, run) };
                match time {
                    Ok(time) if best.is_none_or(|(least, _)| time < least) => best = Some((time, algorithm)),
                    Err(DeviceError::Lost(why)) => return Err(DeviceError::Lost(why)),
                    // This algorithm cannot run, although the heuristic proposed it.
                    Ok(_) | Err(_) => {}
                }
            }
            let Some((time, algorithm)) = best else {
                return Err(DeviceError::Other("no algorithm of cuBLASLt can do it".into()));
            };
            tracing::trace!(rows = power, time_ms = time, "a matrix product was measured");
            product.measured.insert(power, algorithm);
        }
        Ok(())
    }

    /// Algorithms for the current number of rows, at least one. The heuristic puts the likely best first.
    pub(super) fn candidates(&self, product: &PlannedProduct) -> DeviceResult<Vec<lt::cublasLtMatmulAlgo_t>> {
        let preference = Preference::new(&self.context, self.batch_invariant)?;
        // SAFETY: the struct holds plain numbers, for which zero is valid.
        let mut results: [lt::cublasLtMatmulHeuristicResult_t; MAX_CANDIDATES] = unsafe { std::mem::zeroed() };
        let mut len = 0;
        // SAFETY: all descriptors exist, and there is room for the requested number of results.
        let status = unsafe {
            lt::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                product.descriptor.0,
                product.w.0,
                product.x.0,
                product.out.0,
                product.out.0,
                preference.0,
                MAX_CANDIDATES as i32,
                results.as_mut_ptr(),
                &mut len,
            )
        };
        self.context.check_cublas(status, "cublasLtMatmulAlgoGetHeuristic")?;
        let good = |result: &&lt::cublasLtMatmulHeuristicResult_t| {
            result.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS
                && result.workspaceSize <= WORKSPACE_BYTES
                && (!self.batch_invariant || sums_in_one_piece(&result.algo))
        };
        let found: Vec<_> = results[..len.max(0) as usize].iter().filter(good).map(|result| result.algo).collect();
        if found.is_empty() {
            return Err(DeviceError::Other("cuBLASLt has no algorithm for it".into()));
        }
        Ok(found)
    }

    /// Whether an algorithm supports the current number of rows with our workspace.
    pub(super) fn can_run(&self, product: &PlannedProduct, algorithm: &lt::cublasLtMatmulAlgo_t) -> bool {
        // SAFETY: as above.
        let mut result: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: all descriptors exist, and the result is ours to write.
        let status = unsafe {
            lt::cublasLtMatmulAlgoCheck(
                self.handle,
                product.descriptor.0,
                product.w.0,
                product.x.0,
                product.out.0,
                product.out.0,
                algorithm,
                &mut result,
            )
        };
        status == cublasStatus_t::CUBLAS_STATUS_SUCCESS && result.workspaceSize <= WORKSPACE_BYTES
    }

    /// # Safety
    /// As [`Self::enqueue`], for the current number of rows.
    pub(super) unsafe fn launch(
        &self,
        product: &PlannedProduct,
        operands: Operands,
        algorithm: &lt::cublasLtMatmulAlgo_t,
    ) -> cublasStatus_t {
        let [x, w, _, out] = operands.map(|ptr| ptr.0 as *mut c_void);
        let (one, zero) = (1f32, 0f32);
        // SAFETY: the descriptors exist and describe the operands. The workspace is used only on this stream.
        unsafe {
            lt::cublasLtMatmul(
                self.handle,
                product.descriptor.0,
                (&raw const one).cast(),
                w,
                product.w.0,
                x,
                product.x.0,
                (&raw const zero).cast(),
                out,
                product.out.0,
                out,
                product.out.0,
                algorithm,
                self.workspace as *mut c_void,
                WORKSPACE_BYTES,
                self.context.stream(Stream::Compute).cast(),
            )
        }
    }
}

impl Drop for Matmuls {
    fn drop(&mut self) {
        self.context.enter_to_free();
        self.products.clear();
        // SAFETY: both exist unless they are null, and are freed once. No enqueued work uses them.
        unsafe {
            if !self.handle.is_null() {
                let _ = lt::cublasLtDestroy(self.handle);
            }
            if self.workspace != 0 {
                let _ = sys::cuMemFree_v2(self.workspace);
            }
        }
    }
}

/// Whether one thread block computes the sum over `k`, in order.
fn sums_in_one_piece(algorithm: &lt::cublasLtMatmulAlgo_t) -> bool {
    let get = |attribute| {
        let (mut value, mut written) = (0u32, 0);
        // SAFETY: the attribute is a number of this size.
        let status = unsafe {
            lt::cublasLtMatmulAlgoConfigGetAttribute(
                algorithm,
                attribute,
                (&raw mut value).cast(),
                size_of::<u32>(),
                &mut written,
            )
        };
        (status == cublasStatus_t::CUBLAS_STATUS_SUCCESS).then_some(value)
    };
    use lt::cublasLtMatmulAlgoConfigAttributes_t::{
        CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
    };
    // Both 0 and 1 mean no split.
    get(CUBLASLT_ALGO_CONFIG_SPLITK_NUM).is_none_or(|parts| parts <= 1)
        && get(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME).is_none_or(|scheme| scheme == 0)
}

impl PlannedProduct {
    fn new(context: &Context, shape: Shape) -> DeviceResult<Self> {
        let Shape { n, k, operands, out, bias } = shape;
        let descriptor = Descriptor::new(context, bias)?;
        if let OperandKind::Fp8(scaling) = operands {
            descriptor.set_scaling(context, scaling)?;
        }
        Ok(Self {
            shape,
            descriptor,
            w: MatrixLayout::new(context, operands.data_type(), k, n)?,
            x: MatrixLayout::new(context, operands.data_type(), k, 1)?,
            out: MatrixLayout::new(context, data_type(out), n, 1)?,
            num_rows: 1,
            measured: BTreeMap::new(),
            chosen: HashMap::new(),
            invariant: InvariantAlgorithms::default(),
        })
    }

    pub(super) fn set_rows(&mut self, context: &Context, num_rows: usize) -> DeviceResult<()> {
        if self.num_rows != num_rows {
            self.x.set_cols(context, num_rows)?;
            self.out.set_cols(context, num_rows)?;
            self.num_rows = num_rows;
        }
        Ok(())
    }

    fn set_bias(&self, context: &Context, bias: DevicePtr) -> DeviceResult<()> {
        use lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
        if self.shape.bias { self.descriptor.set(context, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.0) } else { Ok(()) }
    }
}
