// Prefill on tensor cores of sm_90a: products of warp groups (`wgmma`), with a warp group of its own for the copies of
// their operands, as in FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608). It takes the same work list as
// `attention_prefill` of attention.cu, with the same tiles of query rows, and writes and merges results of chunks in
// the same way. Its sums are added in another order, so it is not used where both kernels have to give the same bits.
//
// Warp group 0 copies: two warps K, two warps V, as far ahead as shared memory has room. Warp groups 1 and 2 have 64
// query rows each. Each computes the scores of the next tile while it multiplies the weights of this one with V.
//
// K and V are copied with `cp.async`, 16 bytes at a time. The vectors of a head lie in a block as plain rows, and a
// bulk copy would leave them so: without a swizzle, no descriptor of `wgmma` fits rows of 128 bytes or more. A tensor
// map could swizzle, but its box has one size and lies within a block (4 KiB of 16 tokens), and blocks may have any
// size from 1 to 256. FlashAttention-3 copies small pages in this way, too.
//
// Codes of a quantised cache are copied in the same way, to where only the warp that copies them reads them. This warp
// then makes the tile's elements of them, so the others multiply what a plain cache would hold.
//
// Specialised further by
//   KV_TILE      tokens of K and V that are multiplied at a time: 128, or 64 if the sums of a head need the registers
//   KV_STAGES    tiles of K, and of V, that shared memory holds
//   CODE_STAGES  tiles of codes of K, and of V, that shared memory holds besides; with KV_CODES
#include "include/attention_merge.cuh"
#include "include/warp_groups.cuh"

constexpr int CONSUMERS = 2 * WARP_GROUP;
constexpr int BLOCK_THREADS = WARP_GROUP + CONSUMERS;
constexpr int PREFILL_ROWS = 128;
// Registers of a thread: of those that copy, and of those that compute. All warps together have 168 each.
constexpr int COPY_REGISTERS = HAS_CODES ? 88 : 40, COMPUTE_REGISTERS = (3 * 168 - COPY_REGISTERS) / 2;

// Panels are as wide as a swizzle that divides a head.
constexpr int PANEL = HEAD_DIM % 64 == 0 ? 64 : HEAD_DIM % 32 == 0 ? 32 : 16;
constexpr int PANELS = HEAD_DIM / PANEL;
constexpr int KV_PANEL_SIZE = KV_TILE * PANEL, Q_PANEL_SIZE = PREFILL_ROWS * PANEL;
constexpr int KV_SIZE = PANELS * KV_PANEL_SIZE, Q_SIZE = PANELS * Q_PANEL_SIZE;

// Where 8 elements of a token are in a tile of K or V.
__device__ __forceinline__ int chunk_place(int token, int chunk) { return swizzled<PANEL, KV_PANEL_SIZE>(token, chunk); }

// Each of the warps that copy has half of the tokens of a tile of K, or of V.
constexpr int WARP_TOKENS = KV_TILE / 2;
#ifdef KV_CODES
// Codes of a warp's tokens, and their scales behind them.
constexpr int CODES_SIZE = LOADED_SIZE<WARP_TOKENS>;
constexpr int ALL_CODES_SIZE = 4 * CODE_STAGES * CODES_SIZE;
#else
constexpr int ALL_CODES_SIZE = 0;
#endif

// Behind the tiles in shared memory.
struct Control {
    Barriers<KV_STAGES> k, v;
    // For `merge_chunks`.
    uint32_t is_last;
};

struct Consumers {
    static constexpr int THREADS = CONSUMERS;
    static __device__ __forceinline__ uint32_t thread() { return threadIdx.x - WARP_GROUP; }
    static __device__ __forceinline__ void synchronize() { named_barrier<1, CONSUMERS>(); }
};

// Where the vectors of a warp's tokens of a tile are.
struct WarpTokens {
    static constexpr int LOOKUPS = WARP_TOKENS / WARP_SIZE;
    // A row is the vector of a token and head. 2^32 of them are 512 GiB or more.
    static constexpr uint32_t BLOCK_ROWS = BLOCK_STRIDE / HEAD_DIM;

    // The position of the first token.
    uint32_t first;
    // Each lane looks up every 32nd token: its row in the pool or, because scales lie between the rows of codes, its
    // block.
    uint32_t found[LOOKUPS];

