//! Products with a matrix, and rows of a table, however the device holds the weights.

use super::few_rows::FewRowsOperand;
use super::fp8_products::Fp8Product;
use super::products::{self, Lookup, QuantizedProduct};
use super::rows::FloatOrScalar;
use super::tensors::CudaWeights;
use super::{CudaBackend, CudaMatrix, CudaTensor, CudaVector, DeviceBuffer, DevicePtr, Matmul, must};
use crate::DType;

impl CudaBackend {
    /// `out = x · wᵀ + bias` over `rows` rows; `out` has elements of `out_dtype`.
    pub(super) fn product(
        &self,
        x: &CudaTensor,
        rows: usize,
        w: &CudaMatrix,
        bias: Option<&CudaVector>,
        out: (DevicePtr, DType),
    ) {
        x.check(rows, w.k);
        assert!(bias.is_none_or(|bias| bias.len == w.n), "a bias for each column");
        if self.try_few_rows(FewRowsOperand::Plain(x), rows, w, bias, |few, product| few.store(product, out)) {
            return;
        }
        let operand = if x.dtype == w.dtype { x.ptr() } else { self.narrowed(x) };
        let weights = match &w.weights {
            CudaWeights::Plain(weights) => weights.ptr(),
            CudaWeights::Quantized(parts) => {
                let product = QuantizedProduct {
                    x: operand,
                    bias: bias.map_or(DevicePtr::NULL, |bias| bias.float.ptr()),
                    out: FloatOrScalar::at(out.0, out.1),
                    rows,
                    k: w.k,
                    batch_invariant: self.options.batch_invariant,
                };
                return must(products::product(parts, &product));
            }
            CudaWeights::Fp8(weights) => {
                let bias = bias.map(|bias| bias.of(out.1));
                return must(weights.product(&Fp8Product { x: operand, bias, out, rows }));
            }
        };
        let matmul = Matmul { m: rows, n: w.n, k: w.k, dtype: w.dtype, out: out.1, bias: bias.is_some() };
        let bias = bias.map_or(DevicePtr::NULL, |bias| bias.of(out.1));
        // SAFETY: all four buffers are as large as the product says: the tensors' sizes are checked, and the sizes of
        // matrices and vectors do not change.
        must(unsafe { self.device.matmul(matmul, operand, weights, bias, out.0) });
    }

    /// Rows of a quantised table.
    pub(super) fn look_up(&self, table: &CudaWeights, lookup: &Lookup, out: &CudaTensor) {
        must(match table {
            CudaWeights::Plain(_) => unreachable!("a plain table is looked up by `row_kernels`"),
            CudaWeights::Quantized(parts) => {
                let [table] = parts.as_slice() else { panic!("a table has one part") };
                table.look_up(self.rows(), lookup, out)
            }
            CudaWeights::Fp8(table) => table.look_up(self.rows(), lookup, out),
        });
    }

    /// Converts `x` from float32 to the weights' type. The result is valid until the next call.
    fn narrowed(&self, x: &CudaTensor) -> DevicePtr {
        let bytes = x.max_rows * x.cols * self.options.dtype.size_bytes();
        let mut narrow = self.narrow.borrow_mut();
        if narrow.as_ref().is_none_or(|buffer| buffer.bytes() < bytes) {
            // This does not happen in a recording: a step is run once before it is recorded.
            *narrow = Some(must(DeviceBuffer::new(&self.device, bytes)));
        }
        let to = narrow.as_ref().expect("it was made above").ptr();
        must(self.row_kernels.narrow(self.rows(), x, to));
        to
    }
}
