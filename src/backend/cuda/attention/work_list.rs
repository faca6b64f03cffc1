//! The work list of attention: which keys of which sequence a thread block multiplies with which query rows.
//!
//! An item is a tile of a sequence's new tokens and a chunk of its keys. Each kernel takes items from a list of its
//! own, longest first (the rule of longest processing time), so that the thread blocks that finish last have little
//! left to do. A sequence with few new tokens, such as a decode, has a tile of the decode kernel; its items are dealt
//! out to as many thread blocks as the device runs at the same time, and the launch does not depend on the batch.
//!
//! A chunk starts at a multiple of its length. Its length follows from the number of keys that a token sees
//! ([`chunk_len`]), so a token's sums are split in the same way whatever else is in the batch. The one exception are
//! large tiles without `batch_invariant`: results of chunks cost memory traffic, and where there are enough tiles to
//! fill the device, their keys are not split.
//!
//! Where several decodes have a chunk in the same blocks, an item has the tokens of as many of them as its tile has
//! room for, its members ([`SharedChunks`]). It takes as long as an item of one of them.

use super::shared_chunks::{BlockTables, SharedChunks};
use crate::Batch;
use bytemuck::NoUninit;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// The shortest chunk: with fewer keys, reading the queries and merging the results takes a larger share of the time.
const MIN_CHUNK: usize = 512;
/// The most chunks of what a token sees. With 8 KV heads this fills a device of 132 multiprocessors that run two thread
/// blocks each.
const MAX_CHUNKS: usize = 32;
/// The most chunks of a large tile that is split to fill the device.
const MAX_BALANCED_CHUNKS: usize = 128;
/// What writing, reading and merging the results of such a chunk costs, in keys: they are as large as K and V of this
/// many keys of an 8B model.
const CHUNK_COST: usize = 128;
/// Thread blocks for each that the device runs at the same time, from which on large tiles are not split.
const ENOUGH_ROUNDS: usize = 4;
/// A chunk of all keys.
const ALL_KEYS: usize = 1 << 40;

/// Keys of a chunk for a token that sees `num_seen` keys.
fn chunk_len(num_seen: usize) -> usize {
    num_seen.div_ceil(MAX_CHUNKS).next_power_of_two().max(MIN_CHUNK)
}

/// The most chunks that the keys of a token have if positions are less than `max_len`.
fn max_chunks(max_len: usize) -> usize {
    // A window may start and end within a chunk.
    max_len.div_ceil(MIN_CHUNK).min(MAX_CHUNKS + 1)
}

/// What the lists depend on apart from the batch.
#[derive(Clone, Debug)]
pub struct WorkRules {
    /// Tokens of a tile of the decode kernel, and of the prefill kernel.
    pub decode_tokens: usize,
    pub prefill_tokens: usize,
    /// Tokens of K and V that a thread block holds at a time, a power of two.
    pub kv_tile: usize,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// Thread blocks of an item of the prefill kernel, one for each KV head or part of its query heads.
    pub prefill_head_tiles: usize,
    /// Thread blocks of the prefill kernel that the device runs at the same time.
    pub resident_prefills: usize,
    /// The windows of the model's layers, each once.
    pub windows: Vec<Option<usize>>,
    /// Whether a token's chunks must not depend on the batch.
    pub batch_invariant: bool,
    /// Room for results of chunks, in tokens.
    pub max_partials: usize,
}

/// A tile of query rows and a chunk of the keys that they see: `AttentionItem` of the kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, NoUninit)]
#[repr(C)]
pub struct AttentionItem {
    pub first_row: u32,
    pub num_tokens: u32,
    pub first_position: u32,
    pub first_block: u32,
    pub first_key: u32,
    pub end_key: u32,
    pub chunk: u32,
    pub num_chunks: u32,
    pub first_chunk: u32,
    pub first_partial: u32,
    pub first_member: u32,
}

/// [`AttentionItem::first_member`] of an item that is not shared.
pub const NO_MEMBER: u32 = u32::MAX;

/// A decode that shares chunks: `AttentionMember` of the kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, NoUninit)]
#[repr(C)]
pub struct AttentionMember {
    pub row: u32,
    pub num_chunks: u32,
    pub first_chunk: u32,
    pub first_partial: u32,
}

