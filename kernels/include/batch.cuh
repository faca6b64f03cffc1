// A step's input in device memory. `transfers.cu` copies all of it at once; `src/backend/cuda/batch.rs` writes the same
// words.
#pragma once
#include "types.cuh"

// Arrays follow the header. Their fields here are offsets from the header's start, in 32-bit words. A graph is replayed
// with the grid of the largest batch that it was recorded for, and rows and sequences beyond the counts have no work.
struct BatchHeader {
    uint32_t num_rows;
    uint32_t num_seqs;
    // Rows whose logits are wanted.
    uint32_t num_logit_rows;
    uint32_t tokens;         // [num_rows] token id, unless `token_sources` has one
    uint32_t token_sources;  // [num_rows] NONE, or the index of the token in `sampled` (of the previous step)
    uint32_t positions;      // [num_rows] position in the sequence
    uint32_t slots;          // [num_rows] block * block_size + offset, where K and V go
    uint32_t seqs;           // [num_seqs] struct SeqEntry
    uint32_t block_tables;   // of all sequences, concatenated
    uint32_t logit_rows;     // [num_logit_rows] rows of the batch
    uint32_t decode_seqs;    // [num_decode_seqs] indices in `seqs` of the sequences with one row
    uint32_t num_decode_seqs;
    uint32_t prefill_tiles;  // [num_prefill_tiles] struct TileEntry
    uint32_t num_prefill_tiles;
    uint32_t padding[2];
};

struct SeqEntry {
    uint32_t first_row;
    uint32_t num_rows;
    // Tokens whose K and V were in the cache before this step; the first row has this position.
    uint32_t num_computed;
    // Index in `block_tables`.
    uint32_t first_block;
};

// Query rows of one sequence that one thread block of the prefill kernel computes.
struct TileEntry {
    uint32_t seq;
    // Counted from the sequence's first row.
    uint32_t first_row;
};

constexpr uint32_t NONE = 0xffffffffu;

__device__ __forceinline__ const uint32_t* batch_words(const BatchHeader* batch, uint32_t offset) {
    return reinterpret_cast<const uint32_t*>(batch) + offset;
}

__device__ __forceinline__ const SeqEntry* batch_seqs(const BatchHeader* batch) {
    return reinterpret_cast<const SeqEntry*>(batch_words(batch, batch->seqs));
}

__device__ __forceinline__ const TileEntry* batch_tiles(const BatchHeader* batch) {
    return reinterpret_cast<const TileEntry*>(batch_words(batch, batch->prefill_tiles));
}
