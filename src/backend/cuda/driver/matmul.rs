//! Matrix products with cuBLASLt.
//!
//! cuBLASLt is column-major: a row-major `out[m, n] = x[m, k] · w[n, k]ᵀ` is, read by columns,
//! `D[n, m] = Wᵀ · X` with `W: [k, n]` and `X: [k, m]`.
//!
//! Which of its algorithms is the fastest is measured, once for each product and for numbers of rows that are powers of
//! two: the first time that a product has that many rows, with all smaller numbers, so that a start that runs a step at
//! its largest measures everything. A product whose rows must not depend on how many there are has one algorithm for
//! all, which does not split the sum over `k`.

use super::super::device::{DeviceError, DevicePtr, DeviceResult, Matmul, Stream};
use super::context::Context;
use super::descriptors::{Descriptor, MatrixLayout, Preference, Timer, WORKSPACE_BYTES};
use crate::backend::DType;
use cudarc::cublaslt::sys::{self as lt, cublasStatus_t};
use cudarc::driver::sys;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::rc::Rc;

/// Algorithms that are measured against each other.
const MAX_CANDIDATES: usize = 8;

/// Numbers of rows that the one algorithm of a batch-invariant product must be able to do.
const ANY_ROWS: [usize; 6] = [128, 1, 8, 64, 512, 8192];

/// All products of a device.
pub struct Matmuls {
    context: Rc<Context>,
    handle: lt::cublasLtHandle_t,
    workspace: sys::CUdeviceptr,
    batch_invariant: bool,
    products: HashMap<Shape, Product>,
}

/// A product of any number of rows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Shape {
    n: usize,
    k: usize,
    dtype: DType,
    out: DType,
    bias: bool,
}

/// Its descriptors, and the algorithms chosen so far.
struct Product {
    descriptor: Descriptor,
    w: MatrixLayout,
    x: MatrixLayout,
    out: MatrixLayout,
    /// Rows that `x` and `out` are set to.
    num_rows: usize,
    /// The best one for so many rows, a power of two, as measured; batch-invariant: the one, under 0.
    measured: BTreeMap<usize, lt::cublasLtMatmulAlgo_t>,
    /// Those in use, by number of rows.
    chosen: HashMap<usize, lt::cublasLtMatmulAlgo_t>,
}

/// `x`, `w`, `bias` and `out` of a product.
type Operands = [DevicePtr; 4];

impl Matmuls {
    pub fn new(context: Rc<Context>, batch_invariant: bool) -> DeviceResult<Self> {
        let (handle, workspace, products) = (std::ptr::null_mut(), 0, HashMap::new());
        let mut all = Self { context, handle, workspace, batch_invariant, products };
        // SAFETY: the handle is ours to write; the context is current.
        let created = unsafe { lt::cublasLtCreate(&mut all.handle) };
        all.context.check_cublas(created, "cublasLtCreate")?;
        // SAFETY: the address is ours to write.
        let allocated = unsafe { sys::cuMemAlloc_v2(&mut all.workspace, WORKSPACE_BYTES) };
        all.context.check(allocated, "the workspace of matrix products: cuMemAlloc")?;
        Ok(all)
    }

    /// Enqueues a product. Algorithms are measured only where `may_measure`: it takes a while, and enqueues the product
    /// many times.
    ///
    /// # Safety
    /// The addresses hold what `matmul` says, 16-byte aligned, until it is done; `out` is none of the others.
    pub unsafe fn enqueue(&mut self, matmul: Matmul, operands: Operands, may_measure: bool) -> DeviceResult<()> {
        let Matmul { m, n, k, dtype, out, bias } = matmul;
        if m == 0 {
            return Ok(());
        }
        let shape = Shape { n, k, dtype, out, bias };
        let mut product = match self.products.remove(&shape) {
            Some(product) => product,
            None => Product::new(&self.context, shape)?,
        };
        let done = product.set_bias(&self.context, operands[2], bias).and_then(|()| {
            // SAFETY: the caller's promise.
            let algorithm = unsafe { self.algorithm(&mut product, m, operands, may_measure)? };
            product.set_rows(&self.context, m)?;
            // SAFETY: the caller's promise.
            let status = unsafe { self.launch(&product, operands, &algorithm) };
            self.context.check_cublas(status, "cublasLtMatmul")
        });
        self.products.insert(shape, product);
        done.map_err(|error| match error {
            DeviceError::Other(why) => DeviceError::Other(format!("{matmul:?}: {why}")),
            lost => lost,
        })
    }

    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn algorithm(
        &self,
        product: &mut Product,
        m: usize,
        operands: Operands,
        may_measure: bool,
    ) -> DeviceResult<lt::cublasLtMatmulAlgo_t> {
        if let Some(algorithm) = product.chosen.get(&m) {
            return Ok(*algorithm);
        }
        if self.batch_invariant {
            let algorithm = self.one_for_all(product)?;
            product.set_rows(&self.context, m)?;
            if !self.can_run(product, &algorithm) {
                let why =
                    format!("the algorithm of this product cannot do {m} rows: set device.batch_invariant = false");
                return Err(DeviceError::Other(why));
            }
            product.chosen.insert(m, algorithm);
            return Ok(algorithm);
        }
        if may_measure {
            // SAFETY: the caller's: fewer rows are there as well.
            unsafe { self.measure(product, m, operands)? };
        }
        product.set_rows(&self.context, m)?;
        let measured = product.measured.get(&m.next_power_of_two()).copied();
        match measured.filter(|algorithm| self.can_run(product, algorithm)) {
            Some(algorithm) => {
                product.chosen.insert(m, algorithm);
                Ok(algorithm)
            }
            // Not measured, or only good for other numbers of rows.
            None => {
                let best = self.candidates(product)?[0];
                if may_measure {
                    product.chosen.insert(m, best);
                }
                Ok(best)
            }
        }
    }