/// Neighbouring items, which one launch computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, NoUninit)]
#[repr(C)]
pub struct AttentionList {
    pub first_item: u32,
    pub num_items: u32,
}

/// Which kernel computes a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKind {
    /// Tiles of few tokens.
    Decode,
    /// Tiles of many.
    Prefill,
}

/// A launch for the layers with one window. Launches of a layer are done in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionLaunch {
    /// Index in the list of different windows of the layers.
    pub window: usize,
    pub kind: AttentionKind,
    /// Index in [`AttentionPlan::lists`].
    pub list: usize,
}

/// A step's attention: the lists that are uploaded with the batch, and the launches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionPlan {
    pub lists: Vec<AttentionList>,
    pub items: Vec<AttentionItem>,
    pub members: Vec<AttentionMember>,
    pub launches: Vec<AttentionLaunch>,
}

impl AttentionPlan {
    pub(super) fn clear(&mut self) {
        let Self { lists, items, members, launches } = self;
        lists.clear();
        items.clear();
        members.clear();
        launches.clear();
    }

    /// Keys that the items of a list read, and keys that they would read if none were shared, for each KV head.
    pub fn keys(&self, list: usize) -> (u64, u64) {
        let AttentionList { first_item, num_items } = self.lists[list];
        let items = &self.items[first_item as usize..][..num_items as usize];
        items.iter().fold((0, 0), |(read, unshared), item| {
            let keys = u64::from(item.end_key - item.first_key);
            let times = if item.first_member == NO_MEMBER { 1 } else { u64::from(item.num_tokens) };
            (read + keys, unshared + times * keys)
        })
    }
}

/// A tile of query rows.
#[derive(Clone, Copy, Debug, Default)]
struct QueryTile {
    first_row: usize,
    num_tokens: usize,
    first_position: usize,
    first_block: usize,
    num_blocks: usize,
    /// The first key that its first token sees.
    first_seen: usize,
    chunk_len: usize,
    /// Chunks with keys that the tile sees.
    first_chunk: usize,
    num_chunks: usize,
    /// Where the results of the first of them are.
    first_partial: usize,
    /// The chunks from the first to before the second of these, counted from `first_chunk`, are in shared items.
    shared: (usize, usize),
}

impl QueryTile {
    fn end(&self) -> usize {
        self.first_position + self.num_tokens
    }

    fn split(&mut self, chunk_len: usize) {
        self.chunk_len = chunk_len;
        self.first_chunk = self.first_seen / chunk_len;
        self.num_chunks = (self.end() - 1) / chunk_len + 1 - self.first_chunk;
    }

    /// The chunks of its sequence of which its first token sees all keys, without its own.
    fn whole_chunks(&self) -> Range<usize> {
        self.first_seen.div_ceil(self.chunk_len)..self.first_position / self.chunk_len
    }

    /// The keys of chunk `index` of the tile.
    fn keys(&self, index: usize, kv_tile: usize) -> (usize, usize) {
        let chunk = self.first_chunk + index;
        let first = (self.first_seen & !(kv_tile - 1)).max(chunk * self.chunk_len);
        (first, self.end().min((chunk + 1) * self.chunk_len))
    }

    /// Room that the results of its chunks take.
    fn num_partials(&self) -> usize {
        if self.num_chunks > 1 { self.num_chunks * self.num_tokens } else { 0 }
    }
}

impl WorkRules {
    /// Room for results of chunks that lets every decode step and most others do with one launch of each kernel:
    /// decodes of `max_seqs` sequences of up to `max_len` tokens, and as many large tiles as are split. More is done in
    /// several launches.
    pub fn partials_for(&self, max_seqs: usize, max_rows: usize, max_len: usize) -> usize {
        let chunks = max_chunks(max_len);
        if chunks == 1 {
            return 0;
        }
        let units = 2 * ENOUGH_ROUNDS * self.resident_prefills;
        let tiles = (units / self.prefill_head_tiles).min(max_rows.div_ceil(self.prefill_tokens) * chunks);
        // A tile's results are in one launch.
        let of_tile = max_len.div_ceil(MIN_CHUNK).min(MAX_BALANCED_CHUNKS.max(MAX_CHUNKS) + 1);
        (max_seqs * chunks).max(tiles.max(of_tile) * self.prefill_tokens.max(self.decode_tokens))
    }

