use super::*;
use crate::prefix_cache::BlockHasher;

fn hash(token: u32) -> BlockHash {
    let hasher = BlockHasher::new([0; 32], 1);
    hasher.block(hasher.root(b""), &[token])
}

#[test]
fn free_blocks_go_before_cached_ones() {
    let mut pool = BlockPool::new(3, true);
    let first = pool.allocate().unwrap();
    assert!(pool.publish(first, hash(1)));
    pool.release(first);
    assert_eq!(pool.stats(), PoolStats { cached: 1, free: 2, ..PoolStats::default() });
    let others = [pool.allocate().unwrap(), pool.allocate().unwrap()];
    assert_eq!(pool.lookup(&hash(1)), Some(first));
    assert_eq!(pool.allocate(), Some(first));
    assert_eq!(pool.lookup(&hash(1)), None);
    assert_eq!(pool.allocate(), None);
    pool.check([&others[..], &[first]].into_iter());
}

#[test]
fn a_cached_block_is_taken_up_again() {
    let mut pool = BlockPool::new(1, true);
    let block = pool.allocate().unwrap();
    pool.publish(block, hash(1));
    pool.release(block);
    pool.take(pool.lookup(&hash(1)).unwrap());
    pool.take(block);
    assert!(pool.is_shared(block));
    assert_eq!(pool.available(), 0);
    pool.check([&[block][..], &[block]].into_iter());
}

#[test]
fn without_keeping_a_released_block_is_free() {
    let mut pool = BlockPool::new(1, false);
    let block = pool.allocate().unwrap();
    pool.publish(block, hash(1));
    assert_eq!(pool.lookup(&hash(1)), Some(block));
    pool.release(block);
    assert_eq!(pool.lookup(&hash(1)), None);
    assert_eq!(pool.stats().free, 1);
}

#[test]
#[should_panic(expected = "released twice")]
fn double_release_is_a_bug() {
    let mut pool = BlockPool::new(1, true);
    let block = pool.allocate().unwrap();
    pool.release(block);
    pool.release(block);
}

#[test]
fn a_smaller_pool_gives_up_free_blocks_then_cached_ones_then_those_that_come_back() {
    let mut pool = BlockPool::new(6, true);
    let held: Vec<BlockId> = (0..3).map(|_| pool.allocate().unwrap()).collect();
    let cached = pool.allocate().unwrap();
    pool.publish(cached, hash(1));
    pool.publish(held[0], hash(2));
    pool.release(cached);
    pool.resize(4);
    assert_eq!(pool.stats(), PoolStats { used: 3, cached: 1, ..PoolStats::default() });
    assert_eq!(pool.lookup(&hash(1)), Some(cached));
    pool.resize(1);
    assert_eq!(pool.stats(), PoolStats { used: 3, draining: 2, evicted: 1, ..PoolStats::default() });
    assert_eq!((pool.num_blocks(), pool.lookup(&hash(1)), pool.allocate()), (1, None, None));
    // What is used is found and shared as ever, until it is given back.
    pool.take(pool.lookup(&hash(2)).unwrap());
    pool.release(held[0]);
    assert_eq!(pool.stats().draining, 2);
    pool.release(held[0]);
    pool.release(held[1]);
    assert_eq!(pool.stats(), PoolStats { used: 1, evicted: 1, ..PoolStats::default() });
    assert_eq!((pool.lookup(&hash(2)), pool.allocate()), (None, None));
    pool.release(held[2]);
    assert_eq!(pool.stats(), PoolStats { free: 1, evicted: 1, ..PoolStats::default() });
    pool.check(std::iter::empty());
}

#[test]
fn a_pool_grows_from_nothing_and_back() {
    for policy in [EvictionPolicy::Lru, EvictionPolicy::Adaptive] {
        let mut pool = BlockPool::with_eviction(0, true, policy);
        assert_eq!(pool.allocate(), None);
        pool.resize(3);
        let blocks: Vec<BlockId> = std::iter::from_fn(|| pool.allocate()).collect();
        assert_eq!(blocks.len(), 3);
        pool.resize(0);
        assert_eq!(pool.stats(), PoolStats { used: 3, draining: 3, ..PoolStats::default() });
        // Enough is there again before they are back: two of them stay.
        pool.resize(2);
        assert_eq!(pool.stats(), PoolStats { used: 3, draining: 1, ..PoolStats::default() });
        blocks.iter().for_each(|block| pool.release(*block));
        assert_eq!(pool.stats(), PoolStats { free: 2, ..PoolStats::default() });
        pool.resize(5);
        let again: std::collections::HashSet<BlockId> = std::iter::from_fn(|| pool.allocate()).collect();
        assert_eq!(again.len(), 5, "each once");
        assert!(again.iter().all(|block| block.index() < 5), "no id is new while an old one is to be had: {again:?}");
    }
}

/// A simple model of a pool with LRU.
#[derive(Default)]
struct Naive {
    /// Blocks of each table.
    tables: Vec<Vec<BlockId>>,
    names: std::collections::HashMap<BlockId, u32>,
    /// In order of release.
    idle: Vec<BlockId>,
}

impl Naive {
    fn evict(&mut self, evicted: Vec<(BlockId, BlockHash)>, policy: EvictionPolicy) {
        for (block, name) in evicted {
            let place = self.idle.iter().position(|idle| *idle == block).expect("only idle blocks go");
            assert!(place == 0 || policy != EvictionPolicy::Lru, "the least recently used goes first");
            self.idle.remove(place);
            assert_eq!(self.names.remove(&block).map(hash), Some(name));
        }
    }

    fn num_used(&self) -> usize {
        self.tables.iter().flatten().collect::<std::collections::HashSet<_>>().len()
    }
}

