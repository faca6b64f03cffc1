//! compressed-tensors, as LLM Compressor writes it.
//!
//! `weight_packed [rows, cols / per]` has `per` columns of a row in a word, the first in the lowest bits. Codes are
//! signed, and stored with the middle of their range added. `weight_zero_point [rows / per, groups]` is packed along
//! the rows in the same way. Without packing, `weight [rows, cols]` has signed bytes or E4M3.

use super::fp8::E4M3;
use super::module::{Codes, ModuleParts, QuantModule, Zeros};
use super::pieces::ModulePieces;
use super::scheme::{CompressedCoding, CompressedWeights};
use crate::checkpoint::StoredTensor;
use pagetide_base::error::StartError;

const PACKED: &str = "weight_packed";
const WEIGHT: &str = "weight";
const SCALE: &str = "weight_scale";
const ZERO_POINT: &str = "weight_zero_point";
const SHAPE: &str = "weight_shape";
const GROUP_OF_COLUMN: &str = "weight_g_idx";

/// Groups of modules that a module fits store the same numbers in the same way, so the first of them is as good as any.
pub(super) fn find<'c>(
    pieces: &ModulePieces<'c, '_>,
    groups: &[CompressedWeights],
) -> Result<Option<QuantModule<'c>>, StartError> {
    let is_coded = |weight: StoredTensor<'_>| weight.type_name == E4M3 || weight.type_name == "I8";
    if pieces.get(PACKED).is_none() && !pieces.get(WEIGHT).is_some_and(is_coded) {
        return Ok(None);
    }
    let mut problems = Vec::new();
    for weights in groups {
        match of_group(pieces, weights) {
            Ok(module) => return Ok(Some(module)),
            Err(error) => problems.push(error),
        }
    }
    let only = if problems.len() == 1 { problems.pop() } else { None };
    Err(only.unwrap_or_else(|| {
        let problems: Vec<_> = problems.iter().map(StartError::to_string).collect();
        let name = pieces.name;
        let key = "quantization_config.config_groups";
        StartError::new(format!("the module {name} fits no group of {key}: {}", problems.join("; ")))
    }))
}

fn of_group<'c>(pieces: &ModulePieces<'c, '_>, weights: &CompressedWeights) -> Result<QuantModule<'c>, StartError> {
    let CompressedWeights { coding, symmetric, span } = *weights;
    let shape = pieces.shape();
    let [rows, cols] = shape;
    let groups = cols.div_ceil(span.sizes(shape)[1]);
    let has_zeros = pieces.get(ZERO_POINT).is_some();
    if !symmetric && !has_zeros {
        return Err(pieces.error(ZERO_POINT, "missing, although the weights are not symmetric"));
    }
    let (codes, zeros, stored_as) = match coding {
        CompressedCoding::Packed { bits } => {
            check_shape(pieces)?;
            let words = pieces.packed(PACKED, bits, shape, false)?;
            let zeros = match has_zeros {
                true => Some(Zeros::Down { words: pieces.packed(ZERO_POINT, bits, [groups, rows], true)?, bits }),
                false => None,
            };
            (Codes::Along { words, bits }, zeros, format!("compressed-tensors int{bits}"))
        }
        CompressedCoding::Bytes => {
            let bytes = pieces.need(WEIGHT, "I8", &shape)?.bytes;
            let zeros = pieces.optional(ZERO_POINT, "I8", &scale_shape(pieces))?.map(Zeros::Bytes);
            (Codes::Bytes(bytes), zeros, "compressed-tensors int8".into())
        }
        CompressedCoding::Floats => {
            (Codes::Floats(pieces.need(WEIGHT, E4M3, &shape)?.bytes), None, "compressed-tensors FP8".into())
        }
    };
    let scales = pieces.scales(SCALE, span)?;
    // Older versions write -1 where the order was not used.
    let is_used = |bytes: &&[u8]| bytes.iter().any(|byte| *byte != 0xff);
    let g_idx = pieces.optional(GROUP_OF_COLUMN, "I32", &[cols])?.filter(is_used);
    let g_idx = g_idx.map(|bytes| (GROUP_OF_COLUMN, bytes));
    let parts = ModuleParts { stored_as, codes, scales, is_turned: false, zeros, symmetric, span, g_idx };
    QuantModule::new(pieces, parts, &[PACKED, WEIGHT, SCALE, ZERO_POINT, SHAPE, GROUP_OF_COLUMN])
}

/// The stored shape of the scales, which is also that of zero points that are not packed.
fn scale_shape(pieces: &ModulePieces<'_, '_>) -> Vec<usize> {
    pieces.get(SCALE).map_or(Vec::new(), |scale| scale.shape.to_vec())
}

/// Packed codes do not say how many columns the last word has, so there is a tensor that does.
fn check_shape(pieces: &ModulePieces<'_, '_>) -> Result<(), StartError> {
    let stored = pieces.need(SHAPE, "I64", &[2])?;
    let found: Vec<_> = stored.bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
    if found == pieces.shape().map(|size| size as i64) {
        return Ok(());
    }
    Err(pieces.error(SHAPE, format!("says {found:?}, but config.json asks for {:?}", pieces.shape())))
}
