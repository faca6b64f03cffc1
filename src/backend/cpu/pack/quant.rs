//! Quantised matrices.
//!
//! A panel is 16 rows of the stored matrix (16 output columns), in chunks of 32 to 256 of the inner dimension. A chunk
//! has the scales of its weights first, and then their codes. Nothing is converted: the bytes of a stored weight block
//! are put in another order, so that a panel takes hardly more memory than its rows in the file.
//!
//! Four bytes of a row, a *word*, go to one of the sixteen 32-bit lanes of a register. With four neighbouring elements
//! of the input in each lane of another register, that is the operand of a product of bytes. How the bits of a word are
//! spread over the inner dimension is left as it is in the file, and the kernels know it (`gemm::quant`).

use super::super::memory::{Buffer, HUGE_PAGE_BYTES, Shared};
use super::super::simd::LANES;
use super::parts::{Columns, On, find_row};
use crate::quant::{QuantFormat, iq4_xs_scale};
use crate::{HostTensor, WeightFormat};
use pagetide_base::error::StartError;
use std::sync::Arc;

/// The panels of a quantised matrix.
pub struct QuantPanels {
    k: usize,
    panels: Vec<QuantPanel>,
    /// Bytes of the weights in the file.
    stored_bytes: usize,
    /// The buffer that they point into. Other matrices may be in it too.
    _buffer: Arc<Buffer<u8>>,
}

/// Sixteen output columns.
#[derive(Clone, Copy)]
pub struct QuantPanel {
    pub format: QuantFormat,
    pub data: Shared<u8>,
}

/// How a chunk of a panel is made of weight blocks.
pub struct PanelLayout {
    /// Weight blocks of a row in a chunk.
    pub blocks: usize,
    pub chunk_bytes: usize,
    fields: &'static [PanelField],
}

/// A part of a weight block.
struct PanelField {
    kind: FieldKind,
    /// Its first byte in a block.
    from: usize,
    /// Its first byte in a chunk, for the first block, and how much further it is for the next block.
    to: usize,
    stride: usize,
}

enum FieldKind {
    /// A float16.
    Half,
    /// So many words.
    Words(usize),
    /// So many bytes, each in a row of 16.
    Bytes(usize),
    /// Four bytes with a bit for each of 32 weights. In the word of a panel, bit `s` of byte `b` is of weight `4s + b`.
    FifthBits,
    /// The scales of IQ4_XS, which become a byte for each group.
    Iq4Scales,
}

/// Bytes of the scales of IQ4_XS.
const IQ4_SCALE_BYTES: usize = 6;

