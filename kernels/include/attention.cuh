// Shared parts of the attention kernels on tensor cores: tiles of K and V in shared memory, S = Q·Kᵀ, the online
// softmax of FlashAttention (Dao et al. 2022, algorithm 1), O += P·V.
//
// A tile's rows are pairs of token and query head, so each K and V is read once for all heads that share a KV head.
#pragma once
#include "batch.cuh"
#include "kv_cache.cuh"
#include "reduce.cuh"
#include "swizzle.cuh"

static_assert(HEAD_DIM % 16 == 0 && sizeof(scalar) == 2, "what tensor cores multiply");

struct AttentionParams {
    const BatchHeader* batch;
    const scalar* qkv;       // [rows, QKV_COLS]
    const kv_element* pool;  // the KV blocks
    scalar* out;             // [rows, NUM_HEADS * HEAD_DIM]
    float* partials;         // results of chunks: see attention_merge.cuh
    uint32_t* arrivals;      // how many of them are there
    uint32_t layer;
    uint32_t window;   // tokens that a token sees, itself included; 0: all before it
    uint32_t list;     // index of the work list
    float scale_log2;  // factor on q·k, times log2(e): exponentials are powers of two
    float cap_scale;   // with SOFTCAP: scores are tanh(q·k * cap_scale) first
};

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP_SIZE;
// Query rows of a thread block of the decode kernel.
constexpr int DECODE_ROWS = 16;

// How the query rows of `ROWS` rows of a matrix are arranged: TOKENS tokens of HEADS heads each. The host plans with
// the same TOKENS.
template <int ROWS> struct Tiling {
    static constexpr int HEADS = GROUP < ROWS ? GROUP : ROWS;
    static constexpr int TOKENS = ROWS / HEADS;
    static constexpr int TILES_PER_GROUP = (GROUP + HEADS - 1) / HEADS;
    // Parts of all heads: thread blocks of an item of the work list.
    static constexpr int HEAD_TILES = NUM_KV_HEADS * TILES_PER_GROUP;
    // Whether items may be shared: the decode kernel's, if a tile has room for several tokens.
    static constexpr bool SHARES = ROWS == DECODE_ROWS && TOKENS > 1;
};

// What a thread block works on: an item of the work list, for some heads.
struct AttentionUnit {
    AttentionItem item;
    uint32_t head_tile;
    uint32_t kv_head, first_head, num_heads;
};

// Unit `index` of a list. The heads of an item are next to each other.
template <int ROWS>
__device__ __forceinline__ AttentionUnit attention_unit(const AttentionParams& p, const AttentionList& list,
                                                        uint32_t index) {
    using Tile = Tiling<ROWS>;
    const uint32_t head_tile = index % Tile::HEAD_TILES, kv_head = head_tile / Tile::TILES_PER_GROUP;
    const uint32_t head_in_group = head_tile % Tile::TILES_PER_GROUP * Tile::HEADS;
    return {
        attention_item(p.batch, list.first_item + index / Tile::HEAD_TILES),
        head_tile,
        kv_head,
        kv_head * GROUP + head_in_group,
        min(uint32_t(Tile::HEADS), GROUP - head_in_group),
    };
}

// Whether the tokens of an item are of several sequences.
template <int ROWS> __device__ __forceinline__ bool is_shared(const AttentionItem& item) {
    return Tiling<ROWS>::SHARES && item.first_member != NONE;
}

// Where a token of an item is in the batch, and where the result of the item's chunk is, counted in tokens. The token
// has so many chunks.
struct TokenPlace {
    uint32_t row, partial, num_chunks;
};

template <int ROWS>
__device__ __forceinline__ TokenPlace token_place(const AttentionParams& p, const AttentionItem& item, uint32_t token) {
    if (is_shared<ROWS>(item)) {
        const AttentionMember& member = attention_member(p.batch, item.first_member + token);
        return {member.row, member.first_partial + item.chunk - member.first_chunk, member.num_chunks};
    }
    return {item.first_row + token, item.first_partial + item.chunk * item.num_tokens + token, item.num_chunks};
}

// Elements from one row to the next in shared memory: an odd number of 16-byte chunks, so that eight rows of a matrix
// are in different banks.
constexpr int ROW_STRIDE = HEAD_DIM + 8;
constexpr int CHUNKS = HEAD_DIM / 8;

