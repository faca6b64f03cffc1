//! Groups of 16 positions in a KV cache of codes: where they lie, and what integers they are multiplied with.

use super::unit::{AttentionCall, AttentionUnit};
use crate::KvDType;
use crate::cpu::kv_codes;
use crate::cpu::simd::LANES;
use std::ops::Range;

/// A query is a scale times integers of two digits, `QUERY_BASE · high + low`, with digits from -127 to 127.
pub(super) const QUERY_BASE: f32 = 254.0;
pub(super) const LARGEST_QUERY: f32 = 127.0 * QUERY_BASE;
/// Smaller numbers count as 0: the inverse of their scale would not be a float32.
pub(super) const SMALLEST: f32 = 1e-30;

/// Where the codes and scales of 16 positions lie.
#[derive(Clone, Copy)]
pub(super) struct GroupCodes {
    /// `[code_bytes / 4][16 positions][4 bytes]`
    pub keys: *const u8,
    /// `[4][code_bytes][4 positions]`
    pub values: *const u8,
    /// `[16]` of bfloat16
    pub key_scales: *const u16,
    /// `[16]` of bfloat16
    pub value_scales: *const u16,
}

/// Memory for a group that the cache stores in rows.
#[derive(Clone, Copy)]
pub(super) struct GatheredGroup {
    /// `[K, V][16 * code_bytes]` codes
    pub codes: *mut u8,
    /// `[K, V][16]` scales
    pub scales: *mut u16,
}

/// Bytes of the codes of a vector of the call's cache, which holds codes.
#[inline(always)]
pub(super) fn code_bytes(call: &AttentionCall<'_>) -> usize {
    let dim = call.shape.head_dim;
    match call.kv.layout.dtype {
        KvDType::Codes(codes) => codes.code_bytes(dim),
        KvDType::Plain(_) => dim,
    }
}

/// Finds the group that begins at position `first`, of which the positions `seen` are used. If the cache is in rows,
/// they are laid out in `to`, and the other positions are copies of them. Otherwise these have codes and scales of any
/// bits.
///
/// # Safety
/// The unit's block table fits the call's cache of codes and has the positions `seen`. Nothing else uses `to`.
#[inline(always)]
pub(super) unsafe fn find(
    call: &AttentionCall<'_>,
    unit: &AttentionUnit,
    first: usize,
    seen: Range<usize>,
    to: GatheredGroup,
) -> GroupCodes {
    if kv_codes::in_groups(&call.kv.layout) {
        return codes_of(call, unit, first);
    }
    let len = code_bytes(call);
    // SAFETY: the caller's promise; slots are below 16 and bytes below those of a vector.
    unsafe {
        let (keys, values) = (to.codes, to.codes.add(LANES * len));
        let (key_scales, value_scales) = (to.scales, to.scales.add(LANES));
        for i in 0..LANES {
            let position = (first + i).clamp(seen.start, seen.end - 1);
            let of = codes_of(call, unit, position);
            for quad in 0..len / 4 {
                let to = keys.add((quad * LANES + i) * 4).cast::<[u8; 4]>();
                to.write_unaligned(of.keys.add(4 * quad).cast::<[u8; 4]>().read_unaligned());
            }
            *key_scales.add(i) = of.key_scales.read_unaligned();
            let to = values.add(i / 4 * 4 * len + i % 4);
            for byte in 0..len {
                *to.add(4 * byte) = *of.values.add(byte);
            }
            *value_scales.add(i) = of.value_scales.read_unaligned();
        }
        GroupCodes { keys, values, key_scales, value_scales }
    }
}

/// The codes and scales of a position's K and V. The codes are a row if the cache is not in groups.
#[inline(always)]
fn codes_of(call: &AttentionCall<'_>, unit: &AttentionUnit, position: usize) -> GroupCodes {
    let (kv, layout) = (call.kv, &call.kv.layout);
    let (block_size, len) = (layout.block_size, code_bytes(call));
    let table = &call.batch.block_tables[unit.seq.first_block..][..unit.seq.num_blocks];
    let (block, slot) = (position / block_size, position % block_size);
    let block = kv.device.as_ptr().wrapping_add(table[block] as usize * layout.block_bytes());
    let keys = block.wrapping_add(kv.head_offset(call.layer, false, unit.kv_head));
    let values = block.wrapping_add(kv.head_offset(call.layer, true, unit.kv_head));
    GroupCodes {
        keys: keys.wrapping_add(slot * len),
        values: values.wrapping_add(slot * len),
        key_scales: keys.wrapping_add(block_size * len).cast::<u16>().wrapping_add(slot),
        value_scales: values.wrapping_add(block_size * len).cast::<u16>().wrapping_add(slot),
    }
}
