//! AWQ, version `gemm`.
//!
//! `qweight [cols, rows / 8]` and `qzeros [groups, rows / 8]` have eight rows in a word, in an order of their own.
//! `scales` is `[groups, rows]`.

use super::module::{Codes, ModuleParts, QuantModule, Zeros};
use super::pieces::ModulePieces;
use super::scheme::ScaleSpan;
use pagetide_base::error::StartError;

const BITS: u32 = 4;
const PER_WORD: usize = 8;

pub(super) fn find<'c>(
    pieces: &ModulePieces<'c, '_>,
    group_size: Option<usize>,
) -> Result<Option<QuantModule<'c>>, StartError> {
    if pieces.get("qweight").is_none() {
        return Ok(None);
    }
    let [rows, cols] = pieces.shape();
    if !rows.is_multiple_of(PER_WORD) {
        return Err(pieces.error("qweight", format!("words of {PER_WORD} codes do not fill {rows} rows")));
    }
    let span = ScaleSpan::of_groups(group_size);
    let groups = cols.div_ceil(span.sizes([rows, cols])[1]);
    let parts = ModuleParts {
        stored_as: "AWQ int4".into(),
        codes: Codes::Awq { words: pieces.packed("qweight", BITS, [cols, rows], false)? },
        scales: pieces.checkpoint.tensor(&pieces.name("scales"), &[groups, rows])?,
        is_turned: true,
        zeros: Some(Zeros::Awq { words: pieces.packed("qzeros", BITS, [groups, rows], false)? }),
        symmetric: false,
        span,
        g_idx: None,
    };
    QuantModule::new(pieces, parts, &["qweight", "qzeros", "scales"]).map(Some)
}