// The first token's K or V of a head in block 0.
__device__ __forceinline__ const kv_element* head_start(const AttentionParams& p, uint32_t is_v, uint32_t kv_head) {
    return p.pool + head_offset(0, p.layer, is_v, kv_head);
}

// The first position that `position` sees.
__device__ __forceinline__ uint32_t first_visible(const AttentionParams& p, uint32_t position) {
    return p.window == 0 || position < p.window ? 0 : position + 1 - p.window;
}

// A tile of the K or V of `TOKENS` tokens as it is copied from the pool. Plain elements are copied to where they are
// multiplied, [TOKENS][ROW_STRIDE]. Codes are copied as they are, with their scales behind them, and `decode_tokens`
// makes the tile of them.
#ifdef KV_CODES
constexpr bool HAS_CODES = true;
template <int TOKENS> constexpr int LOADED_SIZE = TOKENS * (HEAD_DIM + sizeof(bf16));

// Where 16 codes of a token are. The same ones of eight neighbouring tokens are in different banks.
template <int TOKENS> __device__ __forceinline__ int place_of_copy(int token, int copy) {
    // As elements of 16 bits.
    constexpr int ROW = HEAD_DIM / 2, PANEL = ROW % 64 == 0 ? 64 : ROW % 32 == 0 ? 32 : 16;
    // Rows of an odd number of copies need no swizzle.
    return ROW % PANEL == 0 ? 2 * swizzled<PANEL, TOKENS * PANEL>(token, copy) : token * HEAD_DIM + copy * 16;
}
#else
constexpr bool HAS_CODES = false;
template <int TOKENS> constexpr int LOADED_SIZE = TOKENS * ROW_STRIDE;

template <int TOKENS> __device__ __forceinline__ int place_of_copy(int token, int copy) {
    return token * ROW_STRIDE + copy * 8;
}
#endif

// Starts to copy `TOKENS` tokens with `THREADS` threads, starting at `first`, which is a multiple of `TOKENS` and below
// `end`. Elements of tokens from `end` on are zeros.
template <int TOKENS, int THREADS, int UNROLL = 4>
__device__ __forceinline__ void load_tokens(kv_element* shared, const kv_element* head, const uint32_t* table,
                                            uint32_t first, uint32_t end, int thread) {
    constexpr int CHUNK = VEC<kv_element>, ROW_CHUNKS = HEAD_DIM / CHUNK;
    constexpr int COPIES = TOKENS * ROW_CHUNKS;
    // Then one lookup in the block table is enough.
    constexpr bool IN_ONE_BLOCK = BLOCK_SIZE % TOKENS == 0;
    const uint32_t block_of_all = IN_ONE_BLOCK ? table[first / BLOCK_SIZE] : 0;
    const auto block_of = [=](uint32_t position) -> uint32_t {
        return IN_ONE_BLOCK ? block_of_all : position < end ? table[position / BLOCK_SIZE] : 0;
    };
#pragma unroll UNROLL
    for (int i = 0; i < (COPIES + THREADS - 1) / THREADS; i++) {
        const int copy = i * THREADS + thread;
        if (COPIES % THREADS == 0 || copy < COPIES) {
            const int token = copy / ROW_CHUNKS, column = copy % ROW_CHUNKS * CHUNK;
            const uint32_t position = first + token;
            const kv_element* from =
                head + block_of(position) * BLOCK_STRIDE + position % BLOCK_SIZE * HEAD_DIM + column;
            copy_async(shared + place_of_copy<TOKENS>(token, copy % ROW_CHUNKS), from, position < end);
        }
    }
#ifdef KV_CODES
    // Eight scales at a time: these tokens are in one block.
    if (thread < TOKENS / 8) {
        const uint32_t position = first + thread * 8;
        const kv_element* from = scale_of(head + block_of(position) * BLOCK_STRIDE, position % BLOCK_SIZE);
        copy_async(shared + TOKENS * HEAD_DIM + thread * 16, from, position < end);
    }
#endif
}

// Where a unit's row of queries is. Rows without a token or a head are not valid.
struct QueryRow {
    const scalar* start;
    bool valid;
};

