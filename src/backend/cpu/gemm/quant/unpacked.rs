//! A chunk of a panel whose codes and scales lie side by side, so that nothing has to be taken apart any more, and
//! results that are in memory between two of them.

// Indices name registers here, as in `kernel`.
#![allow(clippy::needless_range_loop)]

use super::super::super::simd::{LANES, Simd};
use super::formats::{PanelFormat, num_parts, scales_shorts};
use crate::quant::{MAX_BLOCK_WEIGHTS, QuantFormat};

/// The chunk. Each row of it is a register.
#[repr(C, align(64))]
pub(super) struct UnpackedChunk {
    /// `[parts][steps]`. With [`Simd::PAIRS_ROWS`], each two steps are in the order of [`Simd::pair_steps`].
    codes: [[u8; 4 * LANES]; MAX_BLOCK_WEIGHTS / 4],
    /// `[blocks][2]`
    factors: [[[f32; LANES]; 2]; MAX_BLOCKS],
    /// `[groups]`. With `scales_shorts`, in both halves of lanes.
    scales: [[i32; LANES]; MAX_GROUPS],
    /// `[pairs of groups]`
    minima: [[i32; LANES]; MAX_GROUPS / 2],
}

/// The most weight blocks of a chunk.
const MAX_BLOCKS: usize = 4;
/// The most groups of a large weight block.
const MAX_GROUPS: usize = 16;

impl UnpackedChunk {
    pub const fn new() -> Self {
        Self {
            codes: [[0; 4 * LANES]; MAX_BLOCK_WEIGHTS / 4],
            factors: [[[0.0; LANES]; 2]; MAX_BLOCKS],
            scales: [[0; LANES]; MAX_GROUPS],
            minima: [[0; LANES]; MAX_GROUPS / 2],
        }
    }

    pub fn as_ptr(&self) -> *const u8 {
        std::ptr::from_ref(self).cast()
    }

    /// The codes from a weight of the columns on, which is a multiple of four.
    #[cfg(target_arch = "x86_64")]
    pub fn codes_from(&self, weight: usize) -> *const u8 {
        self.codes[weight / 4].as_ptr()
    }

    /// Takes a chunk apart.
    ///
    /// # Safety
    /// `at` is a chunk of a panel in this format.
    #[inline(always)]
    pub unsafe fn fill<S: Simd, F: PanelFormat>(&mut self, simd: S, format: F, at: *const u8) {
        // SAFETY: the caller's promise. Each place is as long as what is stored there.
        unsafe {
            for part in 0..num_parts::<F>() {
                macro_rules! steps {
                    ($($even:literal $odd:literal),*) => {
                        $(
                            let mut codes = [
                                format.codes::<S, $even>(simd, at, part),
                                format.codes::<S, $odd>(simd, at, part),
                            ];
                            if const { S::PAIRS_ROWS } {
                                codes = simd.pair_steps(codes);
                            }
                            simd.store_bytes(self.codes[8 * part + $even].as_mut_ptr(), codes[0]);
                            simd.store_bytes(self.codes[8 * part + $odd].as_mut_ptr(), codes[1]);
                        )*
                    };
                }
                steps!(0 1, 2 3, 4 5, 6 7);
            }
            for (block, [first, second]) in self.factors[..F::BLOCKS].iter_mut().enumerate() {
                let [factor, minimum_factor] = format.factors(simd, at, block);
                simd.store(first.as_mut_ptr(), factor);
                simd.store(second.as_mut_ptr(), minimum_factor);
            }
            if F::IS_SMALL {
                return;
            }
            let num_groups = MAX_BLOCK_WEIGHTS / F::GROUP;
            for (group, scale) in self.scales[..num_groups].iter_mut().enumerate() {
                let mut of_group = format.scale(simd, at, group);
                if const { scales_shorts::<S, F>() } {
                    of_group = simd.pack_shorts(of_group, of_group);
                }
                simd.store_ints(scale.as_mut_ptr(), of_group);
            }
            if F::HAS_MINIMUM {
                for (pair, minima) in self.minima[..num_groups / 2].iter_mut().enumerate() {
                    simd.store_ints(minima.as_mut_ptr(), format.minima(simd, at, pair));
                }
            }
        }
    }
}

/// A format whose chunks have become [`UnpackedChunk`]s.
#[derive(Clone, Copy)]
pub(super) struct Unpacked<F>(pub F);

// SAFETY (every block below): the caller's promise. The chunk is an `UnpackedChunk`, which was filled from this format.
impl<F: PanelFormat> PanelFormat for Unpacked<F> {
    const FORMAT: QuantFormat = F::FORMAT;
    const BLOCKS: usize = F::BLOCKS;
    const IS_SMALL: bool = F::IS_SMALL;
    const GROUP: usize = F::GROUP;
    const BIAS: i32 = F::BIAS;
    const HAS_MINIMUM: bool = F::HAS_MINIMUM;
    const IS_SIGNED: bool = F::IS_SIGNED;
    const LARGEST: u8 = F::LARGEST;
    const SUMS_FIT_SHORTS: bool = F::SUMS_FIT_SHORTS;
    const IS_UNPACKED: bool = true;

    #[inline(always)]
    unsafe fn factors<S: Simd>(self, simd: S, chunk: *const u8, block: usize) -> [S::V; 2] {
        unsafe {
            let [first, second] = &(*chunk.cast::<UnpackedChunk>()).factors[block];
            [simd.load(first.as_ptr()), simd.load(second.as_ptr())]
        }
    }
    #[inline(always)]
    unsafe fn scale<S: Simd>(self, simd: S, chunk: *const u8, group: usize) -> S::Ints {
        unsafe { simd.load_ints((*chunk.cast::<UnpackedChunk>()).scales[group].as_ptr().cast()) }
    }
    #[inline(always)]
    unsafe fn minima<S: Simd>(self, simd: S, chunk: *const u8, pair: usize) -> S::Ints {
        unsafe { simd.load_ints((*chunk.cast::<UnpackedChunk>()).minima[pair].as_ptr().cast()) }
    }
    #[inline(always)]
    unsafe fn codes<S: Simd, const STEP: usize>(self, simd: S, chunk: *const u8, part: usize) -> S::Bytes {
        unsafe { simd.load_bytes((*chunk.cast::<UnpackedChunk>()).codes[8 * part + STEP].as_ptr()) }
    }
}

/// Results in memory of the first `M` rows.
#[inline(always)]
pub(super) fn load_stored<S: Simd, const M: usize, const P: usize>(
    simd: S,
    results: &[[[f32; LANES]; P]],
) -> [[S::V; P]; M] {
    let mut registers = [[simd.splat(0.0); P]; M];
    for m in 0..M {
        for p in 0..P {
            // SAFETY: a row of results has `LANES` floats for each panel.
            registers[m][p] = unsafe { simd.load(results[m][p].as_ptr()) };
        }
    }
    registers
}

/// Writes such results.
#[inline(always)]
pub(super) fn write_stored<S: Simd, const M: usize, const P: usize>(
    simd: S,
    results: &mut [[[f32; LANES]; P]],
    registers: [[S::V; P]; M],
) {
    for m in 0..M {
        for p in 0..P {
            // SAFETY: a row of results has `LANES` floats for each panel.
            unsafe { simd.store(results[m][p].as_mut_ptr(), registers[m][p]) };
        }
    }
}
