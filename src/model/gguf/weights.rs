//! The tensors of GGUF files with their types.

use pagetide_backend::quant::QuantFormat;
use pagetide_backend::{DType, WeightFormat};
use std::ops::Range;

/// A tensor of a file.
pub struct GgufWeights {
    pub name: String,
    pub format: WeightFormat,
    pub shape: Vec<usize>,
    /// Within the file.
    pub range: Range<usize>,
}

/// ggml's numbers of element types (`enum ggml_type`).
pub fn weight_format(kind: u32) -> Option<WeightFormat> {
    let quantized = |format| Some(WeightFormat::Quantized(format));
    match kind {
        0 => Some(DType::F32.into()),
        1 => Some(DType::F16.into()),
        30 => Some(DType::BF16.into()),
        2 => quantized(QuantFormat::Q4_0),
        3 => quantized(QuantFormat::Q4_1),
        6 => quantized(QuantFormat::Q5_0),
        7 => quantized(QuantFormat::Q5_1),
        8 => quantized(QuantFormat::Q8_0),
        10 => quantized(QuantFormat::Q2_K),
        11 => quantized(QuantFormat::Q3_K),
        12 => quantized(QuantFormat::Q4_K),
        13 => quantized(QuantFormat::Q5_K),
        14 => quantized(QuantFormat::Q6_K),
        20 => quantized(QuantFormat::IQ4_NL),
        23 => quantized(QuantFormat::IQ4_XS),
        39 => quantized(QuantFormat::MXFP4),
        _ => None,
    }
}

/// The name of a type that is not supported.
pub fn type_name(kind: u32) -> String {
    let name = match kind {
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        24..=28 => "an integer or float64",
        _ => return format!("number {kind}, which is unknown"),
    };
    name.into()
}
