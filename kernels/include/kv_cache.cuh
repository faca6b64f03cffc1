// The layout of K and V: a block holds `BLOCK_SIZE` tokens of all layers and is contiguous, [NUM_LAYERS][K,
// V][NUM_KV_HEADS][BLOCK_SIZE][HEAD_DIM] of `scalar`.
#pragma once
#include "types.cuh"

constexpr uint64_t HEAD_STRIDE = uint64_t(BLOCK_SIZE) * HEAD_DIM;
constexpr uint64_t KV_STRIDE = NUM_KV_HEADS * HEAD_STRIDE;
constexpr uint64_t BLOCK_STRIDE = uint64_t(NUM_LAYERS) * 2 * KV_STRIDE;

constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS;
// Columns of a row of Q, K and V.
constexpr int QKV_COLS = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM;

// The first token's vector of a head in a block; `is_v` 0: K, 1: V.
__device__ __forceinline__ uint64_t head_offset(uint32_t block, uint32_t layer, uint32_t is_v, uint32_t kv_head) {
    return block * BLOCK_STRIDE + (2 * layer + is_v) * KV_STRIDE + kv_head * HEAD_STRIDE;
}