    /// The most items of a step.
    pub fn max_items(&self, max_seqs: usize, max_rows: usize, max_len: usize) -> usize {
        let tiles = 2 * max_seqs + max_rows.div_ceil(self.prefill_tokens);
        self.windows.len() * tiles * max_chunks(max_len)
    }

    /// Splits large tiles into chunks that fill the device, or not at all if there are enough of them.
    fn balance(&self, tiles: &mut [QueryTile]) {
        let chunk_len = match tiles.len() * self.prefill_head_tiles < ENOUGH_ROUNDS * self.resident_prefills {
            true => self.balanced_chunk_len(tiles),
            false => ALL_KEYS,
        };
        tiles.iter_mut().for_each(|tile| tile.split(chunk_len));
    }

    /// The length of chunks with which large tiles are done the soonest. The work is cut for 1, 2, ... rounds of all
    /// thread blocks; more rounds are more even, and have more results to merge.
    fn balanced_chunk_len(&self, tiles: &[QueryTile]) -> usize {
        let (blocks, head_tiles) = (self.resident_prefills, self.prefill_head_tiles);
        let seen = |tile: &QueryTile| tile.end() - tile.first_seen;
        let longest = tiles.iter().map(seen).max().unwrap_or(0);
        let even_share = tiles.iter().map(seen).sum::<usize>() * head_tiles / blocks;
        let shortest_chunk = MIN_CHUNK.max(longest.div_ceil(MAX_BALANCED_CHUNKS));
        let mut best = (usize::MAX, ALL_KEYS);
        let (mut costs, mut ends) = (Vec::new(), BinaryHeap::new());
        for rounds in 1..=2 * ENOUGH_ROUNDS {
            let chunk_len = even_share.div_ceil(rounds).max(shortest_chunk).next_multiple_of(self.kv_tile);
            costs.clear();
            for tile in tiles {
                let mut tile = *tile;
                tile.split(chunk_len);
                let cost_of = |index| {
                    let (first, end) = tile.keys(index, self.kv_tile);
                    end - first + if tile.num_chunks > 1 { CHUNK_COST } else { 0 }
                };
                costs.extend((0..tile.num_chunks).map(cost_of));
            }
            if costs.len() * head_tiles > 2 * ENOUGH_ROUNDS * blocks {
                break;
            }
            costs.sort_unstable_by_key(|cost| Reverse(*cost));
            // As the device does, but for thread blocks in groups that take a tile's chunk for all heads.
            ends.clear();
            ends.extend(std::iter::repeat_n(Reverse(0), (blocks / head_tiles).max(1)));
            for cost in &costs {
                if let Some(mut earliest) = ends.peek_mut() {
                    earliest.0 += cost;
                }
            }
            let time = ends.iter().map(|end| end.0).max().unwrap_or(0);
            if time < best.0 {
                best = (time, chunk_len);
            }
        }
        best.1
    }
}

/// Makes the lists of each step, in memory that it keeps.
pub struct WorkPlanner {
    rules: WorkRules,
    decodes: Vec<QueryTile>,
    prefills: Vec<QueryTile>,
    lists: ListMaker,
}

impl WorkPlanner {
    pub fn new(rules: WorkRules) -> Self {
        Self { rules, decodes: Vec::new(), prefills: Vec::new(), lists: ListMaker::default() }
    }

    pub fn rules(&self) -> &WorkRules {
        &self.rules
    }

