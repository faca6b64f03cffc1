//! Every claim beside what is found here: claimed, ours, how, and a sentence where they differ.

mod measured;
mod memory;
mod row;
mod serving;

use super::results::PaperResults;
pub use row::{ClaimRow, ClaimVerdict};

/// All of them, in the order of the paper's topics. None is left out, whatever was run.
pub fn rows(results: &PaperResults) -> Vec<ClaimRow> {
    [serving::rows(results), memory::rows(results), measured::rows(results)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_claim_has_a_row_even_if_nothing_was_run() {
        let rows = rows(&PaperResults::default());
        assert!(rows.len() >= 45, "{}", rows.len());
        for row in &rows {
            assert_eq!((row.verdict, row.ours.as_str()), (ClaimVerdict::NotRun, "not run"), "{}", row.claim);
            assert!(!row.how.is_empty() && !row.source.is_empty() && !row.claimed.is_empty(), "{row:?}");
        }
        let mut claims: Vec<_> = rows.iter().map(|row| &row.claim).collect();
        claims.sort();
        claims.dedup();
        assert_eq!(claims.len(), rows.len(), "a claim stands twice");
    }
}
