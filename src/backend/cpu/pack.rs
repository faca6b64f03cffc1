//! Weight matrices as the kernels read them.
//!
//! A matrix `[n, k]` is stored once, as panels of 16 output columns, in the order in which a product reads it:
//!
//! - bfloat16: `[n / 16][k / 2][16][2]`. A row of 16 pairs is one register of a BF16 dot product, and 16 such rows are
//!   one AMX tile. `k` is padded to a multiple of 32.
//! - float16 and float32: `[n / 16][k][16]`.
//!
//! - quantised: see `quant`.
//!
//! `n` is padded with zeros to a multiple of 16; in the matrix of a gated MLP each half is. See
//! [`PlainPanels::panel_bytes`] for the gap between panels.

mod panel;
mod parts;
mod quant;

use super::memory::{Buffer, HUGE_PAGE_BYTES, Shared};
use super::simd::LANES;
use crate::{DType, HostTensor, WeightFormat, matrix_shape};
use pagetide_base::error::StartError;
use panel::Interleave;
use parts::find_row;
pub(super) use parts::{ColumnOrder, Columns, On};
pub(super) use quant::{PanelLayout, QuantPanels};
use std::sync::Arc;

/// A packed weight matrix.
pub struct CpuMatrix {
    pub(super) columns: Columns,
    /// Inner dimension.
    pub(super) k: usize,
    pub(super) panels: Panels,
}

/// The weights of a matrix.
pub(super) enum Panels {
    Plain(PlainPanels),
    Quantized(QuantPanels),
}

/// Panels of one type, at equal distances.
pub(super) struct PlainPanels {
    pub dtype: DType,
    k: usize,
    count: usize,
    first: Shared<u8>,
    /// The buffer that `first` points into. Other matrices may be in it too.
    _buffer: Arc<Buffer<u8>>,
}

/// Inner dimension of one AMX tile.
pub(super) const BF16_K_BLOCK: usize = 32;
/// Matrices that share a buffer begin at multiples of this.
const PAGE_BYTES: usize = 4096;

