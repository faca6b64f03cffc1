//! Scratch memory of attention over codes.

use super::unit::{AttentionCall, TILE};
use crate::KvDType;
use crate::cpu::simd::LANES;

/// The parts of a member's scratch memory that only a KV cache of codes needs.
#[derive(Clone, Copy)]
pub(super) struct CodesScratch {
    /// `[2 groups][K, V][16 * code_bytes]`: groups that the cache stores in rows.
    pub groups: *mut u8,
    /// `[2 groups][K, V][16]` scales of these.
    pub scales: *mut u16,
    /// `[max_queries][head_dim]` of 16 bits: the integers of the queries.
    pub queries: *mut u32,
    /// `[max_queries]`: what the products of a query begin with.
    pub query_starts: *mut i32,
    /// `[max_queries]`
    pub query_scales: *mut f32,
    /// `[max_queries][TILE]` of 16 bits: the integers of the weights.
    pub weights: *mut u32,
    /// `[max_queries]`: what the weighted sums of a query begin with.
    pub weight_starts: *mut i32,
    /// `[max_queries]`: the factors of a tile on its weighted sums.
    pub weight_scales: *mut f32,
    /// `[max_queries]`: the largest scores of a tile.
    pub tile_max: *mut f32,
}

/// Words of the parts, in the order of the fields.
fn parts(call: &AttentionCall<'_>, queries: usize) -> [usize; 9] {
    let (dim, queries) = (call.shape.head_dim, queries.next_multiple_of(LANES));
    [
        4 * LANES * dim / 4,
        4 * LANES / 2,
        queries * dim / 2,
        queries,
        queries,
        queries * TILE / 2,
        queries,
        queries,
        queries,
    ]
}

impl CodesScratch {
    /// Words of 4 bytes.
    pub fn len(call: &AttentionCall<'_>, queries: usize) -> usize {
        match call.kv.layout.dtype {
            KvDType::Plain(_) => 0,
            KvDType::Codes(_) => parts(call, queries).iter().sum(),
        }
    }

    /// # Safety
    /// `at` points to [`CodesScratch::len`] words if the cache holds codes.
    pub unsafe fn at(at: *mut f32, call: &AttentionCall<'_>, queries: usize) -> Self {
        let mut next = at;
        let [groups, scales, queries, query_starts, query_scales, weights, weight_starts, weight_scales, tile_max] =
            parts(call, queries).map(|len| {
                let part = next;
                next = next.wrapping_add(len);
                part
            });
        Self {
            groups: groups.cast(),
            scales: scales.cast(),
            queries: queries.cast(),
            query_starts: query_starts.cast(),
            query_scales,
            weights: weights.cast(),
            weight_starts: weight_starts.cast(),
            weight_scales,
            tile_max,
        }
    }
}