    /// The algorithm of a batch-invariant product.
    fn one_for_all(&self, product: &mut Product) -> DeviceResult<lt::cublasLtMatmulAlgo_t> {
        if let Some(algorithm) = product.measured.get(&0) {
            return Ok(*algorithm);
        }
        product.set_rows(&self.context, ANY_ROWS[0])?;
        for algorithm in self.candidates(product)? {
            let mut fits = true;
            for rows in ANY_ROWS {
                product.set_rows(&self.context, rows)?;
                fits &= self.can_run(product, &algorithm);
            }
            if fits {
                product.measured.insert(0, algorithm);
                return Ok(algorithm);
            }
        }
        let why = "no algorithm of cuBLASLt does this product for every number of rows: set device.batch_invariant = \
                   false";
        Err(DeviceError::Other(why.into()))
    }

    /// Measures the candidates for `m` rows, and for all powers of two below for which that was not done.
    ///
    /// # Safety
    /// As [`Self::enqueue`].
    unsafe fn measure(&self, product: &mut Product, m: usize, operands: Operands) -> DeviceResult<()> {
        let powers = (0..usize::BITS).map(|i| 1usize << i).take_while(|power| *power <= m.next_power_of_two());
        for power in powers.filter(|power| !product.measured.contains_key(power)).collect::<Vec<_>>() {
            product.set_rows(&self.context, power.min(m))?;
            let timer = Timer::new(&self.context)?;
            let mut best: Option<(f32, lt::cublasLtMatmulAlgo_t)> = None;
            for algorithm in self.candidates(product)? {
                // SAFETY: the caller's promise.
                let time = unsafe { timer.time(|| self.launch(product, operands, &algorithm)) };
                match time {
                    Ok(time) if best.is_none_or(|(least, _)| time < least) => best = Some((time, algorithm)),
                    Err(DeviceError::Lost(why)) => return Err(DeviceError::Lost(why)),
                    // One that cannot run, whatever the heuristic says.
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

    /// Algorithms for the rows that are set, the likely best first; at least one.
    fn candidates(&self, product: &Product) -> DeviceResult<Vec<lt::cublasLtMatmulAlgo_t>> {
        let preference = Preference::new(&self.context, self.batch_invariant)?;
        // SAFETY: plain numbers, for which zero is good.
        let mut results: [lt::cublasLtMatmulHeuristicResult_t; MAX_CANDIDATES] = unsafe { std::mem::zeroed() };
        let mut len = 0;
        // SAFETY: all descriptors live; there is room for as many results as asked for.
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

    /// Whether an algorithm can do as many rows as are set, with our workspace.
    fn can_run(&self, product: &Product, algorithm: &lt::cublasLtMatmulAlgo_t) -> bool {
        // SAFETY: as above.
        let mut result: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: all descriptors live; the result is ours to write.
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
    /// As [`Self::enqueue`], for the rows that are set.
    unsafe fn launch(
        &self,
        product: &Product,
        operands: Operands,
        algorithm: &lt::cublasLtMatmulAlgo_t,
    ) -> cublasStatus_t {
        let [x, w, _, out] = operands.map(|ptr| ptr.0 as *mut c_void);
        let (one, zero) = (1f32, 0f32);
        // SAFETY: the descriptors live and say what the operands are; the workspace is used on this stream alone.
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
        // SAFETY: both were made, where they are not null, and are given back once; nothing is enqueued that uses them.
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

/// Whether the sum over `k` is done by one thread block, in order.
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
    // 0 and 1 both stand for no split.
    get(CUBLASLT_ALGO_CONFIG_SPLITK_NUM).is_none_or(|parts| parts <= 1)
        && get(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME).is_none_or(|scheme| scheme == 0)
}

impl Product {
    fn new(context: &Context, shape: Shape) -> DeviceResult<Self> {
        let Shape { n, k, dtype, out, bias } = shape;
        Ok(Self {
            descriptor: Descriptor::new(context, bias)?,
            w: MatrixLayout::new(context, dtype, k, n)?,
            x: MatrixLayout::new(context, dtype, k, 1)?,
            out: MatrixLayout::new(context, out, n, 1)?,
            num_rows: 1,
            measured: BTreeMap::new(),
            chosen: HashMap::new(),
        })
    }

    fn set_rows(&mut self, context: &Context, num_rows: usize) -> DeviceResult<()> {
        if self.num_rows != num_rows {
            self.x.set_cols(context, num_rows)?;
            self.out.set_cols(context, num_rows)?;
            self.num_rows = num_rows;
        }
        Ok(())
    }

    fn set_bias(&self, context: &Context, bias: DevicePtr, has_bias: bool) -> DeviceResult<()> {
        use lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
        if has_bias { self.descriptor.set(context, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.0) } else { Ok(()) }
    }
}
