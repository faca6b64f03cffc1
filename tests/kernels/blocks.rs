//! The pools of KV blocks, and calls that the backend must refuse.

use crate::support::*;
use pagetide_backend::cpu::{CpuBackend, CpuOptions, Isa};
use pagetide_backend::{AttentionShape, Backend, KvLayout};
use pagetide_base::ids::{BlockId, KvPlace};

const LAYOUT: KvLayout = KvLayout { num_layers: 3, num_kv_heads: 2, head_dim: 16, block_size: 5, dtype: INT8 };

/// A backend whose device block `i` holds bytes that no other block holds.
fn filled(num_blocks: usize, num_swap_blocks: usize) -> CpuBackend {
    let mut backend = backend(Isa::detect(), 3);
    backend.allocate_kv(LAYOUT, num_blocks, num_swap_blocks).unwrap();
    let slots = num_blocks * LAYOUT.block_size;
    let mut batch = plain_batch(slots);
    batch.slots = (0..slots as u32).collect();
    backend.begin(&batch);
    let shape = AttentionShape { num_heads: 2, num_kv_heads: 2, head_dim: 16, scale: 1.0, softcap: None, window: None };
    for layer in 0..LAYOUT.num_layers {
        let mut qkv = tensor(&backend, &Numbers::new(layer as u64).vec(slots * 96), 96);
        backend.rope_and_write_kv(&mut qkv, &shape, None, layer);
    }
    backend
}

fn contents(backend: &mut CpuBackend, num_blocks: u32) -> Vec<Vec<u8>> {
    (0..num_blocks).map(|block| backend.device_block(BlockId(block)).to_vec()).collect()
}

fn pairs(pairs: &[(u32, u32)]) -> Vec<(BlockId, BlockId)> {
    pairs.iter().map(|(from, to)| (BlockId(*from), BlockId(*to))).collect()
}

#[test]
fn swapped_blocks_come_back_whole_at_any_place() {
    let mut backend = filled(40, 40);
    let before = contents(&mut backend, 40);
    let out: Vec<_> = (0..20).map(|i| (i, 39 - i)).collect();
    assert!(backend.swap_out(&pairs(&out)));
    // Other data overwrites the blocks.
    let overwrite: Vec<_> = (0..20).map(|i| (20 + i, i)).collect();
    backend.copy_blocks(&pairs(&overwrite));
    let after = contents(&mut backend, 40);
    assert_eq!(after[..20], before[20..]);
    let back: Vec<_> = (0..20).map(|i| (39 - i, 20 + (i + 7) % 20)).collect();
    assert!(backend.swap_in(&pairs(&back)));
    let after = contents(&mut backend, 40);
    for i in 0..20 {
        assert_eq!(after[20 + (i + 7) % 20], before[i], "block {i}");
    }
}

/// Also while copies between the tiers are under way, which reading and writing wait for.
#[test]
fn blocks_are_read_and_written_from_the_host() {
    let mut backend = filled(40, 40);
    let before = contents(&mut backend, 40);
    let bytes = LAYOUT.block_bytes();
    for round in 0..20 {
        let out: Vec<_> = (0..20).map(|i| (i, (i + round) % 40)).collect();
        assert!(backend.swap_out(&pairs(&out)));
        let places =
            [KvPlace::Swap(BlockId((3 + round) % 40)), KvPlace::Device(BlockId(39)), KvPlace::Device(BlockId(0))];
        let mut read = vec![0; 3 * bytes];
        backend.read_blocks(&places, &mut read);
        assert_eq!(read, [&before[3][..], &before[39], &before[0]].concat());
    }
    assert!(backend.swap_in(&pairs(&[(19, 30), (20, 31)])));
    backend.write_blocks(&[BlockId(31), BlockId(0)], &[&before[5][..], &before[6]].concat());
    let after = contents(&mut backend, 40);
    assert_eq!([&after[30], &after[31], &after[0], &after[1]], [&before[0], &before[5], &before[6], &before[1]]);
}

#[test]
fn chained_copies_happen_in_order() {
    let mut backend = filled(4, 0);
    let before = contents(&mut backend, 4);
    backend.copy_blocks(&pairs(&[(0, 1), (1, 2), (3, 3)]));
    let after = contents(&mut backend, 4);
    assert_eq!([&after[1], &after[2], &after[3]], [&before[0], &before[0], &before[3]]);
}

#[test]
fn pools_start_over_empty() {
    let mut backend = filled(4, 4);
    backend.allocate_kv(LAYOUT, 4, 0).unwrap();
    assert!(contents(&mut backend, 4).iter().flatten().all(|byte| *byte == 0));
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    let error = |options| CpuBackend::new(options).err().unwrap().to_string();
    let threads = |threads| CpuOptions { threads: Some(threads), isa: None };
    assert_eq!(error(threads(0)), "0 threads: must be from 1 to 1024");
    let mut backend = backend(Isa::Portable, 1);
    let mut refused = |layout| backend.allocate_kv(layout, 1, 1).unwrap_err().to_string();
    assert_eq!(refused(KvLayout { block_size: 257, ..LAYOUT }), "block size 257: must be from 1 to 256");
    assert!(refused(KvLayout { head_dim: 12, ..LAYOUT }).starts_with("head size 12: "));
    assert!(refused(KvLayout { head_dim: 264, ..LAYOUT }).starts_with("head size 264: "));
    let huge = backend.allocate_kv(LAYOUT, usize::MAX / 4, 0).unwrap_err().to_string();
    assert!(huge.starts_with("cannot get ") && huge.contains("KV blocks"), "{huge}");
    assert!("avx3".parse::<Isa>().unwrap_err().contains("avx512"));
    assert_eq!("avx2".parse(), Ok(Isa::Avx2));
}

#[test]
#[should_panic(expected = "a block table is too short")]
fn a_batch_that_reads_past_its_table_is_a_bug() {
    let mut backend = filled(4, 0);
    backend.begin(&batch(&[(4, 1, &[0])], LAYOUT.block_size + 1));
    backend.begin(&batch(&[(5, 1, &[0])], LAYOUT.block_size + 1));
}
