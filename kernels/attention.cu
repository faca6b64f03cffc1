// PagedAttention on tensor cores, for 16-bit types: K and V are read through the block table, whatever the block size.
//
// Both kernels take their work from a list that the host makes (`AttentionItem`): a chunk of a sequence's keys and a
// tile of query rows, small in the decode kernel and large in the prefill kernel. Chunks are merged by the thread block
// that finishes last (`attention_merge.cuh`). A tile of the decode kernel may have rows of several sequences, whose
// chunk is in the same blocks: the rows of a product do not depend on each other, so each has the bits that it has
// alone.
//
// Specialised further by
//   KV_TILE            tokens of K and V that a thread block holds at a time
//   PREFILL_ROW_TILES  16-row tiles of a warp in the prefill kernel
//   DECODE_STAGES      tiles of K and V that a thread block of the decode kernel has in flight
#include "include/attention_merge.cuh"

// --- prefill: tiles of many query rows. Each warp has its own rows and all keys.

constexpr int WARP_ROWS = PREFILL_ROW_TILES * 16;
constexpr int PREFILL_ROWS = WARPS * WARP_ROWS;
// With codes there are no registers left for more addresses.
constexpr int LOAD_UNROLL = HAS_CODES ? 2 : 4;

// grid: items of the list * HEAD_TILES;
// dynamic shared memory: (PREFILL_ROWS + 2 * KV_TILE) * ROW_STRIDE scalars; with KV_CODES 2 * LOADED_SIZE<KV_TILE>
// bytes more
KERNEL_OCCUPANCY(THREADS, 2, attention_prefill, AttentionParams) {
    DYNAMIC_SHARED(shared);
    scalar* q = reinterpret_cast<scalar*>(shared);
    scalar* k = q + PREFILL_ROWS * ROW_STRIDE;
    scalar* v = k + KV_TILE * ROW_STRIDE;
#ifdef KV_CODES
    kv_element* loaded_k = reinterpret_cast<kv_element*>(v + KV_TILE * ROW_STRIDE);
    kv_element* loaded_v = loaded_k + LOADED_SIZE<KV_TILE>;
#else
    kv_element *loaded_k = k, *loaded_v = v;
#endif
    const int thread = threadIdx.x, warp = thread / WARP_SIZE, lane_row = thread % WARP_SIZE / 4;

    const AttentionUnit unit = attention_unit<PREFILL_ROWS>(p, attention_list(p.batch, p.list), blockIdx.x);
    const uint32_t* table = batch_words(p.batch, p.batch->block_tables) + unit.item.first_block;
    const kv_element* k_head = head_start(p, 0, unit.kv_head);
    // So that it takes no register of its own.
    const auto v_head = [=] { return k_head + KV_STRIDE; };
    const uint32_t end = unit.item.end_key;
    // Keys that all rows see need no mask.
    const uint32_t all_see_from = first_visible(p, unit.item.first_position + unit.item.num_tokens - 1);
    const uint32_t all_see_to = unit.item.first_position + 1;
    load_queries<PREFILL_ROWS>(q, p, unit);

    SoftmaxRows rows[PREFILL_ROW_TILES];
    float o[PREFILL_ROW_TILES][HEAD_DIM / 8][4] = {};
    const auto load_q = [&](uint32_t(&a)[4], int r, int d) { load_left(a, q, warp * PREFILL_ROW_TILES + r, d); };

    uint32_t first = unit.item.first_key;
    load_tokens<KV_TILE, THREADS, LOAD_UNROLL>(loaded_k, k_head, table, first, end, thread);
    copy_async_commit();
    for (; first < end; first += KV_TILE) {
        copy_async_wait<0>();
        __syncthreads();  // K is there, and no thread reads the previous V
        load_tokens<KV_TILE, THREADS, LOAD_UNROLL>(loaded_v, v_head(), table, first, end, thread);
        copy_async_commit();
        if (HAS_CODES) {
            finish_tile<KV_TILE, THREADS>(k, loaded_k, first, end, thread);
            __syncthreads();  // the elements of K are there
        }

        float s[PREFILL_ROW_TILES][KV_TILE / 8][4];
        scores<PREFILL_ROW_TILES, KV_TILE>(s, k, load_q);
#pragma unroll
        for (int r = 0; r < PREFILL_ROW_TILES; r++) {
            cap_scores<KV_TILE>(s[r], p.cap_scale);
        }

        if (first < all_see_from || first + KV_TILE > all_see_to) {
            // Read again: few iterations get here, and there is no register left to keep it.
            const AttentionUnit masked = attention_unit<PREFILL_ROWS>(p, attention_list(p.batch, p.list), blockIdx.x);
#pragma unroll
            for (int r = 0; r < PREFILL_ROW_TILES; r++) {
                const uint32_t row = warp * WARP_ROWS + r * 16 + lane_row;
                mask_scores<KV_TILE>(s[r], first, visible_keys<PREFILL_ROWS>(p, masked.item, row));
            }
        }
        uint32_t weights[PREFILL_ROW_TILES][KV_TILE / 16][4];
#pragma unroll
        for (int r = 0; r < PREFILL_ROW_TILES; r++) {
            softmax<KV_TILE>(s[r], rows[r], o[r], p.scale_log2);
            pack_weights<KV_TILE>(weights[r], s[r]);
        }

        copy_async_wait<0>();
        __syncthreads();  // V is there, and no thread reads this K any more
        if (first + KV_TILE < end) {
            load_tokens<KV_TILE, THREADS, LOAD_UNROLL>(loaded_k, k_head, table, first + KV_TILE, end, thread);
        }
        copy_async_commit();
        if (HAS_CODES) {
            finish_tile<KV_TILE, THREADS>(v, loaded_v, first, end, thread);
            __syncthreads();  // the elements of V are there
        }
        accumulate<PREFILL_ROW_TILES, KV_TILE>(o, weights, v);
    }
    copy_async_wait<0>();

    const AttentionUnit done = attention_unit<PREFILL_ROWS>(p, attention_list(p.batch, p.list), blockIdx.x);
    const auto column_of = [=](int n) { return n * 8 + thread % 4 * 2; };
#pragma unroll
    for (int r = 0; r < PREFILL_ROW_TILES; r++) {
        finish_sums(rows[r]);
        write_rows<PREFILL_ROWS>(p, done, warp * WARP_ROWS + r * 16 + lane_row, rows[r], o[r], column_of,
                                 thread % 4 == 0);
    }
    if (done.item.num_chunks > 1) {
        merge_chunks<PREFILL_ROWS>(p, done, reinterpret_cast<uint32_t*>(shared));
    }
}

