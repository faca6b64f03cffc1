//! Arithmetic over one row of logits or weights, in loops that the compiler can turn into vector instructions.

use crate::ids::TokenId;

const LANES: usize = 16;

/// Weight of the most likely token. Weights are `exp` in units of 2⁻⁴⁰.
pub const ONE: u64 = 1 << 40;

/// Calls the version of a function for the widest vectors that the processor has. All versions give the same bits: they
/// add in the same order and do not fuse products and sums.
macro_rules! dispatch {
    ($function:ident($($name:ident: $type:ty),*) -> $result:ty) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512($($name: $type),*) -> $result {
            $function($($name),*)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        fn avx2($($name: $type),*) -> $result {
            $function($($name),*)
        }
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: the processor has the features that the function was compiled for.
            unsafe { avx512($($name),*) }
        } else if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            unsafe { avx2($($name),*) }
        } else {
            $function($($name),*)
        }
        #[cfg(not(target_arch = "x86_64"))]
        $function($($name),*)
    }};
}

/// Adding 1.5 · 2²³ to a small number rounds it to an integer, which is then in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// Replaces NaN by −∞, and +∞ by the largest number, so that differences are never NaN.
pub fn sanitize(row: &mut [f32]) {
    dispatch!(sanitize_all(row: &mut [f32]) -> ());
}

#[inline(always)]
fn sanitize_all(row: &mut [f32]) {
    for value in row {
        *value = if value.is_nan() { f32::NEG_INFINITY } else { value.min(f32::MAX) };
    }
}

/// The largest value, ignoring NaN. −∞ for an empty row.
pub fn max(row: &[f32]) -> f32 {
    dispatch!(largest(row: &[f32]) -> f32)
}

#[inline(always)]
fn largest(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = if *value > *lane { *value } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a })
}

/// The lowest index of the largest value. The row need not be sanitized: +∞ counts as the largest number, and NaN is
/// ignored. 0 if there is no value.
pub fn argmax(row: &[f32]) -> usize {
    dispatch!(index_of_largest(row: &[f32]) -> usize)
}

#[inline(always)]
fn index_of_largest(row: &[f32]) -> usize {
    const BLOCK: usize = 512;
    let (mut best, mut start) = (f32::NEG_INFINITY, 0);
    for (number, block) in row.chunks(BLOCK).enumerate() {
        let largest = largest(block).min(f32::MAX);
        if largest > best {
            (best, start) = (largest, number * BLOCK);
        }
    }
    if best == f32::NEG_INFINITY {
        return 0;
    }
    start + row[start..].iter().position(|value| *value >= best).unwrap_or(0)
}

/// `exp(x)` for `x <= 0`, within 2 units in the last place; at least `exp(-87)`. It uses only float32 additions and
/// multiplications, each of them rounded. A device that does not fuse them computes the same bits.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts. Products of the first one with small integers are exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = (std::f64::consts::LN_2 - LN2_HIGH as f64) as f32;
    let x = if x > -87.0 { x } else { -87.0 };
    let rounded = x * LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let series = 1.0 / 5040.0;
    let series = series * r + 1.0 / 720.0;
    let series = series * r + 1.0 / 120.0;
    let series = series * r + 1.0 / 24.0;
    let series = series * r + 1.0 / 6.0;
    let series = series * r + 0.5;
    let series = series * r + 1.0;
    let series = series * r + 1.0;
    series * f32::from_bits((rounded.to_bits() << 23).wrapping_add(127 << 23))
}

/// `ln Σ exp(row − max)`, exponentials in float32, their sum in float64; 0 where `max` is −∞.
pub fn log_sum_exp(row: &[f32], max: f32) -> f64 {
    if max == f32::NEG_INFINITY {
        return 0.0;
    }
    dispatch!(sum_exp(row: &[f32], max: f32) -> f64).ln()
}

#[inline(always)]
fn sum_exp(row: &[f32], max: f32) -> f64 {
    let mut lanes = [0.0_f64; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        // Plain loops: the compiler does not always compile closures for the wider registers.
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(exp(value - max));
        }
    }
    let mut sum: f64 = lanes.iter().sum();
    for value in rest {
        sum += f64::from(exp(value - max));
    }
    sum
}

