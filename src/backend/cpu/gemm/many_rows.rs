//! From how many rows on a product with quantised weights takes a panel apart once for all of them. Both ways give the
//! same bits.

use super::super::isa::Isa;
use crate::quant::QuantFormat;
use std::sync::OnceLock;

/// Where nothing was measured.
const DEFAULT: usize = 32;

/// What this process measured, for each instruction set and format.
static MEASURED: [[OnceLock<usize>; QuantFormat::ALL.len()]; Isa::ALL.len()] =
    [const { [const { OnceLock::new() }; QuantFormat::ALL.len()] }; Isa::ALL.len()];

/// The fewest rows for which panels in this format are taken apart.
pub fn many_rows(isa: Isa, format: QuantFormat) -> usize {
    MEASURED[isa as usize][format as usize].get().copied().unwrap_or(DEFAULT)
}

/// The same, measured now if it was not yet.
pub fn measure_many_rows(isa: Isa, format: QuantFormat, measure: impl FnOnce() -> usize) -> usize {
    *MEASURED[isa as usize][format as usize].get_or_init(measure)
}