// --- decode: tiles of up to 16 query rows, such as the heads of a sequence's one new token, or of several sequences'
//
// The warps of a thread block share a tile of K and V. Each computes the scores and weights of a slice of its tokens,
// and then some columns of the output over all slices.

constexpr int SLICE = 16;
constexpr int SLICES = KV_TILE / SLICE;
static_assert(KV_TILE % SLICE == 0 && SLICES <= WARPS, "a slice for each warp");

// A tile of K and V as it is copied.
constexpr int STAGE_SIZE = 2 * LOADED_SIZE<KV_TILE>;
// The elements of a tile of codes.
constexpr int FINISHED_SIZE = HAS_CODES ? 2 * KV_TILE * ROW_STRIDE : 0;

// What the warps tell each other about a tile.
struct alignas(16) TileExchange {
    float max[SLICES][DECODE_ROWS];
    // Of each lane: its two rows' sums of weights, and its part of the weights as the left operand of a product.
    Vec<float, 2> sums[SLICES][WARP_SIZE];
    Vec<uint32_t, 4> weights[SLICES][WARP_SIZE];
};

__device__ __forceinline__ void decode_unit(const AttentionParams& p, const AttentionUnit& unit,
                                            unsigned char* shared) {
    scalar* q = reinterpret_cast<scalar*>(shared);
    TileExchange& exchange = *reinterpret_cast<TileExchange*>(q + DECODE_ROWS * ROW_STRIDE);
    scalar* finished = reinterpret_cast<scalar*>(&exchange + 1);  // with KV_CODES
    kv_element* stages = reinterpret_cast<kv_element*>(finished + FINISHED_SIZE);
    const int thread = threadIdx.x, warp = thread / WARP_SIZE, lane = thread % WARP_SIZE;

    const AttentionItem& item = unit.item;
    const uint32_t* table = batch_words(p.batch, p.batch->block_tables) + item.first_block;
    const kv_element* k_head = head_start(p, 0, unit.kv_head);
    const kv_element* v_head = head_start(p, 1, unit.kv_head);
    // A shared item has first position 0, so no window hides a key of it.
    const uint32_t all_see_from = first_visible(p, item.first_position + item.num_tokens - 1);
    const uint32_t all_see_to = is_shared<DECODE_ROWS>(item) ? item.end_key : item.first_position + 1;
    load_queries<DECODE_ROWS>(q, p, unit);
    const auto load_q = [&](uint32_t(&a)[4], int row_tile, int d) { load_left(a, q, row_tile, d); };
    const auto load_stage = [&](int stage, uint32_t first) {
        if (first < item.end_key) {
            kv_element* k = stages + stage * STAGE_SIZE;
            load_tokens<KV_TILE, THREADS>(k, k_head, table, first, item.end_key, thread);
            load_tokens<KV_TILE, THREADS>(k + LOADED_SIZE<KV_TILE>, v_head, table, first, item.end_key, thread);
        }
        copy_async_commit();
    };
    uint32_t next = item.first_key;
#pragma unroll
    for (int stage = 0; stage < DECODE_STAGES - 1; stage++) {
        load_stage(stage, next);
        next += KV_TILE;
    }

    // The warp's columns are those of matrices of 16: `warp`, `warp + WARPS`, ...
    constexpr int MATRICES = (HEAD_DIM / 16 + WARPS - 1) / WARPS;
    SoftmaxRows rows;
    float o[2 * MATRICES][4] = {};
    const VisibleKeys keys = visible_keys<DECODE_ROWS>(p, item, lane / 4);
    int stage = 0;
    for (uint32_t first = item.first_key; first < item.end_key; first += KV_TILE) {
        copy_async_wait<DECODE_STAGES - 2>();
        __syncthreads();  // the tile is there, and no thread reads the previous one, which the next overwrites
        load_stage((stage + DECODE_STAGES - 1) % DECODE_STAGES, next);
        next += KV_TILE;

        const kv_element* loaded = stages + stage * STAGE_SIZE;
        if (HAS_CODES) {
            finish_tile<KV_TILE, THREADS>(finished, loaded, first, item.end_key, thread);
            finish_tile<KV_TILE, THREADS>(finished + KV_TILE * ROW_STRIDE, loaded + LOADED_SIZE<KV_TILE>, first,
                                          item.end_key, thread);
            __syncthreads();  // the elements are there
        }
        const scalar* k = HAS_CODES ? finished : reinterpret_cast<const scalar*>(loaded);
        const scalar* v = k + KV_TILE * ROW_STRIDE;
        const bool has_slice = warp < SLICES;
        float s[1][SLICE / 8][4];
        if (has_slice) {
            scores<1, SLICE>(s, k + warp * SLICE * ROW_STRIDE, load_q);
            cap_scores<SLICE>(s[0], p.cap_scale);
            if (first < all_see_from || first + KV_TILE > all_see_to) {
                mask_scores<SLICE>(s[0], first + warp * SLICE, keys);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float max = max_of_row<SLICE>(-INFINITY, s[0], half);
                if (lane % 4 == 0) {
                    exchange.max[warp][lane / 4 + half * 8] = max;
                }
            }
        }
        __syncthreads();  // the maxima of all slices are there

        float factors[2];
        Vec<float, 2> sums;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float max = rows.max[half];
#pragma unroll
            for (int slice = 0; slice < SLICES; slice++) {
                max = fmaxf(max, exchange.max[slice][lane / 4 + half * 8]);
            }
            const RowScaling scaling = move_max(rows, half, max, p.scale_log2);
            factors[half] = scaling.factor;
            if (has_slice) {
                sums.at[half] = weigh_slice(s[0][0], s[0][1], half, scaling.base, p.scale_log2);
            }
        }
        if (has_slice) {
            uint32_t weights[1][4];
            pack_weights<SLICE>(weights, s[0]);
            store(&exchange.sums[warp][lane].at[0], sums);
            const Vec<uint32_t, 4> words = {{weights[0][0], weights[0][1], weights[0][2], weights[0][3]}};
            store(&exchange.weights[warp][lane].at[0], words);
        }
        __syncthreads();  // the weights of all slices are there

#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = exchange.sums[0][lane].at[half];
#pragma unroll
            for (int slice = 1; slice < SLICES; slice++) {
                sum += exchange.sums[slice][lane].at[half];
            }
            rows.sum[half] = __fmaf_rn(rows.sum[half], factors[half], sum);
        }