#[test]
fn a_pool_is_what_it_seems() {
    for seed in 0..40u64 {
        let mut state = seed;
        let mut random = move |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut num_blocks = 1 + random(12);
        let policy = [EvictionPolicy::Lru, EvictionPolicy::Adaptive][random(2)];
        let mut pool = BlockPool::with_eviction(num_blocks, true, policy);
        let mut naive = Naive { tables: vec![vec![]; 4], ..Naive::default() };
        for _ in 0..400 {
            if random(20) == 0 {
                num_blocks = random(13);
                pool.resize(num_blocks);
                naive.evict(pool.take_evicted(), policy);
            }
            operate(&mut pool, &mut naive, policy, &mut random);
            let PoolStats { used, cached, free, draining, .. } = pool.stats();
            assert_eq!((pool.num_blocks(), used + cached + free), (num_blocks, num_blocks + draining));
            assert_eq!(used, naive.num_used(), "a block is used that nobody holds");
            pool.check(naive.tables.iter().map(Vec::as_slice));
            assert_eq!(pool.stats().cached, naive.idle.len());
            for token in 0..10 {
                let holder = naive.names.iter().find(|(_, name)| **name == token).map(|(block, _)| *block);
                assert_eq!(pool.lookup(&hash(token)), holder);
            }
        }
    }
}

fn operate(pool: &mut BlockPool, naive: &mut Naive, policy: EvictionPolicy, random: &mut impl FnMut(usize) -> usize) {
    let table = random(4);
    match random(5) {
        0 | 1 => {
            let room = pool.stats().free;
            let Some(block) = pool.allocate() else {
                return assert_eq!(room + naive.idle.len(), 0, "there is room");
            };
            let evicted = pool.take_evicted();
            assert_eq!(evicted.len(), usize::from(room == 0));
            naive.evict(evicted, policy);
            naive.tables[table].push(block);
        }
        2 => {
            let Some(block) = naive.tables[table].last() else { return };
            let token = random(10) as u32;
            let is_new = !naive.names.contains_key(block) && naive.names.values().all(|name| *name != token);
            assert_eq!(pool.publish(*block, hash(token)), is_new);
            if is_new {
                naive.names.insert(*block, token);
            }
        }
        3 => {
            let Some(block) = pool.lookup(&hash(random(10) as u32)) else { return };
            pool.take(block);
            naive.idle.retain(|idle| *idle != block);
            naive.tables[table].push(block);
        }
        _ => {
            let Some(block) = naive.tables[table].pop() else { return };
            let was_draining = pool.stats().draining > 0;
            pool.release(block);
            let is_idle = !naive.tables.iter().flatten().any(|held| *held == block);
            if is_idle && was_draining {
                naive.names.remove(&block); // it is gone
            } else if is_idle && random(6) == 0 {
                pool.forget(block);
                naive.names.remove(&block);
            } else if is_idle && naive.names.contains_key(&block) {
                naive.idle.push(block);
            }
        }
    }
}

#[test]
fn a_view_says_what_each_block_is() {
    let mut pool = BlockPool::new(6, true);
    let blocks: Vec<BlockId> = (0..4).map(|_| pool.allocate().unwrap()).collect();
    assert!(pool.publish(blocks[0], hash(1)) && pool.publish(blocks[1], hash(2)));
    pool.retain(blocks[1]);
    pool.release(blocks[0]);
    pool.release(blocks[2]);
    pool.resize(5);
    let states = pool.view().states();
    let seen: Vec<BlockState> = blocks.iter().map(|block| states[block.index()]).collect();
    assert_eq!(seen, [BlockState::Cached, BlockState::Used(2), BlockState::Free, BlockState::Used(1)]);
    let PoolStats { used, cached, free, .. } = pool.stats();
    let count = |is: &dyn Fn(BlockState) -> bool| states.iter().filter(|state| is(**state)).count();
    assert_eq!(count(&|state| state == BlockState::Retired), 1);
    assert_eq!(count(&|state| state == BlockState::Cached), cached);
    assert_eq!(count(&|state| state == BlockState::Free), free);
    assert_eq!(count(&|state| matches!(state, BlockState::Used(_))), used);
}

#[test]
fn a_block_that_has_left_is_told_once_and_again_when_it_has_come_back() {
    let mut pool = BlockPool::new(6, true);
    let held = [pool.allocate().unwrap(), pool.allocate().unwrap()];
    pool.resize(1);
    let left = pool.take_retired();
    assert_eq!((left.len(), pool.take_retired().len()), (4, 0));
    pool.release(held[0]);
    assert_eq!(pool.take_retired(), [held[0]]);
    // Two come back, and go again; the others are gone all the time.
    pool.resize(3);
    assert_eq!(pool.take_retired(), []);
    pool.resize(1);
    assert_eq!(pool.take_retired().len(), 2);
    // Blocks that left and came back between two calls are not returned.
    pool.resize(0);
    pool.resize(6);
    assert_eq!(pool.take_retired(), []);
}

#[test]
fn cached_blocks_can_be_dropped_and_used_ones_stay_found() {
    let mut pool = BlockPool::new(4, true);
    let blocks: Vec<BlockId> = (0..3).map(|_| pool.allocate().unwrap()).collect();
    assert!(pool.publish(blocks[0], hash(1)) && pool.publish(blocks[1], hash(2)));
    pool.release(blocks[0]);
    pool.drop_cached();
    let PoolStats { used, cached, free, evicted, .. } = pool.stats();
    assert_eq!((used, cached, free, evicted), (2, 0, 2, 0));
    assert_eq!((pool.lookup(&hash(1)), pool.lookup(&hash(2))), (None, Some(blocks[1])));
    assert!(pool.take_evicted().is_empty(), "nobody copies what is not to be kept");
    pool.check([&blocks[1..]].into_iter());
}
