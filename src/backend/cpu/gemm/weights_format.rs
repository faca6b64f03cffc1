//! The types of plain weights, as their panels hold them.

use super::super::simd::{LANES, Simd};

/// How one step of 16 columns is read and multiplied with one word of the input.
pub(super) trait WeightsFormat: Copy {
    type Weights<S: Simd>: Copy;
    const STEP_BYTES: usize;
    /// Numbers of a step, of a column and in a word of the input.
    const NUMBERS: usize;
    /// # Safety
    /// `STEP_BYTES` can be read at `at`.
    unsafe fn load<S: Simd>(self, simd: S, at: *const u8) -> Self::Weights<S>;
    fn mul_add<S: Simd>(self, simd: S, acc: S::V, w: Self::Weights<S>, x: u32) -> S::V;
    /// Writes a step as float32, `[NUMBERS][LANES]`.
    /// # Safety
    /// `STEP_BYTES` can be read at `at`, and `to` has room.
    unsafe fn widen<S: Simd>(self, simd: S, at: *const u8, to: *mut f32);
    /// A number of a word of the input.
    fn number_of(word: u32, number: usize) -> f32;
    /// A number of each of `LANES` words of the input.
    /// # Safety
    /// The words can be read.
    unsafe fn numbers_of<S: Simd>(simd: S, words: *const u32, number: usize) -> S::V;
}

#[derive(Clone, Copy)]
pub(super) struct WeightsBf16;
impl WeightsFormat for WeightsBf16 {
    type Weights<S: Simd> = S::Pairs;
    const STEP_BYTES: usize = 4 * LANES;
    const NUMBERS: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(self, simd: S, at: *const u8) -> S::Pairs {
        // SAFETY: the caller's promise.
        unsafe { simd.load_pairs(at.cast()) }
    }
    #[inline(always)]
    fn mul_add<S: Simd>(self, simd: S, acc: S::V, w: S::Pairs, x: u32) -> S::V {
        simd.dot_pairs(acc, w, x)
    }
    #[inline(always)]
    unsafe fn widen<S: Simd>(self, simd: S, at: *const u8, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            let pairs = simd.load_ints(at);
            simd.store(to, simd.as_floats(simd.or_shifted(simd.splat_int(0), pairs, 16)));
            simd.store(to.add(LANES), simd.as_floats(simd.int_bits(pairs, 0, 0xffff_0000)));
        }
    }
    #[inline(always)]
    fn number_of(word: u32, number: usize) -> f32 {
        f32::from_bits(if number == 0 { word << 16 } else { word & 0xffff_0000 })
    }
    #[inline(always)]
    unsafe fn numbers_of<S: Simd>(simd: S, words: *const u32, number: usize) -> S::V {
        // SAFETY: the caller's promise.
        let pairs = unsafe { simd.load_ints(words.cast()) };
        simd.as_floats(match number {
            0 => simd.or_shifted(simd.splat_int(0), pairs, 16),
            _ => simd.int_bits(pairs, 0, 0xffff_0000),
        })
    }
}

/// Types with one number in a word: `load` reads the weights of a step.
macro_rules! single_numbers {
    ($name:ident, $bytes:literal, $load:ident) => {
        #[derive(Clone, Copy)]
        pub(super) struct $name;
        impl WeightsFormat for $name {
            type Weights<S: Simd> = S::V;
            const STEP_BYTES: usize = $bytes * LANES;
            const NUMBERS: usize = 1;
            #[inline(always)]
            unsafe fn load<S: Simd>(self, simd: S, at: *const u8) -> S::V {
                // SAFETY: the caller's promise.
                unsafe { simd.$load(at.cast()) }
            }
            #[inline(always)]
            fn mul_add<S: Simd>(self, simd: S, acc: S::V, w: S::V, x: u32) -> S::V {
                simd.mul_add(w, simd.splat(f32::from_bits(x)), acc)
            }
            #[inline(always)]
            unsafe fn widen<S: Simd>(self, simd: S, at: *const u8, to: *mut f32) {
                // SAFETY: the caller's promise.
                unsafe { simd.store(to, self.load(simd, at)) };
            }
            #[inline(always)]
            fn number_of(word: u32, _: usize) -> f32 {
                f32::from_bits(word)
            }
            #[inline(always)]
            unsafe fn numbers_of<S: Simd>(simd: S, words: *const u32, _: usize) -> S::V {
                // SAFETY: the caller's promise.
                unsafe { simd.load(words.cast()) }
            }
        }
    };
}
single_numbers!(WeightsF16, 2, load_f16);
single_numbers!(WeightsF32, 4, load);