    // Tokens from `end` on are not valid.
    __device__ __forceinline__ WarpTokens(const uint32_t* table, uint32_t first, uint32_t end) : first(first) {
#pragma unroll
        for (int i = 0; i < LOOKUPS; i++) {
            const uint32_t position = first + i * WARP_SIZE + threadIdx.x % WARP_SIZE;
            found[i] = NONE;
            if (position < end) {
                const uint32_t block = table[position / BLOCK_SIZE];
                found[i] = HAS_CODES ? block : block * BLOCK_ROWS + position % BLOCK_SIZE;
            }
        }
    }

    // Starts to copy the vectors, 16 bytes at a time: copy `i` of a vector to `place(token, i)`. Tokens that are not
    // valid are zeros.
    template <class Place>
    __device__ __forceinline__ void copy_vectors(const kv_element* head, const Place& place) const {
        constexpr int CHUNK = VEC<kv_element>, COPIES = HEAD_DIM / CHUNK;
        // Copies of a token that neighbouring lanes make, as a power of two, and tokens that a warp copies at a time.
        constexpr int WIDTH = COPIES & -COPIES, TOKENS = WARP_SIZE / WIDTH;
        // More copies at a time would need more registers than these warps have.
        constexpr int UNROLL = WIDTH == COPIES ? 4 : 1;
        static_assert(UNROLL * TOKENS <= WARP_SIZE, "these tokens are looked up at the same time");
        const int lane = threadIdx.x % WARP_SIZE, first_copy = lane % WIDTH;
#pragma unroll 1
        for (int i = 0; i < WARP_TOKENS / TOKENS; i += UNROLL) {
            const uint32_t looked_up = i * TOKENS < WARP_SIZE ? found[0] : found[LOOKUPS - 1];
#pragma unroll
            for (int j = 0; j < UNROLL; j++) {
                const int token = (i + j) * TOKENS + lane / WIDTH;
                const uint32_t of_token = __shfl_sync(FULL_WARP, looked_up, token % WARP_SIZE);
                const bool valid = of_token != NONE;
                const uint64_t index = valid ? of_token : 0;
                const kv_element* from = head + index * HEAD_DIM;
                if (HAS_CODES) {
                    from = head + index * BLOCK_STRIDE + (first + token) % BLOCK_SIZE * HEAD_DIM;
                }
#pragma unroll
                for (int copy = first_copy; copy < COPIES; copy += WIDTH) {
                    copy_async(place(token, copy), from + copy * CHUNK, valid);
                }
            }
        }
    }

#ifdef KV_CODES
    // Starts to copy the scales of the vectors, eight at a time: these tokens are in one block.
    __device__ __forceinline__ void copy_scales(const kv_element* head, kv_element* to) const {
        const int token = threadIdx.x % WARP_SIZE * 8;
        uint32_t block = NONE;
#pragma unroll
        for (int i = 0; i < LOOKUPS; i++) {
            const uint32_t looked_up = __shfl_sync(FULL_WARP, found[i], token % WARP_SIZE);
            block = token / WARP_SIZE == i ? looked_up : block;
        }
        if (token < WARP_TOKENS) {
            const bool valid = block != NONE;
            const kv_element* of_block = head + (valid ? block : 0) * BLOCK_STRIDE;
            copy_async(to + token * sizeof(bf16), scale_of(of_block, (first + token) % BLOCK_SIZE), valid);
        }
    }
#endif
};

