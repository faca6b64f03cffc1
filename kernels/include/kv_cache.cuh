// The layout of K and V: a block holds `BLOCK_SIZE` tokens of all layers and is contiguous, [NUM_LAYERS][K,
// V][NUM_KV_HEADS] parts. A part has the vectors of a head, [BLOCK_SIZE][HEAD_DIM] of `scalar`; with KV_CODES
// [BLOCK_SIZE][HEAD_DIM] codes of one byte, and behind them the scales of these vectors, [BLOCK_SIZE] of bf16.
#pragma once
#include "kv_codes.cuh"
#include "types.cuh"

#ifdef KV_CODES
using kv_element = uint8_t;
constexpr uint64_t VECTOR_SIZE = HEAD_DIM + sizeof(bf16);
// So codes and scales are copied 16 bytes at a time.
static_assert(BLOCK_SIZE % 8 == 0, "the scales of 8 tokens lie together");
#else
using kv_element = scalar;
constexpr uint64_t VECTOR_SIZE = HEAD_DIM;
#endif

// In elements of the pool.
constexpr uint64_t HEAD_STRIDE = BLOCK_SIZE * VECTOR_SIZE;
constexpr uint64_t KV_STRIDE = NUM_KV_HEADS * HEAD_STRIDE;
constexpr uint64_t BLOCK_STRIDE = uint64_t(NUM_LAYERS) * 2 * KV_STRIDE;

constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS;
// Columns of a row of Q, K and V.
constexpr int QKV_COLS = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM;

// The first token's vector of a head in a block; `is_v` 0: K, 1: V.
__device__ __forceinline__ uint64_t head_offset(uint32_t block, uint32_t layer, uint32_t is_v, uint32_t kv_head) {
    return block * BLOCK_STRIDE + (2 * layer + is_v) * KV_STRIDE + kv_head * HEAD_STRIDE;
}

#ifdef KV_CODES
// The scale of the vector in a slot of a head's part of a block.
template <class T> __device__ __forceinline__ T* scale_of(T* head, uint32_t slot) {
    return head + BLOCK_SIZE * HEAD_DIM + slot * sizeof(bf16);
}
#endif