/// `x · 2⁴⁰` rounded to the nearest integer (to the even one at a tie), for `x` in [0, 1]: computed as two halves of 20
/// bits, by adding a number that leaves an integer in the low bits. Unlike a conversion, this has vector instructions
/// on every processor.
#[inline(always)]
fn to_weight(x: f32) -> u64 {
    const HALF: f32 = (1_u32 << 20) as f32;
    let high = x * HALF + ROUND;
    let low = (x * HALF - (high - ROUND)) * HALF + ROUND;
    let one = ROUND.to_bits() as i32;
    let (high, low) = ((high.to_bits() as i32).wrapping_sub(one), (low.to_bits() as i32).wrapping_sub(one));
    ((i64::from(high) << 20) + i64::from(low)) as u64
}

/// `weights[i] = round(2⁴⁰ · exp((row[i] − max) · scale))`, 0 where that is below `least`. Returns the sum.
pub fn weigh(row: &[f32], max: f32, scale: f32, least: u64, weights: &mut Vec<u64>) -> u64 {
    weights.resize(row.len(), 0);
    let weights = &mut weights[..];
    dispatch!(weigh_into(row: &[f32], max: f32, scale: f32, least: u64, weights: &mut [u64]) -> u64)
}

#[inline(always)]
fn weigh_into(row: &[f32], max: f32, scale: f32, least: u64, weights: &mut [u64]) -> u64 {
    let mut lanes = [0_u64; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    let (weight_chunks, weight_rest) = weights.as_chunks_mut::<LANES>();
    for (chunk, weights) in chunks.iter().zip(weight_chunks) {
        for ((lane, to), value) in lanes.iter_mut().zip(weights).zip(chunk) {
            *to = weight(*value, max, scale, least);
            *lane += *to;
        }
    }
    let mut sum = lanes.iter().sum();
    for (value, to) in rest.iter().zip(weight_rest) {
        *to = weight(*value, max, scale, least);
        sum += *to;
    }
    sum
}

#[inline(always)]
fn weight(value: f32, max: f32, scale: f32, least: u64) -> u64 {
    let weight = to_weight(exp((value - max) * scale));
    if weight >= least { weight } else { 0 }
}

/// Sum of the weights that are at least `least`.
pub fn sum_from(weights: &[u64], least: u64) -> u64 {
    dispatch!(sum_weights_from(weights: &[u64], least: u64) -> u64)
}

#[inline(always)]
fn sum_weights_from(weights: &[u64], least: u64) -> u64 {
    let mut sum = 0;
    for &weight in weights {
        sum += if weight >= least { weight } else { 0 };
    }
    sum
}

/// Replaces `indices` by the indices of the values that are at least `least`, in order.
pub fn indices_from(row: &[f32], least: f32, indices: &mut Vec<TokenId>) {
    indices.clear();
    dispatch!(push_indices_from(row: &[f32], least: f32, indices: &mut Vec<TokenId>) -> ());
}

/// Few values are expected to match, so whole chunks are skipped.
#[inline(always)]
fn push_indices_from(row: &[f32], least: f32, indices: &mut Vec<TokenId>) {
    const CHUNK: usize = 64;
    for (number, chunk) in row.chunks(CHUNK).enumerate() {
        let mut any = false;
        for value in chunk {
            any |= *value >= least;
        }
        if any {
            let found = chunk.iter().zip(number * CHUNK..).filter(|(value, _)| **value >= least);
            indices.extend(found.map(|(_, index)| index as TokenId));
        }
    }
}

/// The largest values of the row's blocks of `block` values.
#[inline(always)]
fn push_block_maxima(row: &[f32], block: usize, maxima: &mut Vec<f32>) {
    maxima.extend(row.chunks(block).map(largest));
}

/// Working memory of [`kth_largest`].
#[derive(Debug, Default)]
pub struct Candidates {
    values: Vec<f32>,
    indices: Vec<TokenId>,
}

/// The `k`-th largest value (`k` from 1). −∞ if there are no more than `k` values.
pub fn kth_largest(row: &[f32], k: usize, scratch: &mut Candidates) -> f32 {
    debug_assert!(k > 0);
    if k >= row.len() {
        return f32::NEG_INFINITY;
    }
    let descending = |a: &f32, b: &f32| b.total_cmp(a);
    let Candidates { values, indices } = scratch;
    values.clear();
    // The k-th largest of the blocks' maxima is at most the k-th largest value, and few values reach it.
    let block = row.len() / (4 * k);
    if block >= 2 {
        dispatch!(push_block_maxima(row: &[f32], block: usize, values: &mut Vec<f32>) -> ());
        let (_, bound, _) = values.select_nth_unstable_by(k - 1, descending);
        indices_from(row, *bound, indices);
        values.clear();
        values.extend(indices.iter().map(|index| row[*index as usize]));
    } else {
        values.extend(row);
    }
    *values.select_nth_unstable_by(k - 1, descending).1
}

/// The largest `t` such that the weights of at least `t` sum to `target` or more; `0 < target <= total`, their sum. A
/// few bisections leave a narrow range, and only the weights in it are sorted.
pub fn weight_threshold(weights: &[u64], total: u64, target: u64, scratch: &mut Vec<u64>) -> u64 {
    const HALVINGS: usize = 8;
    // Weights below this sum to less than `total - target`, so the threshold is not among them.
    let mut low = ((total - target) / weights.len() as u64).max(1);
    let mut high = ONE + 1;
    let mut above = 0;
    for _ in 0..HALVINGS {
        // Bisects the range of the logarithm.
        let middle = ((low as f64 * high as f64).sqrt() as u64).clamp(low, high);
        let sum = sum_from(weights, middle);
        if sum >= target {
            low = middle;
        } else {
            (high, above) = (middle, sum);
        }
    }
    scratch.clear();
    // A single comparison that is hardly ever true. Two comparisons would be mispredicted half of the time.
    scratch.extend(weights.iter().filter(|weight| weight.wrapping_sub(low) < high - low));

    let mut missing = target - above;
    let mut rest = &mut scratch[..];
    while rest.len() > 1 {
        let middle = rest.len() / 2;
        rest.select_nth_unstable_by(middle, |a, b| b.cmp(a));
        let (upper, lower) = rest.split_at_mut(middle);
        let sum: u64 = upper.iter().sum();
        if sum >= missing {
            rest = upper;
        } else {
            missing -= sum;
            rest = lower;
        }
    }
    rest.first().copied().unwrap_or(1)
}

/// The first index at which the running sum of the weights of at least `least` exceeds `point`.
pub fn index_at(weights: &[u64], least: u64, point: u64) -> Option<usize> {
    const CHUNK: usize = 256;
    let mut left = point;
    for (number, chunk) in weights.chunks(CHUNK).enumerate() {
        let sum = sum_from(chunk, least);
        if left >= sum {
            left -= sum;
            continue;
        }
        for (index, &weight) in chunk.iter().enumerate().filter(|(_, weight)| **weight >= least) {
            if left < weight {
                return Some(number * CHUNK + index);
            }
            left -= weight;
        }
    }
    None
}

/// The number of values that rank before `row[index]`: larger ones, and equal ones with a lower index.
pub fn rank(row: &[f32], index: usize) -> usize {
    let value = row[index];
    let (before, after) = (&row[..index], &row[index + 1..]);
    dispatch!(count_before(before: &[f32], after: &[f32], value: f32) -> u32) as usize
}

#[inline(always)]
fn count_before(before: &[f32], after: &[f32], value: f32) -> u32 {
    let mut count = 0;
    for other in before {
        count += u32::from(*other >= value);
    }
    for other in after {
        count += u32::from(*other > value);
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn exp_is_accurate_and_exact_at_zero() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), exp(-87.0));
        let mut x = 0.0_f32;
        while x > -87.0 {
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 2.4e-7, "exp({x}) is off by {error:e}");
            x -= 0.000_77;
        }
    }

    #[test]
    fn weights_are_rounded_products() {
        for x in [0.0, 1.0, 0.5, 0.1, 1e-6, 1e-12, 1e-13, 1e-38, 0.999_999_94, 0.333_333_34] {
            assert_eq!(to_weight(x), (f64::from(x) * ONE as f64).round_ties_even() as u64, "{x}");
        }
    }

    #[test]
    fn every_version_gives_the_same_bits() {
        let row: Vec<f32> = (0..1003_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 * -2e-6).collect();
        let (mut wide, mut portable) = (Vec::new(), vec![0; row.len()]);
        let sums = (weigh(&row, 0.0, 1.3, 5, &mut wide), weigh_into(&row, 0.0, 1.3, 5, &mut portable));
        assert_eq!(sums.0, sums.1);
        assert_eq!(wide, portable);
        assert_eq!(log_sum_exp(&row, 0.5).to_bits(), sum_exp(&row, 0.5).ln().to_bits());
        assert_eq!(sum_from(&wide, 1 << 20), sum_weights_from(&wide, 1 << 20));
        assert_eq!((max(&row), rank(&row, 7)), (largest(&row), count_before(&row[..7], &row[8..], row[7]) as usize));
    }

    proptest! {
        #[test]
        fn argmax_is_that_of_the_sanitized_row(
            values in prop::collection::vec(0_usize..6, 1..40), spread in 1_usize..200, shift in 0_usize..200,
        ) {
            const VALUES: [f32; 6] = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, f32::MAX, -1.0, -0.5];
            let at = |i: usize| VALUES[values[(i + shift) / spread % values.len()]];
            let mut row: Vec<f32> = (0..1100).map(at).collect();
            let found = argmax(&row);
            sanitize(&mut row);
            prop_assert_eq!(argmax(&row), found);
            let mut expected = 0;
            (0..row.len()).for_each(|i| if row[i] > row[expected] { expected = i });
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn indices_from_is_a_filter(row in prop::collection::vec(-8_i8..8, 1..400), least in -9_i8..9) {
            let row: Vec<f32> = row.into_iter().map(f32::from).collect();
            let mut found = vec![7];
            indices_from(&row, f32::from(least), &mut found);
            let expected: Vec<u32> = (0..row.len() as u32).filter(|i| row[*i as usize] >= f32::from(least)).collect();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn kth_largest_is_the_sorted_one(row in prop::collection::vec(-8_i8..8, 1..400), k in 1_usize..40) {
            let row: Vec<f32> = row.into_iter().map(f32::from).collect();
            let mut sorted = row.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let expected = if k >= row.len() { f32::NEG_INFINITY } else { sorted[k - 1] };
            prop_assert_eq!(kth_largest(&row, k, &mut Candidates::default()), expected);
        }

        #[test]
        fn weight_threshold_is_the_sorted_one(weights in prop::collection::vec(prop_oneof![0_u64..50, 0..=ONE], 1..300), share in 0.0_f64..=1.0) {
            let total: u64 = weights.iter().sum();
            prop_assume!(total > 0);
            let target = ((total as f64 * share) as u64).clamp(1, total);
            let mut sorted = weights.clone();
            sorted.sort_by(|a, b| b.cmp(a));
            let mut sum = 0;
            let expected = *sorted.iter().find(|weight| { sum += **weight; sum >= target }).expect("target <= total");
            prop_assert_eq!(weight_threshold(&weights, total, target, &mut Vec::new()), expected);
        }

        #[test]
        fn index_at_walks_the_running_sum(weights in prop::collection::vec(0_u64..9, 1..1000), least in 0_u64..9) {
            let total = sum_from(&weights, least);
            let mut point = 0;
            for (index, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight >= least) {
                if weight > 0 {
                    prop_assert_eq!(index_at(&weights, least, point), Some(index));
                    prop_assert_eq!(index_at(&weights, least, point + weight - 1), Some(index));
                }
                point += weight;
            }
            prop_assert_eq!(index_at(&weights, least, total), None);
        }
    }
}
