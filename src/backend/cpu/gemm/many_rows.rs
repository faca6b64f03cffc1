//! How products of many rows with quantised weights are computed, and how many rows are many. Every way gives the same
//! bits.

use super::super::isa::Isa;
use crate::quant::QuantFormat;
use std::sync::OnceLock;

/// How products of many rows are computed. What is best depends on the processor and the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManyRows {
    /// The fewest rows that are many. [`usize::MAX`]: products of many rows are computed like those of few.
    pub from: usize,
    /// The most rows of a register tile. It chooses among [`super::heights_of_many_rows`]. With 8, large blocks are
    /// multiplied with two panels at once for eight rows that are few, too.
    pub max_height: usize,
}

/// Where nothing was measured.
const DEFAULT: ManyRows = ManyRows { from: 32, max_height: usize::MAX };

/// What this process measured, for each instruction set and format.
static MEASURED: [[OnceLock<ManyRows>; QuantFormat::ALL.len()]; Isa::ALL.len()] =
    [const { [const { OnceLock::new() }; QuantFormat::ALL.len()] }; Isa::ALL.len()];

/// What this process measured, or a default if it did not.
pub fn many_rows(isa: Isa, format: QuantFormat) -> ManyRows {
    MEASURED[isa as usize][format as usize].get().copied().unwrap_or(DEFAULT)
}

/// The same, measured now if it was not yet.
pub fn measure_many_rows(isa: Isa, format: QuantFormat, measure: impl FnOnce() -> ManyRows) -> ManyRows {
    *MEASURED[isa as usize][format as usize].get_or_init(measure)
}