// Copies all tiles of K, or of V, with two warps, of which this one has number `half`. Each copies half of a tile. With
// KV_CODES this warp copies codes to `codes` first.
__device__ __forceinline__ void copy_tiles(scalar* tiles, kv_element* codes, Barriers<KV_STAGES>& barriers,
                                           const kv_element* head, const uint32_t* table, const AttentionItem& item,
                                           int half) {
    const auto tokens_of = [&](uint32_t first) { return WarpTokens(table, first + half * WARP_TOKENS, item.end_key); };
    RingPlace<KV_STAGES> place;
#ifdef KV_CODES
    const auto start_codes = [&](const WarpTokens& tokens, uint32_t stage) {
        kv_element* to = codes + stage * CODES_SIZE;
        tokens.copy_vectors(head, [=](int token, int copy) { return to + place_of_copy<WARP_TOKENS>(token, copy); });
        tokens.copy_scales(head, to + WARP_TOKENS * HEAD_DIM);
        copy_async_commit();
    };
#pragma unroll
    for (int stage = 0; stage < CODE_STAGES; stage++) {
        start_codes(tokens_of(item.first_key + stage * KV_TILE), stage);
    }
    uint32_t code_stage = 0;
    for (uint32_t first = item.first_key; first < item.end_key; first += KV_TILE) {
        // What is looked up is needed after this tile has been made.
        const WarpTokens later = tokens_of(first + CODE_STAGES * KV_TILE);
        copy_async_wait<CODE_STAGES - 1>();
        __syncwarp();  // the codes are there that other lanes have copied
        mbarrier_wait(&barriers.empty[place.stage], place.parity ^ 1);
        scalar* tile = tiles + place.stage * KV_SIZE;
        decode_tokens<WARP_TOKENS, WARP_SIZE, 2>(
            codes + code_stage * CODES_SIZE, first + half * WARP_TOKENS, item.end_key, threadIdx.x % WARP_SIZE,
            [=](int token, int chunk) { return tile + chunk_place(half * WARP_TOKENS + token, chunk); });
        fence_async_proxy();
        barriers.publish(place.stage);  // and no lane reads the codes any more
        start_codes(later, code_stage);
        code_stage = (code_stage + 1) % CODE_STAGES;
        place.advance();
    }
    copy_async_wait<0>();
#else
    for (uint32_t first = item.first_key; first < item.end_key; first += KV_TILE) {
        const WarpTokens tokens = tokens_of(first);
        mbarrier_wait(&barriers.empty[place.stage], place.parity ^ 1);
        scalar* tile = tiles + place.stage * KV_SIZE;
        tokens.copy_vectors(
            head, [=](int token, int chunk) { return tile + chunk_place(half * WARP_TOKENS + token, chunk); });
        copy_async_commit();
        copy_async_wait<0>();
        fence_async_proxy();
        barriers.publish(place.stage);
        place.advance();
    }
#endif
}

// Copies the unit's query rows. Rows without a token or a head are zeros.
__device__ __forceinline__ void copy_queries(scalar* q, const AttentionParams& p, const AttentionUnit& unit) {
#pragma unroll
    for (int i = 0; i < PREFILL_ROWS * CHUNKS / CONSUMERS; i++) {
        const uint32_t copy = i * CONSUMERS + Consumers::thread();
        const uint32_t row = copy / CHUNKS, chunk = copy % CHUNKS;
        const QueryRow from = query_row<PREFILL_ROWS>(p, unit, row);
        copy_async(q + swizzled<PANEL, Q_PANEL_SIZE>(row, chunk), from.start + chunk * 8, from.valid);
    }
    copy_async_commit();
    copy_async_wait<0>();
    fence_async_proxy();
    Consumers::synchronize();
}

// Starts S = Q·Kᵀ of the warp group's rows, `q` on.
__device__ __forceinline__ void start_scores(float (&s)[KV_TILE / 8][4], const scalar* q, const scalar* k) {
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) {
        const int panel = d * 16 / PANEL, column = d * 16 % PANEL;
        wgmma_rows(s, swizzled_matrix<PANEL>(q + panel * Q_PANEL_SIZE + column, 0),
                   swizzled_matrix<PANEL>(k + panel * KV_PANEL_SIZE + column, 0), d > 0, scalar());
    }
    wgmma_commit();
}

// Starts O += P·V.
__device__ __forceinline__ void start_accumulation(float (&o)[HEAD_DIM / 8][4],
                                                   const uint32_t (&weights)[KV_TILE / 16][4], const scalar* v) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KV_TILE / 16; k++) {
        const scalar* tokens = v + k * 16 * PANEL;
        wgmma_columns(o, weights[k], swizzled_matrix<PANEL>(tokens, KV_PANEL_SIZE * sizeof(scalar)), scalar());
    }
    wgmma_commit();
}

