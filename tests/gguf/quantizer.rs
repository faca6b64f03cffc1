//! Quantises matrices to ggml's formats as llama.cpp's reference does, without weighing errors.

use crate::converter::{F32, PlainTensor, plain};
use half::f16;

/// ggml's numbers of the formats.
pub const Q4_0: u32 = 2;
pub const Q8_0: u32 = 8;
/// Weights of a block of both.
const BLOCK: usize = 32;

/// The number of a tensor's format, by its name.
pub type Choose<'c> = dyn Fn(&str) -> u32 + 'c;

type Quantize = fn(&[f32]) -> Vec<u8>;

/// The function of the format that `choose` names for a matrix, if its blocks fill the rows.
fn quantizer(choose: &Choose<'_>, name: &str, tensor: &PlainTensor) -> Option<(u32, Quantize)> {
    let fits = tensor.shape.len() > 1 && tensor.shape.last().is_some_and(|cols| cols.is_multiple_of(BLOCK));
    let kind = choose(name);
    let quantize: Quantize = if kind == Q4_0 { q4_0 } else { q8_0 };
    fits.then_some((kind, quantize))
}

/// Matrices in the format that `choose` names for them; in float32 what no blocks fill.
pub fn quantized(choose: &Choose<'_>) -> impl Fn(&str, &PlainTensor) -> (u32, Vec<u8>) {
    move |name, tensor| match quantizer(choose, name, tensor) {
        Some((kind, quantize)) => (kind, tensor.values.chunks_exact(BLOCK).flat_map(quantize).collect()),
        None => plain(F32)(name, tensor),
    }
}

/// The weights of [`quantized`] in float32.
pub fn dequantized(choose: &Choose<'_>) -> impl Fn(&str, &PlainTensor) -> (u32, Vec<u8>) {
    move |name, tensor| {
        let mut tensor = tensor.clone();
        if let Some((kind, quantize)) = quantizer(choose, name, &tensor) {
            for weights in tensor.values.chunks_exact_mut(BLOCK) {
                let block = quantize(weights);
                let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
                for (i, weight) in weights.iter_mut().enumerate() {
                    let code = match kind {
                        Q4_0 => i16::from(block[2 + i % 16] >> (i / 16 * 4) & 15) - 8,
                        _ => i16::from(block[2 + i] as i8),
                    };
                    *weight = scale * f32::from(code);
                }
            }
        }
        plain(F32)(name, &tensor)
    }
}

fn q8_0(weights: &[f32]) -> Vec<u8> {
    let scale = weights.iter().fold(0_f32, |most, weight| most.max(weight.abs())) / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let codes = weights.iter().map(|weight| (weight * inverse).round() as i8 as u8);
    f16::from_f32(scale).to_le_bytes().into_iter().chain(codes).collect()
}

/// The weight farthest from 0 gets the code -8.
fn q4_0(weights: &[f32]) -> Vec<u8> {
    let farthest = weights.iter().fold(0_f32, |most, weight| if weight.abs() > most.abs() { *weight } else { most });
    let scale = farthest / -8.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let code = |weight: f32| ((weight * inverse + 8.5) as u8).min(15);
    let codes = (0..BLOCK / 2).map(|i| code(weights[i]) | code(weights[i + BLOCK / 2]) << 4);
    f16::from_f32(scale).to_le_bytes().into_iter().chain(codes).collect()
}
