// PagedAttention on tensor cores, for 16-bit types: K and V are read through the block table, whatever the block size.
//
// Specialised further by
//   PREFILL_ROW_TILES  16-row tiles of a warp in the prefill kernel
//   PREFILL_KV_TILE    tokens of K and V that its thread blocks hold at a time
//   DECODE_WARPS       warps of a thread block of the decode kernel
//   DECODE_STAGES      slices of K and V that each of them has in flight
#include "include/attention.cuh"

// --- prefill: several rows of a sequence

constexpr int PREFILL_WARPS = 4;
constexpr int PREFILL_THREADS = PREFILL_WARPS * WARP_SIZE;
constexpr int WARP_ROWS = PREFILL_ROW_TILES * 16;
constexpr int TILE_ROWS = PREFILL_WARPS * WARP_ROWS;
// A tile's rows: TILE_TOKENS tokens of TILE_HEADS heads each. The host plans with the same TILE_TOKENS.
constexpr int TILE_HEADS = GROUP < TILE_ROWS ? GROUP : TILE_ROWS;
constexpr int TILE_TOKENS = TILE_ROWS / TILE_HEADS;
constexpr int TILES_PER_GROUP = (GROUP + TILE_HEADS - 1) / TILE_HEADS;

// What a thread block works on.
struct PrefillTile {
    SeqEntry seq;
    uint32_t kv_head, first_head, num_heads;
    uint32_t first_row, num_tokens;
    uint32_t first_position;
};

__device__ __forceinline__ PrefillTile prefill_tile(const BatchHeader* batch) {
    constexpr int HEAD_TILES = NUM_KV_HEADS * TILES_PER_GROUP;
    const TileEntry tile = batch_tiles(batch)[blockIdx.x / HEAD_TILES];
    const SeqEntry seq = batch_seqs(batch)[tile.seq];
    const uint32_t kv_head = blockIdx.x % HEAD_TILES / TILES_PER_GROUP;
    const uint32_t head_in_group = blockIdx.x % TILES_PER_GROUP * TILE_HEADS;
    return {
        seq,
        kv_head,
        kv_head * GROUP + head_in_group,
        min(uint32_t(TILE_HEADS), GROUP - head_in_group),
        seq.first_row + tile.first_row,
        min(uint32_t(TILE_TOKENS), seq.num_rows - tile.first_row),
        seq.num_computed + tile.first_row,
    };
}

