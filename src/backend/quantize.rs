//! Quantises weights to formats of ggml, with the same bytes as the reference functions of `ggml-quants.c`
//! (`quantize_row_*_ref`).
//!
//! Each function makes one weight block. Operations in float32 have the order of the reference, because their rounding
//! decides codes. The weights are finite, and none is larger than a float16 can be.

use crate::quant::{MAX_BLOCK_WEIGHTS, QuantFormat};
use half::f16;
use std::array::from_fn;

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
fn nearest(value: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    (value + SHIFT) - SHIFT
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

/// A number for each of the groups of a block, which are searched side by side: a group's own sums have to be added up
/// in order, and processors do several of them at once.
type Lanes<const GROUPS: usize> = [f32; GROUPS];

/// The weights by their place within their group.
fn by_place<const PLACES: usize, const GROUPS: usize>(weights: &[f32]) -> [Lanes<GROUPS>; PLACES] {
    from_fn(|place| from_fn(|group| weights[PLACES * group + place]))
}

/// Replaces the numbers of the groups for which `is` holds.
fn replace<const GROUPS: usize>(is: [bool; GROUPS], lanes: &mut Lanes<GROUPS>, by: &Lanes<GROUPS>) {
    *lanes = from_fn(|group| if is[group] { by[group] } else { lanes[group] });
}

/// Groups of 32 weights with a scale and a minimum of 6 bits each.
fn q4_k(weights: &[f32], block: &mut [u8]) {
    const GROUPS: usize = 8;
    let (scales, depths, found) = best_with_minimum(&by_place::<32, GROUPS>(weights));
    let most = |values: &[f32]| values.iter().fold(0.0_f32, |most, value| if *value > most { *value } else { most });
    let (most_scale, most_depth) = (most(&scales), most(&depths));
    let six_bits = |value: f32, most: f32| {
        let inverse = if most > 0.0 { 63.0 / most } else { 0.0 };
        nearest(inverse * value).min(63.0) as u8
    };
    block.fill(0);
    let (super_scale, super_depth) = (f16::from_f32(most_scale / 63.0), f16::from_f32(most_depth / 63.0));
    block[..2].copy_from_slice(&super_scale.to_le_bytes());
    block[2..4].copy_from_slice(&super_depth.to_le_bytes());
    let mut codes = [0_u8; MAX_BLOCK_WEIGHTS];
    for (group, (weights, codes)) in weights.chunks_exact(32).zip(codes.chunks_exact_mut(32)).enumerate() {
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
            codes.iter_mut().zip(&found).for_each(|(code, found)| *code = found[group] as u8);
        } else {
            let code = |weight: f32| nearest((weight + depth) / scale).clamp(0.0, 15.0) as u8;
            codes.iter_mut().zip(weights).for_each(|(to, weight)| *to = code(*weight));
        }
    }
    let pairs = codes.as_chunks::<64>().0.iter().flat_map(|codes| codes[..32].iter().zip(&codes[32..]));
    block[16..].iter_mut().zip(pairs).for_each(|(byte, (low, high))| *byte = low | high << 4);
}

