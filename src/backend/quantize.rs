//! Quantises weights to formats of ggml, with the same bytes as the reference functions of `ggml-quants.c`
//! (`quantize_row_*_ref`).
//!
//! Each function makes one weight block. Operations in float32 have the order of the reference, because their rounding
//! decides codes. The weights are finite, and none is larger than a float16 can be.

use crate::quant::{MAX_BLOCK_WEIGHTS, QuantFormat};
use half::f16;

/// Writes a block of as many weights as the format has in a block.
pub type QuantizeBlock = fn(&[f32], &mut [u8]);

impl QuantFormat {
    /// What quantises weights to this format; `None` if nothing here does.
    pub fn quantizer(self) -> Option<QuantizeBlock> {
        Some(match self {
            Self::Q8_0 => q8_0,
            Self::Q4_0 => q4_0,
            Self::Q4_1 => q4_1,
            Self::Q5_0 => q5_0,
            Self::Q5_1 => q5_1,
            Self::Q4_K => q4_k,
            Self::Q6_K => q6_k,
            _ => return None,
        })
    }
}

/// Scales below this count as 0.
const MIN_SCALE: f32 = 1e-15;

fn half(value: f32) -> [u8; 2] {
    f16::from_f32(value).to_le_bytes()
}

/// `1 / scale`, or 0 for a scale of 0.
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// The weight farthest from 0, with its sign. Of several, the first.
fn farthest(weights: &[f32]) -> f32 {
    weights.iter().fold(0.0_f32, |far, weight| if weight.abs() > far.abs() { *weight } else { far })
}

/// The smallest and the largest weight. Of a zero, the sign that comes first.
fn range(weights: &[f32]) -> (f32, f32) {
    weights.iter().fold((f32::MAX, f32::MIN), |(min, max), weight| {
        (if *weight < min { *weight } else { min }, if *weight > max { *weight } else { max })
    })
}

/// The nearest integer; of two, the even one. `|value|` is below 2²².
fn nearest(value: f32) -> i32 {
    const SHIFT: f32 = 12_582_912.0;
    ((value + SHIFT) - SHIFT) as i32
}

fn q8_0(weights: &[f32], block: &mut [u8]) {
    let scale = weights.iter().fold(0.0_f32, |most, weight| most.max(weight.abs())) / 127.0;
    let inverse = inverse(scale);
    let (head, codes) = block.split_at_mut(2);
    head.copy_from_slice(&half(scale));
    for (code, weight) in codes.iter_mut().zip(weights) {
        // Halves are rounded away from 0. The steps are exact, and every machine has them for many weights at once.
        let value = (weight * inverse).clamp(-127.0, 127.0);
        let whole = value as i32;
        let rest = value - whole as f32;
        *code = (whole + i32::from(rest >= 0.5) - i32::from(rest <= -0.5)) as u8;
    }
}

/// Writes codes of 32 weights, of which [`QuantFormat::Q4_0`] and its like hold four bits in this order.
fn put_nibbles(codes: &[u8; 32], bytes: &mut [u8]) {
    let (low, high) = codes.split_at(16);
    bytes.iter_mut().zip(low.iter().zip(high)).for_each(|(byte, (low, high))| *byte = low & 15 | high << 4);
}

/// The fifth bits of 32 codes.
fn fifth_bits(codes: &[u8; 32]) -> [u8; 4] {
    let bits = codes.iter().enumerate().fold(0, |bits, (place, code)| bits | u32::from(code >> 4) << place);
    bits.to_le_bytes()
}

/// The scale and the codes of a format whose codes are from 0 to `2 * middle - 1`. The farthest weight gets code 0.
fn around_zero(weights: &[f32], middle: u8) -> (f32, [u8; 32]) {
    let scale = farthest(weights) / -f32::from(middle);
    let (inverse, shift) = (inverse(scale), f32::from(middle) + 0.5);
    let mut codes = [0; 32];
    for (code, weight) in codes.iter_mut().zip(weights) {
        *code = ((weight * inverse + shift) as u8).min(2 * middle - 1);
    }
    (scale, codes)
}

/// The scale, the minimum and the codes of a format whose codes are from 0 to `most`.
fn above_minimum(weights: &[f32], most: u8) -> (f32, f32, [u8; 32]) {
    let (min, max) = range(weights);
    let scale = (max - min) / f32::from(most);
    let inverse = inverse(scale);
    let mut codes = [0; 32];
    for (code, weight) in codes.iter_mut().zip(weights) {
        *code = (((weight - min) * inverse + 0.5) as u8).min(most);
    }
    (scale, min, codes)
}

fn q4_0(weights: &[f32], block: &mut [u8]) {
    let (scale, codes) = around_zero(weights, 8);
    block[..2].copy_from_slice(&half(scale));
    put_nibbles(&codes, &mut block[2..]);
}

