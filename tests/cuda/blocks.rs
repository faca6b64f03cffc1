//! KV blocks that the host reads and writes.

use crate::support::{device, options, thread_orders};
use pagetide::backend::cuda::CudaBackend;
use pagetide::backend::{Backend, DType, KvDType, KvLayout};
use pagetide::ids::{BlockId, KvPlace};

/// Blocks of 4 MiB, of which a call takes several parts.
const F32: KvDType = KvDType::Plain(DType::F32);
const LAYOUT: KvLayout = KvLayout { num_layers: 16, num_kv_heads: 8, head_dim: 64, block_size: 64, dtype: F32 };

/// Also while copies between the tiers are under way, which reading and writing wait for.
#[test]
fn blocks_are_read_and_written_from_the_host() {
    for order in thread_orders() {
        let mut backend = CudaBackend::new(device(order), options(DType::F32, 8, LAYOUT)).unwrap();
        backend.allocate_kv(LAYOUT, 6, 6).unwrap();
        let bytes = LAYOUT.block_bytes();
        let content = |number: u8| (0..bytes).map(move |at| number.wrapping_mul(31).wrapping_add((at / 7) as u8));
        let blocks: Vec<BlockId> = (0..6).map(BlockId).collect();
        backend.write_blocks(&blocks, &(0..6).flat_map(content).collect::<Vec<u8>>());
        let out: Vec<_> = (0..6).map(|block| (BlockId(block), BlockId(5 - block))).collect();
        assert!(backend.swap_out(&out));
        let mut read = vec![0; 3 * bytes];
        let places = [KvPlace::Swap(BlockId(5)), KvPlace::Device(BlockId(3)), KvPlace::Swap(BlockId(0))];
        backend.read_blocks(&places, &mut read);
        assert!(read.iter().copied().eq([0, 3, 5].into_iter().flat_map(content)));
        assert!(backend.swap_in(&[(BlockId(5), BlockId(1)), (BlockId(4), BlockId(2))]));
        backend.write_blocks(&[BlockId(2)], &content(9).collect::<Vec<u8>>());
        let places = [1, 2, 3].map(|block| KvPlace::Device(BlockId(block)));
        backend.read_blocks(&places, &mut read);
        assert!(read.iter().copied().eq([0, 9, 3].into_iter().flat_map(content)));
    }
}