impl PanelLayout {
    pub const fn of(format: QuantFormat) -> &'static PanelLayout {
        use FieldKind::{Bytes, FifthBits, Half, Iq4Scales, Words};
        macro_rules! layout {
            ($blocks:literal, $chunk_bytes:literal: $($kind:expr, $from:literal => $to:literal + $stride:literal;)+) => {{
                const FIELDS: &[PanelField] =
                    &[$(PanelField { kind: $kind, from: $from, to: $to, stride: $stride }),+];
                &PanelLayout { blocks: $blocks, chunk_bytes: $chunk_bytes, fields: FIELDS }
            }};
        }
        match format {
            QuantFormat::Q4_0 | QuantFormat::IQ4_NL => layout!(2, 576: Half, 0 => 0 + 32; Words(4), 2 => 64 + 256;),
            QuantFormat::Q4_1 => layout!(1, 320: Half, 0 => 0 + 0; Half, 2 => 32 + 0; Words(4), 4 => 64 + 0;),
            QuantFormat::Q5_0 => layout!(
                2, 704: Half, 0 => 0 + 32; FifthBits, 2 => 64 + 64; Words(4), 6 => 192 + 256;
            ),
            QuantFormat::Q5_1 => layout!(
                1, 384: Half, 0 => 0 + 0; Half, 2 => 32 + 0; FifthBits, 4 => 64 + 0; Words(4), 8 => 128 + 0;
            ),
            QuantFormat::Q8_0 => layout!(2, 1088: Half, 0 => 0 + 32; Words(8), 2 => 64 + 512;),
            QuantFormat::Q2_K => layout!(
                1, 1344: Half, 80 => 0 + 0; Half, 82 => 32 + 0; Bytes(16), 0 => 64 + 0; Words(16), 16 => 320 + 0;
            ),
            // 32 bytes behind the first field are not used, so that the next ones begin with a cache line. The same
            // holds for Q6_K and IQ4_XS.
            QuantFormat::Q3_K => layout!(
                1, 1792: Half, 108 => 0 + 0; Words(3), 96 => 64 + 0; Words(8), 0 => 256 + 0; Words(16), 32 => 768 + 0;
            ),
            QuantFormat::Q4_K => layout!(
                1, 2304: Half, 0 => 0 + 0; Half, 2 => 32 + 0; Words(3), 4 => 64 + 0; Words(32), 16 => 256 + 0;
            ),
            QuantFormat::Q5_K => layout!(
                1, 2816: Half, 0 => 0 + 0; Half, 2 => 32 + 0; Words(3), 4 => 64 + 0; Words(8), 16 => 256 + 0;
                Words(32), 48 => 768 + 0;
            ),
            QuantFormat::Q6_K => layout!(
                1, 3392: Half, 208 => 0 + 0; Bytes(16), 192 => 64 + 0; Words(32), 0 => 320 + 0;
                Words(16), 128 => 2368 + 0;
            ),
            QuantFormat::IQ4_XS => layout!(
                1, 2240: Half, 0 => 0 + 0; Iq4Scales, 2 => 64 + 0; Words(32), 8 => 192 + 0;
            ),
            QuantFormat::MXFP4 => layout!(4, 1088: Bytes(1), 0 => 0 + 16; Words(4), 1 => 64 + 256;),
        }
    }

    /// Chunks of a panel of an inner dimension `k`. The last one may lack blocks, whose scales are 0.
    pub fn num_chunks(&self, format: QuantFormat, k: usize) -> usize {
        k.div_ceil(self.blocks * format.block_weights())
    }

    /// Writes a block of the row in `lane` into a chunk.
    fn put(&self, block: &[u8], index: usize, lane: usize, chunk: &mut [u8]) {
        for PanelField { kind, from, to, stride } in self.fields {
            let (block, chunk) = (&block[*from..], &mut chunk[to + index * stride..]);
            match kind {
                FieldKind::Half => chunk[2 * lane..][..2].copy_from_slice(&block[..2]),
                FieldKind::Words(count) => {
                    let words = chunk.chunks_exact_mut(4 * LANES).zip(block.chunks_exact(4)).take(*count);
                    words.for_each(|(to, from)| to[4 * lane..][..4].copy_from_slice(from));
                }
                FieldKind::Bytes(count) => (0..*count).for_each(|i| chunk[i * LANES + lane] = block[i]),
                FieldKind::FifthBits => {
                    let bits = u32::from_le_bytes([block[0], block[1], block[2], block[3]]);
                    let word = (0..32).fold(0_u32, |word, i| word | ((bits >> i) & 1) << (i % 4 * 8 + i / 4));
                    chunk[4 * lane..][..4].copy_from_slice(&word.to_le_bytes());
                }
                FieldKind::Iq4Scales => {
                    let scales = &block[..IQ4_SCALE_BYTES];
                    (0..8).for_each(|group| chunk[group * LANES + lane] = iq4_xs_scale(scales, group) as u8);
                }
            }
        }
    }

    /// Reads a block back, as it was in the file.
    fn get(&self, chunk: &[u8], index: usize, lane: usize, block: &mut [u8]) {
        for PanelField { kind, from, to, stride } in self.fields {
            let (block, chunk) = (&mut block[*from..], &chunk[to + index * stride..]);
            match kind {
                FieldKind::Half => block[..2].copy_from_slice(&chunk[2 * lane..][..2]),
                FieldKind::Words(count) => {
                    let words = chunk.chunks_exact(4 * LANES).zip(block.chunks_exact_mut(4)).take(*count);
                    words.for_each(|(from, to)| to.copy_from_slice(&from[4 * lane..][..4]));
                }
                FieldKind::Bytes(count) => (0..*count).for_each(|i| block[i] = chunk[i * LANES + lane]),
                FieldKind::FifthBits => {
                    let word = &chunk[4 * lane..][..4];
                    let bits = (0..32).fold(0_u32, |bits, i| bits | u32::from((word[i % 4] >> (i / 4)) & 1) << i);
                    block[..4].copy_from_slice(&bits.to_le_bytes());
                }
                FieldKind::Iq4Scales => {
                    block[..IQ4_SCALE_BYTES].fill(0);
                    for group in 0..8 {
                        let scale = (chunk[group * LANES + lane] as i8 + 32) as u8;
                        block[group / 4] |= scale >> 4 << (group % 4 * 2);
                        block[2 + group / 2] |= (scale & 15) << (group % 2 * 4);
                    }
                }
            }
        }
    }
}

impl QuantPanels {
    /// The inner dimension.
    pub fn k(&self) -> usize {
        self.k
    }

    pub fn panel(&self, panel: usize) -> QuantPanel {
        self.panels[panel]
    }

    /// Bytes of the weights in the file.
    pub(super) fn stored_bytes(&self) -> usize {
        self.stored_bytes
    }

