//! Chunks of keys that several decodes of a batch have in the same blocks, such as those of a common prefix.
//!
//! An item of the work list reads such a chunk once for as many of them as a tile of the decode kernel has room for.
//! The idea is that of Hydragen (Juravsky et al. 2024, arXiv 2402.05099) and ChunkAttention (Ye et al. 2024, arXiv
//! 2402.15220), and of FlashInfer's cascade attention (Ye et al. 2025, arXiv 2501.01005). These compute the prefix by
//! itself and merge two results. Here a shared chunk is a chunk like others, and a token's results have the same bits
//! with and without sharing.
//!
//! Groups are found in time that is linear in the blocks that are shared, and `n log n` in the decodes. A group's
//! longest sequence, the pivot, is compared with each of the others from the group's first chunk on. Those that leave
//! it at the same chunk are grouped again from there, by the block in which that chunk ends. So the groups are the
//! nodes of a prefix tree, and the members of a node are neighbours.

use std::cmp::Reverse;
use std::ops::Range;

/// A decode, and its chunks that may be shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SharingDecode {
    /// What the caller calls it.
    pub tile: usize,
    /// Keys of a chunk.
    pub chunk_len: usize,
    /// The chunks of its sequence of which it sees all keys.
    pub whole_chunks: Range<usize>,
    /// Where its block table begins, which has blocks for all of them.
    pub first_block: usize,
    /// The groups that it is in have its whole chunks before this one, each once.
    pub shared_end: usize,
    /// The last block of the chunk that is being looked at; `None` if it does not see all of it.
    last_block: Option<u32>,
    /// Where it leaves the pivot.
    leaves_at: usize,
}

/// Decodes that have the same blocks in some chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SharingGroup {
    chunks: Range<usize>,
    /// In [`SharedChunks::decodes`].
    members: Range<usize>,
}

/// The groups of a list. Their memory is kept from one step to the next.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedChunks {
    /// The members of each group are neighbours.
    decodes: Vec<SharingDecode>,
    groups: Vec<SharingGroup>,
    /// Decodes with the same last block of the same chunk, which are to be compared from that chunk on.
    candidates: Vec<(Range<usize>, usize)>,
}

/// The block tables of a batch.
#[derive(Clone, Copy)]
pub(super) struct BlockTables<'a> {
    pub blocks: &'a [u32],
    pub block_size: usize,
}

impl BlockTables<'_> {
    /// The blocks of some chunks.
    fn of_chunks(&self, decode: &SharingDecode, chunks: Range<usize>) -> &[u32] {
        let first = chunks.start * decode.chunk_len / self.block_size;
        let end = (chunks.end * decode.chunk_len).div_ceil(self.block_size);
        &self.blocks[decode.first_block + first..decode.first_block + end]
    }

    fn last_of_chunk(&self, decode: &SharingDecode, chunk: usize) -> u32 {
        self.blocks[decode.first_block + ((chunk + 1) * decode.chunk_len - 1) / self.block_size]
    }

    /// The first chunk from `from` on in which two decodes have different blocks, or of which one does not see all.
    fn first_difference(&self, a: &SharingDecode, b: &SharingDecode, from: usize) -> usize {
        let end = a.whole_chunks.end.min(b.whole_chunks.end);
        let ends_alike = |chunk: &usize| self.last_of_chunk(a, *chunk) == self.last_of_chunk(b, *chunk);
        let end = (from..end).find(|chunk| !ends_alike(chunk)).unwrap_or(end.max(from));
        // All blocks are compared: a sequence may have some of its own before others that it shares.
        let is_same = |chunks: Range<usize>| self.of_chunks(a, chunks.clone()) == self.of_chunks(b, chunks);
        match from == end || is_same(from..end) {
            true => end,
            false => (from..end).find(|chunk| !is_same(*chunk..chunk + 1)).unwrap_or(end),
        }
    }
}

impl SharedChunks {
    pub fn clear(&mut self) {
        self.decodes.clear();
        self.groups.clear();
    }

    /// Adds a decode. Those without whole chunks share nothing.
    pub fn add(&mut self, tile: usize, chunk_len: usize, whole_chunks: Range<usize>, first_block: usize) {
        if !whole_chunks.is_empty() {
            self.decodes.push(SharingDecode {
                tile,
                chunk_len,
                whole_chunks,
                first_block,
                shared_end: 0,
                last_block: None,
                leaves_at: 0,
            });
        }
    }