// grid: prefill_tiles * NUM_KV_HEADS * TILES_PER_GROUP, the heads of a tile next to each other;
// dynamic shared memory: (TILE_ROWS + 2 * PREFILL_KV_TILE) * ROW_STRIDE scalars; with KV_CODES 2 *
// LOADED_SIZE<PREFILL_KV_TILE> bytes more
KERNEL_OCCUPANCY(PREFILL_THREADS, 2, attention_prefill, AttentionParams) {
    if (blockIdx.x / (NUM_KV_HEADS * TILES_PER_GROUP) >= p.batch->num_prefill_tiles) {
        return;
    }
    DYNAMIC_SHARED(shared);
    scalar* q = reinterpret_cast<scalar*>(shared);
    scalar* k = q + TILE_ROWS * ROW_STRIDE;
    scalar* v = k + PREFILL_KV_TILE * ROW_STRIDE;
#ifdef KV_CODES
    kv_element* loaded_k = reinterpret_cast<kv_element*>(v + PREFILL_KV_TILE * ROW_STRIDE);
    kv_element* loaded_v = loaded_k + LOADED_SIZE<PREFILL_KV_TILE>;
#else
    kv_element *loaded_k = k, *loaded_v = v;
#endif
    const int thread = threadIdx.x, warp = thread / WARP_SIZE, lane_row = thread % WARP_SIZE / 4;

    const PrefillTile tile = prefill_tile(p.batch);
    const uint32_t* table = batch_words(p.batch, p.batch->block_tables) + tile.seq.first_block;
    const kv_element* k_head = head_start(p, 0, tile.kv_head);
    const kv_element* v_head = head_start(p, 1, tile.kv_head);
    const uint32_t end = tile.first_position + tile.num_tokens;
    // Keys that all rows see need no mask.
    const uint32_t all_see_from = first_visible(p, end - 1), all_see_to = tile.first_position + 1;

    for (int copy = thread; copy < TILE_ROWS * CHUNKS; copy += PREFILL_THREADS) {
        const uint32_t row = copy / CHUNKS, column = copy % CHUNKS * 8;
        const uint32_t token = row / TILE_HEADS, head = row % TILE_HEADS;
        const bool valid = token < tile.num_tokens && head < tile.num_heads;
        const uint64_t start = uint64_t(tile.first_row + token) * QKV_COLS + (tile.first_head + head) * HEAD_DIM;
        copy_async(q + row * ROW_STRIDE + column, p.qkv + (valid ? start : 0) + column, valid);
    }

    SoftmaxRows rows[PREFILL_ROW_TILES];
    float o[PREFILL_ROW_TILES][HEAD_DIM / 8][4] = {};
    const auto load_q = [&](uint32_t(&a)[4], int r, int d) { load_left(a, q, warp * PREFILL_ROW_TILES + r, d); };

    // Tiles start at multiples of their size however the prompt is chunked, so a row's sums are always split the same
    // way.
    uint32_t first = first_visible(p, tile.first_position) / PREFILL_KV_TILE * PREFILL_KV_TILE;
    load_tokens<PREFILL_KV_TILE, PREFILL_THREADS>(loaded_k, k_head, table, first, end, thread);
    copy_async_commit();
    for (; first < end; first += PREFILL_KV_TILE) {
        copy_async_wait<0>();
        __syncthreads();  // K is there, and no thread reads the previous V
        load_tokens<PREFILL_KV_TILE, PREFILL_THREADS>(loaded_v, v_head, table, first, end, thread);
        copy_async_commit();
        if (HAS_CODES) {
            finish_tile<PREFILL_KV_TILE, PREFILL_THREADS>(k, loaded_k, first, end, thread);
            __syncthreads();  // the elements of K are there
        }

        float s[PREFILL_ROW_TILES][PREFILL_KV_TILE / 8][4];
        scores<PREFILL_ROW_TILES, PREFILL_KV_TILE>(s, k, load_q);
#pragma unroll
        for (int r = 0; r < PREFILL_ROW_TILES; r++) {
            cap_scores<PREFILL_KV_TILE>(s[r], p.cap_scale);
        }

        if (first < all_see_from || first + PREFILL_KV_TILE > all_see_to) {
            // Read again: few iterations get here, and there is no register left to keep it.
            const PrefillTile tile = prefill_tile(p.batch);
#pragma unroll
            for (int r = 0; r < PREFILL_ROW_TILES; r++) {
                uint32_t from[2], to[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint32_t token = (warp * WARP_ROWS + r * 16 + half * 8 + lane_row) / TILE_HEADS;
                    // Rows without a token see what the first one sees.
                    const uint32_t position = tile.first_position + (token < tile.num_tokens ? token : 0);
                    from[half] = first_visible(p, position);
                    to[half] = position + 1;
                }
                mask_scores<PREFILL_KV_TILE>(s[r], first, from, to);
            }
        }
        uint32_t weights[PREFILL_ROW_TILES][PREFILL_KV_TILE / 16][4];
#pragma unroll
        for (int r = 0; r < PREFILL_ROW_TILES; r++) {
            softmax<PREFILL_KV_TILE>(s[r], rows[r], o[r], p.scale_log2);
            pack_weights<PREFILL_KV_TILE>(weights[r], s[r]);
        }

        copy_async_wait<0>();
        __syncthreads();  // V is there, and no thread reads this K any more
        if (first + PREFILL_KV_TILE < end) {
            const uint32_t next = first + PREFILL_KV_TILE;
            load_tokens<PREFILL_KV_TILE, PREFILL_THREADS>(loaded_k, k_head, table, next, end, thread);
        }
        copy_async_commit();
        if (HAS_CODES) {
            finish_tile<PREFILL_KV_TILE, PREFILL_THREADS>(v, loaded_v, first, end, thread);
            __syncthreads();  // the elements of V are there
        }
        accumulate<PREFILL_ROW_TILES, PREFILL_KV_TILE>(o, weights, v);
    }
    copy_async_wait<0>();

    const PrefillTile done = prefill_tile(p.batch);
#pragma unroll
    for (int r = 0; r < PREFILL_ROW_TILES; r++) {
        finish_sums(rows[r]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t row = warp * WARP_ROWS + r * 16 + half * 8 + lane_row;
            const uint32_t token = row / TILE_HEADS, head = row % TILE_HEADS;
            if (token >= done.num_tokens || head >= done.num_heads) {
                continue;
            }
            const float factor = 1.0f / rows[r].sum[half];
            scalar* out = p.out + (uint64_t(done.first_row + token) * NUM_HEADS + done.first_head + head) * HEAD_DIM;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++) {
                const uint32_t pair = pack<scalar>(o[r][n][2 * half] * factor, o[r][n][2 * half + 1] * factor);
                *reinterpret_cast<uint32_t*>(out + n * 8 + thread % 4 * 2) = pair;
            }
        }
    }
}

