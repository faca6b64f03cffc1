// What is done with the heads of a row of Q, K and V: their norms, the rotary embedding and the KV write. One warp
// computes one head.
#pragma once
#include "batch.cuh"
#include "kv_cache.cuh"
#include "reduce.cuh"

struct RopeParams {
    const BatchHeader* batch;
    scalar* qkv;         // [rows, QKV_COLS]
    const float* table;  // [positions][cos, sin][rotary_dim / 2]; null: no rotation
    kv_element* pool;    // the KV blocks
    uint32_t layer;
    uint32_t rotary_dim;
};

// Normalises a head in place: `weight: [HEAD_DIM]`.
__device__ __forceinline__ void norm_head(scalar* x, const float* weight, float eps) {
    const uint32_t lane = threadIdx.x % WARP_SIZE;
    float sum = 0.0f;
    for (uint32_t i = lane; i < HEAD_DIM; i += WARP_SIZE) {
        const float v = to_float(x[i]);
        sum += v * v;
    }
    const float factor = 1.0f / sqrtf(reduce_warp<Sum>(sum) / HEAD_DIM + eps);
    for (uint32_t i = lane; i < HEAD_DIM; i += WARP_SIZE) {
        x[i] = from_float<scalar>(to_float(x[i]) * factor * weight[i]);
    }
}

// Rotates dimension i with dimension i + rotary_dim / 2, `N` pairs at a time, from `from` to `to`, which may be the
// same.
template <int N, class T>
__device__ __forceinline__ void turn_head(const scalar* from, T* to, const float* table, uint32_t rotary_dim) {
    const uint32_t half = rotary_dim / 2, lane = threadIdx.x % WARP_SIZE;
    for (uint32_t i = lane * N; i < half; i += WARP_SIZE * N) {
        const Vec<scalar, N> low = load<N>(from + i), high = load<N>(from + half + i);
        const Vec<float, N> cos = load<N>(table + i), sin = load<N>(table + half + i);
        Vec<T, N> new_low, new_high;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float a = to_float(low.at[j]), b = to_float(high.at[j]);
            new_low.at[j] = from_float<T>(a * cos.at[j] - b * sin.at[j]);
            new_high.at[j] = from_float<T>(b * cos.at[j] + a * sin.at[j]);
        }
        store(to + i, new_low);
        store(to + half + i, new_high);
    }
}

// Copies a head from `from` to `to`, which may be the same. If `table` is not null, the head is rotated.
template <class T>
__device__ __forceinline__ void move_head(const RopeParams& p, const scalar* from, T* to, const float* table) {
    uint32_t turned = 0;
    if (table != nullptr) {
        turned = p.rotary_dim;
        if (p.rotary_dim % 8 == 0) {
            turn_head<4>(from, to, table, p.rotary_dim);
        } else {
            turn_head<1>(from, to, table, p.rotary_dim);
        }
    }
    if (static_cast<const void*>(to) != from) {
        for (uint32_t i = turned + threadIdx.x % WARP_SIZE; i < HEAD_DIM; i += WARP_SIZE) {
            to[i] = from_float<T>(to_float(from[i]));
        }
    }
}

// Rotates a head of Q in place. Writes a rotated head of K, or an unchanged one of V, into the cache. With KV_CODES
// `vector: [HEAD_DIM]` is shared memory of the warp.
__device__ __forceinline__ void rope_and_write_head(const RopeParams& p, uint32_t row, uint32_t head, float* vector) {
    scalar* from = p.qkv + uint64_t(row) * QKV_COLS + head * HEAD_DIM;
    const bool turns = p.table != nullptr && head < NUM_HEADS + NUM_KV_HEADS;
    const uint64_t position = turns ? batch_words(p.batch, p.batch->positions)[row] : 0;
    const float* table = turns ? p.table + position * p.rotary_dim : nullptr;
    if (head < NUM_HEADS) {
        if (turns) {
            move_head(p, from, from, table);
        }
        return;
    }
    const uint32_t is_v = head >= NUM_HEADS + NUM_KV_HEADS;
    const uint32_t kv_head = head - NUM_HEADS - is_v * NUM_KV_HEADS;
    const uint32_t slot = batch_words(p.batch, p.batch->slots)[row];
    kv_element* part = p.pool + head_offset(slot / BLOCK_SIZE, p.layer, is_v, kv_head);
    kv_element* to = part + slot % BLOCK_SIZE * HEAD_DIM;
#ifdef KV_CODES
    // Codes are made of the numbers before they are rounded to `scalar`.
    move_head(p, from, vector, table);
    __syncwarp();
    write_codes(vector, to, scale_of(part, slot % BLOCK_SIZE));
#else
    move_head(p, from, to, table);
#endif
}