fn q5_0(weights: &[f32], block: &mut [u8]) {
    let (scale, codes) = around_zero(weights, 16);
    block[..2].copy_from_slice(&half(scale));
    block[2..6].copy_from_slice(&fifth_bits(&codes));
    put_nibbles(&codes, &mut block[6..]);
}

fn q4_1(weights: &[f32], block: &mut [u8]) {
    let (scale, min, codes) = above_minimum(weights, 15);
    block[..2].copy_from_slice(&half(scale));
    block[2..4].copy_from_slice(&half(min));
    put_nibbles(&codes, &mut block[4..]);
}

fn q5_1(weights: &[f32], block: &mut [u8]) {
    let (scale, min, codes) = above_minimum(weights, 31);
    block[..2].copy_from_slice(&half(scale));
    block[2..4].copy_from_slice(&half(min));
    block[4..8].copy_from_slice(&fifth_bits(&codes));
    put_nibbles(&codes, &mut block[8..]);
}

/// Groups of 32 weights with a scale and a minimum of 6 bits each.
fn q4_k(weights: &[f32], block: &mut [u8]) {
    const GROUPS: usize = 8;
    let mut codes = [0_u8; MAX_BLOCK_WEIGHTS];
    let (mut scales, mut depths) = ([0.0_f32; GROUPS], [0.0_f32; GROUPS]);
    for (group, weights) in weights.as_chunks().0.iter().enumerate() {
        let (scale, depth, found) = best_with_minimum(weights);
        (scales[group], depths[group]) = (scale, depth);
        codes[32 * group..][..32].copy_from_slice(&found);
    }
    let most = |values: &[f32]| values.iter().fold(0.0_f32, |most, value| most.max(*value));
    let (most_scale, most_depth) = (most(&scales), most(&depths));
    let six_bits = |value: f32, most: f32| {
        let inverse = if most > 0.0 { 63.0 / most } else { 0.0 };
        nearest(inverse * value).min(63) as u8
    };
    block.fill(0);
    let (super_scale, super_depth) = (f16::from_f32(most_scale / 63.0), f16::from_f32(most_depth / 63.0));
    block[..2].copy_from_slice(&super_scale.to_le_bytes());
    block[2..4].copy_from_slice(&super_depth.to_le_bytes());
    for group in 0..GROUPS {
        let (scale, depth) = (six_bits(scales[group], most_scale), six_bits(depths[group], most_depth));
        let packed = &mut block[4..16];
        if group < 4 {
            packed[group] = scale;
            packed[group + 4] = depth;
        } else {
            packed[group + 4] = scale & 15 | depth << 4;
            packed[group - 4] |= scale >> 4 << 6;
            packed[group] |= depth >> 4 << 6;
        }
        let (scale, depth) = (super_scale.to_f32() * f32::from(scale), super_depth.to_f32() * f32::from(depth));
        if scale == 0.0 {
            continue;
        }
        let of_group = 32 * group..32 * (group + 1);
        for (code, weight) in codes[of_group.clone()].iter_mut().zip(&weights[of_group]) {
            *code = nearest((weight + depth) / scale).clamp(0, 15) as u8;
        }
    }
    let pairs = codes.as_chunks::<64>().0.iter().flat_map(|codes| codes[..32].iter().zip(&codes[32..]));
    block[16..].iter_mut().zip(pairs).for_each(|(byte, (low, high))| *byte = low | high << 4);
}

/// Searches for the scale and the minimum with which 4 bits come nearest to 32 weights. Errors of large weights count
/// more. Returns the scale, how far the minimum is below 0, and the codes.
fn best_with_minimum(weights: &[f32; 32]) -> (f32, f32, [u8; 32]) {
    const MOST: f32 = 15.0;
    /// The search shrinks and stretches the range of codes by up to one code, in steps of a tenth.
    const STEPS: u8 = 20;
    let squares = weights.iter().fold(0.0_f32, |sum, weight| sum + weight * weight);
    let typical = (squares / 32.0).sqrt();
    let importance = weights.map(|weight| typical + weight.abs());
    let (min, max) = range(weights);
    let mut min = if min > 0.0 { 0.0 } else { min };
    let (mut sum_w, mut sum_x) = (importance[0], importance[0] * weights[0]);
    for (w, x) in importance.iter().zip(weights).skip(1) {
        sum_w += w;
        sum_x += w * x;
    }
    if max == min {
        return (0.0, -min, [0; 32]);
    }
    let codes_of = |inverse: f32, min: f32| weights.map(|x| nearest(inverse * (x - min)).clamp(0, 15) as u8);
    let error_of = |scale: f32, min: f32, codes: &[u8; 32]| {
        let each = weights.iter().zip(&importance).zip(codes);
        each.fold(0.0_f32, |error, ((x, w), code)| {
            let difference = scale * f32::from(*code) + min - x;
            error + w * (difference * difference)
        })
    };
    let inverse = MOST / (max - min);
    let (mut scale, mut codes) = (1.0 / inverse, codes_of(inverse, min));
    let mut least = error_of(scale, min, &codes);
    for step in 0..=STEPS {
        // From the best minimum so far.
        let tried = codes_of((-1.0 + 0.1 * f32::from(step) + MOST) / (max - min), min);
        // Weighted least squares.
        let (mut sum_l, mut sum_ll, mut sum_xl) = (0.0_f32, 0.0_f32, 0.0_f32);
        for ((x, w), code) in weights.iter().zip(&importance).zip(&tried) {
            let code = f32::from(*code);
            sum_l += w * code;
            sum_ll += w * code * code;
            sum_xl += w * code * x;
        }
        let determinant = sum_w * sum_ll - sum_l * sum_l;
        if determinant > 0.0 {
            let mut new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
            let mut new_min = (sum_ll * sum_x - sum_l * sum_xl) / determinant;
            if new_min > 0.0 {
                (new_scale, new_min) = (sum_xl / sum_ll, 0.0);
            }
            let error = error_of(new_scale, new_min, &tried);
            if error < least {
                (least, scale, min, codes) = (error, new_scale, new_min, tried);
            }
        }
    }
    (scale, -min, codes)
}

