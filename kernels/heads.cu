// The operations on the heads of Q, K and V and on KV blocks: norms of heads, the rotary embedding with the KV write,
// and copies of blocks. Unlike rows.cu they depend on the model's heads and on the layout of the KV cache. Grids may be
// larger than the batch. Rows beyond the batch have no work.
#include "include/heads.cuh"

struct HeadNormParams {
    const BatchHeader* batch;
    scalar* qkv;            // [rows, QKV_COLS]
    const float* q_weight;  // [HEAD_DIM]
    const float* k_weight;
    float eps;
};

constexpr int WARPS_PER_BLOCK = 4;

// Normalises each head of Q and K separately. One warp computes one head. grid: (rows, heads / WARPS_PER_BLOCK)
KERNEL(WARPS_PER_BLOCK * WARP_SIZE, head_norm, HeadNormParams) {
    const uint32_t row = blockIdx.x;
    const uint32_t head = blockIdx.y * WARPS_PER_BLOCK + threadIdx.x / WARP_SIZE;
    if (row >= p.batch->num_rows || head >= NUM_HEADS + NUM_KV_HEADS) {
        return;
    }
    const float* weight = head < NUM_HEADS ? p.q_weight : p.k_weight;
    scalar* x = p.qkv + uint64_t(row) * QKV_COLS + head * HEAD_DIM;
    norm_head(x, weight, p.eps);
}

// Rotates Q, and writes K and V into the cache. One warp computes one head. grid: (rows, (NUM_HEADS + 2 *
// NUM_KV_HEADS) / WARPS_PER_BLOCK); dynamic shared memory with KV_CODES: WARPS_PER_BLOCK * HEAD_DIM floats
KERNEL(WARPS_PER_BLOCK * WARP_SIZE, rope_and_write_kv, RopeParams) {
    DYNAMIC_SHARED(shared);
    const uint32_t row = blockIdx.x, warp = threadIdx.x / WARP_SIZE;
    const uint32_t head = blockIdx.y * WARPS_PER_BLOCK + warp;
    if (row >= p.batch->num_rows || head >= NUM_HEADS + 2 * NUM_KV_HEADS) {
        return;
    }
    rope_and_write_head(p, row, head, reinterpret_cast<float*>(shared) + warp * HEAD_DIM);
}

struct CopyBlocksParams {
    kv_element* pool;
    const uint32_t* pairs;  // [num_pairs][from, to]; no block is both read and written
};

constexpr int COPY_THREADS = 256;
constexpr uint32_t COPY_BYTES_PER_BLOCK = 16384;

// grid: (bytes of a KV block / COPY_BYTES_PER_BLOCK, num_pairs)
KERNEL(COPY_THREADS, copy_blocks, CopyBlocksParams) {
    constexpr int N = VEC<kv_element>;
    const uint32_t from = p.pairs[2 * blockIdx.y], to = p.pairs[2 * blockIdx.y + 1];
    const uint64_t per_block = COPY_BYTES_PER_BLOCK / sizeof(kv_element), start = blockIdx.x * per_block;
    const uint64_t end = min(start + per_block, uint64_t(BLOCK_STRIDE));
    for (uint64_t i = start + threadIdx.x * N; i < end; i += blockDim.x * N) {
        store(p.pool + to * BLOCK_STRIDE + i, load<N>(p.pool + from * BLOCK_STRIDE + i));
    }
}
