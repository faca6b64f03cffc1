//! cuBLASLt's descriptors.

use super::super::device::{DevicePtr, DeviceResult, Fp8Scaling};
use super::context::Context;
use crate::DType;
use cudarc::cublaslt::sys as lt;

/// The size that NVIDIA recommends for Hopper. Older devices need less.
pub const WORKSPACE_BYTES: usize = 32 << 20;

/// Alignment of all operands, in bytes.
const ALIGNMENT: u32 = 16;

/// The operands of a product.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OperandKind {
    Plain(DType),
    /// E4M3 with scales.
    Fp8(Fp8Scaling),
}

impl OperandKind {
    /// Bytes of an element.
    pub fn size_bytes(self) -> usize {
        match self {
            Self::Plain(dtype) => dtype.size_bytes(),
            Self::Fp8(_) => 1,
        }
    }

    pub fn data_type(self) -> lt::cudaDataType_t {
        match self {
            Self::Plain(dtype) => data_type(dtype),
            Self::Fp8(_) => lt::cudaDataType_t::CUDA_R_8F_E4M3,
        }
    }
}

pub fn data_type(dtype: DType) -> lt::cudaDataType_t {
    match dtype {
        DType::F32 => lt::cudaDataType_t::CUDA_R_32F,
        DType::F16 => lt::cudaDataType_t::CUDA_R_16F,
        DType::BF16 => lt::cudaDataType_t::CUDA_R_16BF,
    }
}

/// The computation: `Wᵀ · X` in float32, optionally with a bias for each row of the result.
pub struct Descriptor(pub lt::cublasLtMatmulDesc_t);

impl Descriptor {
    pub fn new(context: &Context, bias: bool) -> DeviceResult<Self> {
        use lt::cublasLtMatmulDescAttributes_t::*;
        let mut descriptor = std::ptr::null_mut();
        // Float32 operands are multiplied in float32, not in TF32.
        let (compute, scale) = (lt::cublasComputeType_t::CUBLAS_COMPUTE_32F, lt::cudaDataType_t::CUDA_R_32F);
        // SAFETY: it is ours to write.
        let created = unsafe { lt::cublasLtMatmulDescCreate(&mut descriptor, compute, scale) };
        context.check_cublas(created, "cublasLtMatmulDescCreate")?;
        let descriptor = Self(descriptor);
        // CUBLAS_OP_T and CUBLAS_OP_N.
        descriptor.set(context, CUBLASLT_MATMUL_DESC_TRANSA, &1i32)?;
        descriptor.set(context, CUBLASLT_MATMUL_DESC_TRANSB, &0i32)?;
        if bias {
            let epilogue = lt::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            descriptor.set(context, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        }
        Ok(descriptor)
    }

    /// Says which elements have a scale in common. The first operand of the computation is the weights.
    pub fn set_scaling(&self, context: &Context, scaling: Fp8Scaling) -> DeviceResult<()> {
        use lt::cublasLtMatmulDescAttributes_t::{
            CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
        };
        use lt::cublasLtMatmulMatrixScale_t::*;
        let (weights, activations) = match scaling {
            Fp8Scaling::Rows => {
                (CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F)
            }
            Fp8Scaling::Blocks => {
                (CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F)
            }
        };
        self.set(context, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &(weights as i32))?;
        self.set(context, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &(activations as i32))
    }

    /// The addresses of the scales of weights and activations.
    pub fn set_scales(&self, context: &Context, [weights, activations]: [DevicePtr; 2]) -> DeviceResult<()> {
        use lt::cublasLtMatmulDescAttributes_t::{
            CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
        };
        self.set(context, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &weights.0)?;
        self.set(context, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &activations.0)
    }

    /// `T` has the attribute's size.
    pub fn set<T>(
        &self,
        context: &Context,
        attribute: lt::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> DeviceResult<()> {
        let pointer = (value as *const T).cast();
        // SAFETY: the value is read before the call returns; cuBLASLt checks its size.
        let set = unsafe { lt::cublasLtMatmulDescSetAttribute(self.0, attribute, pointer, size_of::<T>()) };
        context.check_cublas(set, "cublasLtMatmulDescSetAttribute")
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: it was created and is destroyed once.
        let _ = unsafe { lt::cublasLtMatmulDescDestroy(self.0) };
    }
}

/// A column-major matrix without gaps.
pub struct MatrixLayout(pub lt::cublasLtMatrixLayout_t);

impl MatrixLayout {
    pub fn new(context: &Context, of: lt::cudaDataType_t, rows: usize, cols: usize) -> DeviceResult<Self> {
        let mut layout = std::ptr::null_mut();
        // SAFETY: it is ours to write.
        let created = unsafe { lt::cublasLtMatrixLayoutCreate(&mut layout, of, rows as u64, cols as u64, rows as i64) };
        context.check_cublas(created, "cublasLtMatrixLayoutCreate")?;
        Ok(Self(layout))
    }

    pub fn set_cols(&self, context: &Context, cols: usize) -> DeviceResult<()> {
        let (cols, attribute) = (cols as u64, lt::cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_COLS);
        // SAFETY: the value is read before the call returns, and it has the attribute's size.
        let set = unsafe {
            lt::cublasLtMatrixLayoutSetAttribute(self.0, attribute, (&raw const cols).cast(), size_of::<u64>())
        };
        context.check_cublas(set, "cublasLtMatrixLayoutSetAttribute")
    }
}

impl Drop for MatrixLayout {
    fn drop(&mut self) {
        // SAFETY: it was created and is destroyed once.
        let _ = unsafe { lt::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

/// The limits on the algorithms that cuBLASLt's heuristic may propose.
pub struct Preference(pub lt::cublasLtMatmulPreference_t);

impl Preference {
    pub fn new(context: &Context, batch_invariant: bool) -> DeviceResult<Self> {
        use lt::cublasLtMatmulPreferenceAttributes_t::*;
        use lt::cublasLtReductionScheme_t::*;
        let mut preference = std::ptr::null_mut();
        // SAFETY: it is ours to write.
        let created = unsafe { lt::cublasLtMatmulPreferenceCreate(&mut preference) };
        context.check_cublas(created, "cublasLtMatmulPreferenceCreate")?;
        let preference = Self(preference);
        preference.set(context, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(WORKSPACE_BYTES as u64))?;
        // Partial sums are never rounded to the type of the result.
        let reduction =
            if batch_invariant { CUBLASLT_REDUCTION_SCHEME_NONE } else { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE };
        preference.set(context, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &(reduction as u32))?;
        // Without these it assumes that all operands are 256-byte aligned.
        for operand in [
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            preference.set(context, operand, &ALIGNMENT)?;
        }
        Ok(preference)
    }

    /// `T` has the attribute's size.
    fn set<T>(
        &self,
        context: &Context,
        attribute: lt::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> DeviceResult<()> {
        let pointer = (value as *const T).cast();
        // SAFETY: the value is read before the call returns; cuBLASLt checks its size.
        let set = unsafe { lt::cublasLtMatmulPreferenceSetAttribute(self.0, attribute, pointer, size_of::<T>()) };
        context.check_cublas(set, "cublasLtMatmulPreferenceSetAttribute")
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: it was created and is destroyed once.
        let _ = unsafe { lt::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}