    /// Whether the weights of any panel are in a format of which this is true.
    pub fn any(&self, is: impl Fn(QuantFormat) -> bool) -> bool {
        self.panels.iter().any(|panel| is(panel.format))
    }

    pub(super) fn read_row(&self, row: usize, mut write: impl FnMut(usize, f32)) {
        let (QuantPanel { format, data }, lane) = (self.panels[row / LANES], row % LANES);
        let layout = PanelLayout::of(format);
        let mut block = [0; MAX_BLOCK_BYTES];
        let block = &mut block[..format.block_bytes()];
        let mut weights = [0.0; crate::quant::MAX_BLOCK_WEIGHTS];
        let weights = &mut weights[..format.block_weights()];
        for index in 0..self.k / weights.len() {
            let chunk = data.get().wrapping_add(index / layout.blocks * layout.chunk_bytes);
            // SAFETY: the panel has a chunk for this block, and nothing writes to it any more.
            let chunk = unsafe { std::slice::from_raw_parts(chunk, layout.chunk_bytes) };
            layout.get(chunk, index % layout.blocks, lane, block);
            format.dequantize(block, weights);
            weights.iter().enumerate().for_each(|(i, weight)| write(index * weights.len() + i, *weight));
        }
    }
}

/// The most bytes of a weight block.
const MAX_BLOCK_BYTES: usize = 210;

/// Packs the panels of `count` matrices of the same number of `parts` each, in parallel. `None` if some are not
/// quantised, or if the columns of a panel are in several formats.
pub(super) fn pack(
    count: usize,
    parts: &[HostTensor<'_>],
    columns: Columns,
    k: usize,
    on: On<'_>,
) -> Result<Option<Vec<QuantPanels>>, StartError> {
    let num_panels = columns.num_panels();
    let format = |index: usize| {
        let (first, width) = columns.of_panel(index % num_panels);
        let mut formats =
            (first..first + width).map(|row| find_row(parts, index / num_panels * columns.n + row).0.format);
        let WeightFormat::Quantized(format) = formats.next()? else { return None };
        formats.all(|other| other == WeightFormat::Quantized(format)).then_some(format)
    };
    // The panels of all matrices, and where each begins.
    let Some(formats) = (0..count * num_panels).map(format).collect::<Option<Vec<_>>>() else { return Ok(None) };
    let panel_bytes = |format: QuantFormat| {
        let layout = PanelLayout::of(format);
        layout.num_chunks(format, k) * layout.chunk_bytes
    };
    let mut starts = Vec::with_capacity(formats.len());
    let total = formats.iter().fold(0, |start, format| {
        starts.push(start);
        start + panel_bytes(*format)
    });
    let mut buffer = on.arena.zeroed::<u8>(total, "a weight matrix")?;
    let data = Shared::new(buffer.as_mut_ptr());
    let pack = |index: usize| {
        let (format, layout) = (formats[index], PanelLayout::of(formats[index]));
        // SAFETY: panels do not overlap, `data` holds them all, and each is packed once.
        let panel = unsafe { std::slice::from_raw_parts_mut(data.get().add(starts[index]), panel_bytes(format)) };
        let (first, width) = columns.of_panel(index % num_panels);
        for lane in 0..width {
            let (part, row) = find_row(parts, index / num_panels * columns.n + first + lane);
            let blocks = part.row_range(row..row + 1).bytes.chunks_exact(format.block_bytes());
            for (index, block) in blocks.enumerate() {
                let chunk = &mut panel[index / layout.blocks * layout.chunk_bytes..][..layout.chunk_bytes];
                layout.put(block, index % layout.blocks, lane, chunk);
            }
        }
    };
    // Runs of panels about as large as a huge page: see `Runs`.
    let per_run =
        (HUGE_PAGE_BYTES * formats.len() / total.max(1)).clamp(1, formats.len().div_ceil(on.team.num_members()));
    on.team.for_each(formats.len().div_ceil(per_run), |run| {
        (run * per_run..formats.len().min((run + 1) * per_run)).for_each(pack);
    });
    let buffer = Arc::new(buffer);
    let matrix = |index: usize| {
        let of_matrix = index * num_panels..(index + 1) * num_panels;
        let panel = |index: usize| QuantPanel {
            format: formats[index],
            data: Shared::new(data.get().wrapping_add(starts[index])),
        };
        let parts = &parts[index * parts.len() / count..(index + 1) * parts.len() / count];
        QuantPanels {
            k,
            panels: of_matrix.map(panel).collect(),
            stored_bytes: parts.iter().map(|part| part.bytes.len()).sum(),
            _buffer: buffer.clone(),
        }
    };
    Ok(Some((0..count).map(matrix).collect()))
}