// Computes a warp group's 64 rows, `first_row` on.
__device__ __forceinline__ void attend(const AttentionParams& p, const AttentionUnit& unit, uint32_t first_row,
                                       const scalar* q, const scalar* k_tiles, const scalar* v_tiles,
                                       Control& control) {
    const AttentionItem& item = unit.item;
    const uint32_t lane = threadIdx.x % WARP_SIZE;
    const uint32_t row = first_row + threadIdx.x / WARP_SIZE % 4 * 16 + lane / 4;
    VisibleKeys keys = visible_keys<PREFILL_ROWS>(p, item, row);
    // The last tile may go beyond the chunk.
    keys.to[0] = min(keys.to[0], item.end_key);
    keys.to[1] = min(keys.to[1], item.end_key);
    // Keys that all rows see need no mask.
    const uint32_t all_see_from = first_visible(p, item.first_position + item.num_tokens - 1);
    const uint32_t all_see_to = min(item.first_position + 1, item.end_key);

    SoftmaxRows rows;
    float o[HEAD_DIM / 8][4] = {};
    float s[KV_TILE / 8][4];
    uint32_t weights[KV_TILE / 16][4];
    float factors[2];
    // Turns the scores of a tile into weights. `factors` are then those of the sums so far.
    const auto weigh = [&](uint32_t first) {
        cap_scores<KV_TILE>(s, p.cap_scale);
        if (first < all_see_from || first + KV_TILE > all_see_to) {
            mask_scores<KV_TILE>(s, first, keys);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            factors[half] = softmax_of_row<KV_TILE>(s, rows, half, p.scale_log2);
        }
    };

    RingPlace<KV_STAGES> k_place, v_place;
    uint32_t first = item.first_key;
    mbarrier_wait(&control.k.full[0], 0);
    start_scores(s, q, k_tiles);
    wgmma_wait<0>();
    hold_registers(s);
    control.k.release(0);
    k_place.advance();
    weigh(first);  // there are no sums yet
    pack_weights<KV_TILE>(weights, s);
    for (first += KV_TILE; first < item.end_key; first += KV_TILE) {
        mbarrier_wait(&control.k.full[k_place.stage], k_place.parity);
        hold_registers(o);
        hold_registers(weights);
        start_scores(s, q, k_tiles + k_place.stage * KV_SIZE);
        mbarrier_wait(&control.v.full[v_place.stage], v_place.parity);
        start_accumulation(o, weights, v_tiles + v_place.stage * KV_SIZE);
        wgmma_wait<1>();
        hold_registers(s);
        control.k.release(k_place.stage);
        k_place.advance();
        weigh(first);
        wgmma_wait<0>();
        hold_registers(o);
        hold_registers(weights);
        control.v.release(v_place.stage);
        v_place.advance();
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                o[n][i] *= factors[i / 2];
            }
        }
        pack_weights<KV_TILE>(weights, s);
    }
    mbarrier_wait(&control.v.full[v_place.stage], v_place.parity);
    hold_registers(o);
    hold_registers(weights);
    start_accumulation(o, weights, v_tiles + v_place.stage * KV_SIZE);
    wgmma_wait<0>();
    hold_registers(o);

    finish_sums(rows);
    const auto column_of = [=](int n) { return n * 8 + lane % 4 * 2; };
    write_rows<PREFILL_ROWS>(p, unit, row, rows, o, column_of, lane % 4 == 0);
}

// grid: items of the list * HEAD_TILES;
// dynamic shared memory: Q_SIZE + 2 * KV_STAGES * KV_SIZE scalars, ALL_CODES_SIZE bytes, Control
KERNEL_OCCUPANCY(BLOCK_THREADS, 1, attention_prefill_hopper, AttentionParams) {
    DYNAMIC_SHARED_ALIGNED(shared, 1024);
    scalar* q = reinterpret_cast<scalar*>(shared);
    scalar* k_tiles = q + Q_SIZE;
    scalar* v_tiles = k_tiles + KV_STAGES * KV_SIZE;
    kv_element* codes = reinterpret_cast<kv_element*>(v_tiles + KV_STAGES * KV_SIZE);
    Control& control = *reinterpret_cast<Control*>(codes + ALL_CODES_SIZE);
    if (threadIdx.x == 0) {
        control.k.init(2, CONSUMERS / WARP_SIZE);
        control.v.init(2, CONSUMERS / WARP_SIZE);
    }
    __syncthreads();
    const AttentionUnit unit = attention_unit<PREFILL_ROWS>(p, attention_list(p.batch, p.list), blockIdx.x);
    const int warp = threadIdx.x / WARP_SIZE;
    if (warp < 4) {
        decrease_registers<COPY_REGISTERS>();
        const bool is_v = warp >= 2;
        const uint32_t* table = batch_words(p.batch, p.batch->block_tables) + unit.item.first_block;
        copy_tiles(is_v ? v_tiles : k_tiles, codes + warp * (ALL_CODES_SIZE / 4), is_v ? control.v : control.k,
                   head_start(p, is_v, unit.kv_head), table, unit.item, warp % 2);
    } else {
        increase_registers<COMPUTE_REGISTERS>();
        copy_queries(q, p, unit);
        const uint32_t first_row = (warp / 4 - 1) * 64;
        attend(p, unit, first_row, q + first_row * PANEL, k_tiles, v_tiles, control);
        if (unit.item.num_chunks > 1) {
            merge_chunks<PREFILL_ROWS, Consumers>(p, unit, &control.is_last);
        }
    }
}
