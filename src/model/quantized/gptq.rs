//! GPTQ, as GPTQModel and AutoGPTQ write it.
//!
//! `qweight [cols / per, rows]` has `per` columns of a row in a word, the first in the lowest bits. `qzeros
//! [groups, rows / per]` has zero points of `per` rows. `scales` is `[groups, rows]`, and `g_idx [cols]` has the
//! group of each column. Version 1 was written by subtracting 1 from each zero point of a word, all at once.

use super::module::{Codes, ModuleParts, QuantModule, Zeros};
use super::pieces::ModulePieces;
use super::scheme::{GptqScheme, ScaleSpan};
use pagetide_base::error::StartError;

pub(super) fn find<'c>(
    pieces: &ModulePieces<'c, '_>,
    scheme: &GptqScheme,
) -> Result<Option<QuantModule<'c>>, StartError> {
    let GptqScheme { bits, group_size, symmetric, desc_act, is_v1 } = *scheme;
    if pieces.get("qweight").is_none() {
        return Ok(None);
    }
    let [rows, cols] = pieces.shape();
    let per_word = 32 / bits as usize;
    if !rows.is_multiple_of(per_word) || !cols.is_multiple_of(per_word) {
        return Err(pieces.error("qweight", format!("words of {per_word} codes do not fill [{rows}, {cols}]")));
    }
    let span = ScaleSpan::of_groups(group_size);
    let groups = cols.div_ceil(span.sizes([rows, cols])[1]);
    let words = pieces.packed("qweight", bits, [rows, cols], true)?;
    let zeros = Zeros::Across { words: pieces.packed("qzeros", bits, [groups, rows], false)?, bits, is_v1 };
    let scales = pieces.checkpoint.tensor(&pieces.name("scales"), &[groups, rows])?;
    if desc_act && pieces.get("g_idx").is_none() {
        return Err(pieces.error("g_idx", "missing, although quantization_config.desc_act is true"));
    }
    let g_idx = pieces.optional("g_idx", "I32", &[cols])?.map(|bytes| ("g_idx", bytes));
    let parts = ModuleParts {
        stored_as: format!("GPTQ int{bits}"),
        codes: Codes::Down { words, bits },
        scales,
        is_turned: true,
        zeros: Some(zeros),
        symmetric,
        span,
        g_idx,
    };
    QuantModule::new(pieces, parts, &["qweight", "qzeros", "scales", "g_idx"]).map(Some)
}
