//! Element types, and tensors as checkpoints hold them.

use crate::fp8::{self, FP8_BLOCK_BYTES, FP8_BLOCK_WEIGHTS};
use crate::quant::QuantFormat;
use pagetide_base::error::StartError;
use std::fmt;

/// Type of an element that is stored by itself. Reductions are always float32.
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

    /// The numbers of little-endian bytes.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        elements(bytes, self).collect()
    }

    /// The little-endian bytes of numbers, each rounded as [`DType::encode_to`] does.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; values.len() * self.size_bytes()];
        self.encode_to(values.iter().copied(), &mut bytes);
        bytes
    }

    /// Writes numbers in little-endian bytes, each rounded to the nearest of this type, and to the even one of two.
    pub fn encode_to(self, values: impl Iterator<Item = f32>, out: &mut [u8]) {
        match self {
            DType::F32 => write_elements(values.map(f32::to_le_bytes), out),
            DType::F16 => write_elements(values.map(|x| half::f16::from_f32(x).to_le_bytes()), out),
            DType::BF16 => write_elements(values.map(|x| half::bf16::from_f32(x).to_le_bytes()), out),
        }
    }
}

fn write_elements<const BYTES: usize>(elements: impl Iterator<Item = [u8; BYTES]>, out: &mut [u8]) {
    out.as_chunks_mut().0.iter_mut().zip(elements).for_each(|(out, element)| *out = element);
}

/// How a checkpoint stores the elements of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum WeightFormat {
    /// Each element by itself.
    Plain(DType),
    /// Rows of weight blocks.
    Quantized(QuantFormat),
    /// Rows of blocks of E4M3: see [`fp8`].
    Fp8,
}

impl From<DType> for WeightFormat {
    fn from(dtype: DType) -> Self {
        Self::Plain(dtype)
    }
}

impl From<QuantFormat> for WeightFormat {
    fn from(format: QuantFormat) -> Self {
        Self::Quantized(format)
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl WeightFormat {
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain(dtype) => dtype.name(),
            Self::Quantized(format) => format.name(),
            Self::Fp8 => "FP8",
        }
    }

    /// The fewest elements that can be read by themselves, and their bytes.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::Plain(dtype) => (1, dtype.size_bytes()),
            Self::Quantized(format) => (format.block_weights(), format.block_bytes()),
            Self::Fp8 => (FP8_BLOCK_WEIGHTS, FP8_BLOCK_BYTES),
        }
    }

    /// Bytes of a row of `cols` elements; `None` if blocks do not fill it, or if it is too long for this machine.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let (weights, bytes) = self.block();
        if cols.is_multiple_of(weights) { (cols / weights).checked_mul(bytes) } else { None }
    }

    /// Converts whole blocks to float32.
    pub(crate) fn to_f32(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::Plain(dtype) => dtype.decode(bytes),
            Self::Quantized(format) => {
                let blocks = bytes.chunks_exact(format.block_bytes());
                let mut values = vec![0.0; blocks.len() * format.block_weights()];
                let targets = values.chunks_exact_mut(format.block_weights());
                blocks.zip(targets).for_each(|(block, values)| format.dequantize(block, values));
                values
            }
            Self::Fp8 => bytes.chunks_exact(FP8_BLOCK_BYTES).flat_map(fp8::dequantize).collect(),
        }
    }
}

/// A tensor as stored in a checkpoint: row-major, little-endian, not necessarily aligned.
#[derive(Clone, Copy, Debug)]
pub struct HostTensor<'a> {
    pub format: WeightFormat,
    /// `[rows, cols]`; a vector is `[1, cols]`.
    pub rows: usize,
    pub cols: usize,
    /// `rows` rows of `format.row_bytes(cols)` bytes.
    pub bytes: &'a [u8],
}

impl<'a> HostTensor<'a> {
    /// Checks that the number of bytes fits the shape.
    pub fn check_size(&self) -> Result<(), StartError> {
        let expected = self.format.row_bytes(self.cols).and_then(|bytes| bytes.checked_mul(self.rows));
        if expected == Some(self.bytes.len()) {
            return Ok(());
        }
        let HostTensor { format, rows, cols, bytes } = self;
        Err(StartError::new(format!("a tensor [{rows}, {cols}] of {format} has {} bytes", bytes.len())))
    }

    /// The bytes of the transposed tensor, whose elements are stored by themselves.
    pub fn transposed(&self) -> Vec<u8> {
        let HostTensor { format, rows, cols, bytes } = *self;
        let (weights, size) = format.block();
        assert_eq!(weights, 1, "a tensor of {format} cannot be transposed");
        let at = |row: usize, col: usize| &bytes[(row * cols + col) * size..][..size];
        (0..cols).flat_map(|col| (0..rows).flat_map(move |row| at(row, col).iter().copied())).collect()
    }

    /// The elements in float32.
    pub fn to_f32(&self) -> Vec<f32> {
        self.format.to_f32(self.bytes)
    }

    /// Some of its rows.
    pub fn row_range(&self, rows: std::ops::Range<usize>) -> HostTensor<'a> {
        let row_bytes = self.bytes.len() / self.rows;
        HostTensor { rows: rows.len(), bytes: &self.bytes[rows.start * row_bytes..rows.end * row_bytes], ..*self }
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
    /// An activation that only products read. The type is that of their weights, or float32 if these are quantised. A
    /// backend may lay it out for these products.
    Operand(DType),
    /// Passed between the parts of a fused operation. A backend that does both parts at once does not use it.
    Unfused,
}
