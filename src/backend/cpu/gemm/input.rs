//! The left side of a product: rows rounded to the weights' type, laid out for the kernels.

use super::super::elementwise::gate;
use super::super::isa::Isa;
use super::super::memory::{Arena, Buffer, Shared};
use super::super::pack::{PlainPanels, steps};
use super::super::rows::{ALONE_BELOW, for_runs};
use super::super::simd::{LANES, Simd, SimdKernel, bf16_bits};
use super::super::team::Team;
use super::float_rows::FloatRows;
use crate::{Activation, DType};
use pagetide_base::error::StartError;
use std::ops::Range;

/// The layout of the rounded rows. A word is one step of the inner dimension: a float32, or a pair of bfloat16. The
/// words of a row are stored in chunks of 16, which is a cache line.
#[derive(Clone, Copy)]
pub(super) struct InputLayout {
    /// Words from chunk to chunk of a row.
    pub chunk: usize,
    /// Words from row to row, within 16 rows.
    pub row: usize,
    /// Words from 16 rows to the next 16.
    pub tile: usize,
}

impl InputLayout {
    /// The layout for a product of `rows` rows of width `k` with weights of `dtype`.
    pub fn of(isa: Isa, dtype: DType, rows: usize, k: usize) -> Self {
        let steps = steps(k, dtype);
        if isa.has_tiles_for(dtype) { Self::tiles(rows, steps) } else { Self::rows(steps) }
    }

    /// Words of whole blocks of 32 rows.
    fn len(&self, rows: usize) -> usize {
        rows.next_multiple_of(2 * LANES) / LANES * self.tile
    }

    /// Where a chunk of a row begins.
    fn at(&self, row: usize, chunk: usize) -> usize {
        row / LANES * self.tile + row % LANES * self.row + chunk * self.chunk
    }

    /// Row after row, an odd number of cache lines apart, so that the rows of a register tile fall into different cache
    /// sets.
    fn rows(steps: usize) -> Self {
        let lines = steps.div_ceil(LANES);
        let row = (lines + 1 - lines % 2) * LANES;
        Self { chunk: LANES, row, tile: LANES * row }
    }

    /// AMX tiles of up to 16 rows by 16 words, one after the other along the inner dimension. Groups of 16 rows are an
    /// odd multiple of 16 KiB apart, so that the same 16 KiB of all rows are spread evenly over the sets of the cache.
    fn tiles(rows: usize, steps: usize) -> Self {
        const SPREAD: usize = (16 << 10) / size_of::<u32>();
        let chunk = rows.min(LANES) * LANES;
        let words = chunk * steps.div_ceil(LANES);
        Self { chunk, row: LANES, tile: words.next_multiple_of(2 * SPREAD) + SPREAD }
    }
}

/// The rounded rows of the current product. The next product reuses the memory.
pub(super) struct RoundedInput {
    words: Buffer<u32>,
}

impl RoundedInput {
    pub fn new() -> Result<Self, StartError> {
        Ok(Self { words: Buffer::zeroed(0, "the rounded input of a linear layer")? })
    }

    pub fn as_ptr(&self) -> *const u32 {
        self.words.as_ptr()
    }

    /// Rounds `x: [rows, k]` to the type of `w`. There is room for whole blocks of 32 rows.
    pub fn fill(&mut self, isa: Isa, team: &Team, x: FloatRows<'_>, rows: usize, w: &PlainPanels, layout: InputLayout) {
        let len = layout.len(rows);
        if self.words.len() < len {
            self.words =
                Buffer::zeroed(len, "the rounded input of a linear layer").unwrap_or_else(|error| panic!("{error}"));
        }
        let (k, dtype, num_chunks) = (x.k, w.dtype, w.steps().div_ceil(LANES));
        let words = Shared::new(self.words.as_mut_ptr());
        let round = |row: usize| {
            let x = x.row(row);
            // SAFETY: there is room for `rows` rows of `num_chunks` chunks each, and each row belongs to one task.
            let out = unsafe { words.get().add(layout.at(row, 0)) };
            isa.run(RoundRow { x, dtype, num_chunks, out, chunk: layout.chunk });
        };
        if rows * k < ALONE_BELOW {
            (0..rows).for_each(round);
        } else {
            for_runs(team, rows, |_, rows| rows.for_each(round));
        }
    }
}

/// Activations `[rows, k]` that only products read. They are rounded to the weights' type and in the layout of
/// products.
pub struct Operand {
    words: Buffer<u32>,
    max_rows: usize,
    k: usize,
    dtype: DType,
    isa: Isa,
}

impl Operand {
    /// Room for up to `max_rows` rows of width `k`.
    pub fn new(arena: &Arena, isa: Isa, max_rows: usize, k: usize, dtype: DType) -> Result<Self, StartError> {
        // In tiles, the most rows take the most memory; in rows, every row takes the same.
        let len = InputLayout::of(isa, dtype, max_rows, k).len(max_rows);
        Ok(Self { words: arena.zeroed(len, "activations")?, max_rows, k, dtype, isa })
    }

