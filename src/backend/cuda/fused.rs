//! Operations that `few_rows` may do in one launch.

use super::few_rows::{FewRowsKernels, FewRowsOperand, FewRowsProduct};
use super::heads;
use super::rows::BatchRows;
use super::{CudaBackend, CudaMatrix, CudaTensor, CudaVector, DeviceResult, must};
use crate::{Activation, Heads, NormedInput};

impl CudaBackend {
    /// The left operand of a product that begins with a norm.
    pub(super) fn norm_operand<'a>(input: &'a NormedInput<'_, Self>) -> FewRowsOperand<'a> {
        let NormedInput { stream, delta, norm, .. } = input;
        FewRowsOperand::Norm { stream, norm, is_complete: delta.is_none() }
    }

    /// Calls `launch` with a product of `rows` rows, if there are kernels for few rows. Returns whether the product was
    /// launched.
    pub(super) fn try_few_rows(
        &self,
        x: FewRowsOperand<'_>,
        rows: usize,
        w: &CudaMatrix,
        bias: Option<&CudaVector>,
        launch: impl FnOnce(&FewRowsKernels, &FewRowsProduct<'_>) -> DeviceResult<bool>,
    ) -> bool {
        let rows = BatchRows { num_rows: rows, ..self.rows() };
        let product = FewRowsProduct { x, w, bias, rows, row_kernels: &self.row_kernels };
        self.few_rows.as_ref().is_some_and(|few| must(launch(few, &product)))
    }

    /// [`Backend::qkv_linear`] in one launch. Returns false if it takes several.
    pub(super) fn try_qkv(
        &self,
        x: FewRowsOperand<'_>,
        w: &CudaMatrix,
        bias: Option<&CudaVector>,
        heads: &Heads<'_, Self>,
        qkv: &CudaTensor,
    ) -> bool {
        heads::check_shape(&self.options, heads.shape);
        qkv.check(self.step.num_rows, w.n);
        let norms = heads.norms.map(|[q, k]| {
            let eps = heads::head_norm_eps(q.kind, k.kind);
            ([q.weight.float.ptr(), k.weight.float.ptr()], eps)
        });
        let rope = self.rope_params(qkv, heads.rope, heads.layer);
        self.try_few_rows(x, self.step.num_rows, w, bias, |few, product| few.qkv(product, norms, rope))
    }

    /// [`Backend::gated_linear`] in one launch. Returns false if it takes several.
    pub(super) fn try_gated(
        &self,
        x: FewRowsOperand<'_>,
        w: &CudaMatrix,
        bias: Option<&CudaVector>,
        kind: Activation,
        out: &CudaTensor,
    ) -> bool {
        out.check(self.step.num_rows, w.n / 2);
        self.try_few_rows(x, self.step.num_rows, w, bias, |few, product| few.gated(product, kind, out))
    }
}