template <int ROWS>
__device__ __forceinline__ QueryRow query_row(const AttentionParams& p, const AttentionUnit& unit, uint32_t row) {
    const uint32_t token = row / Tiling<ROWS>::HEADS, head = row % Tiling<ROWS>::HEADS;
    const bool valid = token < unit.item.num_tokens && head < unit.num_heads;
    const uint64_t row_of_token = valid ? token_place<ROWS>(p, unit.item, token).row : 0;
    const uint64_t start = row_of_token * QKV_COLS + (unit.first_head + head) * HEAD_DIM;
    return {p.qkv + (valid ? start : 0), valid};
}

// Starts to copy a unit's query rows to [ROWS][ROW_STRIDE]. Rows without a token or a head are zeros.
template <int ROWS>
__device__ __forceinline__ void load_queries(scalar* q, const AttentionParams& p, const AttentionUnit& unit) {
    for (int copy = threadIdx.x; copy < ROWS * CHUNKS; copy += THREADS) {
        const uint32_t row = copy / CHUNKS, column = copy % CHUNKS * 8;
        const QueryRow from = query_row<ROWS>(p, unit, row);
        copy_async(q + row * ROW_STRIDE + column, from.start + column, from.valid);
    }
}

// The keys that two rows of a tile see: row i sees [from[i], to[i]).
struct VisibleKeys {
    uint32_t from[2], to[2];
};

// Those of rows `row` and `row + 8`.
template <int ROWS>
__device__ __forceinline__ VisibleKeys visible_keys(const AttentionParams& p, const AttentionItem& item, uint32_t row) {
    VisibleKeys keys;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t token = (row + half * 8) / Tiling<ROWS>::HEADS;
        // Rows without a token see what the first one sees.
        const uint32_t position = item.first_position + (token < item.num_tokens ? token : 0);
        keys.from[half] = first_visible(p, position);
        keys.to[half] = position + 1;
    }
    return keys;
}

#ifdef KV_CODES
// The elements of eight codes of a vector: each code times `scale`, which is in the codes' unit, rounded to `scalar` as
// the elements of a plain cache are.
__device__ __forceinline__ Vec<uint32_t, 4> decode_eight(uint32_t first_four, uint32_t last_four, float scale) {
    Vec<uint32_t, 4> pairs;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t four = i < 2 ? first_four : last_four;
        if constexpr (is_same<scalar, bf16> && is_same<KV_CODES, Int8>) {
            // Half of the instructions.
            pairs.at[i] = Int8::scaled_bf16(four, i % 2, Int8::bf16_factors(scale));
        } else {
            const float low = KV_CODES::decode(four, i % 2 * 2), high = KV_CODES::decode(four, i % 2 * 2 + 1);
            pairs.at[i] = pack<scalar>(low * scale, high * scale);
        }
    }
    return pairs;
}

// Makes elements of the loaded codes of `TOKENS` tokens, starting at `first`, with `THREADS` threads: 8 elements of a
// token, its chunk `i`, at `place(token, i)`. All threads that loaded the codes have waited for them, and for each
// other. Eight neighbouring lanes have the same columns of eight tokens.
template <int TOKENS, int THREADS, int UNROLL, class Place>
__device__ __forceinline__ void decode_tokens(const kv_element* loaded, uint32_t first, uint32_t end, int thread,
                                              const Place& place) {
    constexpr int LANE_TOKENS = 8, LANE_COPIES = WARP_SIZE / LANE_TOKENS;
    const bf16* scales = reinterpret_cast<const bf16*>(loaded + TOKENS * HEAD_DIM);
    const int lane = thread % WARP_SIZE;
#pragma unroll UNROLL
    for (int token = thread / WARP_SIZE * LANE_TOKENS + lane % LANE_TOKENS; token < TOKENS;
         token += THREADS / WARP_SIZE * LANE_TOKENS) {
        // Slots behind the last token hold anything. Their codes were not copied.
        const float scale = first + token < end ? to_float(scales[token]) * KV_CODES::UNIT : 0.0f;
#pragma unroll
        for (int copy = lane / LANE_TOKENS; copy < HEAD_DIM / 16; copy += LANE_COPIES) {
            const kv_element* from = loaded + place_of_copy<TOKENS>(token, copy);
            const Vec<uint32_t, 4> codes = load<4>(reinterpret_cast<const uint32_t*>(from));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const Vec<uint32_t, 4> pairs = decode_eight(codes.at[2 * half], codes.at[2 * half + 1], scale);
                store(reinterpret_cast<uint32_t*>(place(token, 2 * copy + half)), pairs);
            }
        }
    }
}
#endif