impl CpuMatrix {
    /// Packs the concatenated rows of `parts`, in parallel.
    pub(super) fn pack(
        parts: &[HostTensor<'_>],
        dtype: DType,
        order: ColumnOrder,
        on: On<'_>,
    ) -> Result<Self, StartError> {
        let mut matrices = Self::pack_several(1, parts, dtype, order, on)?;
        Ok(matrices.remove(0))
    }

    /// Packs `count` matrices, each made of the same number of `parts`, side by side in memory: a single one may be too
    /// small for the huge pages that a stream of weights needs.
    pub(super) fn pack_several(
        count: usize,
        parts: &[HostTensor<'_>],
        dtype: DType,
        order: ColumnOrder,
        on: On<'_>,
    ) -> Result<Vec<Self>, StartError> {
        let (rows, k) = matrix_shape(parts)?;
        assert!(count > 0 && rows.is_multiple_of(count), "{rows} rows of {count} matrices");
        let n = rows / count;
        let columns = Columns { n, order };
        if let Some(matrices) = quant::pack(count, parts, columns, k, on)? {
            let matrix = |panels| Self { columns, k, panels: Panels::Quantized(panels) };
            return Ok(matrices.into_iter().map(matrix).collect());
        }
        if let Some(part) = parts.iter().find(|part| matches!(part.format, WeightFormat::Quantized(_))) {
            let (from, to) = (part.format, dtype.name());
            tracing::info!("a matrix [{n}, {k}] in several formats, {from} among them, is converted to {to}");
        }
        Self::from_rows((count, n, k), dtype, order, on, |matrix, row, space| {
            let (part, row) = find_row(parts, matrix * n + row);
            let row = part.row_range(row..row + 1);
            match part.format {
                WeightFormat::Plain(from) if from == dtype => return Some(row.bytes),
                WeightFormat::Plain(from) => panel::convert(row.bytes, from, dtype, space),
                WeightFormat::Quantized(_) | WeightFormat::Fp8 => {
                    let values: Vec<u8> = row.to_f32().into_iter().flat_map(f32::to_le_bytes).collect();
                    panel::convert(&values, DType::F32, dtype, space);
                }
            }
            None
        })
    }

    /// See [`Backend::random_matrices`](crate::Backend::random_matrices).
    pub(super) fn random(
        shape: (usize, usize, usize),
        dtype: DType,
        order: ColumnOrder,
        seed: u64,
        on: On<'_>,
    ) -> Result<Vec<Self>, StartError> {
        // Half the width of a uniform distribution of standard deviation 0.02.
        const BOUND: f32 = 0.034_641_016;
        let (_, n, k) = shape;
        Self::from_rows(shape, dtype, order, on, |matrix, row, space| {
            let mut state = mix(seed ^ mix((matrix * n + row) as u64));
            let value = |_| {
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                ((mix(state) >> 40) as f32 * 2.0_f32.powi(-23) - 1.0) * BOUND
            };
            let bytes: Vec<u8> = (0..k).map(value).flat_map(f32::to_le_bytes).collect();
            panel::convert(&bytes, DType::F32, dtype, space);
            None
        })
    }

    /// Makes `count` matrices `[n, k]`. `find(matrix, row, space)` either returns a row in `dtype`, or writes it to
    /// `space` and returns `None`. It is called once for each row, in parallel.
    fn from_rows<'r>(
        (count, n, k): (usize, usize, usize),
        dtype: DType,
        order: ColumnOrder,
        on: On<'_>,
        find: impl Fn(usize, usize, &mut [u8]) -> Option<&'r [u8]> + Sync,
    ) -> Result<Vec<Self>, StartError> {
        let columns = Columns { n, order };
        let (num_panels, panel_bytes) = (columns.num_panels(), panel_bytes(k, dtype));
        let stride = (num_panels * panel_bytes).next_multiple_of(PAGE_BYTES);
        let mut buffer = on.arena.zeroed::<u8>(count * stride, "a weight matrix")?;
        let data = Shared::new(buffer.as_mut_ptr());
        let row_bytes = k * dtype.size_bytes();
        // For each member a row of zeros, and sixteen rows for `find` to write to. Most matrices use none of this
        // memory, and it costs nothing until it is touched.
        let space_bytes = (1 + LANES) * row_bytes;
        let mut spaces = Buffer::<u8>::zeroed(on.team.num_members() * space_bytes, "packing a weight matrix")?;
        let space_data = Shared::new(spaces.as_mut_ptr());
        let pack = |index: usize, panel: usize, space: &mut [u8]| {
            // SAFETY: panels do not overlap, `data` holds `num_panels` of each matrix, and each is packed once.
            let panel_data = unsafe {
                std::slice::from_raw_parts_mut(data.get().add(index * stride + panel * panel_bytes), panel_bytes)
            };
            let (first, width) = columns.of_panel(panel);
            let mut rows: [&[u8]; LANES] = [&[]; LANES];
            let (zeros, space) = space.split_at_mut(row_bytes);
            for (lane, space) in space.chunks_exact_mut(row_bytes).enumerate() {
                let row = if lane < width { find(index, first + lane, space) } else { Some(&*zeros) };
                rows[lane] = row.unwrap_or(space);
            }
            on.isa.run(Interleave { rows, dtype, panel: panel_data });
        };
        // Panels of all matrices, in the order of their addresses.
        let panels = Runs { base: data.get().addr(), count, stride, num_panels, panel_bytes };
        let run_bytes = (count * stride / (2 * on.team.num_members())).clamp(1, HUGE_PAGE_BYTES);
        on.team.for_each_member(panels.num_runs(run_bytes), |member, run| {
            // SAFETY: there is a space for each member.
            let space =
                unsafe { std::slice::from_raw_parts_mut(space_data.get().add(member * space_bytes), space_bytes) };
            panels.run(run, run_bytes).for_each(|(index, panel)| pack(index, panel, space));
        });
        let buffer = Arc::new(buffer);
        let matrix = |index| {
            let first = Shared::new(data.get().wrapping_add(index * stride));
            let panels = PlainPanels { dtype, k, count: num_panels, first, _buffer: buffer.clone() };
            Self { columns, k, panels: Panels::Plain(panels) }
        };
        Ok((0..count).map(matrix).collect())
    }

    /// Output columns.
    pub(super) fn n(&self) -> usize {
        self.columns.n
    }

    pub(super) fn num_panels(&self) -> usize {
        self.columns.num_panels()
    }

    /// Bytes of the weights, without padding.
    pub(super) fn size_bytes(&self) -> usize {
        match &self.panels {
            Panels::Plain(panels) => self.n() * self.k * panels.dtype.size_bytes(),
            Panels::Quantized(panels) => panels.stored_bytes(),
        }
    }

    /// Passes each element of row `row` of the unpacked matrix to `write`, in float32.
    pub(super) fn read_row(&self, row: usize, write: impl FnMut(usize, f32)) {
        assert!(row < self.n(), "row {row} of a matrix of {} rows", self.n());
        assert!(self.columns.order == ColumnOrder::Plain, "a table of rows");
        match &self.panels {
            Panels::Plain(panels) => panels.read_row(row, write),
            Panels::Quantized(panels) => panels.read_row(row, write),
        }
    }
}

impl PlainPanels {
    /// The first panel.
    pub fn as_ptr(&self) -> *const u8 {
        self.first.get()
    }

    /// All panels.
    fn as_slice(&self) -> &[u8] {
        // SAFETY: the buffer has room for all panels of each of its matrices, and nothing writes to it any more.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.count * self.panel_bytes()) }
    }

    /// Steps of the inner loop: pairs of elements for bfloat16, otherwise single elements.
    pub fn steps(&self) -> usize {
        steps(self.k, self.dtype)
    }

