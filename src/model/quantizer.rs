//! Quantises the matrices of a plain checkpoint while it is loaded, or takes them from a file that an earlier load has
//! kept.
//!
//! The recipe is that of `llama-quantize` for a format that is not a mixture. All matrices get the format, and the
//! vocabulary product a better one. The router of experts, learned positions and everything that is no matrix stay
//! plain.

pub mod kept;

use crate::options::Quantization;
use kept::{KeptPlace, KeptWeights, KeptWriter};
use pagetide_backend::quant::QuantFormat;
use pagetide_backend::{HostTensor, QuantizeBlock, WeightFormat};
use pagetide_base::error::StartError;
use std::borrow::Cow;
use std::thread;
use std::time::{Duration, Instant};

/// Rises when the same weights get other formats or other bytes.
pub const QUANTIZER_VERSION: u32 = 1;
/// The largest number in float16. A block of weights beyond it could have no scale or minimum.
const LARGEST_WEIGHT: f32 = 65504.0;
/// A matrix with fewer weights is quantised on one thread.
const MIN_PARALLEL_WEIGHTS: usize = 1 << 16;

/// How the matrices of a checkpoint are quantised.
#[derive(Clone, Debug)]
pub struct QuantizePlan {
    pub to: Quantization,
    /// Where they are kept for the next load, and what for.
    pub place: Option<KeptPlace>,
}

/// What a matrix is for, as far as its format depends on that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixUse {
    Layer,
    /// The vocabulary product.
    Head,
    /// Never quantised: small, and results depend on it.
    Plain,
}

impl QuantizePlan {
    /// The format of a matrix with rows of `cols` weights. `None`: it stays plain.
    pub fn format(&self, matrix: MatrixUse, cols: usize) -> Option<QuantFormat> {
        let format = match self.to {
            Quantization::None => return None,
            Quantization::Q8_0 => QuantFormat::Q8_0,
            Quantization::Q4_0 => QuantFormat::Q4_0,
            Quantization::Q4_1 => QuantFormat::Q4_1,
            Quantization::Q5_0 => QuantFormat::Q5_0,
            Quantization::Q5_1 => QuantFormat::Q5_1,
            Quantization::Q4K => QuantFormat::Q4_K,
            Quantization::Q6K => QuantFormat::Q6_K,
        };
        let format = match matrix {
            MatrixUse::Plain => return None,
            MatrixUse::Head if format != QuantFormat::Q8_0 => QuantFormat::Q6_K,
            MatrixUse::Head | MatrixUse::Layer => format,
        };
        // For rows that blocks of 256 do not fill.
        let smaller = match format {
            QuantFormat::Q4_K => QuantFormat::Q5_0,
            QuantFormat::Q6_K => QuantFormat::Q8_0,
            other => other,
        };
        [format, smaller].into_iter().find(|format| format.row_bytes(cols).is_some())
    }
}

/// A load that quantises. It is asked for each matrix, in any order.
pub struct Quantizing<'a> {
    plan: &'a QuantizePlan,
    kept: Option<&'a KeptWeights>,
    /// Begins with the first matrix that is quantised. `Err`: nothing is kept.
    writer: Option<Result<KeptWriter, ()>>,
    spent: Duration,
    /// Of what was quantised, before and after.
    source_bytes: u64,
    made_bytes: u64,
}

impl<'a> Quantizing<'a> {
    /// `kept` is what an earlier load has kept for this plan.
    pub fn new(plan: &'a QuantizePlan, kept: Option<&'a KeptWeights>) -> Self {
        Self { plan, kept, writer: None, spent: Duration::ZERO, source_bytes: 0, made_bytes: 0 }
    }

    /// The format of a matrix with rows of `cols` weights. `None`: it stays plain.
    pub fn format(&self, matrix: MatrixUse, cols: usize) -> Option<QuantFormat> {
        self.plan.format(matrix, cols)
    }

