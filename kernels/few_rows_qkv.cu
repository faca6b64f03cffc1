// The product of up to 8 rows that makes Q, K and V, and what follows it in each head. The other products of few rows
// do not depend on the model's heads: few_rows.cu.
#include "include/few_rows.cuh"
#include "include/heads.cuh"

struct FewRowsQkvParams {
    FewRowsInput input;     // of QKV_COLS columns
    const float* bias;      // [QKV_COLS], or null
    const float* q_norm;    // [HEAD_DIM] the norms of the heads of Q and K, or null
    const float* k_norm;
    uint32_t* arrivals;     // [NUM_HEADS + 2 * NUM_KV_HEADS], 0 between launches
    RopeParams rope;        // `rope.qkv` takes the product
    float head_eps;
    uint32_t padding;
};

// Thread blocks of a head. The kernel is for heads of a multiple of TILE_N dimensions.
constexpr uint32_t HEAD_BLOCKS = HEAD_DIM < TILE_N ? 1 : HEAD_DIM / TILE_N;

// Whether this thread block is the last of its head to arrive. What all threads of the others have written before is
// then there. The counter is 0 again after the last arrival.
__device__ __forceinline__ bool is_last_of_head(uint32_t* counter, uint32_t* shared) {
    __syncthreads();
    if (threadIdx.x == 0) {
        // Releases what the whole thread block has written, and acquires what the others have released.
        __threadfence();
        *shared = atomicInc(counter, HEAD_BLOCKS - 1) == HEAD_BLOCKS - 1;
        __threadfence();
    }
    __syncthreads();
    return *shared != 0;
}

// The product, and what follows it in each head: norm, rotary embedding and KV write, by the thread block that is the
// last of its head to finish. Rows of the batch only. grid: QKV_COLS / TILE_N; dynamic shared memory:
// FewRowsShape<1>::SHARED_BYTES
KERNEL_WAITS_LATER_OCCUPANCY(FEW_THREADS, 3, few_rows_qkv, FewRowsQkvParams) {
    DYNAMIC_SHARED(shared);
    few_rows_product<1>(p.input, shared, [&](uint32_t row, uint32_t column, const float (&sums)[1]) {
        const float value = sums[0] + (p.bias != nullptr ? p.bias[column] : 0.0f);
        p.rope.qkv[uint64_t(row) * QKV_COLS + column] = from_float<scalar>(value);
    });
    const uint32_t head = blockIdx.x / HEAD_BLOCKS;
    constexpr int FLAG = FewRowsShape<1>::PIPELINE_BYTES;  // its place in shared memory
    if (!is_last_of_head(p.arrivals + head, reinterpret_cast<uint32_t*>(shared + FLAG))) {
        return;
    }
    static_assert(FEW_WARPS == FEW_ROWS, "a warp for each row");
    static_assert(FEW_WARPS * HEAD_DIM * 4 <= FLAG, "the vectors that become codes lie where the tiles were");
    const uint32_t warp = threadIdx.x / WARP_SIZE;
    if (warp >= min(p.input.rows, p.rope.batch->num_rows)) {
        return;
    }
    const float* norm = head < NUM_HEADS ? p.q_norm : head < NUM_HEADS + NUM_KV_HEADS ? p.k_norm : nullptr;
    if (norm != nullptr) {
        norm_head(p.rope.qkv + uint64_t(warp) * QKV_COLS + head * HEAD_DIM, norm, p.head_eps);
        __syncwarp();
    }
    rope_and_write_head(p.rope, warp, head, reinterpret_cast<float*>(shared) + warp * HEAD_DIM);
}
static_assert(QKV_COLS % TILE_N == 0 || HEAD_DIM % TILE_N != 0, "thread blocks do not share heads");
