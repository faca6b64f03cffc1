//! The algorithms of a batch-invariant product that `invariance` has proven.

use cudarc::cublaslt::sys as lt;
use std::collections::{BTreeMap, BTreeSet};

/// The algorithms of a batch-invariant product.
#[derive(Default)]
pub struct InvariantAlgorithms {
    /// By number of rows. All of them give the same bits.
    pub proven: BTreeMap<usize, lt::cublasLtMatmulAlgo_t>,
    /// The numbers of rows that were tried, with those that failed.
    pub tried: BTreeSet<usize>,
    /// The algorithm that the bits are those of.
    pub reference: Option<lt::cublasLtMatmulAlgo_t>,
}

impl InvariantAlgorithms {
    /// The numbers of rows that `m` rows are computed in. `None` if no algorithm is proven for so few.
    pub fn pieces(&self, m: usize) -> Option<Vec<usize>> {
        let (mut rest, mut pieces) = (m, Vec::new());
        while rest > 0 {
            let (rows, _) = self.proven.range(..=rest).next_back()?;
            pieces.push(*rows);
            rest -= rows;
        }
        Some(pieces)
    }
}
