//! From how many rows on products on the CPU use the kernels for many rows.

use pagetide_backend::cpu::{self, Isa};
use pagetide_backend::quant::QuantFormat;
use pagetide_model::tally::WeightTally;
use serde::Serialize;
use std::fmt::{self, Display};

/// For each format of the model for which these are faster, as this process measured it.
#[derive(Serialize)]
#[serde(transparent)]
pub(super) struct ManyRowsOfFormats(Vec<OfFormat>);

#[derive(Serialize)]
struct OfFormat {
    format: &'static str,
    rows: usize,
}

impl ManyRowsOfFormats {
    /// `None` if there is no such format, or if there is no memory to measure it.
    pub fn measure(isa: Isa, weights: &WeightTally) -> Option<Self> {
        let of_format =
            |format| Some(OfFormat { format: QuantFormat::name(format), rows: cpu::many_rows(isa, format).ok()?.from });
        let formats: Vec<_> = weights
            .quantized_formats()
            .filter(|format| !cpu::heights_of_many_rows(isa, *format).is_empty())
            .filter_map(of_format)
            .filter(|of_format| of_format.rows != usize::MAX)
            .collect();
        (!formats.is_empty()).then_some(Self(formats))
    }
}

impl Display for ManyRowsOfFormats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "products use the kernel for many rows from")?;
        for (index, OfFormat { format, rows }) in self.0.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma} {rows} rows on in {format}")?;
        }
        Ok(())
    }
}
