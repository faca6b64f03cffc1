//! Loops of one instruction over registers, to measure how fast a processor multiplies.

use super::simd::{LANES, Simd, SimdKernel};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Runs over all accumulators in one measurement: some tens of microseconds on any processor.
pub(super) const RUNS: usize = 1 << 14;

/// How often each instruction is timed to choose between them, in turn. The shortest time counts.
const TURNS: usize = 5;
/// Chains that fill the pipelines of multiply-adds and of dot products.
const CHAINS: usize = 12;

/// Whether a processor multiplies pairs of bfloat16 so slowly that products should widen them to float32. In the time
/// of one dot product of sixteen pairs, an Intel Xeon (Emerald Rapids) does four multiply-adds of sixteen float32, and
/// an AMD EPYC (Zen 4) does one. The two functions run a loop with the instructions that are compared.
pub(super) fn are_dots_slow(mul_adds: impl Fn(MulAdd<CHAINS>), dots: impl Fn(DotPairs<CHAINS>)) -> bool {
    let time = |run: &dyn Fn()| {
        let started = Instant::now();
        run();
        started.elapsed()
    };
    let mut shortest = [Duration::MAX; 2];
    for _ in 0..TURNS {
        shortest[0] = shortest[0].min(time(&|| mul_adds(MulAdd)));
        shortest[1] = shortest[1].min(time(&|| dots(DotPairs)));
    }
    is_widening_faster(shortest)
}

/// Given the times of equally many multiply-adds and dot products of pairs: whether a product should widen bfloat16 and
/// use multiply-adds. It needs two of these for each dot product, and some time to widen.
fn is_widening_faster([mul_adds, dots]: [Duration; 2]) -> bool {
    3 * mul_adds < dots
}

/// `CHAINS` chains of multiply-adds, [`RUNS`] long.
pub(super) struct MulAdd<const CHAINS: usize>;

impl<const CHAINS: usize> SimdKernel for MulAdd<CHAINS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (factor, term) = (simd.splat(black_box(0.999)), simd.splat(black_box(0.001)));
        let mut chains = [simd.splat(black_box(0.5)); CHAINS];
        for _ in 0..RUNS {
            for chain in &mut chains {
                *chain = simd.mul_add(*chain, factor, term);
            }
        }
        for chain in chains {
            black_box(simd.to_array(chain));
        }
    }
}

/// `CHAINS` chains of dot products of pairs, [`RUNS`] long.
pub(super) struct DotPairs<const CHAINS: usize>;

impl<const CHAINS: usize> SimdKernel for DotPairs<CHAINS> {
    type Output = ();
    const HAS_BF16_PRODUCTS: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let words = black_box([0x3c00_3c00u32; LANES]);
        // SAFETY: sixteen pairs.
        let weights = unsafe { simd.load_pairs(words.as_ptr()) };
        let x = black_box(0x3c00_3c00);
        let mut chains = [simd.splat(black_box(0.5)); CHAINS];
        for _ in 0..RUNS {
            for chain in &mut chains {
                *chain = simd.dot_pairs(*chain, weights, x);
            }
        }
        for chain in chains {
            black_box(simd.to_array(chain));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bfloat16_is_widened_only_where_dot_products_are_slow() {
        let micros = Duration::from_micros;
        assert!(is_widening_faster([micros(35), micros(140)]), "four multiply-adds in the time of a dot product");
        assert!(!is_widening_faster([micros(35), micros(70)]), "two are as fast, and widening takes time");
        assert!(!is_widening_faster([micros(35), micros(105)]), "three are not enough faster");
        assert!(!is_widening_faster([micros(35), micros(35)]), "one");
    }
}