/// Searches for the scale and the minimum with which 4 bits come nearest to the 32 weights of each group. Errors of
/// large weights count more. Returns the scales, how far the minima are below 0, and the codes.
fn best_with_minimum<const GROUPS: usize>(
    weights: &[Lanes<GROUPS>; 32],
) -> (Lanes<GROUPS>, Lanes<GROUPS>, [Lanes<GROUPS>; 32]) {
    const MOST: f32 = 15.0;
    /// The search shrinks and stretches the range of codes by up to one code, in steps of a tenth.
    const STEPS: u8 = 20;
    let squares: Lanes<GROUPS> =
        weights.iter().fold([0.0; GROUPS], |sum, x| from_fn(|group| sum[group] + x[group] * x[group]));
    let typical = squares.map(|squares| (squares / 32.0).sqrt());
    let importance: [Lanes<GROUPS>; 32] =
        from_fn(|place| from_fn(|group| typical[group] + weights[place][group].abs()));
    let (mut min, mut max) = (weights[0], weights[0]);
    let mut sum_w = importance[0];
    let mut sum_x: Lanes<GROUPS> = from_fn(|group| sum_w[group] * weights[0][group]);
    for (w, x) in importance.iter().zip(weights).skip(1) {
        for group in 0..GROUPS {
            min[group] = if x[group] < min[group] { x[group] } else { min[group] };
            max[group] = if x[group] > max[group] { x[group] } else { max[group] };
            sum_w[group] += w[group];
            sum_x[group] += w[group] * x[group];
        }
    }
    min = min.map(|min| if min > 0.0 { 0.0 } else { min });
    // Groups of one value. What the search finds for them is not used.
    let is_flat: [bool; GROUPS] = from_fn(|group| max[group] == min[group]);
    let flat_depth = min.map(|min| -min);

    let codes_of = |inverse: &Lanes<GROUPS>, min: &Lanes<GROUPS>| -> [Lanes<GROUPS>; 32] {
        let code = |x: f32, inverse: f32, min: f32| nearest(inverse * (x - min)).clamp(0.0, MOST);
        from_fn(|place| from_fn(|group| code(weights[place][group], inverse[group], min[group])))
    };
    let error_of = |scale: &Lanes<GROUPS>, min: &Lanes<GROUPS>, codes: &[Lanes<GROUPS>; 32]| -> Lanes<GROUPS> {
        let each = weights.iter().zip(&importance).zip(codes);
        each.fold([0.0; GROUPS], |error, ((x, w), code)| {
            from_fn(|group| {
                let difference = scale[group] * code[group] + min[group] - x[group];
                error[group] + w[group] * (difference * difference)
            })
        })
    };
    let inverse: Lanes<GROUPS> = from_fn(|group| MOST / (max[group] - min[group]));
    let (mut scale, mut codes) = (inverse.map(|inverse| 1.0 / inverse), codes_of(&inverse, &min));
    let mut least = error_of(&scale, &min, &codes);
    for step in 0..=STEPS {
        // From the best minimum so far.
        let range = -1.0 + 0.1 * f32::from(step) + MOST;
        let tried = codes_of(&from_fn(|group| range / (max[group] - min[group])), &min);
        // Weighted least squares.
        let [mut sum_l, mut sum_ll, mut sum_xl] = [[0.0_f32; GROUPS]; 3];
        for ((x, w), code) in weights.iter().zip(&importance).zip(&tried) {
            for group in 0..GROUPS {
                sum_l[group] += w[group] * code[group];
                sum_ll[group] += w[group] * code[group] * code[group];
                sum_xl[group] += w[group] * code[group] * x[group];
            }
        }
        let [mut determinant, mut new_scale, mut new_min] = [[0.0_f32; GROUPS]; 3];
        for group in 0..GROUPS {
            let (w, x, l, ll, xl) = (sum_w[group], sum_x[group], sum_l[group], sum_ll[group], sum_xl[group]);
            determinant[group] = w * ll - l * l;
            let min = (ll * x - l * xl) / determinant[group];
            let scale = (w * xl - x * l) / determinant[group];
            (new_scale[group], new_min[group]) = if min > 0.0 { (xl / ll, 0.0) } else { (scale, min) };
        }
        let error = error_of(&new_scale, &new_min, &tried);
        let is_better: [bool; GROUPS] = from_fn(|group| determinant[group] > 0.0 && error[group] < least[group]);
        replace(is_better, &mut least, &error);
        replace(is_better, &mut scale, &new_scale);
        replace(is_better, &mut min, &new_min);
        codes.iter_mut().zip(&tried).for_each(|(codes, tried)| replace(is_better, codes, tried));
    }
    let mut depth = min.map(|min| -min);
    replace(is_flat, &mut scale, &[0.0; GROUPS]);
    replace(is_flat, &mut depth, &flat_depth);
    codes.iter_mut().for_each(|codes| replace(is_flat, codes, &[0.0; GROUPS]));
    (scale, depth, codes)
}

