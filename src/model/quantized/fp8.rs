//! FP8 (E4M3): `weight [rows, cols]`, and `weight_scale_inv` for blocks, as DeepSeek and Qwen write it, or one
//! `weight_scale`. Both are factors on the weights.

use super::module::{Codes, ModuleParts, QuantModule};
use super::pieces::ModulePieces;
use super::scheme::ScaleSpan;
use pagetide_base::error::StartError;

/// The type in safetensors.
pub(super) const E4M3: &str = "F8_E4M3";

pub(super) fn find<'c>(
    pieces: &ModulePieces<'c, '_>,
    block: Option<[usize; 2]>,
) -> Result<Option<QuantModule<'c>>, StartError> {
    if pieces.get("weight").is_none_or(|weight| weight.type_name != E4M3) {
        return Ok(None);
    }
    let span = block.map_or(ScaleSpan::Tensor, ScaleSpan::Block);
    let scale =
        if block.is_some() || pieces.get("weight_scale_inv").is_some() { "weight_scale_inv" } else { "weight_scale" };
    let parts = ModuleParts {
        stored_as: "FP8".into(),
        codes: Codes::Floats(pieces.need("weight", E4M3, &pieces.shape())?.bytes),
        scales: pieces.scales(scale, span)?,
        is_turned: false,
        zeros: None,
        symmetric: true,
        span,
        g_idx: None,
    };
    QuantModule::new(pieces, parts, &["weight", scale]).map(Some)
}
