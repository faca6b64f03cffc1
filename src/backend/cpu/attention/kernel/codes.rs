//! K and V of a tile from a KV cache of codes, and the attention over codes of one byte in float32.

use super::super::super::kv_codes;
use super::super::super::simd::{LANES, Simd};
use super::super::code_groups::{self, GatheredGroup, GroupCodes};
use super::super::unit::TILE;
use super::UnitKernel;
use super::elements::{ByteCode, Fp8Code, Int8Code};
use crate::CodeType;

/// The groups of a tile.
pub(super) type TileCodes = [GroupCodes; TILE / LANES];

// SAFETY (all blocks in this impl): as in `super`. What the scratch memory has is said in `CodesScratch`.
impl UnitKernel<'_> {
    /// Reads the codes of positions `from..to` of a tile as float32, without their scales. Returns where these are.
    #[inline(always)]
    pub(super) unsafe fn load_codes<S: Simd>(
        &self,
        simd: S,
        code_type: CodeType,
        tile: usize,
        (from, to): (usize, usize),
    ) -> TileCodes {
        unsafe {
            let codes = self.find(tile, from, to);
            let ahead = self.find_ahead(tile, to, codes);
            match code_type {
                CodeType::Int8 => self.widen::<S, Int8Code>(simd, &codes, &ahead),
                CodeType::Fp8 => self.widen::<S, Fp8Code>(simd, &codes, &ahead),
                CodeType::Int4 => unreachable!("codes of 4 bits are multiplied as integers"),
            }
            codes
        }
    }

    /// Finds K and V of positions `from..to` in a tile. The tile's other positions have codes and scales of any bits.
    #[inline(always)]
    pub(super) unsafe fn find(&self, tile: usize, from: usize, to: usize) -> TileCodes {
        let start = tile * TILE;
        let (from, to) = (from.max(start), to.min(start + TILE));
        let seen = (from - start) / LANES..(to - start).div_ceil(LANES);
        let Self { call, unit, scratch, .. } = self;
        let group = |index: usize| {
            let first = start + index * LANES;
            let seen = from.max(first)..to.min(first + LANES);
            let codes = scratch.codes.groups.wrapping_add(2 * index * LANES * code_groups::code_bytes(call));
            let gathered = GatheredGroup { codes, scales: scratch.codes.scales.wrapping_add(2 * index * LANES) };
            unsafe { code_groups::find(call, unit, first, seen, gathered) }
        };
        let (first, last) = (group(seen.start), group(seen.end - 1));
        [first, last]
    }

    /// The groups of the next tile, to be prefetched; those of this one if there is none, or if the cache is in rows.
    #[inline(always)]
    pub(super) unsafe fn find_ahead(&self, tile: usize, to: usize, codes: TileCodes) -> TileCodes {
        if (tile + 1) * TILE < to && kv_codes::in_groups(&self.call.kv.layout) {
            unsafe { self.find(tile + 1, (tile + 1) * TILE, to) }
        } else {
            codes
        }
    }

    /// Reads the codes of a tile as float32, without their scales, and prefetches those of `ahead`.
    #[inline(always)]
    unsafe fn widen<S: Simd, C: ByteCode>(&self, simd: S, codes: &TileCodes, ahead: &TileCodes) {
        let (head_dim, dim) = (self.call.shape.head_dim, self.call.padded_dim());
        unsafe {
            for (half, (group, ahead)) in codes.iter().zip(ahead).enumerate() {
                for d in (0..head_dim).step_by(4) {
                    let four = simd.load_ints(group.keys.add(d * LANES));
                    simd.prefetch(ahead.keys.wrapping_add(d * LANES));
                    for i in 0..4 {
                        let to = self.scratch.keys.add((d + i) * TILE + half * LANES);
                        simd.store(to, C::widen(simd, four, i as u32));
                    }
                }
                for slot in (0..LANES).step_by(4) {
                    for d in (0..dim).step_by(LANES) {
                        let at = slot * head_dim + 4 * d;
                        let four = simd.load_ints(group.values.add(at));
                        simd.prefetch(ahead.values.wrapping_add(at));
                        for i in 0..4 {
                            let to = self.scratch.values.add((half * LANES + slot + i) * dim + d);
                            simd.store(to, C::widen(simd, four, i as u32));
                        }
                    }
                }
            }
        }
    }

    /// Multiplies the numbers of the tile's positions, of all queries, by the scales of K or of V.
    #[inline(always)]
    pub(super) unsafe fn scale<S: Simd>(&self, simd: S, scales: [*const u16; TILE / LANES]) {
        unsafe {
            let scales = [simd.load_bf16(scales[0]), simd.load_bf16(scales[1])];
            for i in 0..self.num_queries() {
                let at = self.scratch.weights.add(i * TILE);
                simd.store(at, simd.mul(simd.load(at), scales[0]));
                simd.store(at.add(LANES), simd.mul(simd.load(at.add(LANES)), scales[1]));
            }
        }
    }
}