/// Groups of 16 weights with a scale of 8 bits each.
fn q6_k(weights: &[f32], block: &mut [u8]) {
    const GROUPS: usize = 16;
    /// Codes are from -32 to 31.
    const MIDDLE: f32 = 32.0;
    let (scales, found) = best_around_zero(&by_place::<16, GROUPS>(weights));
    block.fill(0);
    let most = farthest(&scales);
    if most.abs() < MIN_SCALE {
        return;
    }
    let inverse = -128.0 / most;
    let super_scale = f16::from_f32(1.0 / inverse);
    block[208..].copy_from_slice(&super_scale.to_le_bytes());
    let mut codes = [0_u8; MAX_BLOCK_WEIGHTS];
    for (group, (weights, codes)) in weights.chunks_exact(16).zip(codes.chunks_exact_mut(16)).enumerate() {
        let scale = nearest(inverse * scales[group]).min(127.0) as i8;
        block[192 + group] = scale as u8;
        let scale = super_scale.to_f32() * f32::from(scale);
        if scale == 0.0 {
            codes.iter_mut().zip(&found).for_each(|(code, found)| *code = found[group] as u8);
        } else {
            let code = |weight: f32| (nearest(weight / scale).clamp(-MIDDLE, MIDDLE - 1.0) + MIDDLE) as u8;
            codes.iter_mut().zip(weights).for_each(|(to, weight)| *to = code(*weight));
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

/// Searches for the scale with which 6 bits come nearest to the 16 weights of each group. Errors count by the square of
/// the weight. Returns the scales, and the codes from 0 on.
fn best_around_zero<const GROUPS: usize>(weights: &[Lanes<GROUPS>; 16]) -> (Lanes<GROUPS>, [Lanes<GROUPS>; 16]) {
    const MIDDLE: f32 = 32.0;
    let most: Lanes<GROUPS> = weights.iter().fold([0.0; GROUPS], |most, x| {
        from_fn(|group| if x[group].abs() > most[group].abs() { x[group] } else { most[group] })
    });
    // Groups of zeros. What the search finds for them is not used.
    let is_flat = most.map(|most| most.abs() < MIN_SCALE);
    let codes_of = |range: f32| -> [Lanes<GROUPS>; 16] {
        let inverse = most.map(|most| -range / most);
        let code = |x: f32, inverse: f32| nearest(inverse * x).clamp(-MIDDLE, MIDDLE - 1.0);
        from_fn(|place| from_fn(|group| code(weights[place][group], inverse[group])))
    };
    let sums = |codes: &[Lanes<GROUPS>; 16]| {
        let [mut sum_xl, mut sum_ll] = [[0.0_f32; GROUPS]; 2];
        for (x, code) in weights.iter().zip(codes) {
            for group in 0..GROUPS {
                let w = x[group] * x[group];
                sum_xl[group] += w * x[group] * code[group];
                sum_ll[group] += w * code[group] * code[group];
            }
        }
        (sum_xl, sum_ll)
    };
    let mut codes = codes_of(MIDDLE);
    let (sum_xl, sum_ll) = sums(&codes);
    let mut scale: Lanes<GROUPS> =
        from_fn(|group| if sum_ll[group] == 0.0 { 0.0 } else { sum_xl[group] / sum_ll[group] });
    let mut best: Lanes<GROUPS> = from_fn(|group| scale[group] * sum_xl[group]);
    for step in (-9_i8..=9).filter(|step| *step != 0) {
        let tried = codes_of(MIDDLE + 0.1 * f32::from(step));
        let (sum_xl, sum_ll) = sums(&tried);
        let is_better: [bool; GROUPS] =
            from_fn(|group| sum_ll[group] > 0.0 && sum_xl[group] * sum_xl[group] > best[group] * sum_ll[group]);
        let new_scale: Lanes<GROUPS> = from_fn(|group| sum_xl[group] / sum_ll[group]);
        replace(is_better, &mut scale, &new_scale);
        replace(is_better, &mut best, &from_fn(|group| new_scale[group] * sum_xl[group]));
        codes.iter_mut().zip(&tried).for_each(|(codes, tried)| replace(is_better, codes, tried));
    }
    for codes in &mut codes {
        *codes = codes.map(|code| code + MIDDLE);
        replace(is_flat, codes, &[0.0; GROUPS]);
    }
    replace(is_flat, &mut scale, &[0.0; GROUPS]);
    (scale, codes)
}
