//! What a matrix is made of, and how its columns are divided into panels.

use super::super::isa::Isa;
use super::super::memory::Arena;
use super::super::simd::LANES;
use super::super::team::Team;
use crate::HostTensor;

/// The output columns of a matrix, and the panels that they are in.
#[derive(Clone, Copy)]
pub struct Columns {
    pub n: usize,
    pub order: ColumnOrder,
}

/// Which columns a panel holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ColumnOrder {
    /// Sixteen columns after the other.
    Plain,
    /// Panels of the first half of the columns alternate with panels of the second half, so that gate and up of the
    /// same columns are side by side.
    GateUp,
}

impl Columns {
    pub fn num_panels(&self) -> usize {
        match self.order {
            ColumnOrder::Plain => self.n.div_ceil(LANES),
            ColumnOrder::GateUp => 2 * (self.n / 2).div_ceil(LANES),
        }
    }

    /// The first of a panel's columns, and how many it has.
    #[inline(always)]
    pub fn of_panel(&self, panel: usize) -> (usize, usize) {
        match self.order {
            ColumnOrder::Plain => (panel * LANES, LANES.min(self.n - panel * LANES)),
            ColumnOrder::GateUp => {
                let (half, first) = (self.n / 2, panel / 2 * LANES);
                (panel % 2 * half + first, LANES.min(half - first))
            }
        }
    }
}

/// The parts of the backend that make matrices.
#[derive(Clone, Copy)]
pub struct On<'a> {
    pub arena: &'a Arena,
    pub team: &'a Team,
    pub isa: Isa,
}

/// The part that has row `row` of a matrix, and the row within it.
pub fn find_row<'a, 'b>(parts: &'b [HostTensor<'a>], mut row: usize) -> (&'b HostTensor<'a>, usize) {
    for part in parts {
        if row < part.rows {
            return (part, row);
        }
        row -= part.rows;
    }
    unreachable!("the row is below the sum of the parts' rows")
}