    /// Replaces `plan` by that of a batch.
    pub fn plan(&mut self, batch: &Batch, plan: &mut AttentionPlan) {
        let Self { rules, decodes, prefills, lists } = self;
        plan.clear();
        for (index, window) in rules.windows.iter().enumerate() {
            let window = window.unwrap_or(usize::MAX);
            decodes.clear();
            prefills.clear();
            for seq in &batch.seqs {
                let is_decode = seq.num_rows <= rules.decode_tokens;
                let (tiles, tokens) = match is_decode {
                    true => (&mut *decodes, rules.decode_tokens),
                    false => (&mut *prefills, rules.prefill_tokens),
                };
                let mut row = 0;
                while row < seq.num_rows {
                    let first_position = seq.num_computed + row;
                    let chunk_len = chunk_len(window.min(first_position + 1));
                    // Tokens of a tile have chunks of the same length.
                    let same = match window > chunk_len * MAX_CHUNKS {
                        true => chunk_len * MAX_CHUNKS - first_position,
                        false => usize::MAX,
                    };
                    let num_tokens = tokens.min(seq.num_rows - row).min(same);
                    let mut tile = QueryTile {
                        first_row: seq.first_row + row,
                        num_tokens,
                        first_position,
                        first_block: seq.first_block,
                        num_blocks: seq.num_blocks,
                        first_seen: (first_position + 1).saturating_sub(window),
                        chunk_len,
                        ..QueryTile::default()
                    };
                    tile.split(chunk_len);
                    tiles.push(tile);
                    row += num_tokens;
                }
            }
            if !rules.batch_invariant {
                rules.balance(prefills);
            }
            prefills.sort_by_key(|tile| Reverse(tile.end() - tile.first_seen));
            lists.add(rules, plan, (index, AttentionKind::Decode), decodes, &batch.block_tables);
            lists.add(rules, plan, (index, AttentionKind::Prefill), prefills, &batch.block_tables);
        }
    }
}

/// Makes lists of tiles.
#[derive(Default)]
struct ListMaker {
    shared: SharedChunks,
    /// Of items with so many tiles of keys: first how many there are, then where the next one goes.
    counts: Vec<u32>,
}

impl ListMaker {
    /// Adds a list of the tiles' chunks, or several if their results need more room than there is.
    fn add(
        &mut self,
        rules: &WorkRules,
        plan: &mut AttentionPlan,
        (window, kind): (usize, AttentionKind),
        tiles: &mut [QueryTile],
        block_tables: &[u32],
    ) {
        let mut rest = tiles;
        while !rest.is_empty() {
            let (mut partials, mut fitting) = (0, 0);
            for tile in &mut *rest {
                tile.first_partial = partials;
                partials += tile.num_partials();
                if partials > rules.max_partials {
                    break;
                }
                fitting += 1;
            }
            let (tiles, others) = rest.split_at_mut(fitting);
            assert!(fitting > 0, "a sequence is longer than the most tokens that the backend was made for");
            rest = others;
            plan.launches.push(AttentionLaunch { window, kind, list: plan.lists.len() });
            self.shared.clear();
            if kind == AttentionKind::Decode && rules.decode_tokens > 1 {
                self.share(BlockTables { blocks: block_tables, block_size: rules.block_size }, tiles);
            }
            self.add_list(rules, plan, tiles);
        }
    }

    /// Finds the chunks of these decodes that are computed together.
    fn share(&mut self, tables: BlockTables<'_>, tiles: &mut [QueryTile]) {
        for (index, tile) in tiles.iter().enumerate() {
            let whole = tile.whole_chunks();
            // A step that is recorded has no tables.
            let has_table = whole.end * tile.chunk_len <= tile.num_blocks * tables.block_size;
            if tile.num_tokens == 1 && has_table {
                self.shared.add(index, tile.chunk_len, whole, tile.first_block);
            }
        }
        self.shared.find(tables);
        for decode in self.shared.decodes() {
            let tile = &mut tiles[decode.tile];
            let first = decode.whole_chunks.start - tile.first_chunk;
            tile.shared = (first, first.max(decode.shared_end.saturating_sub(tile.first_chunk)));
        }
    }

