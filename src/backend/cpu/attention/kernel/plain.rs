//! K and V of a tile from a KV cache of floating-point numbers.

// Indices name registers here, as in `super`.
#![allow(clippy::needless_range_loop)]

use super::super::super::simd::{LANES, Simd};
use super::super::groups::{self, GROUP};
use super::super::unit::TILE;
use super::UnitKernel;
use super::elements::{CacheBf16, CacheElement, CacheF16, CacheF32};
use crate::DType;

// SAFETY (all blocks in this impl): as in `super`.
impl UnitKernel<'_> {
    /// Reads K and V of positions `from..to` of a tile as float32. What the tile has at other positions is excluded by
    /// the masks.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(&self, simd: S, dtype: DType, tile: usize, (from, to): (usize, usize)) {
        // SAFETY (all): the caller's promise.
        unsafe {
            match dtype {
                DType::F32 => self.load_rows::<S, CacheF32>(simd, tile, from, to),
                DType::F16 => self.load_rows::<S, CacheF16>(simd, tile, from, to),
                DType::BF16 if self.call.kv.grouped => self.load_groups(simd, tile, from, to),
                DType::BF16 => self.load_rows::<S, CacheBf16>(simd, tile, from, to),
            }
        }
    }

    /// From elements that are each stored by itself. The tile's other positions are filled with copies of these.
    #[inline(always)]
    unsafe fn load_rows<S: Simd, E: CacheElement>(&self, simd: S, tile: usize, from: usize, to: usize) {
        let Self { call, unit, scratch, .. } = self;
        let (kv, dim) = (call.kv, call.padded_dim());
        let row_bytes = call.shape.head_dim * E::BYTES;
        let key_offset = kv.head_offset(call.layer, false, unit.kv_head);
        let value_offset = kv.head_offset(call.layer, true, unit.kv_head);
        let table = &call.batch.block_tables[unit.seq.first_block..][..unit.seq.num_blocks];
        let (block_size, block_bytes) = (kv.layout.block_size, kv.layout.block_bytes());
        let mut rows = [std::ptr::null::<u8>(); TILE];
        for (i, row) in rows.iter_mut().enumerate() {
            let position = (tile * TILE + i).clamp(from, to - 1);
            let block = table[position / block_size] as usize;
            *row = unsafe { kv.device.as_ptr().add(block * block_bytes + position % block_size * row_bytes) };
        }
        unsafe {
            for d in (0..dim).step_by(LANES) {
                for half in [0, LANES] {
                    let mut block = [simd.splat(0.0); LANES];
                    for i in 0..LANES {
                        block[i] = E::widen(simd, rows[half + i].add(key_offset + d * E::BYTES));
                    }
                    simd.transpose(&mut block);
                    for i in 0..LANES {
                        simd.store(scratch.keys.add((d + i) * TILE + half), block[i]);
                    }
                }
            }
            for (i, row) in rows.iter().enumerate() {
                for d in (0..dim).step_by(LANES) {
                    let v = E::widen(simd, row.add(value_offset + d * E::BYTES));
                    simd.store(scratch.values.add(i * dim + d), v);
                }
            }
        }
    }

    /// As [`Self::load_rows`], from groups of bfloat16. Groups without a position of `from..to` are left out: the masks
    /// exclude what the tile has there.
    #[inline(always)]
    unsafe fn load_groups<S: Simd>(&self, simd: S, tile: usize, from: usize, to: usize) {
        let dim = self.call.shape.head_dim;
        for half in [0, LANES] {
            let first = tile * TILE + half;
            if first + GROUP > from && first < to {
                let next = if first + TILE < to { first + TILE } else { first };
                unsafe {
                    let (keys, values) = (self.scratch.keys.add(half), self.scratch.values.add(half * dim));
                    groups::load::<S, TILE>(simd, dim, self.group(first), self.group(next), keys, values);
                }
            }
        }
    }

    /// K and V of the group that begins at position `first`.
    #[inline(always)]
    fn group(&self, first: usize) -> [*const u8; 2] {
        let Self { call, unit, .. } = self;
        let (kv, block_size) = (call.kv, call.kv.layout.block_size);
        let table = &call.batch.block_tables[unit.seq.first_block..][..unit.seq.num_blocks];
        let block = table[first / block_size] as usize * kv.layout.block_bytes();
        let at = kv.device.as_ptr().wrapping_add(block + first % block_size * call.shape.head_dim * CacheBf16::BYTES);
        [false, true].map(|value| at.wrapping_add(kv.head_offset(call.layer, value, unit.kv_head)))
    }
}
