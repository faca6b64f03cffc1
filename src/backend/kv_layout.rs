//! The shape of the KV cache, and how it stores K and V.

use super::tensors::DType;
use std::fmt;

/// Raised when a backend lays out or computes KV differently, so that no KV of an older version is taken for its own.
pub const KV_VERSION: u32 = 2;

/// How the KV cache stores the elements of K and V.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum KvDType {
    /// Each element by itself.
    Plain(DType),
    /// Codes of a byte or of 4 bits, with a scale for each token and head of K, and of V.
    Codes(CodeType),
}

/// A type of codes. An element is its code times the scale of its vector: of the K or V of one token and head. The
/// scale is the vector's largest magnitude divided by the largest code, rounded up to a bfloat16. Codes are the nearest
/// to the quotients by the scale so rounded. If an element is not finite, the scale is NaN.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum CodeType {
    /// Integers from -127 to 127.
    Int8,
    /// Floating point numbers up to 448, with 4 bits of exponent and 3 of mantissa: OCP's E4M3.
    Fp8,
    /// The 16 odd integers from -15 to 15, in 4 bits. The vectors are rotated by a Hadamard matrix first.
    Int4,
}

/// Bytes of the scale of a vector of codes.
pub(super) const SCALE_BYTES: usize = 2;

impl CodeType {
    /// Bytes of the codes of a vector of `dims` elements, which is even.
    pub fn code_bytes(self, dims: usize) -> usize {
        match self {
            Self::Int8 | Self::Fp8 => dims,
            Self::Int4 => dims / 2,
        }
    }
}

impl KvDType {
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain(dtype) => dtype.name(),
            Self::Codes(CodeType::Int8) => "int8",
            Self::Codes(CodeType::Fp8) => "fp8",
            Self::Codes(CodeType::Int4) => "int4",
        }
    }

    /// Bytes of a vector of `dims` elements, with its scale.
    pub fn vector_bytes(self, dims: usize) -> usize {
        match self {
            Self::Plain(dtype) => dims * dtype.size_bytes(),
            Self::Codes(codes) => codes.code_bytes(dims) + SCALE_BYTES,
        }
    }

    /// The type of the elements if each is stored by itself.
    pub fn plain(self) -> Option<DType> {
        match self {
            Self::Plain(dtype) => Some(dtype),
            Self::Codes(_) => None,
        }
    }
}

impl fmt::Display for KvDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<DType> for KvDType {
    fn from(dtype: DType) -> Self {
        Self::Plain(dtype)
    }
}

impl PartialEq<DType> for KvDType {
    fn eq(&self, dtype: &DType) -> bool {
        self.plain() == Some(*dtype)
    }
}

/// The shape of the KV cache. One block holds `block_size` tokens of every layer and is contiguous, so that moving a
/// block is one copy: `[num_layers, 2 (K, V), num_kv_heads]` parts, each of which has the vectors of a head:
/// `[block_size, head_dim]` elements of `dtype`, and behind codes their scales, `[block_size]` of bfloat16. The order
/// of the elements of a part is the backend's. The CUDA backend has rows as said here. So has the CPU backend for codes
/// if 16 does not divide the block size; otherwise it has groups of 16 tokens (`cpu::kv_codes`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub num_layers: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub block_size: usize,
    pub dtype: KvDType,
}

impl KvLayout {
    pub fn block_bytes(&self) -> usize {
        self.num_layers * 2 * self.num_kv_heads * self.head_bytes()
    }

    /// Bytes of K, or of V, of one head in a block.
    pub fn head_bytes(&self) -> usize {
        self.block_size * self.dtype.vector_bytes(self.head_dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_take_about_a_half_or_a_quarter_of_the_bytes_of_bfloat16() {
        let bytes = |head_dim, dtype| {
            KvLayout { num_layers: 28, num_kv_heads: 8, head_dim, block_size: 16, dtype }.block_bytes() as f64
        };
        for codes in [CodeType::Int8, CodeType::Fp8] {
            for (head_dim, at_least) in [(64, 1.93), (128, 1.96), (256, 1.98)] {
                let ratio = bytes(head_dim, DType::BF16.into()) / bytes(head_dim, KvDType::Codes(codes));
                assert!(ratio > at_least && ratio < 2.0, "{codes:?}, {head_dim}: {ratio}");
            }
        }
        for (head_dim, at_least) in [(64, 3.76), (128, 3.87), (256, 3.93)] {
            let ratio = bytes(head_dim, DType::BF16.into()) / bytes(head_dim, KvDType::Codes(CodeType::Int4));
            assert!(ratio > at_least && ratio < 4.0, "{head_dim}: {ratio}");
        }
    }
}