    /// Finds the groups of the decodes that were added, and orders the decodes by them.
    pub fn find(&mut self, tables: BlockTables<'_>) {
        self.decodes.sort_unstable_by_key(|decode| (decode.chunk_len, decode.tile));
        let mut start = 0;
        while start < self.decodes.len() {
            let chunk_len = self.decodes[start].chunk_len;
            let end = start + self.decodes[start..].partition_point(|decode| decode.chunk_len == chunk_len);
            // With a window, sequences may have whole chunks far from their beginning only.
            let first = self.decodes[start..end].iter().map(|decode| decode.whole_chunks.start).min();
            self.add_candidates(tables, start..end, first.unwrap_or(0));
            start = end;
        }
        while let Some((range, chunk)) = self.candidates.pop() {
            self.compare(tables, range, chunk);
        }
    }

    /// Orders decodes by the block in which a chunk ends. Those with the same one are candidates for a group.
    fn add_candidates(&mut self, tables: BlockTables<'_>, range: Range<usize>, chunk: usize) {
        let mut start = range.start;
        let decodes = &mut self.decodes[range];
        for decode in &mut *decodes {
            decode.last_block = (chunk < decode.whole_chunks.end).then(|| tables.last_of_chunk(decode, chunk));
        }
        decodes.sort_unstable_by_key(|decode| (decode.last_block, decode.tile));
        for run in decodes.chunk_by(|a, b| a.last_block == b.last_block) {
            if run.len() > 1 && run[0].last_block.is_some() {
                self.candidates.push((start..start + run.len(), chunk));
            }
            start += run.len();
        }
    }

    /// Compares candidates from `chunk` on: one of them with all others.
    fn compare(&mut self, tables: BlockTables<'_>, range: Range<usize>, chunk: usize) {
        let decodes = &mut self.decodes[range.clone()];
        let longest = (0..decodes.len()).max_by_key(|index| (decodes[*index].whole_chunks.end, Reverse(*index)));
        decodes.swap(0, longest.unwrap_or(0));
        let Some((pivot, others)) = decodes.split_first_mut() else { return };
        for other in &mut *others {
            other.leaves_at = tables.first_difference(pivot, other, chunk);
            if other.leaves_at > chunk {
                other.shared_end = other.leaves_at;
                pivot.shared_end = pivot.shared_end.max(other.leaves_at);
            }
        }
        others.sort_unstable_by_key(|other| (Reverse(other.leaves_at), other.tile));
        // From those that go with the pivot the furthest, to all.
        let (mut end, mut start) = (range.start + 1, range.start + 1);
        while end < range.end {
            let leaves_at = self.decodes[end].leaves_at;
            end += self.decodes[end..range.end].partition_point(|other| other.leaves_at == leaves_at);
            let next = self.decodes[..range.end].get(end).map_or(chunk, |other| other.leaves_at);
            if next < leaves_at {
                self.groups.push(SharingGroup { chunks: next..leaves_at, members: range.start..end });
            }
            self.add_candidates(tables, start..end, leaves_at);
            start = end;
        }
    }

    /// Whether any chunk is shared.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    pub fn decodes(&self) -> &[SharingDecode] {
        &self.decodes
    }

    /// The shared items: each chunk of each group, with up to `most` of the decodes that see all of its keys. Items of
    /// the same keys are neighbours, so that they are computed at the same time, and share the L2 cache.
    pub fn items(&self, most: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let of_chunk = move |members: Range<usize>, chunk: usize| {
            let mut next = members.start;
            std::iter::from_fn(move || {
                let sees = |decode: &SharingDecode| decode.whole_chunks.start <= chunk;
                let first = next + self.decodes[next..members.end].iter().position(sees)?;
                let limit = members.end.min(first + most);
                next = first + self.decodes[first..limit].iter().take_while(|decode| sees(decode)).count();
                Some((chunk, first..next))
            })
        };
        let of_group = move |group: &SharingGroup| {
            let members = group.members.clone();
            group.chunks.clone().flat_map(move |chunk| of_chunk(members.clone(), chunk))
        };
        self.groups.iter().flat_map(of_group)
    }
}