// --- decode: one row of a sequence
//
// A thread block computes one partition of a sequence's tokens for the heads of one group (PagedAttention's "v2"
// kernel). With one partition it computes the final result. Its warps take slices of 16 tokens in turn, each with its
// own pipeline of copies, and add up their results at the end.

constexpr int SLICE = 16;
constexpr int DECODE_HEADS = GROUP < 16 ? GROUP : 16;
constexpr int DECODES_PER_GROUP = (GROUP + DECODE_HEADS - 1) / DECODE_HEADS;
// A warp's memory: the slices as they are copied, and, if these are codes, one slice of their elements before them.
constexpr int STAGE_SIZE = 2 * LOADED_SIZE<SLICE>;
constexpr int FINISHED_BYTES = HAS_CODES ? 2 * SLICE * ROW_STRIDE * sizeof(scalar) : 0;
constexpr int WARP_BYTES = FINISHED_BYTES + DECODE_STAGES * STAGE_SIZE * sizeof(kv_element);
// A partition's result for one head: [HEAD_DIM] weighted sums of V, the maximum, the sum of weights.
constexpr int PARTIAL_STRIDE = HEAD_DIM + 4;
// The result of one warp in shared memory, of the same form.
constexpr int RESULT_STRIDE = HEAD_DIM + 4;

static_assert(DECODE_HEADS * RESULT_STRIDE * sizeof(float) <= WARP_BYTES, "results fit");

// A sequence's tokens are split into equal partitions, each of whole rounds of all warps' slices.
struct Partition {
    uint32_t first, end;
    uint32_t num_with_tokens;
};

__device__ __forceinline__ Partition partition_of(const AttentionParams& p, uint32_t num_tokens, uint32_t index) {
    const uint32_t first_seen = first_visible(p, num_tokens - 1) / SLICE * SLICE;
    const uint32_t seen = num_tokens - first_seen;
    const uint32_t round = SLICE * DECODE_WARPS;
    const uint32_t size = ceil_div(ceil_div(seen, p.partitions), round) * round;
    const uint32_t first = first_seen + index * size;
    return {first, min(first + size, num_tokens), ceil_div(seen, size)};
}

