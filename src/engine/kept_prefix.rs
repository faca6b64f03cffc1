//! Prefixes that leave the pools for a file and come back from it, between two steps.
//!
//! Nothing is held from one step to the next: blocks that come back are cached when these calls return, and cached
//! blocks count as available ones, as free blocks do. So the scheduler needs not be told. The executor reads and writes
//! blocks in the order in which it is asked, between the plans that were made before and after. So a block that is
//! found here has its content when it is read, and one that comes back has it before any plan uses it.

use crate::block_pool::BlockPool;
use crate::prefix_cache::BlockHash;
use pagetide_base::ids::{BlockId, KvPlace};

/// The blocks of a prefix that the pool holds.
pub fn locate(pool: &BlockPool, names: &[BlockHash]) -> Vec<Option<BlockId>> {
    names.iter().map(|name| pool.lookup(name)).collect()
}

/// Where the leading blocks of a prefix lie that are on either tier. `device` and `swap` are what [`locate`] found.
pub fn leading(device: &[Option<BlockId>], swap: &[Option<BlockId>]) -> Vec<KvPlace> {
    let both = device.iter().zip(swap);
    both.map_while(|(device, swap)| device.map(KvPlace::Device).or(swap.map(KvPlace::Swap))).collect()
}

/// Puts the blocks of a part of a prefix into the device pool's cache: as many from the first as fit beside the blocks
/// in use. Returns those that were not there, with their places in `names`: their content has to be written. What makes
/// room for them is not kept on the other tier, because its blocks are written before they could be copied.
pub fn put_back(pool: &mut BlockPool, names: &[BlockHash]) -> Vec<(usize, BlockId)> {
    // Those that are there are taken first, because making room evicts blocks that no table holds.
    let mut table = locate(pool, names);
    table.iter().flatten().for_each(|block| pool.take(*block));
    let mut written = Vec::new();
    let mut place = 0;
    while place < table.len() {
        if table[place].is_none() {
            let Some(block) = pool.allocate() else {
                // The head of a prefix is worth more than its tail.
                table.pop().flatten().into_iter().for_each(|last| pool.release(last));
                continue;
            };
            pool.publish(block, names[place]);
            table[place] = Some(block);
            written.push((place, block));
        }
        place += 1;
    }
    table.iter().rev().flatten().for_each(|block| pool.release(*block));
    pool.take_evicted();
    written
}

/// Forgets the blocks of a prefix that no table holds. Returns for each name whether it was there.
pub fn erase(pool: &mut BlockPool, names: &[BlockHash]) -> Vec<bool> {
    let mut erase_one = |name| {
        let idle = pool.lookup(name).filter(|block| !pool.is_used(*block));
        idle.inspect(|block| pool.forget(*block)).is_some()
    };
    names.iter().map(&mut erase_one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_pool::PoolStats;
    use crate::prefix_cache::{BlockHasher, EvictionPolicy};

    fn names(count: u32) -> Vec<BlockHash> {
        let hasher = BlockHasher::new([7; 32], 1);
        let mut parent = hasher.root(b"");
        let mut next = |token| {
            parent = hasher.block(parent, &[token]);
            parent
        };
        (0..count).map(&mut next).collect()
    }

    fn is_there(pool: &BlockPool, names: &[BlockHash]) -> Vec<bool> {
        locate(pool, names).iter().map(Option::is_some).collect()
    }

    #[test]
    fn a_prefix_comes_back_as_cached_blocks_and_is_written_once() {
        for policy in [EvictionPolicy::Adaptive, EvictionPolicy::Lru] {
            let mut pool = BlockPool::with_eviction(6, true, policy);
            let all = names(4);
            let written = put_back(&mut pool, &all[1..3]);
            assert_eq!(written.iter().map(|(place, _)| *place).collect::<Vec<_>>(), [0, 1]);
            let later = put_back(&mut pool, &all);
            assert_eq!(later.iter().map(|(place, _)| *place).collect::<Vec<_>>(), [0, 3], "the others were there");
            assert_eq!(pool.lookup(&all[1]), Some(written[0].1));
            let PoolStats { used, cached, free, .. } = pool.stats();
            assert_eq!((used, cached, free, pool.available()), (0, 4, 2, 6));
            assert!(put_back(&mut pool, &all).is_empty());
            pool.check([].into_iter());
        }
    }

    #[test]
    fn a_prefix_that_does_not_fit_comes_back_from_its_head() {
        for policy in [EvictionPolicy::Adaptive, EvictionPolicy::Lru] {
            let mut pool = BlockPool::with_eviction(5, true, policy);
            let used = [pool.allocate().unwrap(), pool.allocate().unwrap()];
            let all = names(6);
            // The tail is there, and has to go for the head.
            put_back(&mut pool, &all[3..]);
            let written = put_back(&mut pool, &all);
            assert_eq!(written.len(), 3);
            assert_eq!(is_there(&pool, &all), [true, true, true, false, false, false]);
            assert!(pool.take_evicted().is_empty(), "nobody copies blocks that have been written since");
            pool.check([&used[..]].into_iter());
            let more: Vec<BlockId> = (0..3).map(|_| pool.allocate().unwrap()).collect();
            assert_eq!(put_back(&mut pool, &all), [], "no block is left");
            pool.check([&used[..], &more[..]].into_iter());
        }
    }

    #[test]
    fn a_block_in_use_is_neither_erased_nor_replaced() {
        let mut pool = BlockPool::new(4, true);
        let all = names(4);
        put_back(&mut pool, &all[..3]);
        let held = pool.lookup(&all[0]).unwrap();
        pool.take(held);
        assert_eq!(erase(&mut pool, &all), [false, true, true, false]);
        assert_eq!(is_there(&pool, &all), [true, false, false, false]);
        pool.check([&[held][..]].into_iter());
        assert_eq!(put_back(&mut pool, &all).len(), 3);
        assert_eq!(pool.lookup(&all[0]), Some(held));
        pool.release(held);
        assert_eq!(erase(&mut pool, &all), [true; 4]);
        assert_eq!(pool.stats(), PoolStats { free: 4, ..PoolStats::default() });
        pool.check([].into_iter());
    }

    #[test]
    fn the_leading_blocks_are_found_on_both_tiers() {
        let (one, two) = (Some(BlockId(1)), Some(BlockId(2)));
        assert_eq!(
            leading(&[one, None, one, None, one], &[two, two, None, None, two]),
            [KvPlace::Device(BlockId(1)), KvPlace::Swap(BlockId(2)), KvPlace::Device(BlockId(1))]
        );
    }
}