// Makes a tile of elements, [TOKENS][ROW_STRIDE], of a loaded tile of codes.
template <int TOKENS, int THREADS>
__device__ __forceinline__ void finish_tile(scalar* tile, const kv_element* loaded, uint32_t first, uint32_t end,
                                            int thread) {
#ifdef KV_CODES
    // Several tokens at a time would need more registers than prefill has.
    decode_tokens<TOKENS, THREADS, 1>(loaded, first, end, thread,
                                      [=](int token, int chunk) { return tile + token * ROW_STRIDE + chunk * 8; });
#endif
}

// Rows `row_tile * 16 ..` and columns `k * 16 ..` of a matrix in shared memory, as the left operand.
__device__ __forceinline__ void load_left(uint32_t (&a)[4], const scalar* rows, int row_tile, int k) {
    const int lane = threadIdx.x % WARP_SIZE;
    load_matrix_x4(a, rows + (row_tile * 16 + lane % 16) * ROW_STRIDE + k * 16 + lane / 16 * 8);
}

// s = Q·Kᵀ for the tokens in `k`; `load_q(a, row_tile, k)` gives Q as the left operand.
template <int ROW_TILES, int TOKENS, class LoadQ>
__device__ __forceinline__ void scores(float (&s)[ROW_TILES][TOKENS / 8][4], const scalar* k, const LoadQ& load_q) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++) {
            s[r][n][0] = s[r][n][1] = s[r][n][2] = s[r][n][3] = 0.0f;
        }
    }
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) {
        uint32_t a[ROW_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            load_q(a[r], r, d);
        }
#pragma unroll
        for (int n = 0; n < TOKENS / 16; n++) {
            uint32_t b[4];
            load_matrix_x4(b, k + (n * 16 + lane / 16 * 8 + lane % 8) * ROW_STRIDE + d * 16 + lane / 8 % 2 * 8);
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                mma(s[r][2 * n], a[r], b[0], b[1], scalar());
                mma(s[r][2 * n + 1], a[r], b[2], b[3], scalar());
            }
        }
    }
}

// tanh(x) within 2e-7.
__device__ __forceinline__ float tanh_approx(float x) {
    constexpr float TWO_LOG2_E = 2.88539008f;
    return 1.0f - 2.0f / (1.0f + exp2_approx(x * TWO_LOG2_E));
}

// Limits scores to a cap (Gemma 2). The softmax multiplies by the cap afterwards.
template <int TOKENS> __device__ __forceinline__ void cap_scores(float (&s)[TOKENS / 8][4], float cap_scale) {
#ifdef SOFTCAP
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[n][i] = tanh_approx(s[n][i] * cap_scale);
        }
    }
#endif
}

// A lane's part of 16 rows of the softmax: rows g (0) and g + 8 (1) of the accumulators' layout.
struct SoftmaxRows {
    float max[2] = {-INFINITY, -INFINITY};
    // The sums of this lane's columns only.
    float sum[2] = {0.0f, 0.0f};
};

// Excludes what a row does not see.
template <int TOKENS>
__device__ __forceinline__ void mask_scores(float (&s)[TOKENS / 8][4], uint32_t first, const VisibleKeys& keys) {
    const uint32_t column = first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t position = column + n * 8 + i % 2;
            if (position < keys.from[i / 2] || position >= keys.to[i / 2]) {
                s[n][i] = -INFINITY;
            }
        }
    }
}

// The steps of the softmax. Both kernels are made of these and take tiles of the same KV_TILE tokens, slices of 16
// tokens of them and chunks in the same order. So a row has the same bits whichever of them computes it. Where the
// compiler could fuse a product with a sum in one kernel and not in the other, the text says which.

// The largest of `max` and of a row's scores.
template <int TOKENS>
__device__ __forceinline__ float max_of_row(float max, const float (&s)[TOKENS / 8][4], int half) {
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
        max = fmaxf(max, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    }
    max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 1));
    return fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 2));
}

