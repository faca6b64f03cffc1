//! A model's weight matrices, counted by the format in which a device holds them.

use pagetide_backend::cuda::held_bytes;
use pagetide_backend::quant::QuantFormat;
use pagetide_backend::{DType, WeightFormat};
use std::collections::HashMap;
use std::fmt;

/// The matrices of a model. Norms and biases are not counted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WeightTally {
    formats: HashMap<WeightFormat, FormatTally>,
}

/// The matrices in one format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FormatTally {
    /// The parts of fused matrices, and those of single experts.
    pub matrices: usize,
    pub weights: u64,
    pub bytes: u64,
}

impl WeightTally {
    /// Counts a matrix of `rows` rows with `cols` weights each.
    pub(crate) fn add(&mut self, format: WeightFormat, rows: usize, cols: usize) {
        let counted = self.formats.entry(format).or_default();
        counted.matrices += 1;
        counted.weights += rows as u64 * cols as u64;
        counted.bytes += format.row_bytes(cols).unwrap_or(0) as u64 * rows as u64;
    }

    /// The same matrices as a GPU holds them, for a model of type `dtype`.
    pub(crate) fn on_gpu(&self, dtype: DType) -> Self {
        let mut held = Self::default();
        for (format, counted) in &self.formats {
            let bytes = held_bytes(*format, dtype, counted.weights);
            let to = if bytes.is_some() { *format } else { dtype.into() };
            let all = held.formats.entry(to).or_default();
            all.matrices += counted.matrices;
            all.weights += counted.weights;
            all.bytes += bytes.unwrap_or(counted.weights * dtype.size_bytes() as u64);
        }
        held
    }

    /// Bytes of all matrices.
    pub(crate) fn bytes(&self) -> u64 {
        self.formats.values().map(|counted| counted.bytes).sum()
    }

    /// The number of weights of all matrices.
    pub(crate) fn weights(&self) -> u64 {
        self.formats.values().map(|counted| counted.weights).sum()
    }

    /// Whether any matrix is quantised.
    pub fn has_quantized(&self) -> bool {
        self.formats.keys().any(|format| !matches!(format, WeightFormat::Plain(_)))
    }

    /// The formats of the quantised matrices, in ggml's order.
    pub fn quantized_formats(&self) -> impl Iterator<Item = QuantFormat> {
        QuantFormat::ALL.iter().copied().filter(|format| self.formats.contains_key(&WeightFormat::Quantized(*format)))
    }

    pub fn is_empty(&self) -> bool {
        self.formats.is_empty()
    }

    /// The names of the formats with what is in them, most bytes first.
    pub fn formats(&self) -> Vec<(&'static str, FormatTally)> {
        let mut formats: Vec<_> = self.formats.iter().map(|(format, counted)| (format.name(), *counted)).collect();
        formats.sort_unstable_by_key(|(name, counted)| (std::cmp::Reverse(counted.bytes), *name));
        formats
    }
}

impl fmt::Display for WeightTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, FormatTally { matrices, bytes, .. })) in self.formats().into_iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            let plural = if matrices == 1 { "matrix" } else { "matrices" };
            write!(f, "{comma}{name} {matrices} {plural} {:.1} MiB", bytes as f64 / f64::from(1 << 20))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_backend::quant::QuantFormat;

    #[test]
    fn matrices_are_counted_by_format() {
        let mut tally = WeightTally::default();
        assert!(tally.is_empty() && tally.on_gpu(DType::F16).is_empty() && tally.to_string().is_empty());
        tally.add(DType::BF16.into(), 1024, 1024);
        assert!(!tally.has_quantized());
        let mut fp8 = tally.clone();
        fp8.add(WeightFormat::Fp8, 64, 64);
        assert!(fp8.has_quantized());
        for _ in 0..3 {
            tally.add(WeightFormat::Quantized(QuantFormat::Q8_0), 1024, 2048);
        }
        assert!(tally.has_quantized());
        assert_eq!(tally.to_string(), "Q8_0 3 matrices 6.4 MiB, bfloat16 1 matrix 2.0 MiB");
        assert_eq!(tally.on_gpu(DType::F32).to_string(), "float32 4 matrices 28.0 MiB");
        assert_eq!(tally.on_gpu(DType::BF16).to_string(), "Q8_0 3 matrices 6.4 MiB, bfloat16 1 matrix 2.0 MiB");
        tally.add(WeightFormat::Fp8, 1024, 1024);
        assert!(tally.on_gpu(DType::BF16).to_string().ends_with(", FP8 1 matrix 1.1 MiB"), "8.5 bits of a weight");
        tally.add(WeightFormat::Quantized(QuantFormat::Q6_K), 1024, 1024);
        assert!(tally.on_gpu(DType::BF16).to_string().ends_with("Q6_K 1 matrix 0.9 MiB"), "7 bits of a weight");
    }
}
