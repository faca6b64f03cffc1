//! Tables and charts of what was found, beside the claims.

mod measured;
mod memory;
mod part;
mod serving;

use super::results::PaperResults;
pub use part::{ReportPart, ReportSection};

/// Those of which something was run.
pub fn sections(results: &PaperResults) -> Vec<ReportSection> {
    let all = [
        serving::throughput(results),
        serving::latency(results),
        memory::memory(results),
        memory::sharing(results),
        memory::ablations(results),
        measured::section(results),
        serving::constants(results),
    ];
    all.into_iter().flatten().collect()
}