// How a row's sums so far are scaled, and what is subtracted from its scores.
struct RowScaling {
    float factor;
    float base;
};

// Moves a row's maximum. A row that has seen no token has maximum -inf and weights 0.
__device__ __forceinline__ RowScaling move_max(SoftmaxRows& rows, int half, float max, float scale_log2) {
    const float seen = max == -INFINITY ? 0.0f : max;
    // Exactly 1 if the maximum stays. The difference of two products would not be 0 where one of them is fused with the
    // subtraction, and the sums would drift with each tile.
    const float factor = exp2_approx((rows.max[half] - seen) * scale_log2);
    rows.max[half] = max;
    return {factor, __fmul_rn(seen, scale_log2)};
}

// Turns a row's scores of a slice into weights. Returns their sum.
__device__ __forceinline__ float weigh_slice(float (&left)[4], float (&right)[4], int half, float base,
                                             float scale_log2) {
    float& a = left[2 * half];
    float& b = left[2 * half + 1];
    float& c = right[2 * half];
    float& d = right[2 * half + 1];
    a = exp2_approx(__fmaf_rn(a, scale_log2, -base));
    b = exp2_approx(__fmaf_rn(b, scale_log2, -base));
    c = exp2_approx(__fmaf_rn(c, scale_log2, -base));
    d = exp2_approx(__fmaf_rn(d, scale_log2, -base));
    return a + b + c + d;
}

// The softmax of a row's scores of a tile: turns them into weights, and scales the sum of weights so far to the new
// maximum. Returns the factor of the other sums.
template <int TOKENS>
__device__ __forceinline__ float softmax_of_row(float (&s)[TOKENS / 8][4], SoftmaxRows& rows, int half,
                                                float scale_log2) {
    const float max = max_of_row<TOKENS>(rows.max[half], s, half);
    const RowScaling scaling = move_max(rows, half, max, scale_log2);
    float sum = weigh_slice(s[0], s[1], half, scaling.base, scale_log2);
#pragma unroll
    for (int n = 2; n < TOKENS / 8; n += 2) {
        sum += weigh_slice(s[n], s[n + 1], half, scaling.base, scale_log2);
    }
    rows.sum[half] = __fmaf_rn(rows.sum[half], scaling.factor, sum);
    return scaling.factor;
}

// The softmax of a tile: turns scores into weights, and scales the sums so far to the new maximum.
template <int TOKENS>
__device__ __forceinline__ void softmax(float (&s)[TOKENS / 8][4], SoftmaxRows& rows, float (&o)[HEAD_DIM / 8][4],
                                        float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float factor = softmax_of_row<TOKENS>(s, rows, half, scale_log2);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
            o[n][2 * half] *= factor;
            o[n][2 * half + 1] *= factor;
        }
    }
}

// Sums the rows' sums over all lanes.
__device__ __forceinline__ void finish_sums(SoftmaxRows& rows) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        rows.sum[half] += __shfl_xor_sync(FULL_WARP, rows.sum[half], 1);
        rows.sum[half] += __shfl_xor_sync(FULL_WARP, rows.sum[half], 2);
    }
}

// Weights as the left operand, rounded to `scalar`: 16 tokens in four registers.
template <int TOKENS>
__device__ __forceinline__ void pack_weights(uint32_t (&a)[TOKENS / 16][4], const float (&s)[TOKENS / 8][4]) {
#pragma unroll
    for (int k = 0; k < TOKENS / 16; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&pair)[4] = s[2 * k + i / 2];
            a[k][i] = pack<scalar>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
    }
}

// o += P·V.
template <int ROW_TILES, int TOKENS>
__device__ __forceinline__ void accumulate(float (&o)[ROW_TILES][HEAD_DIM / 8][4],
                                           const uint32_t (&weights)[ROW_TILES][TOKENS / 16][4], const scalar* v) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int k = 0; k < TOKENS / 16; k++) {
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; n++) {
            uint32_t b[4];
            load_matrix_x4_trans(b, v + (k * 16 + lane % 16) * ROW_STRIDE + n * 16 + lane / 16 * 8);
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                mma(o[r][2 * n], weights[r][k], b[0], b[1], scalar());
                mma(o[r][2 * n + 1], weights[r][k], b[2], b[3], scalar());
            }
        }
    }
}