// grid: (decode_seqs, NUM_KV_HEADS * DECODES_PER_GROUP, partitions);
// dynamic shared memory: SLICE * ROW_STRIDE scalars, and DECODE_WARPS * WARP_BYTES
KERNEL(DECODE_WARPS * WARP_SIZE, attention_decode, AttentionParams) {
    if (blockIdx.x >= p.batch->num_decode_seqs) {
        return;
    }
    const uint32_t seq_index = batch_words(p.batch, p.batch->decode_seqs)[blockIdx.x];
    const SeqEntry seq = batch_seqs(p.batch)[seq_index];
    const uint32_t num_tokens = seq.num_computed + 1;
    const Partition part = partition_of(p, num_tokens, blockIdx.z);
    if (part.first >= num_tokens) {
        return;
    }
    const uint32_t* table = batch_words(p.batch, p.batch->block_tables) + seq.first_block;
    const uint32_t kv_head = blockIdx.y / DECODES_PER_GROUP;
    const uint32_t head_in_group = blockIdx.y % DECODES_PER_GROUP * DECODE_HEADS;
    const uint32_t first_head = kv_head * GROUP + head_in_group;
    const uint32_t num_heads = min(uint32_t(DECODE_HEADS), GROUP - head_in_group);

    DYNAMIC_SHARED(shared);
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    scalar* q = reinterpret_cast<scalar*>(shared);
    unsigned char* of_warps = shared + SLICE * ROW_STRIDE * sizeof(scalar);
    unsigned char* mine = of_warps + warp * WARP_BYTES;
    scalar* finished = reinterpret_cast<scalar*>(mine);  // with KV_CODES
    kv_element* stages = reinterpret_cast<kv_element*>(mine + FINISHED_BYTES);
    const kv_element* k_head = head_start(p, 0, kv_head);
    const kv_element* v_head = head_start(p, 1, kv_head);

    // Row i of Q is head i of the group, or zeros.
    for (int copy = threadIdx.x; copy < SLICE * CHUNKS; copy += DECODE_WARPS * WARP_SIZE) {
        const uint32_t head = copy / CHUNKS, column = copy % CHUNKS * 8;
        const bool valid = head < num_heads;
        const uint64_t from = uint64_t(seq.first_row) * QKV_COLS + (first_head + (valid ? head : 0)) * HEAD_DIM;
        copy_async(q + head * ROW_STRIDE + column, p.qkv + from + column, valid);
    }

    const uint32_t step = SLICE * DECODE_WARPS;
    const auto load_slice = [&](int stage, uint32_t first) {
        if (first < part.end) {
            kv_element* k = stages + stage * STAGE_SIZE;
            load_tokens<SLICE, WARP_SIZE>(k, k_head, table, first, part.end, lane);
            load_tokens<SLICE, WARP_SIZE>(k + LOADED_SIZE<SLICE>, v_head, table, first, part.end, lane);
        }
        copy_async_commit();
    };
    uint32_t next = part.first + warp * SLICE;
#pragma unroll
    for (int stage = 0; stage < DECODE_STAGES - 1; stage++) {
        load_slice(stage, next);
        next += step;
    }
    copy_async_wait<DECODE_STAGES - 2>();
    __syncthreads();  // Q came with the first slice

    const auto load_q = [&](uint32_t(&a)[4], int row_tile, int d) { load_left(a, q, row_tile, d); };

    SoftmaxRows rows[1];
    float o[1][HEAD_DIM / 8][4] = {};
    const uint32_t seen = first_visible(p, num_tokens - 1);
    const uint32_t from[2] = {seen, seen}, to[2] = {part.end, part.end};
    int stage = 0;
    for (uint32_t first = part.first + warp * SLICE; first < part.end; first += step) {
        copy_async_wait<DECODE_STAGES - 2>();
        __syncwarp();  // the slice is there, and no lane reads the previous one, which the next overwrites
        load_slice((stage + DECODE_STAGES - 1) % DECODE_STAGES, next);
        next += step;

        const kv_element* loaded = stages + stage * STAGE_SIZE;
        if (HAS_CODES) {
            finish_tile<SLICE, WARP_SIZE>(finished, loaded, first, part.end, lane);
            finish_tile<SLICE, WARP_SIZE>(finished + SLICE * ROW_STRIDE, loaded + LOADED_SIZE<SLICE>, first, part.end,
                                          lane);
            __syncwarp();  // the elements are there
        }
        const scalar* k = HAS_CODES ? finished : reinterpret_cast<const scalar*>(loaded);
        float s[1][SLICE / 8][4];
        scores<1, SLICE>(s, k, load_q);
        cap_scores<SLICE>(s[0], p.cap_scale);
        if (first < seen || first + SLICE > part.end) {
            mask_scores<SLICE>(s[0], first, from, to);
        }
        softmax<SLICE>(s[0], rows[0], o[0], p.scale_log2);
        uint32_t weights[1][SLICE / 16][4];
        pack_weights<SLICE>(weights[0], s[0]);
        accumulate<1, SLICE>(o, weights, k + SLICE * ROW_STRIDE);
        stage = (stage + 1) % DECODE_STAGES;
    }
    copy_async_wait<0>();
    finish_sums(rows[0]);
    __syncwarp();

    // The warps' results overwrite their slices.
    float* results = reinterpret_cast<float*>(mine);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t head = lane / 4 + half * 8;
        if (head >= num_heads) {
            continue;
        }
        float* result = results + head * RESULT_STRIDE;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
            const Vec<float, 2> pair = {{o[0][n][2 * half], o[0][n][2 * half + 1]}};
            store(result + n * 8 + lane % 4 * 2, pair);
        }
        if (lane % 4 == 0) {
            result[HEAD_DIM] = rows[0].max[half];
            result[HEAD_DIM + 1] = rows[0].sum[half];
        }
    }
    __syncthreads();

    for (uint32_t i = threadIdx.x; i < num_heads * HEAD_DIM; i += DECODE_WARPS * WARP_SIZE) {
        const uint32_t head = i / HEAD_DIM, d = i % HEAD_DIM;
        constexpr uint32_t WARP_RESULTS = WARP_BYTES / sizeof(float);
        const float* result = reinterpret_cast<const float*>(of_warps) + head * RESULT_STRIDE;
        // The first warp has at least one slice, so its maximum is finite.
        float max = result[HEAD_DIM];
#pragma unroll
        for (int w = 1; w < DECODE_WARPS; w++) {
            max = fmaxf(max, result[w * WARP_RESULTS + HEAD_DIM]);
        }
        float value = 0.0f, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < DECODE_WARPS; w++) {
            const float* of_warp = result + w * WARP_RESULTS;
            const float factor = exp2_approx((of_warp[HEAD_DIM] - max) * p.scale_log2);
            value += of_warp[d] * factor;
            sum += of_warp[HEAD_DIM + 1] * factor;
        }
        if (p.partitions == 1) {
            p.out[(uint64_t(seq.first_row) * NUM_HEADS + first_head + head) * HEAD_DIM + d] =
                from_float<scalar>(value / sum);
        } else {
            const uint64_t row = (uint64_t(blockIdx.x) * NUM_HEADS + first_head + head) * p.partitions + blockIdx.z;
            float* partial = p.partials + row * PARTIAL_STRIDE;
            partial[d] = value;
            if (d == 0) {
                partial[HEAD_DIM] = max;
                partial[HEAD_DIM + 1] = sum;
            }
        }
    }
}

