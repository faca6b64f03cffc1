//! A quantised matrix, and its conversion to what backends read.

use super::pieces::ModulePieces;
use super::scheme::ScaleSpan;
use half::f16;
use pagetide_backend::fp8::{self, E4M3_VALUES, FP8_BLOCK_BYTES, FP8_BLOCK_WEIGHTS};
use pagetide_backend::quant::QuantFormat;
use pagetide_backend::{DType, HostTensor, WeightFormat};
use pagetide_base::error::StartError;
use std::thread;

/// Weights of a block of Q4_0, Q4_1 and Q8_0.
const BLOCK: usize = 32;
/// Rows that are converted side by side. Where neighbours in memory are rows, not columns, the codes of so many rows
/// fill whole cache lines.
const TILE_ROWS: usize = 128;
/// A matrix with fewer weights is converted on one thread.
const MIN_PARALLEL_WEIGHTS: usize = 1 << 18;

/// The codes of a matrix `[rows, cols]`. Words have 32 bits.
pub(super) enum Codes<'c> {
    /// `[cols / per, rows]` words, each of `per` columns.
    Down { words: &'c [u8], bits: u32 },
    /// `[rows, cols / per]` words, each of `per` columns.
    Along { words: &'c [u8], bits: u32 },
    /// `[cols, rows / 8]` words, each of eight rows in AWQ's order.
    Awq { words: &'c [u8] },
    /// Signed bytes.
    Bytes(&'c [u8]),
    /// E4M3.
    Floats(&'c [u8]),
}

/// The zero points of groups, for a matrix of some rows.
pub(super) enum Zeros<'c> {
    /// `[groups, rows / per]` words, each of `per` rows.
    Across { words: &'c [u8], bits: u32, is_v1: bool },
    /// `[rows / per, groups]` words, each of `per` rows.
    Down { words: &'c [u8], bits: u32 },
    /// `[groups, rows / 8]` words, each of eight rows in AWQ's order.
    Awq { words: &'c [u8] },
    /// Signed bytes, one for each scale.
    Bytes(&'c [u8]),
}

/// What the tensors of a module say.
pub(super) struct ModuleParts<'c> {
    /// For people: `GPTQ int4`.
    pub stored_as: String,
    pub codes: Codes<'c>,
    /// `[lines, groups]`, or `[groups, lines]` if `is_turned`. A line is a number of rows.
    pub scales: HostTensor<'c>,
    pub is_turned: bool,
    /// `None`: all are in the middle.
    pub zeros: Option<Zeros<'c>>,
    /// All zero points should be in the middle.
    pub symmetric: bool,
    pub span: ScaleSpan,
    /// The piece with the group of each column, and its numbers. Without it, groups are neighbours.
    pub g_idx: Option<(&'static str, &'c [u8])>,
}

/// A quantised matrix `[rows, cols]`.
pub struct QuantModule<'c> {
    name: String,
    /// The full names of the stored tensors.
    tensors: Vec<String>,
    parts: ModuleParts<'c>,
    rows: usize,
    cols: usize,
    /// The group of each column, if groups are not neighbours.
    group_of: Option<Vec<usize>>,
    format: WeightFormat,
}

/// Scales and zero points by line and group.
struct ScaleGrid {
    /// `[lines, groups]`
    scales: Vec<f32>,
    /// As the scales. Codes and zero points are from 0.
    zeros: Vec<i16>,
    groups: usize,
    line_rows: usize,
}

/// The word number `index`.
fn word(words: &[u8], index: usize) -> u32 {
    let at = &words[4 * index..];
    u32::from_le_bytes([at[0], at[1], at[2], at[3]])
}

/// The number at `place` of a word.
fn unpack(word: u32, place: usize, bits: u32) -> u8 {
    (word >> (place as u32 * bits) & ((1 << bits) - 1)) as u8
}

/// All numbers of a word, as bytes from the lowest on.
fn unpack_all(word: u32, bits: u32) -> u64 {
    let word = u64::from(word);
    if bits == 8 {
        return word;
    }
    let halves = (word | word << 16) & 0x0000_ffff_0000_ffff;
    let bytes = (halves | halves << 8) & 0x00ff_00ff_00ff_00ff;
    (bytes | bytes << 4) & 0x0f0f_0f0f_0f0f_0f0f
}

/// Where AWQ puts the number of each of eight rows.
const AWQ_PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

impl Codes<'_> {
    /// Bits of a code; `None` for floats.
    fn bits(&self) -> Option<u32> {
        match self {
            Self::Down { bits, .. } | Self::Along { bits, .. } => Some(*bits),
            Self::Awq { .. } => Some(4),
            Self::Bytes(_) => Some(8),
            Self::Floats(_) => None,
        }
    }

    /// The codes of a row from column `first`, which is a multiple of [`BLOCK`], in a matrix `[rows, cols]`. Signed
    /// bytes are moved to 0 to 255. Of floats, the stored bytes.
    fn read(&self, [rows, cols]: [usize; 2], row: usize, first: usize, out: &mut [u8]) {
        match self {
            Self::Down { words, bits } => {
                let per_word = 32 / *bits as usize;
                for (index, codes) in out.chunks_mut(per_word).enumerate() {
                    let word = word(words, (first / per_word + index) * rows + row);
                    codes.copy_from_slice(&unpack_all(word, *bits).to_le_bytes()[..codes.len()]);
                }
            }
            Self::Along { words, bits } => {
                let per_word = 32 / *bits as usize;
                let start = row * cols.div_ceil(per_word) + first / per_word;
                for (index, codes) in out.chunks_mut(per_word).enumerate() {
                    let word = word(words, start + index);
                    codes.copy_from_slice(&unpack_all(word, *bits).to_le_bytes()[..codes.len()]);
                }
            }
            Self::Awq { words } => {
                for (index, code) in out.iter_mut().enumerate() {
                    *code = unpack(word(words, (first + index) * (rows / 8) + row / 8), AWQ_PLACES[row % 8], 4);
                }
            }
            Self::Bytes(bytes) => {
                let bytes = &bytes[row * cols + first..][..out.len()];
                out.iter_mut().zip(bytes).for_each(|(code, byte)| *code = byte ^ 128);
            }
            Self::Floats(bytes) => out.copy_from_slice(&bytes[row * cols + first..][..out.len()]),
        }
    }
}

impl Zeros<'_> {
    /// The zero point of a group in a line; there are `lines` lines of `groups` groups.
    fn get(&self, [lines, groups]: [usize; 2], line: usize, group: usize) -> i16 {
        i16::from(match self {
            Self::Across { words, bits, is_v1 } => {
                let per_word = 32 / *bits as usize;
                let stored = word(words, group * (lines / per_word) + line / per_word);
                // A one in each place.
                let ones = u32::MAX / ((1 << bits) - 1);
                let word = if *is_v1 { stored.wrapping_add(ones) } else { stored };
                unpack(word, line % per_word, *bits)
            }
            Self::Down { words, bits } => {
                let per_word = 32 / *bits as usize;
                unpack(word(words, line / per_word * groups + group), line % per_word, *bits)
            }
            Self::Awq { words } => unpack(word(words, group * (lines / 8) + line / 8), AWQ_PLACES[line % 8], 4),
            Self::Bytes(bytes) => bytes[line * groups + group] ^ 128,
        })
    }
}

impl<'c> QuantModule<'c> {
    /// A module whose `parts` have the right sizes. `names` are the pieces that it may have.
    pub(super) fn new(
        pieces: &ModulePieces<'c, '_>,
        parts: ModuleParts<'c>,
        names: &[&str],
    ) -> Result<Self, StartError> {
        let shape = pieces.shape();
        let [rows, cols] = shape;
        let span_cols = parts.span.sizes(shape)[1];
        let groups = cols.div_ceil(span_cols);
        let mut group_of = None;
        if let Some((piece, numbers)) = parts.g_idx {
            let numbers = numbers.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes));
            let group = |number: i32| {
                usize::try_from(number).ok().filter(|group| *group < groups).ok_or_else(|| {
                    pieces.error(piece, format!("a column belongs to group {number}, and there are {groups} groups"))
                })
            };
            let listed = numbers.map(group).collect::<Result<Vec<_>, _>>()?;
            let is_in_order = listed.iter().enumerate().all(|(col, group)| *group == col / span_cols);
            group_of = (!is_in_order).then_some(listed);
        }
        let tensors =
            names.iter().filter(|piece| pieces.get(piece).is_some()).map(|piece| pieces.name(piece)).collect();
        // `held_in` decides.
        let format = DType::F32.into();
        Ok(Self { name: pieces.name.to_string(), tensors, parts, rows, cols, group_of, format })
    }

    /// Decides the format after the conversion: a format of blocks if it can hold the weights, or else `dtype`.
    pub(super) fn held_in(mut self, dtype: DType) -> Self {
        let span_cols = self.parts.span.sizes([self.rows, self.cols])[1];
        let fits_blocks = self.cols.is_multiple_of(BLOCK)
            && (span_cols.is_multiple_of(BLOCK) || span_cols >= self.cols)
            && self.group_of.is_none();
        self.format = match (self.parts.codes.bits(), self.parts.symmetric) {
            (Some(4), true) if fits_blocks => WeightFormat::Quantized(QuantFormat::Q4_0),
            (Some(4), false) if fits_blocks => WeightFormat::Quantized(QuantFormat::Q4_1),
            (Some(8), true) if fits_blocks => WeightFormat::Quantized(QuantFormat::Q8_0),
            _ => dtype.into(),
        };
        self
    }

    /// Keeps E4M3 as it is, if blocks of [`FP8_BLOCK_WEIGHTS`] can hold the weights.
    pub fn keep_fp8(mut self) -> Self {
        let span_cols = self.parts.span.sizes([self.rows, self.cols])[1];
        let fits_blocks = self.cols.is_multiple_of(FP8_BLOCK_WEIGHTS)
            && (span_cols.is_multiple_of(FP8_BLOCK_WEIGHTS) || span_cols >= self.cols)
            && self.group_of.is_none();
        if matches!(self.parts.codes, Codes::Floats(_)) && fits_blocks {
            self.format = WeightFormat::Fp8;
        }
        self
    }

    /// The full names of the stored tensors.
    pub fn tensors(&self) -> &[String] {
        &self.tensors
    }

    /// For people: `GPTQ int4`.
    pub fn stored_as(&self) -> String {
        let order = if self.group_of.is_some() { ", act-order" } else { "" };
        format!("{}{order}", self.parts.stored_as)
    }

    pub fn format(&self) -> WeightFormat {
        self.format
    }

    pub fn num_weights(&self) -> usize {
        self.rows * self.cols
    }

    /// Bytes after the conversion.
    pub fn held_bytes(&self) -> usize {
        self.rows * self.row_bytes()
    }

    fn row_bytes(&self) -> usize {
        self.format.row_bytes(self.cols).expect("blocks fill the rows of a format that was chosen for them")
    }

    /// Converts the matrix to [`QuantModule::format`].
    pub fn convert(&self) -> Result<Vec<u8>, StartError> {
        let grid = self.grid()?;
        let row_bytes = self.row_bytes();
        let mut bytes = vec![0; self.held_bytes()];
        let threads = thread::available_parallelism().map_or(1, |threads| threads.get());
        let threads = if self.num_weights() < MIN_PARALLEL_WEIGHTS { 1 } else { threads };
        let rows = self.rows.div_ceil(threads).next_multiple_of(TILE_ROWS);
        thread::scope(|scope| {
            let mut runs = bytes.chunks_mut(rows * row_bytes).enumerate();
            let first = runs.next();
            for (index, run) in runs {
                let grid = &grid;
                scope.spawn(move || self.convert_rows(grid, index * rows, run));
            }
            first.into_iter().for_each(|(_, run)| self.convert_rows(&grid, 0, run));
        });
        Ok(bytes)
    }

    /// Scales and zero points, which are checked.
    fn grid(&self) -> Result<ScaleGrid, StartError> {
        let shape = [self.rows, self.cols];
        let [line_rows, span_cols] = self.parts.span.sizes(shape);
        let (lines, groups) = (self.rows.div_ceil(line_rows), self.cols.div_ceil(span_cols));
        let stored = self.parts.scales.to_f32();
        let at = |line: usize, group: usize| {
            stored[if self.parts.is_turned { group * lines + line } else { line * groups + group }]
        };
        let places = || (0..lines).flat_map(|line| (0..groups).map(move |group| (line, group)));
        let scales: Vec<f32> = places().map(|(line, group)| at(line, group)).collect();
        let is_in_blocks = matches!(self.format, WeightFormat::Quantized(_));
        let fits = |scale: &f32| if is_in_blocks { f16::from_f32(*scale).is_finite() } else { scale.is_finite() };
        if let Some(scale) = scales.iter().find(|scale| !fits(scale)) {
            let holds = if is_in_blocks { "float16, in which blocks hold scales, cannot hold" } else { "is no number" };
            return Err(self.error(format!("a scale is {scale}, which {holds}")));
        }
        let middle = self.parts.codes.bits().map_or(0, |bits| 1 << (bits - 1));
        let zero =
            |(line, group)| self.parts.zeros.as_ref().map_or(middle, |zeros| zeros.get([lines, groups], line, group));
        let zeros: Vec<i16> = places().map(zero).collect();
        if self.parts.symmetric
            && let Some(zero) = zeros.iter().find(|zero| **zero != middle)
        {
            let problem = format!("a zero point is {zero}, but symmetric weights have {middle} as zero point");
            return Err(self.error(problem));
        }
        Ok(ScaleGrid { scales, zeros, groups, line_rows })
    }

    fn error(&self, problem: String) -> StartError {
        StartError::new(format!("the quantised weights of {}: {problem}", self.name))
    }

    /// The group of a column, and the first column after it that may belong to another one.
    fn group(&self, col: usize) -> (usize, usize) {
        match &self.group_of {
            Some(groups) => (groups[col], col + 1),
            None => {
                let size = self.parts.span.sizes([self.rows, self.cols])[1];
                (col / size, (col / size + 1).saturating_mul(size))
            }
        }
    }

    /// Converts the rows from `first` on into `out`.
    fn convert_rows(&self, grid: &ScaleGrid, first: usize, out: &mut [u8]) {
        let row_bytes = self.row_bytes();
        let step = if self.format == WeightFormat::Fp8 { FP8_BLOCK_WEIGHTS } else { BLOCK };
        let mut codes = [0; FP8_BLOCK_WEIGHTS];
        for (tile, rows) in out.chunks_mut(TILE_ROWS * row_bytes).enumerate() {
            for col in (0..self.cols).step_by(step) {
                let codes = &mut codes[..step.min(self.cols - col)];
                for (index, row_out) in rows.chunks_exact_mut(row_bytes).enumerate() {
                    let row = first + tile * TILE_ROWS + index;
                    self.parts.codes.read([self.rows, self.cols], row, col, codes);
                    let line = row / grid.line_rows * grid.groups;
                    match self.format {
                        WeightFormat::Plain(dtype) => {
                            let out = &mut row_out[col * dtype.size_bytes()..][..codes.len() * dtype.size_bytes()];
                            self.write_plain(grid, line, col, codes, dtype, out);
                        }
                        WeightFormat::Quantized(format) => {
                            let at = line + self.group(col).0;
                            let block = &mut row_out[col / BLOCK * format.block_bytes()..][..format.block_bytes()];
                            write_block(format, grid.scales[at], grid.zeros[at], codes, block);
                        }
                        WeightFormat::Fp8 => {
                            let block = &mut row_out[col / FP8_BLOCK_WEIGHTS * FP8_BLOCK_BYTES..][..FP8_BLOCK_BYTES];
                            fp8::write_block(grid.scales[line + self.group(col).0], codes, block);
                        }
                    }
                }
            }
        }
    }

    /// Writes the weights of codes from column `first` on. The groups of the line begin at `line` of the grid.
    fn write_plain(&self, grid: &ScaleGrid, line: usize, first: usize, codes: &[u8], dtype: DType, out: &mut [u8]) {
        let is_float = self.parts.codes.bits().is_none();
        let mut values = [0.0; BLOCK];
        let values = &mut values[..codes.len()];
        let (mut col, end) = (first, first + codes.len());
        while col < end {
            let (group, next) = self.group(col);
            let (scale, zero) = (grid.scales[line + group], grid.zeros[line + group]);
            let run = col - first..next.min(end) - first;
            let run = values[run.clone()].iter_mut().zip(&codes[run]);
            if is_float {
                run.for_each(|(value, code)| *value = scale * E4M3_VALUES[usize::from(*code)]);
            } else {
                run.for_each(|(value, code)| *value = scale * f32::from(i16::from(*code) - zero));
            }
            col = next;
        }
        dtype.encode_to(values.iter().copied(), out);
    }
}

/// Writes a block of Q4_0, Q4_1 or Q8_0. The minimum of Q4_1 is what code 0 stands for.
fn write_block(format: QuantFormat, scale: f32, zero: i16, codes: &[u8], block: &mut [u8]) {
    let scale = f16::from_f32(scale);
    block[..2].copy_from_slice(&scale.to_le_bytes());
    let codes_at = match format {
        QuantFormat::Q4_1 => {
            block[2..4].copy_from_slice(&f16::from_f32(-scale.to_f32() * f32::from(zero)).to_le_bytes());
            4
        }
        _ => 2,
    };
    let out = &mut block[codes_at..];
    if format == QuantFormat::Q8_0 {
        out.iter_mut().zip(codes).for_each(|(out, code)| *out = code ^ 128);
    } else {
        let (low, high) = codes.split_at(BLOCK / 2);
        out.iter_mut().zip(low.iter().zip(high)).for_each(|(out, (low, high))| *out = low | high << 4);
    }
}

#[cfg(test)]
mod tests;
