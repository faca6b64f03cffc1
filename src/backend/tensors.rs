//! Element types, and tensors as checkpoints hold them.

use pagetide_base::error::StartError;

/// Element type of weights and of the KV cache. Reductions are always float32.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum DType {
    F32,
    F16,
    BF16,
}

impl DType {
    pub fn size_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "float32",
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
        }
    }
}

/// A tensor as stored in a checkpoint: row-major, little-endian, not necessarily aligned.
#[derive(Clone, Copy, Debug)]
pub struct HostTensor<'a> {
    pub dtype: DType,
    /// `[rows, cols]`; a vector is `[1, cols]`.
    pub rows: usize,
    pub cols: usize,
    /// `rows * cols * dtype.size_bytes()` bytes.
    pub bytes: &'a [u8],
}

impl<'a> HostTensor<'a> {
    /// Checks that the number of bytes fits the shape.
    pub fn check_size(&self) -> Result<(), StartError> {
        let expected = self.rows.checked_mul(self.cols).and_then(|n| n.checked_mul(self.dtype.size_bytes()));
        if expected == Some(self.bytes.len()) {
            return Ok(());
        }
        let HostTensor { rows, cols, dtype, bytes } = self;
        Err(StartError::new(format!("a tensor [{rows}, {cols}] of {} has {} bytes", dtype.name(), bytes.len())))
    }

    /// The bytes of the transposed tensor.
    pub(super) fn transposed(&self) -> Vec<u8> {
        let HostTensor { dtype, rows, cols, bytes } = *self;
        let size = dtype.size_bytes();
        let at = |row: usize, col: usize| &bytes[(row * cols + col) * size..][..size];
        (0..cols).flat_map(|col| (0..rows).flat_map(move |row| at(row, col).iter().copied())).collect()
    }

    /// The elements in float32.
    pub fn elements(&self) -> impl Iterator<Item = f32> + 'a {
        elements(self.bytes, self.dtype)
    }
}

/// Elements of `dtype`, little-endian, in float32.
pub(crate) fn elements(bytes: &[u8], dtype: DType) -> impl Iterator<Item = f32> + '_ {
    bytes.chunks_exact(dtype.size_bytes()).map(move |b| match dtype {
        DType::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        DType::F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::BF16 => half::bf16::from_le_bytes([b[0], b[1]]).to_f32(),
    })
}

/// Checks that all parts of a matrix have the same width. Returns `(rows, cols)` of the whole matrix.
pub fn matrix_shape(parts: &[HostTensor<'_>]) -> Result<(usize, usize), StartError> {
    let cols = parts.first().map_or(0, |part| part.cols);
    for part in parts {
        part.check_size()?;
        if part.cols != cols {
            return Err(StartError::new(format!("the parts of a matrix have {cols} and {} columns", part.cols)));
        }
    }
    let rows = parts.iter().map(|part| part.rows).sum();
    if rows == 0 || cols == 0 {
        return Err(StartError::new(format!("a matrix [{rows}, {cols}] has no elements")));
    }
    Ok((rows, cols))
}

/// What a tensor is used for. A device may store activations in the weights' type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TensorRole {
    /// The residual stream, always in float32.
    Residual,
    /// The result of one operation of a layer and the input of another.
    Activation,
    /// An activation that only products with weights of this type read. A backend may lay it out for these products.
    Operand(DType),
    /// Passed between the parts of a fused operation. A backend that does both parts at once does not use it.
    Unfused,
}