    /// Adds a list with all chunks of the tiles, the longest first. It is a counting sort.
    fn add_list(&mut self, rules: &WorkRules, plan: &mut AttentionPlan, tiles: &[QueryTile]) {
        let (kv_tile, shared, places) = (rules.kv_tile, &self.shared, &mut self.counts);
        let chunks = |tile: &QueryTile| {
            let (tile, (first_shared, end_shared)) = (*tile, tile.shared);
            let indices = (0..first_shared).chain(end_shared..tile.num_chunks);
            indices.map(move |index| (index, tile.keys(index, kv_tile)))
        };
        let rank = |(first, end): (usize, usize)| (end - first + kv_tile - 1) >> kv_tile.trailing_zeros();
        // Keys of a shared item.
        let keys_of = |chunk: usize, members: &Range<usize>| {
            let chunk_len = shared.decodes()[members.start].chunk_len;
            (chunk * chunk_len, (chunk + 1) * chunk_len)
        };
        places.clear();
        let of_shared = shared.items(rules.decode_tokens).map(|(chunk, members)| keys_of(chunk, &members));
        for keys in of_shared.chain(tiles.iter().flat_map(chunks).map(|(_, keys)| keys)) {
            let rank = rank(keys);
            if rank >= places.len() {
                places.resize(rank + 1, 0);
            }
            places[rank] += 1;
        }
        let first_item = plan.items.len();
        let mut next = first_item as u32;
        for count in places.iter_mut().rev() {
            next += std::mem::replace(count, next);
        }
        plan.items.resize(next as usize, AttentionItem::default());
        let mut place = |keys, item| {
            let place = &mut places[rank(keys)];
            plan.items[*place as usize] = item;
            *place += 1;
        };

        let first_member = plan.members.len();
        if !shared.is_empty() {
            plan.members.extend(shared.decodes().iter().map(|decode| {
                let tile = &tiles[decode.tile];
                AttentionMember {
                    row: tile.first_row as u32,
                    num_chunks: tile.num_chunks as u32,
                    first_chunk: tile.first_chunk as u32,
                    first_partial: tile.first_partial as u32,
                }
            }));
        }
        for (chunk, members) in shared.items(rules.decode_tokens) {
            let keys = keys_of(chunk, &members);
            let item = AttentionItem {
                num_tokens: members.len() as u32,
                first_block: shared.decodes()[members.start].first_block as u32,
                first_key: keys.0 as u32,
                end_key: keys.1 as u32,
                chunk: chunk as u32,
                first_member: (first_member + members.start) as u32,
                ..AttentionItem::default()
            };
            place(keys, item);
        }
        for tile in tiles {
            for (chunk, keys) in chunks(tile) {
                let item = AttentionItem {
                    first_row: tile.first_row as u32,
                    num_tokens: tile.num_tokens as u32,
                    first_position: tile.first_position as u32,
                    first_block: tile.first_block as u32,
                    first_key: keys.0 as u32,
                    end_key: keys.1 as u32,
                    chunk: chunk as u32,
                    num_chunks: tile.num_chunks as u32,
                    first_chunk: tile.first_chunk as u32,
                    first_partial: tile.first_partial as u32,
                    first_member: NO_MEMBER,
                };
                place(keys, item);
            }
        }
        let num_items = plan.items.len() - first_item;
        plan.lists.push(AttentionList { first_item: first_item as u32, num_items: num_items as u32 });
    }
}

/// Replaces `plan` by the list for the kernel without tensor cores: an item for each row.
pub fn plan_rows(batch: &Batch, plan: &mut AttentionPlan) {
    let rules = WorkRules {
        decode_tokens: 1,
        prefill_tokens: 1,
        kv_tile: 64,
        block_size: 1,
        prefill_head_tiles: 1,
        resident_prefills: 0,
        windows: vec![None],
        batch_invariant: true,
        max_partials: 0,
    };
    let mut tiles: Vec<QueryTile> = batch
        .seqs
        .iter()
        .flat_map(|seq| {
            (0..seq.num_rows).map(|row| QueryTile {
                first_row: seq.first_row + row,
                num_tokens: 1,
                first_position: seq.num_computed + row,
                first_block: seq.first_block,
                chunk_len: ALL_KEYS,
                num_chunks: 1,
                ..QueryTile::default()
            })
        })
        .collect();
    plan.clear();
    ListMaker::default().add(&rules, plan, (0, AttentionKind::Prefill), &mut tiles, &batch.block_tables);
}

#[cfg(test)]
mod tests;