#pragma unroll
        for (int n = 0; n < 2 * MATRICES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                o[n][i] *= factors[i / 2];
            }
        }
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
            const Vec<uint32_t, 4> words = load<4>(&exchange.weights[slice][lane].at[0]);
            const uint32_t weights[4] = {words.at[0], words.at[1], words.at[2], words.at[3]};
#pragma unroll
            for (int j = 0; j < MATRICES; j++) {
                const int matrix = j * WARPS + warp;
                if (HEAD_DIM / 16 % WARPS == 0 || matrix < HEAD_DIM / 16) {
                    uint32_t b[4];
                    load_matrix_x4_trans(b, v + (slice * SLICE + lane % 16) * ROW_STRIDE + matrix * 16 + lane / 16 * 8);
                    mma(o[2 * j], weights, b[0], b[1], scalar());
                    mma(o[2 * j + 1], weights, b[2], b[3], scalar());
                }
            }
        }
        stage = (stage + 1) % DECODE_STAGES;
    }
    copy_async_wait<0>();
    finish_sums(rows);
    const auto column_of = [=](int n) { return (n / 2 * WARPS + warp) * 16 + n % 2 * 8 + lane % 4 * 2; };
    write_rows<DECODE_ROWS>(p, unit, lane / 4, rows, o, column_of, warp == 0 && lane % 4 == 0);
    if (is_shared<DECODE_ROWS>(item)) {
        merge_members<DECODE_ROWS>(p, unit, reinterpret_cast<uint32_t*>(shared));
    } else if (item.num_chunks > 1) {
        merge_chunks<DECODE_ROWS>(p, unit, reinterpret_cast<uint32_t*>(shared));
    }
    __syncthreads();  // no thread reads shared memory any more
}

// The grid depends on the device alone. Its thread blocks deal out the units in turn, in every second round from the
// last block to the first: a block that got a long unit in one round gets a short one in the next.
// grid: as many thread blocks as the device runs at the same time, or fewer;
// dynamic shared memory: DECODE_ROWS * ROW_STRIDE scalars, TileExchange, FINISHED_SIZE scalars, DECODE_STAGES *
// STAGE_SIZE elements of the cache
KERNEL_OCCUPANCY(THREADS, 2, attention_decode, AttentionParams) {
    const AttentionList list = attention_list(p.batch, p.list);
    const uint32_t num_units = list.num_items * Tiling<DECODE_ROWS>::HEAD_TILES;
    DYNAMIC_SHARED(shared);
    uint32_t place = blockIdx.x;
    for (uint32_t first = 0; first < num_units; first += gridDim.x) {
        if (first + place < num_units) {
            decode_unit(p, attention_unit<DECODE_ROWS>(p, list, first + place), shared);
        }
        place = gridDim.x - 1 - place;
    }
}
