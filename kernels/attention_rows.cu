// PagedAttention without tensor cores: for float32, and for head sizes that tensor cores cannot take. One warp computes
// one query head of one token.
#include "include/batch.cuh"
#include "include/kv_cache.cuh"
#include "include/reduce.cuh"

struct AttentionParams {
    const BatchHeader* batch;
    const scalar* qkv;       // [rows, QKV_COLS]
    const kv_element* pool;  // the KV blocks
    scalar* out;             // [rows, NUM_HEADS * HEAD_DIM]
    float* partials;         // not used
    uint32_t* arrivals;      // not used
    uint32_t layer;
    uint32_t window;   // tokens that a token sees, itself included; 0: all before it
    uint32_t list;     // index of the work list
    float scale_log2;  // factor on q·k, times log2(e): exponentials are powers of two
    float cap_scale;   // with SOFTCAP: scores are tanh(q·k * cap_scale) first
};

constexpr int WARPS = 4;

// One token's vector of the KV cache.
struct KvVector {
    const kv_element* at;
    float scale;  // 1 without KV_CODES

    // Elements d, d + 1, ..., in units of `scale`.
    template <int N> __device__ __forceinline__ void read(int d, float (&elements)[N]) const {
        const Vec<kv_element, N> stored = load<N>(at + d);
#pragma unroll
        for (int i = 0; i < N; i++) {
#ifdef KV_CODES
            elements[i] = KV_CODES::decode(stored.at[i], 0);
#else
            elements[i] = to_float(stored.at[i]);
#endif
        }
    }
};

__device__ __forceinline__ KvVector vector_of(const kv_element* head, const uint32_t* table, uint32_t position) {
    const kv_element* part = head + table[position / BLOCK_SIZE] * BLOCK_STRIDE;
    const uint32_t slot = position % BLOCK_SIZE;
#ifdef KV_CODES
    const float scale = to_float(*reinterpret_cast<const bf16*>(scale_of(part, slot))) * KV_CODES::UNIT;
#else
    const float scale = 1.0f;
#endif
    return {part + slot * HEAD_DIM, scale};
}

// Items are single tokens with all of their keys. grid: (items of the list, NUM_HEADS / WARPS); dynamic shared memory:
// WARPS * HEAD_DIM floats
KERNEL_OCCUPANCY(WARPS * WARP_SIZE, 4, attention_rows, AttentionParams) {
    const uint32_t warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const uint32_t head = blockIdx.y * WARPS + warp;
    const AttentionList list = attention_list(p.batch, p.list);
    if (blockIdx.x >= list.num_items || head >= NUM_HEADS) {
        return;
    }
    const AttentionItem& item = attention_item(p.batch, list.first_item + blockIdx.x);
    const uint32_t* table = batch_words(p.batch, p.batch->block_tables) + item.first_block;
    const uint64_t row = item.first_row;
    const uint32_t position = item.first_position;
    const uint32_t seen_from = p.window == 0 || position < p.window ? 0 : position + 1 - p.window;
    const kv_element* k_head = p.pool + head_offset(0, p.layer, 0, head / GROUP);
    const kv_element* v_head = p.pool + head_offset(0, p.layer, 1, head / GROUP);

    DYNAMIC_SHARED(shared);
    float* q = reinterpret_cast<float*>(shared) + warp * HEAD_DIM;
    for (int d = lane; d < HEAD_DIM; d += WARP_SIZE) {
        q[d] = to_float(p.qkv[row * QKV_COLS + head * HEAD_DIM + d]);
    }
    __syncwarp();

    constexpr int DIMS = (HEAD_DIM + WARP_SIZE - 1) / WARP_SIZE;
    float out[DIMS] = {}, max = -INFINITY, sum = 0.0f;
    // 32 tokens at a time, starting at multiples of 32. Each lane first computes one token's score, and then some
    // dimensions of all tokens.
    for (uint32_t first = seen_from / WARP_SIZE * WARP_SIZE; first <= position; first += WARP_SIZE) {
        const uint32_t mine = first + lane;
        float score = -INFINITY;
        if (mine >= seen_from && mine <= position) {
            // Heads have multiples of 8 dimensions.
            constexpr int N = VEC<kv_element> < 8 ? VEC<kv_element> : 8;
            const KvVector k = vector_of(k_head, table, mine);
            score = 0.0f;
            for (int d = 0; d < HEAD_DIM; d += N) {
                float elements[N];
                k.read(d, elements);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    score += q[d + i] * elements[i];
                }
            }
#ifdef KV_CODES
            score *= k.scale;
#endif
#ifdef SOFTCAP
            score = tanhf(score * p.cap_scale);
#endif
        }
        const float new_max = fmaxf(max, reduce_warp<Max>(score));
        const float factor = exp2_approx((max - new_max) * p.scale_log2);
        const float weight = exp2_approx((score - new_max) * p.scale_log2);
        max = new_max;
        sum = sum * factor + reduce_warp<Sum>(weight);
#pragma unroll
        for (int i = 0; i < DIMS; i++) {
            out[i] *= factor;
        }
        const uint32_t num_tokens = min(uint32_t(WARP_SIZE), position + 1 - first);
        for (uint32_t t = seen_from > first ? seen_from - first : 0; t < num_tokens; t++) {
            const float of_token = __shfl_sync(FULL_WARP, weight, t);
            const KvVector v = vector_of(v_head, table, first + t);
            const float of_code = of_token * v.scale;
#pragma unroll
            for (int i = 0; i < DIMS; i++) {
                const int d = i * WARP_SIZE + lane;
                if (d < HEAD_DIM) {
                    float element[1];
                    v.read(d, element);
                    out[i] += of_code * element[0];
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < DIMS; i++) {
        const int d = i * WARP_SIZE + lane;
        if (d < HEAD_DIM) {
            p.out[(row * NUM_HEADS + head) * HEAD_DIM + d] = from_float<scalar>(out[i] / sum);
        }
    }
}