constexpr int MERGE_WARPS = 4;
// Partitions that a warp reads at once.
constexpr int MERGE_UNROLL = 4;

// Merges the partitions. One thread block computes one head, and its warps take partitions in turn. grid: (decode_seqs,
// NUM_HEADS); dynamic shared memory: MERGE_WARPS * (HEAD_DIM + 1) floats
KERNEL(MERGE_WARPS * WARP_SIZE, attention_merge, AttentionParams) {
    if (blockIdx.x >= p.batch->num_decode_seqs) {
        return;
    }
    const uint32_t head = blockIdx.y, warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const uint32_t seq_index = batch_words(p.batch, p.batch->decode_seqs)[blockIdx.x];
    const SeqEntry seq = batch_seqs(p.batch)[seq_index];
    const uint32_t num_parts = partition_of(p, seq.num_computed + 1, 0).num_with_tokens;
    const float* partials = p.partials + (uint64_t(blockIdx.x) * NUM_HEADS + head) * p.partitions * PARTIAL_STRIDE;

    float max = -INFINITY;
    for (uint32_t i = lane; i < num_parts; i += WARP_SIZE) {
        max = fmaxf(max, partials[i * PARTIAL_STRIDE + HEAD_DIM]);
    }
    max = reduce_warp<Max>(max);
    constexpr int N = (HEAD_DIM + WARP_SIZE - 1) / WARP_SIZE;
    float value[N] = {}, sum = 0.0f;
    for (uint32_t first = warp; first < num_parts; first += MERGE_WARPS * MERGE_UNROLL) {
#pragma unroll
        for (int u = 0; u < MERGE_UNROLL; u++) {
            const uint32_t part = first + u * MERGE_WARPS;
            // All are read without a branch, so that their reads overlap. Those that do not exist get weight 0.
            const float* partial = partials + min(part, num_parts - 1) * PARTIAL_STRIDE;
            const float weight = exp2_approx((partial[HEAD_DIM] - max) * p.scale_log2);
            const float factor = part < num_parts ? weight : 0.0f;
            sum += partial[HEAD_DIM + 1] * factor;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const uint32_t d = n * WARP_SIZE + lane;
                value[n] += HEAD_DIM % WARP_SIZE == 0 || d < HEAD_DIM ? partial[d] * factor : 0.0f;
            }
        }
    }

    DYNAMIC_SHARED(shared);
    float* of_warps = reinterpret_cast<float*>(shared);
    float* mine = of_warps + warp * (HEAD_DIM + 1);
#pragma unroll
    for (int n = 0; n < N; n++) {
        const uint32_t d = n * WARP_SIZE + lane;
        if (d < HEAD_DIM) {
            mine[d] = value[n];
        }
    }
    if (lane == 0) {
        mine[HEAD_DIM] = sum;
    }
    __syncthreads();
    scalar* out = p.out + (uint64_t(seq.first_row) * NUM_HEADS + head) * HEAD_DIM;
    for (int d = threadIdx.x; d < HEAD_DIM; d += MERGE_WARPS * WARP_SIZE) {
        float total = 0.0f, weights = 0.0f;
#pragma unroll
        for (int w = 0; w < MERGE_WARPS; w++) {
            total += of_warps[w * (HEAD_DIM + 1) + d];
            weights += of_warps[w * (HEAD_DIM + 1) + HEAD_DIM];
        }
        out[d] = from_float<scalar>(total / weights);
    }
}
