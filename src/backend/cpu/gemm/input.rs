//! The left side of a product: rows rounded to the weights' type, laid out for the kernels.

use super::super::isa::{Isa, Kernel};
use super::super::memory::{Buffer, Shared};
use super::super::pack::CpuMatrix;
use super::super::simd::{LANES, Simd, bf16_bits};
use super::super::team::Team;
use super::ALONE_BELOW;
use crate::backend::DType;
use crate::error::StartError;

/// Where the rounded rows lie. A word is one step of the inner dimension: a float32, or a pair of bfloat16. Words of a
/// row come in chunks of 16, a cache line.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// Words from chunk to chunk of a row.
    pub chunk: usize,
    /// Words from row to row, within 16 rows.
    pub row: usize,
    /// Words from 16 rows to the next 16.
    pub tile: usize,
}

impl Layout {
    /// Row after row, an odd number of cache lines apart, so that the rows of a register tile do not fall into the
    /// same cache set.
    pub fn rows(steps: usize) -> Self {
        let lines = steps.div_ceil(LANES);
        let row = (lines + 1 - lines % 2) * LANES;
        Self { chunk: LANES, row, tile: LANES * row }
    }

    /// AMX tiles of up to 16 rows by 16 words, one after the other along the inner dimension. From 16 rows to the next
    /// it is an odd multiple of 16 KiB, so that the same 16 KiB of all rows spread evenly over the sets of the cache.
    pub fn tiles(rows: usize, steps: usize) -> Self {
        const SPREAD: usize = (16 << 10) / size_of::<u32>();
        let chunk = rows.min(LANES) * LANES;
        let words = chunk * steps.div_ceil(LANES);
        Self { chunk, row: LANES, tile: words.next_multiple_of(2 * SPREAD) + SPREAD }
    }
}

/// The rounded rows of the product at hand; the memory is used again for the next one.
pub(super) struct Input {
    words: Buffer<u32>,
}

impl Input {
    pub fn new() -> Result<Self, StartError> {
        Ok(Self { words: Buffer::zeroed(0, "the rounded input of a linear layer")? })
    }

    pub fn as_ptr(&self) -> *const u32 {
        self.words.as_ptr()
    }

    /// Rounds `x: [rows, k]` to the type of `w`. There is room for whole blocks of 32 rows.
    pub fn fill(&mut self, isa: Isa, team: &Team, x: &[f32], rows: usize, w: &CpuMatrix, layout: Layout) {
        let len = rows.next_multiple_of(2 * LANES) / LANES * layout.tile;
        if self.words.len() < len {
            self.words =
                Buffer::zeroed(len, "the rounded input of a linear layer").unwrap_or_else(|error| panic!("{error}"));
        }
        let (k, dtype, num_chunks) = (w.k, w.dtype, w.steps().div_ceil(LANES));
        let words = Shared::new(self.words.as_mut_ptr());
        let round = |row: usize| {
            let x = &x[row * k..][..k];
            // SAFETY: there is room for `rows` rows of `num_chunks` chunks each; each row is one task's.
            let out = unsafe { words.get().add(row / LANES * layout.tile + row % LANES * layout.row) };
            isa.run(RoundRow { x, dtype, num_chunks, out, chunk: layout.chunk });
        };
        if rows * k < ALONE_BELOW {
            (0..rows).for_each(round);
        } else {
            team.for_each(rows, round);
        }
    }
}

/// Rounds one row; words past the row's end become 0.
struct RoundRow<'a> {
    x: &'a [f32],
    dtype: DType,
    num_chunks: usize,
    /// `num_chunks` chunks of 16 words, `chunk` words apart.
    out: *mut u32,
    chunk: usize,
}

impl Kernel for RoundRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { x, dtype, num_chunks, out, chunk } = self;
        let per_chunk = if dtype == DType::BF16 { 2 * LANES } else { LANES };
        for i in 0..num_chunks {
            let x = &x[(i * per_chunk).min(x.len())..];
            // SAFETY: `out` has this chunk.
            let out = unsafe { &mut *out.add(i * chunk).cast::<[u32; LANES]>() };
            if dtype == DType::BF16 {
                match x.first_chunk() {
                    Some(x) => round_pairs(x, out),
                    None => {
                        let mut padded = [0.0; 2 * LANES];
                        padded[..x.len()].copy_from_slice(x);
                        round_pairs(&padded, out);
                    }
                }
            } else {
                // SAFETY: at most `x.len()` numbers are read, and sixteen words written.
                unsafe {
                    let v = simd.load_first(x.as_ptr(), x.len().min(LANES));
                    let v = if dtype == DType::F16 { simd.round_to_f16(v) } else { v };
                    simd.store(out.as_mut_ptr().cast(), v);
                }
            }
        }
    }
}

#[inline(always)]
fn round_pairs(x: &[f32; 2 * LANES], out: &mut [u32; LANES]) {
    for i in 0..LANES {
        out[i] = u32::from(bf16_bits(x[2 * i])) | u32::from(bf16_bits(x[2 * i + 1])) << 16;
    }
}
