// A step's input in device memory. `transfers.cu` copies all of it at once; `src/backend/cuda/batch.rs` writes the same
// words.
#pragma once
#include "types.cuh"

// Arrays follow the header. Their fields here are offsets from the header's start, in 32-bit words. A graph is replayed
// with the grid of the largest batch that it was recorded for, and rows beyond the counts have no work.
struct BatchHeader {
    uint32_t num_rows;
    // Rows whose logits are wanted.
    uint32_t num_logit_rows;
    uint32_t tokens;           // [num_rows] token id, unless `token_sources` has one
    uint32_t token_sources;    // [num_rows] NONE, or the index of the token in `sampled` (of the previous step)
    uint32_t positions;        // [num_rows] position in the sequence
    uint32_t slots;            // [num_rows] block * block_size + offset, where K and V go
    uint32_t block_tables;     // of all sequences, concatenated
    uint32_t logit_rows;       // [num_logit_rows] rows of the batch
    uint32_t attention_lists;  // struct AttentionList, one for each launch of an attention kernel in a layer
    uint32_t attention_items;  // struct AttentionItem, those of a list behind each other
    uint32_t attention_members;  // struct AttentionMember, those of an item behind each other
    uint32_t padding[5];
};

struct AttentionList {
    // In `attention_items`.
    uint32_t first_item;
    uint32_t num_items;
};

// The work list of attention has an item for each tile of query rows and chunk of keys (a sequence's positions), the
// ones with the most keys first. Every KV head has the same items. `src/backend/cuda/attention/work_list.rs` makes
// them.
//
// The tokens of a shared item are the members of a group: each is the only new token of its sequence, and the chunk is
// in the same blocks for all of them. They see all of its keys, and have at least one more chunk, with their own key.
// The members say what the fields `first_row`, `num_chunks`, `first_chunk` and `first_partial` of another item do;
// these and `first_position` are 0. `shared_chunks.rs` finds the groups.
struct AttentionItem {
    // The tile's tokens are neighbouring rows of the batch, of one sequence.
    uint32_t first_row;
    uint32_t num_tokens;
    uint32_t first_position;
    // Of the sequence, in `block_tables`.
    uint32_t first_block;
    // The chunk's keys that the tile's tokens see; the first is a multiple of KV_TILE. One token need not see all.
    uint32_t first_key;
    uint32_t end_key;
    // Index of this chunk among those of the tile, their number, and the position of the first of them in the sequence,
    // counted in chunks. Of a shared item, `chunk` is the chunk's own position in each sequence.
    uint32_t chunk;
    uint32_t num_chunks;
    uint32_t first_chunk;
    // If the tile has several chunks: where the results of the first one are, counted in tokens. Those of the others
    // follow.
    uint32_t first_partial;
    // Of a shared item: the member of its first token, in `attention_members`. NONE for others.
    uint32_t first_member;
};

// A sequence with one new token, as it is in all shared items that have it.
struct AttentionMember {
    uint32_t row;
    uint32_t num_chunks;
    uint32_t first_chunk;
    uint32_t first_partial;
};

constexpr uint32_t NONE = 0xffffffffu;

__device__ __forceinline__ const uint32_t* batch_words(const BatchHeader* batch, uint32_t offset) {
    return reinterpret_cast<const uint32_t*>(batch) + offset;
}

__device__ __forceinline__ AttentionList attention_list(const BatchHeader* batch, uint32_t index) {
    return reinterpret_cast<const AttentionList*>(batch_words(batch, batch->attention_lists))[index];
}

__device__ __forceinline__ const AttentionItem& attention_item(const BatchHeader* batch, uint32_t index) {
    return reinterpret_cast<const AttentionItem*>(batch_words(batch, batch->attention_items))[index];
}

__device__ __forceinline__ const AttentionMember& attention_member(const BatchHeader* batch, uint32_t index) {
    return reinterpret_cast<const AttentionMember*>(batch_words(batch, batch->attention_members))[index];
}
