//! The tile sizes of the attention kernels for a model and a device.

use crate::{DType, KvDType, KvLayout};

/// Warps of a thread block of both kernels.
pub(super) const WARPS: usize = 4;
/// Rows of the matrix of queries that a thread block of the decode kernel has.
const DECODE_ROWS: usize = 16;
/// Tokens of which a warp of the decode kernel computes the scores.
const SLICE: usize = 16;

/// The tile sizes of the kernels on tensor cores for a model and a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileShape {
    head_dim: usize,
    /// Whether K and V are copied to shared memory as codes, from which tiles are made.
    has_codes: bool,
    /// 16-row tiles of a warp of the prefill kernel.
    pub prefill_row_tiles: usize,
    /// Tokens of K and V that a thread block holds at a time. It is the same in both kernels, so that both give the
    /// same bits.
    pub kv_tile: usize,
    /// Tiles of K and V that a thread block of the decode kernel has in flight.
    pub decode_stages: usize,
}

impl TileShape {
    /// `None` if the kernels cannot run on tensor cores: with float32, or a head size that is not a multiple of 16.
    pub fn choose(dtype: DType, kv: &KvLayout, max_shared_bytes: usize) -> Option<Self> {
        let head_dim = kv.head_dim;
        if dtype == DType::F32 || !head_dim.is_multiple_of(16) {
            return None;
        }
        let wide = head_dim > 128;
        let shape = |decode_stages| Self {
            head_dim,
            has_codes: matches!(kv.dtype, KvDType::Codes(_)),
            prefill_row_tiles: if wide { 1 } else { 2 },
            kv_tile: if wide { 32 } else { 64 },
            decode_stages,
        };
        // `(stages, thread blocks on a multiprocessor)`, best first. Two thread blocks are better than one if that
        // leaves two stages. A third one is better than a fourth stage: as many tiles are in flight, and more warps
        // compute.
        let candidates = [(4, 3), (3, 3), (4, 2), (3, 2), (2, 2), (4, 1), (3, 1), (2, 1)];
        let fits = |(stages, blocks): &(usize, usize)| {
            blocks * (shape(*stages).decode_shared_bytes() + 1024) <= max_shared_bytes + 1024
        };
        let (stages, _) = candidates.into_iter().find(fits)?;
        Some(shape(stages))
    }

    /// Bytes of `rows` rows of elements in shared memory.
    fn row_bytes(&self, rows: usize) -> usize {
        rows * 2 * (self.head_dim + 8)
    }

    /// Bytes of the codes and scales of `tokens` tokens.
    fn code_bytes(&self, tokens: usize) -> usize {
        tokens * (self.head_dim + 2)
    }

    /// Rows of the matrix of queries that a thread block of the prefill kernel has.
    pub fn prefill_rows(&self) -> usize {
        WARPS * self.prefill_row_tiles * 16
    }

    /// The same of the decode kernel.
    pub fn decode_rows(&self) -> usize {
        DECODE_ROWS
    }

    /// Dynamic shared memory of the kernels' thread blocks.
    pub fn prefill_shared_bytes(&self) -> usize {
        let tiles = 2 * self.kv_tile;
        self.row_bytes(self.prefill_rows() + tiles) + if self.has_codes { self.code_bytes(tiles) } else { 0 }
    }

    pub fn decode_shared_bytes(&self) -> usize {
        let (tile, stages) = (2 * self.kv_tile, self.decode_stages);
        let of_tiles = match self.has_codes {
            true => self.row_bytes(tile) + stages * self.code_bytes(tile),
            false => stages * self.row_bytes(tile),
        };
        // `TileExchange`: a maximum for each row, and for each lane two sums and four words of weights.
        let exchange = self.kv_tile / SLICE * (DECODE_ROWS * 4 + 32 * (2 + 4) * 4);
        self.row_bytes(DECODE_ROWS) + exchange + of_tiles
    }

    pub(super) fn defines(&self) -> [(&'static str, String); 3] {
        [
            ("KV_TILE", self.kv_tile.to_string()),
            ("PREFILL_ROW_TILES", self.prefill_row_tiles.to_string()),
            ("DECODE_STAGES", self.decode_stages.to_string()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CodeType;

    fn kv(head_dim: usize, dtype: impl Into<KvDType>) -> KvLayout {
        KvLayout { num_layers: 1, num_kv_heads: 1, head_dim, block_size: 16, dtype: dtype.into() }
    }

    #[test]
    fn tiles_fit_into_every_device() {
        // sm_80, sm_86 and sm_89, sm_90.
        for max_shared in [163 << 10, 99 << 10, 227 << 10] {
            for head_dim in (16..=256).step_by(16) {
                for dtype in [KvDType::Plain(DType::BF16), KvDType::Codes(CodeType::Int8)] {
                    let kv = kv(head_dim, dtype);
                    let shape = TileShape::choose(DType::BF16, &kv, max_shared).expect("all of these are supported");
                    assert!(shape.prefill_shared_bytes() <= max_shared, "prefill, {kv:?}");
                    assert!(shape.decode_shared_bytes() <= max_shared, "decode, {kv:?}");
                    assert!(shape.decode_stages >= 2, "a copy runs while another one's slice is read");
                }
            }
        }
        assert_eq!(TileShape::choose(DType::F32, &kv(128, DType::F32), 227 << 10), None);
        assert_eq!(TileShape::choose(DType::F16, &kv(24, DType::F16), 227 << 10), None);
        let h100 = TileShape::choose(DType::BF16, &kv(128, DType::BF16), 227 << 10).expect("supported");
        assert_eq!((h100.kv_tile, h100.decode_stages), (64, 3));
    }

    #[test]
    fn small_heads_have_three_thread_blocks_on_hopper() {
        for (head_dim, dtype) in
            [(64, KvDType::Plain(DType::BF16)), (80, KvDType::Plain(DType::BF16)), (96, KvDType::Codes(CodeType::Fp8))]
        {
            let shape = TileShape::choose(DType::BF16, &kv(head_dim, dtype), 227 << 10).expect("supported");
            assert!(shape.decode_stages >= 3, "as many tiles in flight as with two thread blocks");
            assert!(3 * (shape.decode_shared_bytes() + 1024) <= 228 << 10, "{head_dim}");
        }
    }
}
