//! The rotation of heads before they become codes of 4 bits.
//!
//! A head of K has a few dimensions that are much larger than the others. With one scale for a vector, the codes of the
//! others would be coarse. A Hadamard matrix mixes all dimensions, so that each is a sum with signs of all others and
//! none stands out (QuIP#, arXiv:2402.04396, section 3; QuaRot, arXiv:2404.00456, section 4.3). The matrix is
//! orthogonal: Q and K that are both rotated have the same products, and a rotated mean of V is rotated back.
//!
//! A head whose size is no power of two is rotated in blocks of the largest power of two that divides it: 16 for a size
//! of 80, 32 for 96. All operations are rounded once and in the same order on every instruction set.

use super::simd::LANES;

/// The largest power of two that divides the head size.
#[inline(always)]
fn block_len(head_dim: usize) -> usize {
    1 << head_dim.trailing_zeros()
}

/// Multiplies each block of a head with the Hadamard matrix of its size, divided by the square root of the size. The
/// matrix is its own inverse, so this also undoes itself, up to rounding.
#[inline(always)]
pub(super) fn rotate(head: &mut [f32]) {
    let len = block_len(head.len());
    let norm = 1.0 / (len as f32).sqrt();
    for block in head.chunks_exact_mut(len) {
        for x in block.iter_mut() {
            *x *= norm;
        }
        let (vectors, rest) = block.as_chunks_mut::<LANES>();
        // Elements of one vector. Their number is known, so that the compiler uses vectors here too.
        for vector in vectors {
            add_and_subtract::<1>(vector);
            add_and_subtract::<2>(vector);
            add_and_subtract::<4>(vector);
            add_and_subtract::<8>(vector);
        }
        // A block of 8 is shorter than a vector.
        let mut half = if rest.is_empty() { LANES } else { 1 };
        while half < len {
            for pair in block.chunks_exact_mut(2 * half) {
                let (first, second) = pair.split_at_mut(half);
                for (a, b) in first.iter_mut().zip(second) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
    }
}

/// Replaces elements that are `APART` apart by their sum and difference.
#[inline(always)]
fn add_and_subtract<const APART: usize>(vector: &mut [f32; LANES]) {
    let from = *vector;
    let mut partners = [0.0; LANES];
    let mut signed = [0.0; LANES];
    for i in 0..LANES {
        partners[i] = from[i ^ APART];
        signed[i] = if i & APART == 0 { from[i] } else { -from[i] };
    }
    for i in 0..LANES {
        vector[i] = partners[i] + signed[i];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(len: usize) -> Vec<f32> {
        (0..len).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect()
    }

    fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    }

    #[test]
    fn products_stay_and_a_second_rotation_undoes_the_first() {
        for len in [8, 16, 40, 64, 80, 96, 128, 256] {
            let (a, mut b) = (numbers(len), numbers(len));
            b.reverse();
            let [mut rotated_a, mut rotated_b] = [a.clone(), b.clone()];
            rotate(&mut rotated_a);
            rotate(&mut rotated_b);
            assert!((dot(&a, &b) - dot(&rotated_a, &rotated_b)).abs() < 1e-4 * len as f64, "{len}");
            assert_ne!(rotated_a, a);
            rotate(&mut rotated_a);
            assert!(a.iter().zip(&rotated_a).all(|(x, y)| (x - y).abs() < 1e-5), "{len}");
        }
    }

    #[test]
    fn a_single_large_dimension_is_spread_over_its_block() {
        for (len, block) in [(64, 64), (80, 16), (96, 32), (128, 128), (40, 8)] {
            let mut head = vec![0.0; len];
            head[3] = 1.0;
            rotate(&mut head);
            let expected = 1.0 / (block as f32).sqrt();
            assert!(head[..block].iter().all(|x| x.abs() == expected), "{len}: {head:?}");
            assert!(head[block..].iter().all(|x| *x == 0.0), "{len}");
        }
    }
}