/// Groups of 16 weights with a scale of 8 bits each.
fn q6_k(weights: &[f32], block: &mut [u8]) {
    const GROUPS: usize = 16;
    let mut codes = [0_u8; MAX_BLOCK_WEIGHTS];
    let mut scales = [0.0_f32; GROUPS];
    for (group, weights) in weights.as_chunks().0.iter().enumerate() {
        let (scale, found) = best_around_zero(weights);
        scales[group] = scale;
        codes[16 * group..][..16].copy_from_slice(&found);
    }
    block.fill(0);
    let most = farthest(&scales);
    if most.abs() < MIN_SCALE {
        return;
    }
    let inverse = -128.0 / most;
    let super_scale = f16::from_f32(1.0 / inverse);
    block[208..].copy_from_slice(&super_scale.to_le_bytes());
    for group in 0..GROUPS {
        let scale = nearest(inverse * scales[group]).min(127) as i8;
        block[192 + group] = scale as u8;
        let scale = super_scale.to_f32() * f32::from(scale);
        if scale == 0.0 {
            continue;
        }
        let of_group = 16 * group..16 * (group + 1);
        for (code, weight) in codes[of_group.clone()].iter_mut().zip(&weights[of_group]) {
            *code = (nearest(weight / scale).clamp(-32, 31) + 32) as u8;
        }
    }
    for (half, codes) in codes.as_chunks::<128>().0.iter().enumerate() {
        for i in 0..32 {
            let [a, b, c, d] = [codes[i], codes[i + 32], codes[i + 64], codes[i + 96]];
            block[64 * half + i] = a & 15 | c << 4;
            block[64 * half + 32 + i] = b & 15 | d << 4;
            block[128 + 32 * half + i] = a >> 4 | b >> 4 << 2 | c >> 4 << 4 | d >> 4 << 6;
        }
    }
}

/// Searches for the scale with which 6 bits come nearest to 16 weights. Errors count by the square of the weight.
/// Returns the scale and the codes with their bias.
fn best_around_zero(weights: &[f32; 16]) -> (f32, [u8; 16]) {
    const MIDDLE: f32 = 32.0;
    let most = farthest(weights);
    if most.abs() < MIN_SCALE {
        return (0.0, [0; 16]);
    }
    let codes_of = |inverse: f32| weights.map(|x| nearest(inverse * x).clamp(-32, 31));
    let sums = |codes: &[i32; 16]| {
        weights.iter().zip(codes).fold((0.0_f32, 0.0_f32), |(sum_xl, sum_ll), (x, code)| {
            let (w, code) = (x * x, *code as f32);
            (sum_xl + w * x * code, sum_ll + w * code * code)
        })
    };
    let mut codes = codes_of(-MIDDLE / most);
    let (sum_xl, sum_ll) = sums(&codes);
    let mut scale = if sum_ll == 0.0 { 0.0 } else { sum_xl / sum_ll };
    let mut best = scale * sum_xl;
    for step in (-9_i8..=9).filter(|step| *step != 0) {
        let tried = codes_of(-(MIDDLE + 0.1 * f32::from(step)) / most);
        let (sum_xl, sum_ll) = sums(&tried);
        if sum_ll > 0.0 && sum_xl * sum_xl > best * sum_ll {
            (codes, scale) = (tried, sum_xl / sum_ll);
            best = scale * sum_xl;
        }
    }
    (scale, codes.map(|code| (code + 32) as u8))
}
