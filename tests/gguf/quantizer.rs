//! Quantises matrices of GGUF files to ggml's formats.

use crate::converter::{F32, PlainTensor, plain};
use pagetide::backend::WeightFormat;
use pagetide::backend::quant::QuantFormat;
use pagetide::model::gguf::weights::weight_format;

/// The format of a matrix by its name and the length of its rows. `None`: it stays in float32.
pub type Choose<'c> = dyn Fn(&str, usize) -> Option<QuantFormat> + 'c;

/// The number of a format.
fn number(format: QuantFormat) -> u32 {
    (0..64).find(|number| weight_format(*number) == Some(WeightFormat::Quantized(format))).unwrap()
}

/// The blocks of a tensor, if it is a matrix that `choose` has a format for. llama.cpp takes one row for a vector.
fn blocks(choose: &Choose<'_>, name: &str, tensor: &PlainTensor) -> Option<(QuantFormat, Vec<u8>)> {
    let cols = *tensor.shape.last().filter(|_| tensor.shape.len() > 1 && tensor.shape[0] > 1)?;
    let format = choose(name, cols).filter(|format| format.row_bytes(cols).is_some())?;
    let quantize = format.quantizer().unwrap();
    let of_block = |weights: &[f32]| {
        let mut block = vec![0; format.block_bytes()];
        quantize(weights, &mut block);
        block
    };
    Some((format, tensor.values.chunks_exact(format.block_weights()).flat_map(of_block).collect()))
}

/// Matrices in the format that `choose` names for them; in float32 what no blocks fill.
pub fn quantized(choose: &Choose<'_>) -> impl Fn(&str, &PlainTensor) -> (u32, Vec<u8>) {
    move |name, tensor| match blocks(choose, name, tensor) {
        Some((format, blocks)) => (number(format), blocks),
        None => plain(F32)(name, tensor),
    }
}

/// The weights of [`quantized`] in float32.
pub fn dequantized(choose: &Choose<'_>) -> impl Fn(&str, &PlainTensor) -> (u32, Vec<u8>) {
    move |name, tensor| {
        let mut tensor = tensor.clone();
        if let Some((format, blocks)) = blocks(choose, name, &tensor) {
            let weights = tensor.values.chunks_exact_mut(format.block_weights());
            let blocks = blocks.chunks_exact(format.block_bytes());
            blocks.zip(weights).for_each(|(block, weights)| format.dequantize(block, weights));
        }
        plain(F32)(name, &tensor)
    }
}