    /// Bytes of one activation: a word holds a pair of bfloat16, or one number.
    pub fn element_bytes(&self) -> usize {
        if self.dtype == DType::BF16 { size_of::<u32>() / 2 } else { size_of::<u32>() }
    }

    /// Prepares the operand for `rows` rows of width `k`.
    pub fn reshape(&mut self, rows: usize, k: usize) {
        assert!(rows <= self.max_rows && k == self.k, "an operand of another shape");
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The rows of an operand in float32.
    pub fn floats(&self, rows: usize, k: usize) -> FloatRows<'_> {
        assert!(rows <= self.max_rows && k == self.k && self.dtype == DType::F32, "an operand of another shape");
        let stride = InputLayout::of(self.isa, self.dtype, rows, k).row;
        // SAFETY: the words are float32, one chunk behind the other.
        let values = unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), rows * stride) };
        FloatRows { values, k, stride }
    }

    pub fn words(&self, rows: usize, k: usize, dtype: DType) -> *const u32 {
        assert!(rows <= self.max_rows && k == self.k && dtype == self.dtype, "an operand of another shape");
        self.words.as_ptr()
    }

    /// Writes elements of a row, starting at column `first`, which is the first of a chunk. They end with a chunk or
    /// with the row. `rows` is the number of all rows of the operand.
    ///
    /// # Safety
    /// The row is below `rows`, and nothing else uses these elements.
    pub unsafe fn write(&self, isa: Isa, rows: usize, row: usize, first: usize, x: &[f32]) {
        let per_chunk = LANES * if self.dtype == DType::BF16 { 2 } else { 1 };
        let layout = InputLayout::of(self.isa, self.dtype, rows, self.k);
        let x = &x[..x.len().min(self.k - first)];
        let num_chunks = x.len().div_ceil(per_chunk);
        assert!(rows <= self.max_rows && row < rows && first.is_multiple_of(per_chunk), "columns of an operand");
        // SAFETY: there is room for `rows` rows, and the columns exist.
        let out = unsafe { self.words.as_ptr().cast_mut().add(layout.at(row, first / per_chunk)) };
        isa.run(RoundRow { x, dtype: self.dtype, num_chunks, out, chunk: layout.chunk });
    }
}

impl Operand {
    /// Writes `act(gate) * up` for `rows`, starting at column `first`, which is the first of a chunk. `gate_up` has
    /// these rows, `stride` apart; panels of 16 columns of gate alternate with those of up. `all_rows` is the number of
    /// all rows of the operand.
    ///
    /// # Safety
    /// `gate_up` is long enough, the rows and columns exist, and nothing else uses these elements.
    pub unsafe fn write_gated(
        &self,
        kind: Activation,
        all_rows: usize,
        rows: Range<usize>,
        first: usize,
        gate_up: *const f32,
        stride: usize,
    ) {
        assert!(all_rows <= self.max_rows && rows.end <= all_rows && first < self.k, "rows of an operand");
        let layout = InputLayout::of(self.isa, self.dtype, all_rows, self.k);
        let words = self.words.as_ptr().cast_mut();
        self.isa.run(GatedRows { kind, dtype: self.dtype, rows, first, gate_up, stride, words, layout });
    }
}

struct GatedRows {
    kind: Activation,
    dtype: DType,
    rows: Range<usize>,
    first: usize,
    gate_up: *const f32,
    stride: usize,
    words: *mut u32,
    layout: InputLayout,
}

impl SimdKernel for GatedRows {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { kind, dtype, rows, first, gate_up, stride, words, layout } = self;
        let num_panels = stride / (2 * LANES);
        for (i, row) in rows.enumerate() {
            // SAFETY: `Operand::write_gated`'s contract; a panel of gate and one of up are sixteen numbers each.
            unsafe {
                let of_row = gate_up.add(i * stride);
                if dtype == DType::BF16 {
                    for pair in 0..num_panels.div_ceil(2) {
                        let mut values = [0.0; 2 * LANES];
                        for panel in 2 * pair..num_panels.min(2 * pair + 2) {
                            let at = of_row.add(panel * 2 * LANES);
                            let value = gate(simd, kind, simd.load(at), simd.load(at.add(LANES)));
                            simd.store(values.as_mut_ptr().add((panel - 2 * pair) * LANES), value);
                        }
                        let out = words.add(layout.at(row, first / (2 * LANES) + pair));
                        round_pairs(&values, &mut *out.cast());
                    }
                } else {
                    for panel in 0..num_panels {
                        let at = of_row.add(panel * 2 * LANES);
                        let value = gate(simd, kind, simd.load(at), simd.load(at.add(LANES)));
                        let value = if dtype == DType::F16 { simd.round_to_f16(value) } else { value };
                        simd.store(words.add(layout.at(row, first / LANES + panel)).cast(), value);
                    }
                }
            }
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

impl SimdKernel for RoundRow<'_> {
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