    /// Bytes of 16 columns at one step.
    pub fn step_bytes(&self) -> usize {
        step_bytes(self.dtype)
    }

    /// Bytes from panel to panel.
    pub fn panel_bytes(&self) -> usize {
        panel_bytes(self.k, self.dtype)
    }

    fn read_row(&self, row: usize, mut write: impl FnMut(usize, f32)) {
        let (panel, lane) = (row / LANES, row % LANES);
        let panel = &self.as_slice()[panel * self.panel_bytes()..][..self.panel_bytes()];
        let (rows, k) = (panel.chunks_exact(self.step_bytes()).take(self.steps()), self.k);
        match self.dtype {
            DType::F32 => rows.enumerate().for_each(|(i, row)| write(i, f32::from_bits(get_u32(row, lane)))),
            DType::F16 => rows.enumerate().for_each(|(i, row)| {
                write(i, half::f16::from_bits(u16::from_le_bytes([row[2 * lane], row[2 * lane + 1]])).to_f32());
            }),
            DType::BF16 => rows.take(k.div_ceil(2)).enumerate().for_each(|(i, row)| {
                let pair = get_u32(row, lane);
                write(2 * i, f32::from_bits(pair << 16));
                if 2 * i + 1 < k {
                    write(2 * i + 1, f32::from_bits(pair & 0xffff_0000));
                }
            }),
        }
    }
}

/// The finalizer of SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn get_u32(row: &[u8], lane: usize) -> u32 {
    let bytes = &row[4 * lane..4 * lane + 4];
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Steps of the inner loop over `k`.
pub(super) fn steps(k: usize, dtype: DType) -> usize {
    match dtype {
        DType::BF16 => k.next_multiple_of(BF16_K_BLOCK) / 2,
        DType::F16 | DType::F32 => k,
    }
}

fn step_bytes(dtype: DType) -> usize {
    match dtype {
        DType::BF16 | DType::F32 => 4 * LANES,
        DType::F16 => 2 * LANES,
    }
}

/// Large panels are followed by a gap of up to 1/64 of their size. Without it, at the usual sizes, the same step of
/// many panels would compete for a few sets of the cache.
fn panel_bytes(k: usize, dtype: DType) -> usize {
    const GAP_UNIT: usize = 1024;
    let bytes = steps(k, dtype) * step_bytes(dtype);
    bytes + bytes / 64 / GAP_UNIT * GAP_UNIT
}

/// The panels of `count` matrices, split into runs at multiples of a number of bytes of address space. The system
/// zeroes a huge page when a thread first touches it. If several threads touch it at once, each zeroes a page and all
/// but one of these pages are thrown away. So each huge page belongs to one run.
struct Runs {
    base: usize,
    count: usize,
    stride: usize,
    num_panels: usize,
    panel_bytes: usize,
}

impl Runs {
    fn num_runs(&self, run_bytes: usize) -> usize {
        (self.base % run_bytes + self.count * self.stride).div_ceil(run_bytes)
    }

    /// The `(matrix, panel)` that begin in run `run`.
    fn run(&self, run: usize, run_bytes: usize) -> impl Iterator<Item = (usize, usize)> {
        let start = (run * run_bytes).saturating_sub(self.base % run_bytes);
        let end = (run + 1) * run_bytes - self.base % run_bytes;
        let num_panels = self.num_panels;
        (self.first_from(start)..self.first_from(end)).map(move |panel| (panel / num_panels, panel % num_panels))
    }

    /// The first panel, counted over all matrices, that begins at or after `byte`.
    fn first_from(&self, byte: usize) -> usize {
        let (matrix, byte) = (byte / self.stride, byte % self.stride);
        let panel = byte.div_ceil(self.panel_bytes).min(self.num_panels);
        (matrix * self.num_panels + panel).min(self.count * self.num_panels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_have_each_panel_once_in_order() {
        let cases: [(usize, usize, usize, usize, usize); 4] = [
            (0, 1, 31, 66 << 10, HUGE_PAGE_BYTES),
            (12 << 10, 3, 5, 1000, 8192),
            (4096, 2, 40, 1 << 10, 1),
            (0, 1, 1, 64, 9),
        ];
        for (base, count, num_panels, panel_bytes, run_bytes) in cases {
            let stride = (num_panels * panel_bytes).next_multiple_of(PAGE_BYTES);
            let panels = Runs { base, count, stride, num_panels, panel_bytes };
            let all: Vec<_> = (0..panels.num_runs(run_bytes)).flat_map(|run| panels.run(run, run_bytes)).collect();
            let expected: Vec<_> =
                (0..count).flat_map(|matrix| (0..num_panels).map(move |panel| (matrix, panel))).collect();
            assert_eq!(all, expected, "{base} {count} {num_panels} {panel_bytes} {run_bytes}");
        }
    }
}
