//! The most blocks that any eviction could have hit, knowing the future.

use super::trace::TraceRequest;
use std::collections::{BTreeSet, HashMap};

/// What a cache must hold while a request runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheHolding {
    /// Nothing: a block may be read from the cache, computed and dropped without taking a place. This is more than a
    /// pool can do whose blocks are those that requests compute in.
    Bypass,
    /// All blocks of the request, in the cache's own blocks: what every policy of a pool has to do.
    Request,
}

/// Maximum number of blocks hit by a cache of `capacity` blocks that starts empty and serves one request after the
/// other.
///
/// A request hits its leading blocks that are in the cache. After it, any of its blocks and of the cached blocks may
/// stay. The result is the maximum over all choices.
///
/// Keeping a block from one of its uses to the next gives one hit and takes one place in between. So the hits are a set
/// of intervals of which at most `capacity` (less what the running request holds) overlap. The largest such set is
/// found by going through time and dropping, whenever too many overlap, the interval that ends last (Belady's rule). A
/// block is useful only if all blocks before it are cached, but this costs nothing: a request for a block also uses the
/// blocks before it, so these are needed again no later. Of blocks needed at the same time the deepest is dropped
/// first, so no block is dropped before one behind it.
pub fn optimum<'a>(requests: impl Iterator<Item = &'a TraceRequest>, capacity: usize, holding: CacheHolding) -> usize {
    let requests: Vec<&[u32]> = requests.map(|request| &request.blocks[..]).collect();
    let mut next_uses: Vec<Vec<Option<usize>>> = requests.iter().map(|blocks| vec![None; blocks.len()]).collect();
    let mut last_uses: HashMap<u32, (usize, usize)> = HashMap::new();
    for (time, blocks) in requests.iter().enumerate() {
        for (place, block) in blocks.iter().enumerate() {
            if let Some((earlier, place)) = last_uses.insert(*block, (time, place)) {
                next_uses[earlier][place] = Some(time);
            }
        }
    }
    // Next use and place in that request: together they name a block.
    let mut kept: BTreeSet<(usize, usize)> = BTreeSet::new();
    let mut num_hits = 0;
    for (time, blocks) in requests.iter().enumerate() {
        while kept.first().is_some_and(|(next_use, _)| *next_use == time) {
            kept.pop_first();
            num_hits += 1;
        }
        if holding == CacheHolding::Request {
            shrink(&mut kept, capacity.saturating_sub(blocks.len()));
        }
        let places = next_uses[time].iter().enumerate();
        kept.extend(places.filter_map(|(place, next_use)| Some(((*next_use)?, place))));
        shrink(&mut kept, capacity);
    }
    num_hits
}

fn shrink(kept: &mut BTreeSet<(usize, usize)>, capacity: usize) {
    while kept.len() > capacity {
        kept.pop_last();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::trace::tests::trace_of;

    /// Over everything that could be kept, as sets of blocks: the most hits that lead to each set.
    fn by_trying_everything(requests: &[Vec<u32>], capacity: usize, holding: CacheHolding) -> usize {
        let size = |set: u32| set.count_ones() as usize;
        let mut best: HashMap<u32, usize> = HashMap::from([(0, 0)]);
        for blocks in requests {
            let own = blocks.iter().fold(0, |set, block| set | 1 << block);
            let mut next: HashMap<u32, usize> = HashMap::new();
            for (cached, hits) in &best {
                let hits = hits + blocks.iter().take_while(|block| cached & (1 << **block) != 0).count();
                let all = cached | own;
                // All subsets of `all`.
                let mut kept = all;
                loop {
                    let held = if holding == CacheHolding::Request { kept | own } else { kept };
                    if size(held) <= capacity {
                        let most = next.entry(kept).or_insert(0);
                        *most = hits.max(*most);
                    }
                    if kept == 0 {
                        break;
                    }
                    kept = (kept - 1) & all;
                }
            }
            best = next;
        }
        best.into_values().max().unwrap_or(0)
    }

    #[test]
    fn no_choice_of_blocks_hits_more() {
        let mut state = 1u64;
        let mut below = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        let mut differ = 0;
        for _ in 0..150 {
            // Up to 7 distinct blocks, as a tree of prefixes.
            let mut prefixes: Vec<Vec<u64>> = vec![vec![]];
            for id in 0..7 {
                let mut prefix = prefixes[below(prefixes.len() as u64) as usize].clone();
                prefix.push(id);
                if prefix.len() <= 4 {
                    prefixes.push(prefix);
                }
            }
            let ids: Vec<&[u64]> =
                (0..9).map(|_| &prefixes[1 + below(prefixes.len() as u64 - 1) as usize][..]).collect();
            let trace = trace_of(&ids);
            let blocks: Vec<_> = trace.requests.iter().map(|request| request.blocks.clone()).collect();
            let capacity = 4 + below(3) as usize;
            let [most, less] = [CacheHolding::Bypass, CacheHolding::Request].map(|holding| {
                let found = optimum(trace.requests.iter(), capacity, holding);
                assert_eq!(found, by_trying_everything(&blocks, capacity, holding), "{ids:?} {capacity} {holding:?}");
                found
            });
            assert!(less <= most);
            differ += usize::from(less < most);
        }
        assert!(differ > 5, "having to hold the request should cost something: {differ}");
    }
}