    /// The weight blocks of the matrix `name`, `[rows, cols]`, in a format of [`Quantizing::format`]. `source` reads
    /// the stored elements, of type `source_format`. It is not called if the blocks have been kept. Fails if a weight
    /// is NaN, or too large for the format.
    pub fn blocks(
        &mut self,
        name: &str,
        format: QuantFormat,
        [rows, cols]: [usize; 2],
        source_format: WeightFormat,
        source: impl FnOnce() -> Cow<'a, [u8]>,
    ) -> Result<Cow<'a, [u8]>, StartError> {
        if let Some(blocks) = self.kept.and_then(|kept| kept.get(name, format, [rows, cols])) {
            return Ok(Cow::Borrowed(blocks));
        }
        let start = Instant::now();
        let stored = source();
        let source = HostTensor { format: source_format, rows, cols, bytes: &stored };
        let blocks = quantized(&source, format).ok_or_else(|| {
            StartError::new(format!(
                "model.quantization = {}: the tensor {name} has a weight that is NaN, or not between -{LARGEST_WEIGHT} \
                 and {LARGEST_WEIGHT}: {format} cannot hold it",
                self.plan.to
            ))
        })?;
        self.spent += start.elapsed();
        self.source_bytes += stored.len() as u64;
        self.made_bytes += blocks.len() as u64;
        self.keep(name, &HostTensor { format: WeightFormat::Quantized(format), rows, cols, bytes: &blocks });
        Ok(Cow::Owned(blocks))
    }

    /// A matrix has been read, so that its pages of the file need not stay in memory.
    pub fn release(&self, name: &str) {
        self.kept.iter().for_each(|kept| kept.release(name));
    }

    fn keep(&mut self, name: &str, blocks: &HostTensor<'_>) {
        // A file that was read has all matrices of its load. One without them must not replace it.
        let Some(place) = self.plan.place.as_ref().filter(|_| self.kept.is_none()) else { return };
        let writer = self.writer.get_or_insert_with(|| place.writer());
        if let Ok(open) = writer
            && let Err(error) = open.add(name, blocks)
        {
            place.warn(&error);
            *writer = Err(());
        }
    }

    /// Keeps what was quantised, and says in the log where the weights come from.
    pub fn finish(self) {
        if let Some(kept) = self.kept.filter(|_| self.made_bytes == 0) {
            tracing::info!("quantised weights are read from {} ({})", kept.path().display(), mib(kept.total_bytes()));
        }
        if self.made_bytes == 0 {
            return;
        }
        let Self { source_bytes, made_bytes, .. } = self;
        let seconds = self.spent.as_secs_f64();
        tracing::info!("weights were quantised in {seconds:.1} s: {} became {}", mib(source_bytes), mib(made_bytes));
        let (Some(Ok(writer)), Some(place)) = (self.writer, &self.plan.place) else { return };
        match writer.finish() {
            Ok(()) => tracing::info!("the next start reads them from {}", place.path.display()),
            Err(error) => place.warn(&error),
        }
    }
}

/// For people.
fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// The weight blocks of a matrix, made on all cores. `None` if it has a weight that the format cannot hold.
fn quantized(source: &HostTensor<'_>, format: QuantFormat) -> Option<Vec<u8>> {
    let (quantize, row_bytes) = (format.quantizer()?, format.row_bytes(source.cols)?);
    let mut blocks = vec![0; source.rows * row_bytes];
    let threads = if source.rows * source.cols < MIN_PARALLEL_WEIGHTS { 1 } else { num_threads() };
    let run_rows = source.rows.div_ceil(threads).max(1);
    let are_good = thread::scope(|scope| {
        let mut runs = blocks.chunks_mut((run_rows * row_bytes).max(1)).enumerate();
        let first = runs.next();
        let others: Vec<_> = runs
            .map(|(index, run)| scope.spawn(move || quantize_rows(source, index * run_rows, format, quantize, run)))
            .collect();
        let is_good = first.is_none_or(|(_, run)| quantize_rows(source, 0, format, quantize, run));
        others.into_iter().fold(is_good, |are_good, run| run.join().unwrap_or(false) && are_good)
    });
    are_good.then_some(blocks)
}

/// Quantises the rows from `first` on that fill `blocks`. Returns whether the format can hold all of their weights.
fn quantize_rows(
    source: &HostTensor<'_>,
    first: usize,
    format: QuantFormat,
    quantize: QuantizeBlock,
    blocks: &mut [u8],
) -> bool {
    let row_blocks = source.cols / format.block_weights();
    for (row, blocks) in (first..).zip(blocks.chunks_exact_mut(row_blocks * format.block_bytes())) {
        let weights = source.row_range(row..row + 1).to_f32();
        if !weights.iter().all(|weight| weight.abs() <= LARGEST_WEIGHT) {
            return false;
        }
        let weights = weights.chunks_exact(format.block_weights());
        weights
            .zip(blocks.chunks_exact_mut(format.block_bytes()))
            .for_each(|(weights, block)| quantize(weights, block));
    }
    true
}

fn num_threads() -> usize {
    thread::available_parallelism().map_or(1, |threads| threads.get())
}

#[cfg(test)]
mod tests;
